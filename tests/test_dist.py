"""dist.py: the reducer against one process and failures, on Gloo ranks; compression, on threads,
whose bits are Gloo's by test_local_ranks.py. Order, overlap and sums in 16 bits:
course/test_graders.py."""
import concurrent.futures
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
import zlib
from unittest.mock import Mock, call

import pytest
import torch
from torch import nn

import dist
from tests import ranks
from tests.conftest import SEED
from tests.local_ranks import on_threads
from tests.ranks import one_of_two, run_ranks, together
from tests.variants import common, gradientflow, powersgd, topk

# (ranks, ranks of a node, of how many each exchanges with the others)
SIZES = [(1, 1, 1), (3, 3, 3), (4, 2, 2)]


def check_same_bits(world, tensors):
    """Raises DistError if a dict of tensors is not the same on all ranks."""
    world.check_same({name: zlib.crc32(tensor.detach().cpu().numpy().tobytes())
                      for name, tensor in tensors.items()}, "has tensors of other bits")


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


def toy(seed=0):
    torch.manual_seed(100 + SEED + seed)
    return Toy()


def batch(count=12):
    return torch.arange(count * 5).view(count, 5) % 11


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@functools.cache
def one_process(accumulation=1):
    """Gradients of the mean over the whole batch, without any of dist.py."""
    model = toy()
    (model(batch(12 * accumulation)) / 12).backward()
    return gradients_of(model)


def assert_near(model, expected, tolerance, case):
    for name, gradient in expected.items():
        error = (model.get_parameter(name).grad.cpu() - gradient).abs().max() / gradient.abs().max()
        assert error <= tolerance, (
            f"{case}: the mean gradient of {name} is {error:.2g} of its largest element away from "
            "that of one process")


def own_part(world, accumulation=1):
    """Returns the micro-batches of this rank."""
    return batch(12 * accumulation)[world.rank::world.size].chunk(accumulation)


def reduced(world, compression, accumulation, bucket_mb):
    """Returns (a model with the mean gradients of the batch, its Reducer)."""
    model = toy(world.rank).to(world.device)                   # only rank 0's weights shall count
    reducer = dist.Reducer(model, world, compression, bucket_mb)
    for _ in range(2):                                         # the second step begins clean
        reducer.zero_grad()
        for number, tokens in enumerate(own_part(world, accumulation)):
            reducer.last_micro_batch = number + 1 == accumulation
            (model(tokens.to(world.device)) / 12 * world.size).backward()
        reducer.finish()
    check_same_bits(world, model.state_dict())
    check_same_bits(world, gradients_of(model))
    return model, reducer


def in_many_ways(world, exchanging):
    model = toy()
    (model(*own_part(world)) / 12 * world.size).backward()
    dist.average_gradients(model, world)
    assert_near(model, one_process(), 1e-5, "average_gradients")
    for compression, accumulation, bucket_mb, tolerance in [
            ("none", 1, 0.0002, 1e-6), ("none", 3, 100.0, 1e-6), ("fp16", 2, 0.0002, 2e-3),
            ("bf16", 2, 100.0, 2e-2)]:
        model, reducer = reduced(world, compression, accumulation, bucket_mb)
        case = f"{compression}, {accumulation} micro-batches"
        assert_near(model, one_process(accumulation), tolerance, case)
        elements = torch.cat(reducer.flats)
        assert reducer.norm() == pytest.approx(float(elements.norm())), f"{case}: the norm"
        # 2 (W - 1) / W times the gradients, by each of W: the ranks, or the nodes
        expected = 2 * (exchanging - 1) * len(elements) * (4 if compression == "none" else 2)
        sent = world.sum(sent=reducer.bytes_sent)["sent"]
        assert abs(sent - expected) <= 64, f"{case}: {sent} bytes are sent, not {expected}"


@pytest.mark.parametrize("size,local_size,exchanging", SIZES)
def test_gradients_are_those_of_one_process(tmp_path, size, local_size, exchanging):
    run_ranks(in_many_ways, size, tmp_path, exchanging, local_size=local_size)


def test_after_an_error_the_next_step_is_right(monkeypatch):
    model = toy()
    reducer = dist.Reducer(model, one_of_two(), bucket_mb=0.0002)
    with monkeypatch.context() as patch:
        patch.setattr(reducer.buckets[1], "average", lambda scale: time.sleep(0.2) or 1 / 0)
        model(batch()).backward()
        with pytest.raises(ZeroDivisionError):
            reducer.finish()
        concurrent.futures.wait(reducer.jobs)        # the thread still has those after it
    reducer.zero_grad()
    (model(batch()) / 12 * 2).backward()
    reducer.finish()
    assert_near(model, one_process(), 1e-5, "after an error")


def test_averaging_takes_one_core_and_backward_keeps_its_own():
    torch.set_num_threads(2)
    try:
        reducer = dist.Reducer(toy(), one_of_two())
        averaging = reducer.thread.submit(torch.get_num_threads).result()
        assert (averaging, torch.get_num_threads()) == (1, 2), "threads of averaging, of backward"
    finally:
        torch.set_num_threads(1)


# ----- Lossy compression: what comes in goes out, if not in this step then later -----

SHAPES = {"matrix": (64, 48), "vector": (37,), "small": (3, 5), "other": (70, 30)}
COUNT = 5224                                                   # their elements
VARIANTS = {"topk": topk.topk, "powersgd": powersgd.powersgd, "chunk": gradientflow.chunk}
LOSSY = [name for name, wire in dist.COMPRESSORS.items() if not isinstance(wire(), dist.Dense)]
BLOCK_BYTES = {"int8": 512 + 4, "onebit": 64 + 4}              # of 512 elements, and their scale
OVERFLOWS = {3: math.inf, 5: -math.inf, 7: math.nan}           # in these steps, on the last rank


@pytest.fixture(params=[*LOSSY, *VARIANTS])
def lossy(request, monkeypatch):
    """The name of a compressor of dist.py, or of tests/variants."""
    wires = {name: functools.partial(dist.ErrorFeedback, mean) for name, mean in VARIANTS.items()}
    monkeypatch.setattr(dist, "COMPRESSORS", dist.COMPRESSORS | wires)
    monkeypatch.setattr(dist, "Bucket", dist.Bucket)
    common.tell_shapes()                                       # to powersgd
    return request.param


def gradient(rank, step):
    """Returns a rank's gradient; from step 10 on zeros."""
    if step >= 10:
        return torch.zeros(COUNT)
    generator = torch.Generator().manual_seed(1000 * rank + step + 10_000 * SEED)
    return torch.randn(COUNT, generator=generator) * torch.linspace(0.1, 3, COUNT)


def exchange(world, name, exchanging):
    """Takes ten steps, of which some overflow, and then steps in which all gradients are zero."""
    model = nn.ParameterDict({key: torch.zeros(shape) for key, shape in SHAPES.items()})
    reducer = dist.Reducer(model, world, name, bucket_mb=0.01)

    def mean_of(own, scale=1.0):
        reducer.zero_grad(scale)
        (nn.utils.parameters_to_vector(model.parameters()) @ own * scale).backward()
        reducer.finish()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).double() / scale

    came_in = went_out = torch.zeros(COUNT, dtype=torch.float64)
    for step in range(160):
        gradients = [gradient(rank, step) for rank in range(world.size)]
        gradients[-1][7] += OVERFLOWS.get(step, 0)
        mean = mean_of(gradients[world.rank], 2.0 ** (step % 3))
        taken = math.isfinite(reducer.norm())
        assert taken != (step in OVERFLOWS), f"{name}: the mean of step {step} is finite: {taken}"
        reducer.commit(taken)
        if taken:
            came_in = came_in + sum(gradients) / world.size
            went_out = went_out + mean
        if step >= 10 and not mean.any():
            break                                  # nothing is left
    check_same_bits(world, {"what went out": went_out})
    lost = (came_in - went_out).norm() / came_in.norm()
    assert lost < {"onebit": 0.05}.get(name, 1e-6), (
        f"{name}: what came in is not what went out, but {lost:.2g} of it away, after steps with "
        "three loss scales and three overflows")

    if name in BLOCK_BYTES:
        blocks = sum(-(-len(flat) // (exchanging * 512)) for flat in reducer.flats)
        leads = world.rank % world.local_size == 0 or world.nodes == 1
        expected = 2 * (exchanging - 1) * blocks * BLOCK_BYTES[name] * leads
        assert reducer.bytes_sent == expected, f"{name}: not {expected} bytes on rank {world.rank}"
    mean_of(gradient(world.rank, 0))
    reducer.commit(True)
    reducer.forget()
    mean = mean_of(torch.zeros(COUNT))
    assert not mean.any(), f"{name}: after `forget` {mean.abs().max():.2g} is sent"


@pytest.mark.parametrize("size,local_size,exchanging", SIZES)
def test_what_comes_in_goes_out(lossy, size, local_size, exchanging):
    on_threads(exchange, size, lossy, exchanging, local_size=local_size)


def test_codes_are_as_their_equations_say():
    x = torch.randn(3, 512) * torch.tensor([[0.1], [1.0], [10.0]])
    x[0, :2] = torch.tensor([0.0, -0.0])
    scales = x.abs().amax(1, keepdim=True) / 127
    for encode, decode, exact in [
            (dist.encode_int8, dist.decode_int8, (x / scales).round() * scales),
            (dist.encode_onebit, dist.decode_onebit, x.abs().mean(1, keepdim=True).copysign(x))]:
        codes, sent = encode(x)
        torch.testing.assert_close(sent, exact, rtol=1e-6, atol=0, msg=lambda text: (
            f"{encode.__name__}: what it sends is not C(x), of one scale a block: {text}"))
        assert torch.equal(decode(codes), sent), f"{decode.__name__} finds other numbers"


# ----- Ranks -----

def collectives(world):
    """Returns what they give."""
    tensor = torch.arange(2) + 10 * world.rank
    gathered = world.all_gather(tensor).tolist()
    reduced = tensor.clone()
    world.reduce(reduced)
    world.broadcast(tensor)
    with pytest.raises(dist.DistError) as caught:
        world.check_same({"a": 2, "c": 1} if world.rank == 3 else {"a": 0}, "differs")
    total = world.sum(large=2 ** 50 + 1, rank=world.rank, bad=math.nan if world.rank else 0.0)
    return {"all_gather": gathered, "broadcast": tensor.tolist(), "sum": str(total),
            "check_same": str(caught.value), "size": (world.nodes, world.local_size),
            "reduce": reduced.tolist() if world.rank == 0 else "undefined"}


def test_small_collectives(tmp_path):
    expected = {
        "all_gather": [[0, 1], [10, 11], [20, 21], [30, 31]],
        "broadcast": [0, 1],
        "sum": str({"large": 2.0 ** 52 + 4, "rank": 6.0, "bad": math.nan}),
        "check_same": "rank 3 differs: a 2 (not 0), c 1 (not None)",
        "size": (2, 2)}
    for outcomes in (run_ranks(collectives, 4, tmp_path, local_size=2),
                     on_threads(collectives, 4, local_size=2)):
        assert outcomes[0].pop("reduce") == [60, 64], "World.reduce: no sum at rank 0"
        for rank, outcome in enumerate(outcomes):
            for name, value in expected.items():
                assert outcome[name] == value, f"rank {rank}, World.{name}: {outcome[name]}"


def begins_again(world, sizes, store):
    """Meets as nodes of so many ranks, where torch's debugging wraps Gloo; returns the sum of the
    ranks, or the error."""
    torch.distributed.destroy_process_group()
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[nodes[world.rank]])
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.distributed.set_debug_level_from_env()
    try:
        again = dist.init(10, f"file://{store}")
        return str(again.sum(rank=again.rank))
    except dist.DistError as error:
        return str(error)


@pytest.mark.parametrize("sizes", [(2,), (2, 1), (1, 1, 2), (1, 3)])
def test_unequal_nodes_are_refused_by_every_rank(tmp_path, sizes):
    expected = "set the same --nproc_per_node on every node" if len(sizes) > 1 else "'rank': 1.0"
    for words in run_ranks(begins_again, sum(sizes), tmp_path, sizes, tmp_path / "second"):
        assert expected in words


def dies(world):
    os._exit(9)


def world_sum(world):
    return world.sum(rank=world.rank)


def test_ranks_that_are_started_again_do_not_meet_the_dead(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 2)      # as torchrun keeps it
    store.add("newest attempt", 1)                                # rank 1 came and died, ...
    store.set("1/here/1", "")
    assert run_ranks(dies, 2, tmp_path, store="store", check=False) == [None, None]
    for _ in range(2):                                         # ... then both, and both again
        assert run_ranks(world_sum, 2, tmp_path, store="store") == [{"rank": 1.0}] * 2


def wait_for_each_other(world, shape_of_rank_1):
    """Rank 0 waits for the gradients of rank 1, which waits for rank 0 or has another shape."""
    if world.rank == 1 and not shape_of_rank_1:
        threading.Event().wait()
    layer = nn.Linear([3, shape_of_rank_1][world.rank], 1, bias=False)
    layer.weight.grad = torch.ones_like(layer.weight)
    dist.average_gradients(layer, world)
    world.barrier()


@pytest.mark.parametrize("shape, rank_1", [
    (0, "hangs, as ranks .0, 1. do"), (5000, r"dist.py line \d+ \(average_gradients\)")])
def test_ranks_that_wait_for_each_other_say_where(tmp_path, monkeypatch, shape, rank_1):
    monkeypatch.setattr(ranks, "IDLE", 3)
    words = rf"order\?\): rank 0: dist.py line \d+ \(average_gradients\), rank 1: {rank_1}"
    with pytest.raises(AssertionError, match=words):
        run_ranks(wait_for_each_other, 2, tmp_path, shape)


def test_a_rank_that_never_comes_is_named_and_an_orphan_meets_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    path = str(tmp_path / "store")
    with pytest.raises(dist.RankLost, match="rank 0 of 3 could not meet.*rank 1, 2 did not come"):
        dist.init(0.2, "file://" + path)
    store = torch.distributed.FileStore(path, 3)
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
    with pytest.raises(RuntimeError, match="^out of memory$"):
        dist.World(size=2)._run(Mock(side_effect=RuntimeError("out of memory")))


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_without_torchrun_are_refused(monkeypatch, name):
    monkeypatch.setenv("SLURM_NTASKS", "2")                    # a batch script's own process, too
    monkeypatch.delenv("RANK", raising=False)
    assert dist.init().size == 1
    monkeypatch.setenv(name, "2")
    with pytest.raises(dist.DistError, match=f"^{name} is 2, .*; start one torchrun on each node"):
        dist.init()
    monkeypatch.setenv("RANK", "0")                            # torchrun has set it
    assert dist.init().size == 1


# ----- Failures: who failed, said once -----

def leaves(world, said, act):
    """Rank 2 acts, the others go on until a collective fails; what each prints is in a file."""
    sys.stderr = open(f"{said}.{world.rank}", "w", buffering=1)
    torch.distributed.destroy_process_group()                  # all are here now: a short --timeout
    world = dist.init(3, f"file://{said}.store")
    process = world.all_gather_object(os.getpid())[2]
    try:
        if world.rank == 2:
            if act == "killed":
                os.kill(process, signal.SIGKILL)
            if act == "stopped":
                late = 'sleep 5; touch "$0"; kill -9 "$1"'
                subprocess.Popen(["bash", "-c", late, f"{said}.late", str(process)])
                os.kill(process, signal.SIGSTOP)
            raise ZeroDivisionError("an own\nerror")
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)               # as torchrun does
            time.sleep(2)                                      # busy, but alive
        while True:
            world.barrier()
    except (dist.RankLost, ZeroDivisionError) as error:
        if os.path.exists(f"{said}.late"):
            error = "Gloo does not raise after --timeout, but when the stopped rank is killed"
        rank_lost = isinstance(error, dist.RankLost)
        dist.leave(f"rank {world.rank}: {error}", rank_lost or act != "mistake", rank_lost)


LOST = "rank [013]: rank 2 died or did not answer in time; the same command resumes .*"
OWN = "rank 2: an own\nerror"


def test_one_rank_says_who_failed(tmp_path):
    expected = {"killed": LOST, "stopped": LOST, "bug": OWN, "mistake": OWN}

    def run(act):
        return run_ranks(leaves, 4, tmp_path, tmp_path / act, act, check=False)

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
    time.sleep(20)
    return "it was not ended"


def test_a_rank_that_does_not_notice_ends_a_minute_later(tmp_path):
    assert run_ranks(waits_in_nccl, 2, tmp_path, tmp_path, check=False) == [None, None]
    assert (tmp_path / "1").exists(), "rank 1 does not end its torchrun, where rank 0 says so"


@pytest.mark.parametrize("torchrun, helps", [(4711, False), (4711, True), (None, False)])
def test_leaving_ends_torchrun_where_a_restart_is_in_vain(monkeypatch, capsys, torchrun, helps):
    kill = Mock()
    monkeypatch.setattr(dist, "TORCHRUN", torchrun)
    monkeypatch.setattr(dist, "find_torchrun", lambda: torchrun)
    monkeypatch.setattr(dist, "time", Mock())
    monkeypatch.setattr(os, "kill", kill)
    with pytest.raises(SystemExit, match="1"):                 # see conftest.py
        dist.leave("the reason", helps)
    assert capsys.readouterr().err == "the reason\n"
    assert kill.mock_calls == [call(4711, signal.SIGTERM)] * bool(torchrun and not helps)


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

def on_gpus(world):
    for name in dist.COMPRESSORS:
        model, _ = reduced(world, name, 1, 0.0002)
        if name not in LOSSY:
            assert_near(model, one_process(), 2e-2, name)


@pytest.mark.gpu
@pytest.mark.parametrize("size,local_size", [(2, 2), (4, 2)])            # the second in two levels
def test_gradients_on_gpus_are_those_of_one_process(tmp_path, size, local_size):
    run_ranks(on_gpus, size, tmp_path, local_size=local_size, gpu=True)
