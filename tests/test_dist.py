"""dist.py on Gloo ranks: the reducer against one process, overlap, and what it refuses."""

import contextlib
import json
import os
import re
import time

import pytest
import torch
from torch import nn

import dist
from tests.ranks import run_ranks


class Toy(nn.Module):
    """A model with all that troubles a reducer: a frozen parameter, one used twice, a buffer."""

    def __init__(self, unused=False):
        super().__init__()
        self.table = nn.Embedding(11, 6)  # also the output matrix
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("shift", torch.randn(6))
        if unused:
            self.spare = nn.Linear(2, 2)

    def forward(self, tokens):
        x = self.frozen(self.table(tokens)) + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.norm(x) @ self.table.weight.T).logsumexp(-1).square().sum()


def batch(count=12):
    return torch.arange(count * 5).view(count, 5) % 11


def one_process(accumulation=1):
    """Gradients of the mean over the whole batch, without any of dist.py."""
    torch.manual_seed(100)
    model = Toy()
    (model(batch(12 * accumulation)) / 12).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def reduced(world, bucket_mb, accumulation, compression="none"):
    """Gradients of the same batch by the Reducer: each rank takes its share in micro-batches."""
    torch.manual_seed(100 + world.rank)  # only rank 0's weights shall count
    model = Toy()
    reducer = dist.Reducer(model, world, bucket_mb, compression)
    for _ in range(2):  # the second step begins clean
        reducer.zero_grad()
        mine = batch(12 * accumulation)[world.rank :: world.size].chunk(accumulation)
        for k, tokens in enumerate(mine):
            with reducer.accumulate() if k + 1 < accumulation else contextlib.nullcontext():
                (model(tokens) / 12 * world.size).backward()
        reducer.finish()
    result = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    assert model.frozen.weight.grad is None
    assert all(
        p.grad is reducer.gradients[name] for name, p in model.named_parameters() if p.requires_grad
    )
    reducer.close()
    return result, [p.detach() for p in [*model.parameters(), *model.buffers()]], reducer.bytes_sent


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bucket_mb", [0.0002, 100.0])
def test_gradients_are_those_of_one_process(tmp_path, size, bucket_mb):
    outcomes = run_ranks(reduced, size, tmp_path, bucket_mb, 1)
    expected = one_process()
    for gradients, weights, sent in outcomes:
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)
            assert torch.equal(gradients[name], outcomes[0][0][name])  # on all ranks the same bits
        assert all(torch.equal(a, b) for a, b in zip(weights, outcomes[0][1]))
        assert (sent == 0) == (size == 1)


@pytest.mark.parametrize("bucket_mb", [0.0002, 100.0])
def test_two_levels_give_the_same_gradients(tmp_path, bucket_mb):
    expected, levels = one_process(), {}
    for local_size in (2, 4):  # two nodes of two, one node of four
        outcomes = run_ranks(reduced, 4, tmp_path, bucket_mb, 1, local_size=local_size)
        for gradients, _, _ in outcomes:
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)
                assert torch.equal(gradients[name], outcomes[0][0][name])
        levels[local_size] = sum(sent for _, _, sent in outcomes)
    trainable = sum(g.numel() for g in expected.values())
    assert abs(levels[2] - 2 * 4 * trainable) <= 64  # each node sends each number once
    assert abs(levels[4] - 4 * 1.5 * 4 * trainable) <= 64


@pytest.mark.parametrize("accumulation", [1, 3, 4])
def test_micro_batches_add_up(tmp_path, accumulation):
    expected = one_process(accumulation)
    for gradients, _, sent in run_ranks(reduced, 2, tmp_path, 0.0002, accumulation):
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)
        trainable = sum(g.numel() for g in expected.values())
        assert abs(sent - 4 * trainable) <= 8  # once a step: 2 (n-1)/n x 4 bytes


@pytest.mark.parametrize("compression,tolerance,share", [("fp16", 2e-3, 0.5), ("bf16", 2e-2, 0.5)])
def test_half_precision_on_the_wire(tmp_path, compression, tolerance, share):
    expected = one_process()
    dense = run_ranks(reduced, 2, tmp_path, 0.0002, 1)
    for rank, (gradients, _, sent) in enumerate(
        run_ranks(reduced, 2, tmp_path, 0.0002, 1, compression)
    ):
        for name, gradient in expected.items():
            scale = gradient.abs().max()
            assert (gradients[name] - gradient).abs().max() <= tolerance * scale
        assert sent == share * dense[rank][2]


def sums_of_large_numbers(world):
    bucket = torch.full((4,), 40000.0)
    dist.make_compressor("fp16", world, [(4,)]).average(bucket)
    return bucket.tolist()


def test_fp16_does_not_overflow_in_the_sum(tmp_path):
    assert run_ranks(sums_of_large_numbers, 2, tmp_path) == [[40000.0] * 4] * 2


def half_model(world, dtype):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(dtype)
    reducer = dist.Reducer(model, world)
    for k in range(200):  # each adds less than bf16 could add to the sum
        with reducer.accumulate() if k < 199 else contextlib.nullcontext():
            (model.bias.sum() + 0 * model.weight.sum()).backward()
    reducer.finish()
    reducer.close()
    assert model.bias.grad is None
    return reducer.gradients["bias"].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_models_add_up_in_fp32(tmp_path, dtype):
    assert run_ranks(half_model, 2, tmp_path, dtype) == [[200.0] * 4] * 2


def overlap(world):
    """Events of one backward: (what, number) in their real order."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    reducer, events = dist.Reducer(model, world, bucket_mb=0.004), []
    model[0].weight.register_hook(lambda gradient: time.sleep(0.3))  # the last layer to be ready
    for number, p in enumerate(model.parameters()):
        p.register_hook(lambda gradient, number=number: events.append(("gradient", number)))
    average = dist.NoCompression.average

    def traced(self, bucket, scale):
        sent = average(self, bucket, scale)
        events.append(("end", None))
        return sent

    dist.NoCompression.average = traced
    model(torch.randn(8, 32)).sum().backward()
    reducer.finish()
    reducer.close()
    return events, len(reducer.buckets)


def test_buckets_are_averaged_while_backward_goes_on(tmp_path):
    for events, buckets in run_ranks(overlap, 2, tmp_path):
        last_gradient = max(k for k, (what, _) in enumerate(events) if what == "gradient")
        done_before = [what for what, _ in events[: last_gradient + 1]].count("end")
        assert buckets == 6 and done_before >= 4  # all but the last one or two


def test_a_bucket_has_its_embeddings_last_and_no_crumbs():
    model = nn.Module()  # registers in the order of a BERT, the output's bias first
    model.embeddings = nn.Module()
    model.embeddings.table, model.embeddings.norm = nn.Embedding(50, 8), nn.LayerNorm(8)
    model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    model.bias = nn.Parameter(torch.zeros(50))
    reducer = dist.Reducer(model, dist.World(), bucket_mb=72 * 4e-6)
    names = [list(bucket.shapes) for bucket in reducer._buckets]
    reducer.close()
    assert names[0] == ["bias", "blocks.3.bias", "blocks.3.weight"]
    assert names[-1] == [
        "embeddings.norm.bias",
        "embeddings.norm.weight",
        "embeddings.table.weight",
    ]
    assert all(sum(map(torch.Size.numel, b.shapes.values())) >= 72 for b in reducer._buckets)


def test_the_lane_counts_its_seconds():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reducer = dist.Reducer(model, dist.World(), bucket_mb=1e-9)
    average = reducer._buckets[0].average
    reducer._buckets[0].average = lambda scale: time.sleep(0.2) or average(scale)
    model(torch.ones(1, 4)).sum().backward()
    reducer.finish()
    assert len(reducer.bucket_seconds) == 4 and 0.2 <= reducer.bucket_seconds[0] < 2
    assert max(reducer.bucket_seconds[1:]) < 0.2 and 0.1 < reducer.wait_seconds < 2
    reducer.close()


def launch_order(world):
    """Ranks whose gradients become ready in different orders; returns the sizes sent, in order."""
    model = nn.ModuleList(nn.Linear(k, 1, bias=False) for k in (3, 5, 7))
    reducer, sizes = dist.Reducer(model, world, bucket_mb=1e-9), []
    dist.NoCompression.average = lambda self, bucket, scale: sizes.append(len(bucket)) or 0
    layers = list(model) if world.rank == 0 else list(reversed(model))
    for layer in layers:  # one after the other, in this order
        layer(torch.ones(1, layer.in_features)).sum().backward()
    reducer.finish()
    reducer.close()
    return sizes


def test_buckets_are_launched_in_the_same_order_on_every_rank(tmp_path):
    assert run_ranks(launch_order, 2, tmp_path) == [[7, 5, 3]] * 2


def test_an_unused_parameter_is_named():
    model = Toy(unused=True)
    reducer = dist.Reducer(model, dist.World())
    model(batch()).backward()
    with pytest.raises(dist.DistError, match=r"no gradient for spare.bias, spare.weight"):
        reducer.finish()
    reducer.close()


def test_a_second_backward_without_accumulate_is_refused():
    model = Toy()
    reducer = dist.Reducer(model, dist.World())
    model(batch()).backward()
    with pytest.raises(dist.DistError, match="ready twice.*accumulate"):
        model(batch()).backward()
    reducer.close()


def test_an_exception_inside_accumulate_leaves_it_usable():
    torch.manual_seed(100)
    model = Toy()
    reducer = dist.Reducer(model, dist.World())
    with pytest.raises(KeyError), reducer.accumulate():
        model(batch()).backward()
        raise KeyError
    reducer.zero_grad()
    (model(batch()) / 12).backward()
    reducer.finish()
    for name, gradient in one_process().items():
        torch.testing.assert_close(reducer.gradients[name], gradient)
    reducer.close()


def test_gradients_set_to_none_by_an_optimizer_are_found_again():
    model = nn.Linear(3, 1)
    reducer = dist.Reducer(model, dist.World())
    for _ in range(2):
        torch.optim.SGD(model.parameters(), 0.1).zero_grad()  # sets p.grad to None
        reducer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        reducer.finish()
        assert model.weight.grad is reducer.gradients["weight"]
        assert reducer.gradients["weight"].tolist() == [[1.0, 1.0, 1.0]]
    reducer.close()


def test_nothing_is_allocated_after_the_first_step():
    model = Toy()
    reducer = dist.Reducer(model, dist.World(), compression="fp16")

    def addresses():
        reducer.zero_grad()
        model(batch()).backward()
        reducer.finish()
        return (
            [flat.data_ptr() for flat in reducer.buckets],
            [p.grad.data_ptr() for p in model.parameters() if p.requires_grad],
            [bucket.compressor.wire.data_ptr() for bucket in reducer._buckets],
        )

    assert addresses() == addresses() == addresses()
    reducer.close()


def collectives(world):
    shared = world.share({"from": world.rank})
    total = world.sum([1, world.rank, float("nan") if world.rank == 1 else 0.0])
    return shared, total, world.gather(world.rank), (world.node, world.nodes, world.local_rank)


def test_small_collectives(tmp_path):
    for rank, (shared, total, ranks, place) in enumerate(
        run_ranks(collectives, 4, tmp_path, local_size=2)
    ):
        assert shared == {"from": 0} and ranks == [0, 1, 2, 3]
        assert total[:2] == [4.0, 6.0] and total[2] != total[2]  # NaN of rank 1 is not lost
        assert place == (rank // 2, 2, rank % 2)
    assert dist.World().sum([3]) == [3.0] and dist.World().share("x") == "x"


def dies(world):
    if world.rank == 1:
        os._exit(9)
    return [world.sum([1]) for _ in range(3)]


def test_a_dead_rank_is_an_error_that_says_so(tmp_path):
    outcome = run_ranks(dies, 2, tmp_path, check=False)[0]
    assert isinstance(outcome, dist.RankLost) and "another rank died" in str(outcome)
    assert "\n" not in str(outcome)


def test_the_interface_is_the_one_that_reaches_the_master():
    assert dist.interface_towards("127.0.0.1", 1) == "lo"
    assert dist.interface_towards("127.0.0.1", 2) is None  # other nodes cannot reach it
    assert dist.interface_towards("no such host", 1) is None


def lacking(world, name):
    def refuse(*arguments, **options):
        raise RuntimeError("Backend gloo does not support alltoall_base")

    torch.distributed.all_to_all_single = refuse
    dist.make_compressor(name, world, SHAPES).average(torch.ones(COUNT))


def test_a_missing_collective_is_not_a_dead_rank(tmp_path):
    for outcome in run_ranks(lacking, 2, tmp_path, "onebit", check=False):
        assert type(outcome) is dist.DistError
        assert "alltoall_base); take another --compression" in str(outcome)


def crumbs(world, name):
    """Buckets of fewer numbers than a node has ranks: one step, a checkpoint, another step."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1))
    reducer = dist.Reducer(model, world, 1e-9, name)
    for _ in range(2):
        reducer.zero_grad()
        model(torch.full((4, 1), 1.0 + world.rank)).sum().backward()
        reducer.finish()
        reducer.commit(True)
        reducer.load_state_dict(reducer.state_dict())
    reducer.close()
    return {key: view.clone() for key, view in reducer.gradients.items()}


def test_buckets_smaller_than_a_node(tmp_path):
    torch.manual_seed(0)
    outcomes = run_ranks(crumbs, 6, tmp_path, "onebit", local_size=3)
    for gradients in outcomes:
        assert gradients["1.bias"].item() == pytest.approx(4.0)
        assert all(torch.equal(view, outcomes[0][key]) for key, view in gradients.items())


def test_unequal_nodes_are_refused_by_every_rank(tmp_path):
    for outcome in run_ranks(collectives, 3, tmp_path, local_size=2, check=False):
        assert type(outcome) is dist.DistError and "3 in all; set the same --np" in str(outcome)


def test_bad_settings_are_one_line():
    with pytest.raises(dist.DistError, match="--bucket-mb"):
        dist.Reducer(Toy(), dist.World(), bucket_mb=float("nan"))
    with pytest.raises(dist.DistError, match="gains nothing.*lower --powersgd-rank"):
        dist.Reducer(Toy(), dist.World(), compression="powersgd", rank=6)
    with pytest.raises(
        dist.DistError, match="unknown compression 'zip'; known are none, fp16, bf16, int8"
    ):
        dist.Reducer(Toy(), dist.World(), compression="zip")
    with pytest.raises(dist.DistError, match="--bucket-mb"):
        dist.Reducer(Toy(), dist.World(), bucket_mb=0)


def test_the_program_measures_each_compressor(program, tmp_path):
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2 dist.py --mb 1 --json"
    run = program(*torchrun.split(), tmp_path / "table.json")
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["compression"] for row in rows] == list(dist.COMPRESSORS)
    for row in rows:
        assert re.search(rf"^{row['compression']} +1( +[\d.]+){{3}} +[\d.e+-]+$", run.stdout, re.M)
    errors = {row["compression"]: row["error"] for row in rows}
    assert errors["none"] < 1e-6 and errors["fp16"] < 1e-3 and errors["int8"] < 0.03
    assert errors["onebit"] < errors["topk"] < 1


# Lossy compression

SHAPES = [(64, 48), (37,), (3, 5), (70, 30)]
COUNT = 64 * 48 + 37 + 15 + 2100
LOSSY = ["int8", "onebit", "topk", "chunk", "powersgd"]


def gradient(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(COUNT, generator=generator) * torch.linspace(0.1, 3, COUNT)


def fifty_steps(world, name):
    """Returns (difference of in and out + residual, the last mean, bytes, size of the residual)."""
    compressor = dist.make_compressor(name, world, SHAPES)
    went_in = went_out = torch.zeros(COUNT, dtype=torch.float64)
    for step in range(50):
        scale = 2.0 ** (step % 3)  # residuals must not mind the scale
        bucket = gradient(world.rank, step) * scale
        sent = compressor.average(bucket, scale)
        compressor.commit(True)
        mean = sum(gradient(rank, step) for rank in range(world.size)) / world.size
        went_in, went_out = went_in + mean, went_out + bucket.double() / scale
    rest = compressor.fold().double()
    difference = (went_in - went_out - rest).abs().max().item()
    return difference, bucket, sent, rest.norm().item() / went_in.norm().item()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LOSSY)
def test_what_went_out_and_the_residual_are_what_came_in(tmp_path, name, size):
    outcomes = run_ranks(fifty_steps, size, tmp_path, name)
    for difference, last, sent, rest in outcomes:
        assert difference < 2e-4  # 50 steps of numbers around 3
        assert torch.equal(last, outcomes[0][1])  # on all ranks the same bits
        assert sent <= 4 * COUNT * (size - 1) and (sent == 0) == (size == 1)
        assert rest < {"int8": 0.01, "onebit": 2, "topk": 9, "chunk": 9, "powersgd": 2}[name]


def test_one_bit_sends_a_bit_a_number(tmp_path):
    for _, _, sent, _ in run_ranks(fifty_steps, 2, tmp_path, "onebit"):
        blocks = -(-COUNT // 1024)  # in each half: 512 signs and a scale; sent in two phases
        assert sent == 2 * blocks * (512 // 8 + 4)


def overflow_between(world, name):
    compressor = dist.make_compressor(name, world, SHAPES)

    def step(number, spoil=None):
        bucket = gradient(world.rank, number)
        if spoil is not None and world.rank == 1:
            bucket[7] = spoil
        compressor.average(bucket)
        finite = bool(bucket.isfinite().all())
        compressor.commit(finite)
        return finite, bucket

    first = [step(number)[0] for number in range(3)]
    before = {key: value.clone() for key, value in compressor.state.items()}
    spoiled = [step(3, spoil=float(bad))[0] for bad in ("inf", "-inf", "nan")]
    same = all(torch.equal(before[key], value) for key, value in compressor.state.items())
    return first, spoiled, same, step(4)[0]


@pytest.mark.parametrize("name", LOSSY)
def test_an_overflow_on_one_rank_leaves_no_trace(tmp_path, name):
    for first, spoiled, same, after in run_ranks(overflow_between, 2, tmp_path, name):
        assert first == [True] * 3 and not any(spoiled) and same and after


@pytest.mark.parametrize("count,k", [(1, 1), (96, 5), (5224, 52), (100_000, 1000), (100_000, 1)])
def test_largest_is_topk(count, k):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator)
    sampled = x.clone()
    sampled[::97] = 9.0  # the sample promises more large numbers than there are
    for numbers in (x, x.sort().values, torch.ones(count), torch.zeros(count), sampled):
        places = dist.largest(numbers, k)
        assert len(set(places.tolist())) == k
        expected = numbers.abs().topk(k).values
        assert torch.equal(numbers[places].abs().sort(descending=True).values, expected)


def constant(world, name):
    compressor, total = dist.make_compressor(name, world, SHAPES), torch.zeros(COUNT)
    for _ in range(300):
        bucket = gradient(world.rank, 0)
        compressor.average(bucket)
        compressor.commit(True)
        total += bucket
    mean = sum(gradient(rank, 0) for rank in range(world.size)) / world.size
    return ((total / 300 - mean).norm() / mean.norm()).item()


@pytest.mark.parametrize("name", LOSSY)
def test_a_constant_gradient_arrives_in_full_over_time(tmp_path, name):
    for error in run_ranks(constant, 2, tmp_path, name):
        assert error < 0.25


def residuals(world, name, bucket_mb, state):
    """The state of the compressors after a step; or after no step, from a state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 40))
    reducer = dist.Reducer(model, world, bucket_mb, name)
    if state:
        reducer.load_state_dict(state)
        again = reducer.state_dict()
        reducer.close()
        return again
    torch.manual_seed(world.rank)
    model(torch.randn(5, 64)).square().sum().backward()
    reducer.finish()
    reducer.commit(True)
    state = reducer.state_dict()
    reducer.close()
    return {kind: {key: value.clone() for key, value in state[kind].items()} for kind in state}


@pytest.mark.parametrize("name", LOSSY)
def test_residuals_travel_to_other_ranks_and_buckets(tmp_path, name):
    two = run_ranks(residuals, 2, tmp_path, name, 0.001, None)
    three = run_ranks(residuals, 3, tmp_path, name, 100.0, two[0])
    four = run_ranks(residuals, 4, tmp_path, name, 0.003, two[0], local_size=2)
    assert any(value.any() for value in two[0]["residual"].values())
    for state in two + three + four:
        for key, value in two[0]["residual"].items():
            torch.testing.assert_close(state["residual"][key], value, rtol=1e-6, atol=1e-6)
        for key, value in state["factors"].items():
            assert torch.equal(value, two[0]["factors"][key.split("@")[0] + "@0"])
        assert bool(state["factors"]) == (name == "powersgd")


def two_level_steps(world, name):
    """Ten steps of a Reducer; returns in - out - residual, the last mean, the residual's size."""
    model = nn.Linear(64, 80)
    reducer = dist.Reducer(model, world, 100.0, name)
    difference = {key: torch.zeros_like(p) for key, p in model.named_parameters()}
    for step in range(10):
        reducer.zero_grad()
        slopes = [gradient(rank, step)[:5200] for rank in range(world.size)]
        mine = slopes[world.rank]
        (model.weight.flatten() @ mine[:5120] + model.bias @ mine[5120:]).backward()
        reducer.finish()
        reducer.commit(True)
        mean = sum(slopes) / world.size
        difference["weight"] += mean[:5120].view(80, 64) - reducer.gradients["weight"]
        difference["bias"] += mean[5120:] - reducer.gradients["bias"]
    rest = reducer.state_dict()["residual"]
    reducer.close()
    errors = [(difference[key] - rest[key]).abs().max().item() for key in rest]
    return max(errors), reducer.gradients["weight"].clone(), rest["weight"].norm().item()


@pytest.mark.parametrize("name", LOSSY)
def test_two_levels_lose_nothing_either(tmp_path, name):
    outcomes = run_ranks(two_level_steps, 4, tmp_path, name, local_size=2)
    for error, mean, size in outcomes:
        assert error < 5e-5 and size > 0
        assert torch.equal(mean, outcomes[0][1])


def test_pieces_of_a_bucket():
    shapes = {"a": (4, 5), "b": (3,), "c": (2, 2, 2)}
    assert dist.pieces(shapes, 0, 31) == [("a", (4, 5)), ("b", (3,)), ("c", (2, 2, 2))]
    assert dist.pieces(shapes, 3, 17) == [("a", (2,)), ("a", (2, 5)), ("a", (2,))]
    assert dist.pieces(shapes, 6, 9) == [("a", (3,))] and dist.pieces(shapes, 9, 9) == []
    assert dist.pieces(shapes, 21, 26) == [("b", (2,)), ("c", (3,))]


@pytest.mark.parametrize(
    "name,options,message",
    [
        ("topk", {"fraction": 0.0}, "--topk-fraction"),
        ("topk", {"fraction": 0.6}, "more than fp32 on 2 ranks; set --topk-fraction below 0.5"),
        ("chunk", {"fraction": 2.0}, "--chunk-fraction"),
        ("powersgd", {"rank": 0}, "--powersgd-rank"),
    ],
)
def test_options_that_cannot_work_are_refused(name, options, message):
    with pytest.raises(dist.DistError, match=message):
        dist.make_compressor(name, dist.World(size=2), SHAPES, **options)


def average_on_gpu(world):
    """For each compressor, the finite gradients of a step on a GPU, on the CPU."""
    found = {}
    for name in dist.COMPRESSORS:
        torch.manual_seed(100)
        model = Toy().to(world.device)
        options = {"rank": 1} if name == "powersgd" else {}
        reducer = dist.Reducer(model, world, 0.0002, name, **options)
        (model(batch().to(world.device)) / 12).backward()
        reducer.finish()
        reducer.commit(True)
        found[name] = {key: view.cpu() for key, view in reducer.gradients.items()}
        assert len(reducer.bucket_seconds) == len(reducer.buckets) and reducer.wait_seconds >= 0
        reducer.close()
    return found


@pytest.mark.gpu
def test_the_lane_is_a_stream_on_a_gpu(tmp_path):
    found, expected = run_ranks(average_on_gpu, 1, tmp_path, gpu=True)[0], one_process()
    for name, gradients in found.items():
        assert all(view.isfinite().all() for view in gradients.values())
        for key in expected if name in ("none", "fp16", "bf16") else ():
            torch.testing.assert_close(gradients[key], expected[key], rtol=2e-2, atol=2e-2)
