"""dist.py: the reducer against one process and failures, on Gloo ranks; the compressors'
invariants, on threads, whose bits are Gloo's by test_local_ranks.py. Order, overlap and sums in 16
bits: course/test_graders.py."""
import functools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from torch import nn

import dist
from tests.conftest import SEED
from tests.local_ranks import on_threads
from tests.ranks import one_of_two, run_ranks, together
from tests.variants import common, gradientflow, powersgd, topk

# Those of dist.py and of tests/variants. A new one is tested at once.
dist.COMPRESSORS |= {
    "topk": lambda: dist.ErrorFeedback(topk.topk),
    "powersgd": lambda: dist.ErrorFeedback(powersgd.powersgd),
    "chunk": lambda: dist.ErrorFeedback(gradientflow.chunk)}
common.tell_shapes()                                           # to powersgd
DENSE = [name for name, wire in dist.COMPRESSORS.items() if isinstance(wire(), dist.Dense)]
LOSSY = [name for name in dist.COMPRESSORS if name not in DENSE]


# ----- The reducer against one process -----

class Toy(nn.Module):
    """A model with all that troubles a reducer: a frozen parameter, one used twice, a buffer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)                       # also the output matrix
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("shift", torch.randn(6))

    def forward(self, tokens):
        x = self.frozen(self.table(tokens)) + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.norm(x) @ self.table.weight.T).logsumexp(-1).square().sum()


TRAINABLE = 11 * 6 + 3 * 42 + 12


def toy(seed=0):
    torch.manual_seed(100 + SEED + seed)
    return Toy()


def batch(count=12):
    return torch.arange(count * 5).view(count, 5) % 11


@functools.cache
def one_process(accumulation=1):
    """Gradients of the mean over the whole batch, without any of dist.py."""
    model = toy()
    (model(batch(12 * accumulation)) / 12).backward()
    return gradients_of(model)


def reduced(world, bucket_mb, accumulation, compression):
    """Gradients of the same batch by the Reducer, of which each rank takes its part."""
    model = toy(world.rank)                                    # only rank 0's weights shall count
    reducer = dist.Reducer(model, world, compression, bucket_mb)
    for _ in range(2):                                         # the second step begins clean
        reducer.zero_grad()
        mine = batch(12 * accumulation)[world.rank::world.size].chunk(accumulation)
        for number, tokens in enumerate(mine):
            reducer.last_micro_batch = number + 1 == accumulation
            (model(tokens) / 12 * world.size).backward()
        reducer.finish()
    gradients = gradients_of(model)
    every = torch.cat([gradient.flatten() for gradient in gradients.values()])
    assert reducer.norm() == pytest.approx(float(every.norm()))
    weights = [p.detach() for p in [*model.parameters(), *model.buffers()]]
    return gradients, weights, reducer.bytes_sent


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def simple(world):
    """Gradients of one batch by average_gradients."""
    model = toy()
    (model(batch()[world.rank::world.size]) / 12 * world.size).backward()
    dist.average_gradients(model, world)
    return gradients_of(model)


WAYS = [(0.0002, 1, "none"), (100.0, 3, "none"), (0.0002, 2, "fp16"), (100.0, 2, "bf16")]


def in_many_ways(world):
    return simple(world), [reduced(world, *way) for way in WAYS]


@pytest.mark.parametrize("size,local_size,exchanging", [(1, 1, 1), (3, 3, 3), (4, 2, 2)])
def test_gradients_are_those_of_one_process(tmp_path, size, local_size, exchanging):
    outcomes = run_ranks(in_many_ways, size, tmp_path, local_size=local_size)
    for naive, _ in outcomes:
        for name, gradient in one_process().items():
            torch.testing.assert_close(naive[name], gradient, rtol=1e-5, atol=1e-5)
    for k, (_, accumulation, compression) in enumerate(WAYS):
        tolerance = {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2}[compression]
        case = f"{compression}, {accumulation} micro-batches"
        found = [ways[k] for _, ways in outcomes]
        first_gradients, first_weights, _ = found[0]
        for name, gradient in one_process(accumulation).items():
            error = (first_gradients[name] - gradient).abs().max() / gradient.abs().max()
            assert error <= tolerance, (
                f"{case}: the mean gradient of {name} is {error:.2g} of its largest element away "
                "from that of one process")
        for gradients, weights, _ in found:
            for name, gradient in first_gradients.items():
                assert torch.equal(gradients[name], gradient), (
                    f"{case}: the mean gradient of {name} has other bits on another rank")
            assert all(map(torch.equal, weights, first_weights)), "a rank has other weights"
        # 2 (W - 1) / W times the gradients, by each of W: the ranks, or the nodes
        expected = 2 * (exchanging - 1) * TRAINABLE * (4 if compression == "none" else 2)
        sent = sum(sent for _, _, sent in found)
        assert abs(sent - expected) <= 64, f"{case}: {sent} bytes are sent, not {expected}"


def test_after_an_error_the_next_step_is_right():
    model = toy()
    reducer = dist.Reducer(model, one_of_two(), bucket_mb=0.0002)
    reducer.buckets[1].average = lambda loss_scale: time.sleep(0.2) or 1 / 0
    (model(batch()) / 12).backward()
    with pytest.raises(ZeroDivisionError):
        reducer.finish()
    del reducer.buckets[1].average

    reducer.zero_grad()
    (model(batch()) / 12 * 2).backward()
    reducer.finish()
    for name, gradient in one_process().items():
        ours = model.get_parameter(name).grad
        torch.testing.assert_close(ours, gradient, rtol=1e-5, atol=1e-5)


def test_averaging_takes_one_core_and_backward_keeps_its_own():
    torch.set_num_threads(2)
    try:
        reducer = dist.Reducer(toy(), one_of_two())
        averaging = reducer.thread.submit(torch.get_num_threads).result()
        assert (averaging, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(1)


# ----- Lossy compression: what came in = what went out + what is kept -----

SHAPES = {"matrix": (64, 48), "vector": (37,), "small": (3, 5), "other": (70, 30)}
COUNT = 5224                                                   # their elements


def gradient(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step + 10_000 * SEED)
    return torch.randn(COUNT, generator=generator) * torch.linspace(0.1, 3, COUNT)


def mean_gradient(world, step):
    return sum(gradient(rank, step) for rank in range(world.size)) / world.size


def average(world, bucket, step, scale=1.0, spoil=None):
    """Averages the ranks' gradients of a step; returns (the mean, bytes sent)."""
    bucket.flat.copy_(gradient(world.rank, step) * scale)
    if spoil is not None and world.rank == world.size - 1:
        bucket.flat[7] = spoil
    sent = bucket.average(scale)
    return bucket.flat / scale, sent


def kept(world, bucket):
    """Returns what is not sent yet, (COUNT,), as a mean over all ranks."""
    rest = torch.zeros(COUNT)
    leaders = bucket.across_nodes
    if bucket.within_node.rank == 0:
        residual, state = bucket.wire.kept
        rest = residual[:COUNT].clone()
        leaders.all_reduce(rest.div_(leaders.size))
        if "part_residual" in state:                               # lost after the average
            parts = leaders.all_gather(state["part_residual"])
            rest += parts.view(-1)[:COUNT]
    bucket.within_node.broadcast(rest)
    return rest


def fifty_steps(world, name):
    """Returns (|in - out - kept|, the last mean, bytes, size of what is kept)."""
    bucket = dist.Bucket(SHAPES, world, name)
    went_in = went_out = torch.zeros(COUNT, dtype=torch.float64)
    for step in range(50):
        mean, sent = average(world, bucket, step, 2.0 ** (step % 3))     # any scale
        bucket.wire.commit(True)
        went_in, went_out = went_in + mean_gradient(world, step), went_out + mean
    rest = kept(world, bucket)
    difference = (went_in - went_out - rest).abs().max().item()
    bucket.wire.forget()
    assert bucket.wire.kept == (None, {})
    return difference, mean, sent, rest.norm().item() / went_in.norm().item()


def fifty_steps_of_all(world):
    return {name: fifty_steps(world, name) for name in LOSSY}


@pytest.mark.parametrize("size,local_size,exchanging", [(1, 1, 1), (3, 3, 3), (4, 2, 2)])
def test_what_came_in_went_out_or_is_kept(size, local_size, exchanging):
    outcomes = on_threads(fifty_steps_of_all, size, local_size=local_size)
    blocks = -(-COUNT // (exchanging * 512))                   # of each rank's part
    sizes = {"int8": 516 * blocks, "onebit": 68 * blocks}      # bytes, with the fp32 scales
    for name in LOSSY:
        for rank, (difference, last, sent, rest) in enumerate(each[name] for each in outcomes):
            assert difference < 2e-4, (                        # 50 steps of numbers around 3
                f"{name}: what came in is not what went out and is kept, but {difference:.2g} "
                "away, after 50 steps with other loss scales")
            assert torch.equal(last, outcomes[0][name][1]), f"{name}: ranks have other bits"
            assert rest < {"int8": 0.01, "onebit": 2, "powersgd": 2}.get(name, 9), (
                f"{name}: what is kept has {rest:.3g} times the norm of all that came in: it grows")
            if rank % local_size and size > local_size:
                assert sent == 0, f"{name}: rank {rank} leads no node, and sends {sent} bytes"
            elif name in sizes:
                assert sent == 2 * (exchanging - 1) * sizes[name]


def overflow(world, name):
    """An inf or NaN of one rank makes the mean not finite on all, and a skipped step changes
    nothing. Returns whether the mean of the step after that is finite."""
    bucket = dist.Bucket(SHAPES, world, name)
    for step in range(3):
        assert average(world, bucket, step)[0].isfinite().all(), f"{name}: a mean is not finite"
        bucket.wire.commit(True)
    residual, state = before = bucket.wire.kept
    kept = [value for value in [residual, *state.values()] if torch.is_tensor(value)]
    bits = [value.clone() for value in kept]
    for bad in math.inf, -math.inf, math.nan:
        assert not average(world, bucket, 3, spoil=bad)[0].isfinite().all(), (
            f"{name}: a gradient of one rank is {bad}, and the mean of all is finite")
        bucket.wire.commit(False)
    assert bucket.wire.kept is before
    assert all(map(torch.equal, kept, bits)), f"{name}: a skipped step has changed what is kept"
    return average(world, bucket, 4)[0].isfinite().all()


def constant(world, name):
    """The relative error of the mean of 120 equal steps."""
    model, total = nn.Linear(COUNT, 1, bias=False), torch.zeros(COUNT)
    reducer = dist.Reducer(model, world, name)
    for _ in range(120):
        reducer.zero_grad()
        model(gradient(world.rank, 0)).sum().backward()
        reducer.finish()
        reducer.commit(True)
        total += model.weight.grad.view(-1)
    exact = mean_gradient(world, 0)
    return ((total / 120 - exact).norm() / exact.norm()).item()


def overflow_and_constant(world):
    return {name: (overflow(world, name), constant(world, name)) for name in LOSSY}


def test_an_overflow_leaves_no_trace_and_a_constant_gradient_arrives_in_full():
    for outcome in on_threads(overflow_and_constant, 2):
        for name, (after, error) in outcome.items():
            assert after, f"{name}: the mean of the step after a skipped one is not finite"
            assert error < 0.25, (
                f"{name}: of a gradient that is the same in 120 steps the mean of all that arrived "
                f"is {error:.0%} off")


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_stay_zero(name):
    bucket = dist.Bucket({"matrix": (40, 1024)}, dist.World(), name)
    for _ in range(3):                             # the second step sends what the first has left
        bucket.flat[:1024], bucket.flat[1024:] = 1.0, 0.0
        bucket.average(1.0)
        assert bucket.flat[:1024].any() and not bucket.flat[1024:].any()
        bucket.wire.commit(True)


def test_codes_are_as_their_equations_say():
    x = torch.randn(3, 512) * torch.tensor([[0.1], [1.0], [10.0]])
    x[0, :2] = torch.tensor([0.0, -0.0])
    scales = x.abs().amax(1, keepdim=True) / 127
    for encode, decode, exact in [
            (dist.encode_int8, dist.decode_int8, (x / scales).round() * scales),
            (dist.encode_onebit, dist.decode_onebit, x.abs().mean(1, keepdim=True).copysign(x))]:
        codes, sent = encode(x)
        torch.testing.assert_close(sent, exact, rtol=1e-6, atol=0)
        assert torch.equal(decode(codes), sent)


# ----- Ranks -----

def collectives(world):
    total = world.sum(large=2 ** 50 + 1, ranks=world.rank, nan=math.nan if world.rank == 1 else 0.0)
    tensor = torch.arange(3) + world.rank + 2
    world.broadcast(tensor)
    assert tensor.tolist() == [2, 3, 4]
    assert world.all_gather(tensor + world.rank).tolist() == [
        [rank + 2, rank + 3, rank + 4] for rank in range(world.size)]
    with pytest.raises(dist.DistError, match="^rank 2 differs: a 2 .not 0., c 1 .not None.$"):
        world.check_same({"a": 2, "c": 1} if world.rank == 2 else {"a": 0}, "differs")
    return total, world.all_gather_object(world.rank), (world.nodes, world.local_size)


def test_small_collectives(tmp_path):
    outcomes = run_ranks(collectives, 4, tmp_path, local_size=2)
    outcomes += on_threads(collectives, 4, local_size=2)
    for total, ranks, place in outcomes:
        assert ranks == [0, 1, 2, 3] and place == (2, 2)
        assert total.pop("ranks") == 6 and total.pop("large") == 2 ** 52 + 4
        assert math.isnan(total.pop("nan")) and not total              # nor is NaN lost


def begins_again(world, sizes, store):
    """Meets as nodes of so many ranks; returns the sum of the ranks, or the error."""
    torch.distributed.destroy_process_group()
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[nodes[world.rank]])
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.distributed.set_debug_level_from_env()
    try:
        again = dist.init(10, f"file://{store}")
        return again.sum(rank=again.rank)
    except dist.DistError as error:
        return str(error)


def test_torchs_debugging_of_collectives_works(tmp_path):
    assert run_ranks(begins_again, 2, tmp_path, (2,), tmp_path / "second") == [{"rank": 1.0}] * 2


@pytest.mark.parametrize("sizes", [(2, 1), (1, 1, 2), (1, 3)])
def test_unequal_nodes_are_refused_by_every_rank(tmp_path, sizes):
    for words in run_ranks(begins_again, sum(sizes), tmp_path, sizes, tmp_path / "second"):
        assert "set the same --nproc_per_node on every node" in words


def dies(world):
    os._exit(9)


def test_ranks_that_are_started_again_do_not_meet_the_dead(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)      # as torchrun keeps it
    store.add("newest attempt", 1)                                # rank 1 came and died, ...
    store.set("1/here/1", "")
    assert run_ranks(dies, 2, tmp_path, store="store", check=False) == [None, None]
    for _ in range(2):                                         # ... then both, and both again
        assert run_ranks(world_sum, 2, tmp_path, store="store") == [{"rank": 1.0}] * 2


def world_sum(world):
    return world.sum(rank=world.rank)


def test_a_rank_that_never_comes_is_named_and_an_orphan_meets_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    path = str(tmp_path / "store")
    store = torch.distributed.FileStore(path, 3)
    began = time.monotonic()
    with pytest.raises(dist.RankLost, match="rank 0 of 3 could not meet.*rank 1, 2 did not come"):
        dist.init(1, "file://" + path)
    assert 1 <= time.monotonic() - began < 5
    store.set("2/here/1", "")                                  # now they wait for rank 0
    store.set("2/here/2", "")
    monkeypatch.setattr(dist, "torchrun_died", lambda: True)
    with pytest.raises(dist.RankLost, match="torchrun has died"):
        dist.init(1, "file://" + path)


def test_a_rank_takes_the_only_gpu_that_it_sees(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for gpus in 8, 1:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        dist.init()
    assert taken == [torch.device("cuda", 3), torch.device("cuda", 0)]


def test_a_lack_of_memory_is_no_lost_rank():
    def collective(group):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="^out"):
        dist.World(size=2)._run(collective)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_without_torchrun_are_refused(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(dist.DistError, match=f"^{name} is 2, .*; start one torchrun on each node"):
        dist.init()
    monkeypatch.setenv("RANK", "0")                            # torchrun has set it
    assert dist.init().size == 1
    monkeypatch.delenv("RANK")
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")                    # a batch script's own process
    assert dist.init().size == 1


# ----- Failures: who failed, said once -----

def leaves(world, said, act):
    """Rank 2 acts, the others go on until a collective fails; what each prints is in a file."""
    sys.stderr = open(f"{said}.{world.rank}", "w", buffering=1)
    world.all_gather_object(os.getpid())
    try:
        if world.rank == 2:
            if act == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if act == "stopped":
                subprocess.Popen(f"sleep 5; kill -9 {os.getpid()}", shell=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            raise ZeroDivisionError("an own\nerror")
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)               # as torchrun does
            time.sleep(2)                                      # busy, but alive
        while True:
            world.barrier()
    except (dist.RankLost, ZeroDivisionError) as error:
        rank_lost = isinstance(error, dist.RankLost)
        dist.leave(f"rank {world.rank}: {error}", rank_lost or act != "mistake", rank_lost)


LOST = "rank [013]: rank 2 died or did not answer in time; the same command resumes .*"
OWN = "rank 2: an own\nerror"


def test_one_rank_says_who_failed(tmp_path):
    expected = {"killed": LOST, "stopped": LOST, "bug": OWN, "mistake": OWN}

    def run(act):
        return run_ranks(leaves, 4, tmp_path, tmp_path / act, act, timeout=3, check=False)

    ended = together(*[functools.partial(run, act) for act in expected])       # they mostly wait
    assert ended == [[None] * 4] * 4
    for act, words in expected.items():
        said = [(tmp_path / f"{act}.{rank}").read_text() for rank in range(4)]
        assert re.fullmatch(words, "".join(said).strip()), f"{act}: {said}"


def waits_in_nccl(world, folder):
    """Rank 1 does not notice that rank 0 fails."""
    dist.end_torchrun = (folder / f"{world.rank}").touch
    later = dist.faulthandler.dump_traceback_later
    dist.faulthandler = types.SimpleNamespace(
        dump_traceback_later=lambda limit, exit: later(limit / 200, exit=exit))
    world.barrier()
    if world.rank == 0:
        dist.leave("a mistake", False)
    time.sleep(30)


def test_a_rank_that_does_not_notice_ends_a_minute_later(tmp_path):
    began = time.monotonic()
    assert run_ranks(waits_in_nccl, 2, tmp_path, tmp_path, check=False) == [None, None]
    assert time.monotonic() - began < 15 and (tmp_path / "1").exists()


@pytest.mark.parametrize("torchrun, helps", [(4711, False), (4711, True), (None, False)])
def test_leaving_ends_torchrun_where_a_restart_is_in_vain(monkeypatch, capsys, torchrun, helps):
    kills = []
    monkeypatch.setattr(dist, "TORCHRUN", torchrun)
    monkeypatch.setattr(dist, "find_torchrun", lambda: torchrun)
    monkeypatch.setattr(os, "kill", lambda *arguments: kills.append(arguments))
    with pytest.raises(SystemExit, match="1"):                 # see conftest.py
        dist.leave("the reason", helps)
    assert capsys.readouterr().err == "the reason\n"
    assert kills == [(4711, signal.SIGTERM)] * bool(torchrun and not helps)


def cannot_agree(world, said):
    sys.stderr = open(f"{said}.{world.rank}", "w", buffering=1)
    world.barrier()

    def gone(*arguments):
        raise torch.distributed.DistNetworkError("no store, no thread")

    dist.TORCHRUN = 1
    dist.open_store = gone
    if world.rank == 3:                          # has no memory left, which is its own error
        threading.Thread.start = gone
    dist.leave(f"rank {world.rank}", True, rank_lost=world.rank != 3)


def test_without_a_store_a_rank_of_each_node_speaks_and_who_has_no_memory(tmp_path):
    run_ranks(cannot_agree, 4, tmp_path, tmp_path / "said", local_size=2, check=False)
    assert [(tmp_path / f"said.{rank}").read_text() for rank in range(4)] == [
        "rank 0\n", "", "rank 2\n", "rank 3\n"]


# ----- On GPUs -----

def average_on_gpu(world):
    """For each compressor, the gradients of a step on GPUs, on the CPU."""
    found = {}
    for name in dist.COMPRESSORS:
        model = toy().to(world.device)
        reducer = dist.Reducer(model, world, name, 0.0002)
        mine = batch()[world.rank::world.size].to(world.device)
        (model(mine) / 12 * world.size).backward()
        reducer.finish()
        found[name] = {key: view.cpu() for key, view in gradients_of(model).items()}
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("size,local_size", [(2, 2), (4, 2)])            # the second in two levels
def test_gradients_on_gpus_are_those_of_one_process(tmp_path, size, local_size):
    outcomes = run_ranks(average_on_gpu, size, tmp_path, local_size=local_size, gpu=True)
    expected = one_process()
    for name, gradients in outcomes[0].items():
        for key, view in gradients.items():
            if name in DENSE:
                torch.testing.assert_close(view, expected[key], rtol=2e-2, atol=2e-2)
            for other in outcomes:                             # on all ranks the same bits
                assert torch.equal(other[name][key], view)
