"""Tests dist.py: the Reducer against one process, with equal bits on Gloo ranks and on threads;
what compression loses; how ranks meet and fail. course/test_graders.py tests the order of buckets,
overlap and its errors, and sums in 16 bits."""
import functools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from torch import distributed, nn

import dist
import optim
from tests.conftest import SEED
from tests.local_ranks import on_threads
from tests.ranks import begin, one_of_two, run_ranks
from tests.tools.plan import wire_bytes
from tests.variants import common, gradientflow, onebit, powersgd, topk

# (ranks, ranks of a node, how many exchange: the ranks of a single node, or the nodes' leaders)
SIZES = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 2, 2)]


def check_same_bits(outcomes):
    """Asserts that outcomes, each {name: tensor}, have the same bits as the first of them."""
    for number, tensors in enumerate(outcomes):
        for name, tensor in tensors.items():
            same = torch.equal(tensor, outcomes[0][name])
            assert same, f"{name}: outcome {number} differs in bits from outcome 0"


@pytest.fixture(scope="module")
def in_trouble(tmp_path_factory):
    """Begins six runs whose ranks hang or fail, which takes seconds: {shape or act: a future}; and
    {"folder": where the ranks of `leaves` write}.

    `begun_first` in conftest.py begins it before the other tests of this file; it waits for no run.
    Six threads of pytest's process call run_ranks at the same time. Each starts its ranks, 20 in
    all, and waits until they have ended or are killed. The two tests that want this fixture wait
    for the futures, which hold the outcomes of run_ranks or its error.
    """
    folder = tmp_path_factory.mktemp("trouble")
    found = {"folder": folder}
    environment = dict(os.environ)
    for shape in 0, 5000:
        found[shape] = begin(run_ranks, wait_for_each_other, 2, folder, shape, idle=3,
                             environment=environment)
    for act in "killed", "stopped", "error", "mistake":
        found[act] = begin(run_ranks, leaves, 4, folder, folder / act, act, check=False,
                           environment=environment)
    return found


# ----- The reducer against one process -----

def toy(seed=0):
    """Returns a model that is hard to reduce: one frozen parameter, one used twice, a buffer."""
    table = nn.Embedding(11, 6)
    output = nn.Linear(6, 11)
    output.weight = table.weight
    frozen = nn.Linear(6, 6).requires_grad_(False)
    model = nn.Sequential(table, frozen, nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), output)
    model.register_buffer("buffer", torch.zeros(6))
    # Its own generator, since ranks on threads draw at the same time.
    generator = torch.Generator().manual_seed(100 + SEED + seed)
    for tensor in model.state_dict().values():
        tensor.uniform_(-1, 1, generator=generator)
    return model


def mean_loss(model, tokens):
    """Returns this rank's share of a mean over 12 examples: a sum, divided by 12."""
    return model(tokens).logsumexp(-1).square().sum() / 12


def batch(accumulation=1):
    return torch.arange(60 * accumulation).view(-1, 5) % 11


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@functools.cache
def one_process(accumulation=1):
    """Returns the gradients of the mean over the whole batch, computed without dist.py."""
    model = toy()
    mean_loss(model, batch(accumulation)).backward()
    return gradients_of(model)


def assert_near(model, expected, tolerance, case):
    for name, gradient in expected.items():
        error = (model.get_parameter(name).grad.cpu() - gradient).abs().max() / gradient.abs().max()
        assert error <= tolerance, (
            f"{case}: the mean gradient of {name} differs from that of one process by {error:.2g} "
            "of its largest element")


def own_part(world, accumulation=1):
    """Returns the micro-batches of this rank."""
    return batch(accumulation)[world.rank::world.size].to(world.device).chunk(accumulation)


def reduced(world, compression, accumulation, bucket_mb):
    """Returns a model with the mean gradients of the batch, and its Reducer."""
    model = toy(world.rank).to(world.device)                   # only rank 0's weights may count
    reducer = dist.Reducer(model, world, compression, bucket_mb)
    for _ in range(2):                                         # step 2 must begin clean
        reducer.zero_grad()
        for number, tokens in enumerate(own_part(world, accumulation)):
            reducer.last_micro_batch = number + 1 == accumulation
            (mean_loss(model, tokens) * world.size).backward()
        reducer.finish()
        reducer.commit(True)
    return model, reducer


TOLERANCES = {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2}        # int8: see below


def in_many_ways(world, exchanging):
    """Averages in many ways. Returns the weights and gradients of each, {case and name: tensor}."""
    model = toy()
    (mean_loss(model, *own_part(world)) * world.size).backward()
    dist.average_gradients(model, world)
    assert_near(model, one_process(), 1e-5, "average_gradients")
    bits = {}
    for compression in dist.COMPRESSORS:
        for accumulation, bucket_mb in [(1, 0.0002), (3, 100.0)]:
            model, reducer = reduced(world, compression, accumulation, bucket_mb)
            case = f"{compression}, {accumulation} micro-batches"
            if compression in TOLERANCES:
                assert_near(model, one_process(accumulation), TOLERANCES[compression], case)
            norm = float(torch.cat(reducer.flats).norm())
            assert reducer.norm() == pytest.approx(norm), (
                f"{case}: `norm` returns {reducer.norm():.6g}, not {norm:.6g}")
            # Summed over all that exchange, see SIZES.
            expected = exchanging * sum(
                wire_bytes(compression, len(flat), exchanging) for flat in reducer.flats)
            sent = world.sum(sent=reducer.bytes_sent)["sent"]
            assert abs(sent - expected) <= 64, (
                f"{case}: the ranks send {sent} bytes in all, not {expected}")
            for name, tensor in (model.state_dict() | gradients_of(model)).items():
                bits[f"{case}: {name}"] = tensor.detach()
    return bits


@pytest.mark.parametrize("size, local_size, exchanging", SIZES)
def test_gradients_are_those_of_one_process_on_gloo_and_on_threads(
        tmp_path, size, local_size, exchanging):
    processes = run_ranks(in_many_ways, size, tmp_path, exchanging, local_size=local_size)
    threads = on_threads(in_many_ways, size, exchanging, local_size=local_size)
    check_same_bits(processes)
    check_same_bits(threads)
    if size != 3:                                  # there Gloo adds up in a different order
        check_same_bits([processes[0], threads[0]])


def masters_of(world):
    model = toy(world.rank)
    masters = optim.cast_with_masters(model, torch.bfloat16)
    dist.Reducer(model, world, masters=masters)
    return masters


def test_all_ranks_begin_with_the_masters_of_rank_0():
    check_same_bits(on_threads(masters_of, 2))


def test_averaging_takes_one_core_and_backward_keeps_its_own():
    torch.set_num_threads(2)
    try:
        reducer = dist.Reducer(toy(), one_of_two())
        averaging = reducer.thread.submit(torch.get_num_threads).result()
        assert (averaging, torch.get_num_threads()) == (1, 2), (
            "averaging must use 1 core, and leave backward its 2")
    finally:
        torch.set_num_threads(1)


# ----- Lossy compression: what comes in goes out, if not in this step then later -----

SHAPES = {"matrix": (64, 48), "vector": (37,), "small": (3, 5), "other": (70, 30)}
COUNT = 5224                                                   # elements of all SHAPES
VARIANTS = {"onebit": onebit.onebit, "topk": topk.topk, "powersgd": powersgd.powersgd,
            "chunk": gradientflow.chunk}
BLOCK_BYTES = {"int8": 512 + 4, "onebit": 64 + 4}              # codes of 512 elements, and a scale
OVERFLOWS = {3: math.inf, 5: -math.inf, 7: math.nan}           # {step: value}, on the last rank


@pytest.fixture(params=[*(BLOCK_BYTES | VARIANTS)])
def lossy(request, monkeypatch):
    """Returns the name of a lossy compressor, of dist.py or of tests/variants."""
    if request.param in VARIANTS:
        wire = functools.partial(dist.ErrorFeedback, VARIANTS[request.param])
        monkeypatch.setattr(dist, "COMPRESSORS", dist.COMPRESSORS | {request.param: wire})
        monkeypatch.setattr(dist, "Bucket", dist.Bucket)
        common.tell_shapes()                                   # powersgd needs them
    return request.param


def gradient(rank, step):
    """Returns a rank's gradient; from step 10 on it is 0."""
    if step >= 10:
        return torch.zeros(COUNT)
    generator = torch.Generator().manual_seed(1000 * rank + step + 10_000 * SEED)
    return torch.randn(COUNT, generator=generator) * torch.linspace(0.1, 3, COUNT)


def exchange(world, name, exchanging):
    """Takes ten steps, some with an overflow, then more with gradients of 0 until the mean is 0."""
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
        assert taken != (step in OVERFLOWS), (
            f"{name}: the norm in step {step} is {'' if taken else 'not '}finite, which is wrong")
        reducer.commit(taken)
        if taken:
            came_in = came_in + sum(gradients) / world.size
            went_out = went_out + mean
        if step >= 10 and not mean.any():
            break                                  # no residual is left
    lost = (came_in - went_out).norm() / came_in.norm()
    assert lost < {"onebit": 0.05}.get(name, 1e-6), (
        f"{name}: the sum of all means differs from that of the exact means by {lost:.2g} of its "
        "norm, after steps with three loss scales and three overflows")

    if name in BLOCK_BYTES:
        blocks = sum(-(-len(flat) // (exchanging * 512)) for flat in reducer.flats)
        leads = world.rank % world.local_size == 0 or world.local_size == world.size
        expected = 2 * (exchanging - 1) * blocks * BLOCK_BYTES[name] * leads
        assert reducer.bytes_sent == expected, (
            f"{name}: rank {world.rank} sends {reducer.bytes_sent} bytes, not {expected}")
    mean_of(gradient(world.rank, 0))
    reducer.commit(True)
    reducer.forget()
    mean = mean_of(torch.zeros(COUNT))
    assert not mean.any(), (
        f"{name}: after `forget` the mean of zeros is up to {mean.abs().max():.2g}, not 0")
    return {f"{name}: the sum of all means": went_out}


@pytest.mark.parametrize("size, local_size, exchanging", SIZES)
def test_what_comes_in_goes_out(lossy, size, local_size, exchanging):
    check_same_bits(on_threads(exchange, size, lossy, exchanging, local_size=local_size))


def test_codes_are_as_their_equations_say():
    x = torch.randn(3, 512) * torch.tensor([[1e-9], [1.0], [10.0]])
    x[0, :2] = torch.tensor([0.0, -0.0])
    scales = x.abs().amax(1, keepdim=True) / 127
    for encode, decode, exact in [
            (dist.encode_int8, dist.decode_int8, (x / scales).round() * scales),
            (onebit.encode, onebit.decode, x.abs().mean(1, keepdim=True).copysign(x))]:
        torch.testing.assert_close(decode(encode(x)), exact, rtol=1e-6, atol=0, msg=lambda text: (
            f"{decode} does not return C(x), with one scale for each block: {text}"))


def collectives_of_a_bucket(world):
    """Returns the names of this rank's collectives within its node and across nodes."""
    for level in world.levels:
        level._run = Mock(side_effect=level._run)
    dist.Bucket({"weight": (600,)}, world, "none").average(1.0)
    return [[called.args[0].__name__ for called in level._run.mock_calls]
            for level in world.levels]


def test_only_the_first_rank_of_a_node_exchanges_with_other_nodes():
    leader = [["all_reduce", "broadcast"], ["all_reduce"]]
    other = [["all_reduce", "broadcast"], []]
    assert on_threads(collectives_of_a_bucket, 4, local_size=2) == [leader, other] * 2


# ----- Ranks -----

def collectives(world):
    """Returns the results of small collectives, {name: result}."""
    tensor = nn.Parameter(torch.full((2,), world.rank + 5.0))
    world.broadcast(tensor)
    mine = [world.rank]
    everyone = world.all_gather_object(mine)
    everyone[0].append("changed")                  # a copy of `mine`
    with pytest.raises(dist.DistError) as caught:
        world.check_same({"a": 2, "c": 1} if world.rank == 3 else {"a": 0, "b": 1}, "differs")
    total = world.sum(large=2 ** 50 + 1, rank=world.rank, bad=math.nan if world.rank else 0.0)
    return {"broadcast": tensor.tolist(), "sum": str(total), "check_same": str(caught.value),
            "all_gather_object": everyone, "what it gave": mine}


def test_small_collectives(tmp_path):
    expected = {
        "broadcast": [5, 5],
        "sum": str({"large": 2.0 ** 52 + 4, "rank": 6.0, "bad": math.nan}),
        "check_same": "rank 3 differs: a 2 (not 0), b absent (not 1), c 1 (not absent)",
        "all_gather_object": [[0, "changed"], [1], [2], [3]]}
    for outcomes in (run_ranks(collectives, 4, tmp_path, local_size=2),
                     on_threads(collectives, 4, local_size=2)):
        for rank, found in enumerate(outcomes):
            for what, right in (expected | {"what it gave": [rank]}).items():
                assert found[what] == right, f"on rank {rank}: {what}"


@pytest.mark.parametrize("nodes", [(2, 1), (1, 1, 2), (1, 3)])
def test_unequal_nodes_are_refused_by_every_rank(tmp_path, nodes):
    for error in run_ranks(dist.World.barrier, sum(nodes), tmp_path, nodes=nodes, timeout=10,
                           check=False):
        assert "set the same --nproc_per_node on every node" in str(error)


def timeouts(world):
    groups = [distributed.group.WORLD] + [level.group for level in world.levels]
    return [group._get_backend(world.device).options._timeout.seconds for group in groups]


def test_timeout_is_that_of_groups_within_and_across_nodes(tmp_path):
    assert run_ranks(timeouts, 2, tmp_path, local_size=1, timeout=47)[0][1:] == [47, 47]


def dies(world):
    os._exit(9)


def test_ranks_that_are_started_again_do_not_meet_the_dead(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 2)  # as torchrun keeps it
    store.add("newest attempt", 1)                             # rank 1 came and died, ...
    store.set("1/here/1", "")
    assert run_ranks(dies, 2, tmp_path, store="store", check=False) == [None, None]
    count = functools.partial(dist.World.sum, ranks=1)
    for _ in range(2):                                         # ... then both, and both again
        assert run_ranks(count, 2, tmp_path, store="store") == [{"ranks": 2.0}] * 2


def wait_for_each_other(world, shape_of_rank_1):
    """Rank 0 waits for the gradient of rank 1, which has a different shape; if shape_of_rank_1
    is 0, rank 1 calls no collective and waits forever."""
    if world.rank == 1 and not shape_of_rank_1:
        threading.Event().wait()
    layer = nn.Linear([3, shape_of_rank_1][world.rank], 1, bias=False)
    layer.weight.grad = torch.ones_like(layer.weight)
    dist.average_gradients(layer, world)
    world.barrier()


@pytest.mark.parametrize("shape, rank_1", [
    (0, "hangs, as ranks .0, 1. do"), (5000, r"dist.py line \d+ \(average_gradients\)")])
def test_ranks_that_wait_for_each_other_say_where(in_trouble, shape, rank_1):
    words = rf"order\?\): rank 0: dist.py line \d+ \(average_gradients\), rank 1: {rank_1}"
    with pytest.raises(AssertionError, match=words):
        in_trouble[shape].result()


def test_a_rank_that_never_comes_is_named_and_an_orphan_meets_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    path = str(tmp_path / "store")
    with pytest.raises(dist.RankLost, match="rank 0 of 3 could not meet.*rank 1, 2 did not come"):
        dist.init(0.2, "file://" + path)
    store = distributed.FileStore(path, 3)
    store.set("2/here/1", "")                                  # now the others wait for rank 0
    store.set("2/here/2", "")
    monkeypatch.setattr(dist, "torchrun_died", lambda: True)
    with pytest.raises(dist.RankLost, match="torchrun has died"):
        dist.init(1, "file://" + path)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(dist.RankLost, match="rank 0 of 3 could not meet.*MASTER_ADDR"):
        dist.init(1)


@pytest.mark.parametrize("status, parent", [
    (["7 (a (wrapper)) S 42 7 7"], 42), (ProcessLookupError("it is gone"), None)])
def test_torchrun_is_the_parent_of_the_first_process_of_a_session(monkeypatch, status, parent):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(dist.Path, "read_text", Mock(side_effect=status))
    assert dist.find_torchrun() == (parent or os.getppid())


@pytest.mark.parametrize("gpus, taken", [(8, 3), (1, 0)])
def test_a_rank_takes_its_gpu_or_the_only_one_that_it_sees(monkeypatch, gpus, taken):
    set_device = Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", "3")
    dist.init()
    set_device.assert_called_once_with(torch.device("cuda", taken))


def test_a_lack_of_memory_is_no_lost_rank(monkeypatch):
    with pytest.raises(RuntimeError, match="^out of memory$"):
        dist.World(size=2)._run(Mock(side_effect=RuntimeError("out of memory")))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "meet", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="^out of memory$"):
        dist.init()


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_without_torchrun_are_refused(monkeypatch, name):
    monkeypatch.setenv("SLURM_NTASKS", "2")                    # is set in a batch script, too
    monkeypatch.setenv("LOCAL_RANK", "")                       # some launchers set it so
    monkeypatch.delenv("RANK", raising=False)
    assert dist.init().size == 1
    monkeypatch.setenv(name, "2")
    with pytest.raises(dist.DistError, match=f"^{name} is 2, .*; start one torchrun on each node"):
        dist.init()
    monkeypatch.setenv("RANK", "0")                            # torchrun has set it
    assert dist.init().size == 1


# ----- Failures: who failed, said once -----

def leaves(world, said, act):
    """Rank 2 fails as `act` says; the others go on until a collective fails, or do not notice. Each
    rank prints into the file SAID.RANK, and makes SAID.RANK.ends if it would end its torchrun."""
    sys.stderr = open(f"{said}.{world.rank}", "w", buffering=1)
    distributed.destroy_process_group()                        # all have met: --timeout is short
    dist.own_store.cache_clear()
    if act == "error":
        distributed.set_debug_level(distributed.DebugLevel.DETAIL)       # torch then wraps Gloo
    if act == "mistake":
        soon = functools.partial(dist.faulthandler.dump_traceback_later, 0.3, file=sys.__stderr__)
        dist.faulthandler = Mock(dump_traceback_later=lambda limit, exit: soon(exit=exit))
    dist.end_torchrun = Path(f"{said}.{world.rank}.ends").touch
    world = dist.init(3, f"file://{said}.store")
    process = world.all_gather_object(os.getpid())[2]
    assert dist.asking.submit(dist.own_store).result() is dist.own_store(), (
        "each thread has a connection of its own, and waits to connect to a store that is gone")
    try:
        if world.rank == 2:
            if act == "killed":
                os.kill(process, signal.SIGKILL)
            if act == "stopped":
                late = 'sleep 5; touch "$0"; kill -9 "$1"'
                subprocess.Popen(["bash", "-c", late, f"{said}.late", str(process)])
                os.kill(process, signal.SIGSTOP)
            if act == "error":                                 # such as a lack of memory
                threading.Thread.start = Mock(side_effect=RuntimeError("can't start new thread"))
            raise ZeroDivisionError("an own\nerror")
        if act == "mistake":                                   # others see nothing, as in NCCL
            threading.Event().wait(20)
            return "`watch` did not end this rank"
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)               # as torchrun does
            time.sleep(2)                                      # busy, but alive
        while True:
            world.barrier()
    except (dist.RankLost, ZeroDivisionError) as error:
        if os.path.exists(f"{said}.late"):
            error = "Gloo raises only when the stopped rank is killed, not after --timeout"
        rank_lost = isinstance(error, dist.RankLost)
        dist.leave(f"rank {world.rank}: {error}", act != "mistake", rank_lost)


LOST_RANK = "rank [013]: rank 2 died or did not answer in time; the same command resumes .*"
OWN = "rank 2: an own\nerror"


# words: all that the ranks print; ends: how many ranks end their torchrun.
@pytest.mark.parametrize("act, words, ends", [
    ("killed", LOST_RANK, 0), ("stopped", LOST_RANK, 0), ("error", OWN, 0), ("mistake", OWN, 4)])
def test_one_rank_says_who_failed_and_all_end(in_trouble, act, words, ends):
    left = in_trouble[act].result()
    assert left == [None] * 4, f"a rank did not end itself; the outcomes are {left}"
    said = [(in_trouble["folder"] / f"{act}.{rank}").read_text() for rank in range(4)]
    assert re.fullmatch(words, "".join(said).strip()), said
    found = len([*in_trouble["folder"].glob(f"{act}.*.ends")])
    assert found == ends, f"{found} of 4 ranks end their torchrun, not {ends}"


@pytest.mark.parametrize("place, missing, error", [
    (dist, "own_store", distributed.DistNetworkError), (threading.Thread, "start", RuntimeError),
    (Future, "result", TimeoutError)])                         # a node that is cut off
@pytest.mark.parametrize("local_rank, rank_lost, restart_helps, other_failed, speaks", [
    ("0", True, True, False, True), ("1", True, True, False, False), ("1", False, True, True, True),
    ("1", False, False, False, True), ("0", True, True, True, False)])
def test_without_a_store_one_rank_of_each_node_speaks_and_who_has_an_own_error(
        monkeypatch, capsys, place, missing, error, local_rank, rank_lost, restart_helps,
        other_failed, speaks):
    """A lost rank is not reported if `watch` has seen a failure before: that one was reported."""
    kill = Mock(side_effect=ProcessLookupError)                # torchrun has just ended
    monkeypatch.setattr(dist, "may_leave", Mock(is_set=lambda: other_failed))
    monkeypatch.setattr(dist, "os", SimpleNamespace(**vars(os) | {"kill": kill}))  # dist's alone
    monkeypatch.setattr(dist, "TORCHRUN", 4711)
    monkeypatch.setattr(dist, "find_torchrun", lambda: 4711)
    monkeypatch.setattr(dist, "time", Mock())
    monkeypatch.setattr(dist, "asking", ThreadPoolExecutor())
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(place, missing, Mock(side_effect=error("gone")))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit, match="1"):                 # see conftest.py
        dist.leave("the reason", restart_helps, rank_lost)
    assert capsys.readouterr().err == "the reason\n" * speaks
    ends = [] if restart_helps else [call(4711, signal.SIGTERM)]
    assert kill.mock_calls == ends, (
        f"the signals sent are {kill.mock_calls}, not {ends}: torchrun is ended if, and only if, a "
        "restart does not help")
    if place is Future:
        Future.result.assert_called_once_with(timeout=10)


@pytest.mark.parametrize("answer", [distributed.DistNetworkError("gone"), [True, True]])
def test_the_first_to_fail_speaks_if_the_store_goes_or_all_are_alive(monkeypatch, capsys, answer):
    store = Mock(compare_set=lambda key, expected, value: value.encode())
    store.check.side_effect = answer
    monkeypatch.setattr(dist, "own_store", lambda: store)
    monkeypatch.setattr(dist, "time", Mock())
    monkeypatch.setattr(dist, "TORCHRUN", 4711)
    monkeypatch.setattr(dist, "may_leave", Mock(is_set=lambda: True))      # it saw its own failure
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit, match="1"):
        dist.leave("rank ? died", True, rank_lost=True)
    assert capsys.readouterr().err == "rank ? died\n"


def test_the_first_to_fail_says_whether_a_restart_helps(monkeypatch):
    monkeypatch.setattr(dist, "own_store", lambda: Mock(compare_set=lambda *_: b"0 True"))
    monkeypatch.setattr(dist, "may_leave", Mock())
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    assert dist.agree("an error of its own", False, False) == ("", True)


def test_a_torchrun_that_is_gone_gets_no_signal(monkeypatch):
    """Its number may be another process's by now."""
    monkeypatch.setattr(dist, "TORCHRUN", 4711)
    monkeypatch.setattr(dist, "find_torchrun", lambda: 1)
    monkeypatch.setattr(dist, "time", Mock())
    monkeypatch.setattr(dist, "os", Mock())
    dist.end_torchrun()
    assert not dist.os.kill.called


def test_before_they_meet_and_without_torchrun_a_rank_speaks_for_itself(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="1"):
        dist.leave("the reason", False)
    assert capsys.readouterr().err == "the reason\n"
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=OSError("no room"))))
    with pytest.raises(SystemExit, match="1"):                 # an unheard rank ends as well
        dist.leave("the reason", False)


# ----- On GPUs -----

def on_gpus(world):
    wire = functools.partial(dist.ErrorFeedback, onebit.onebit)
    dist.COMPRESSORS = dist.COMPRESSORS | {"onebit": wire}
    bits = {}
    for name in dist.COMPRESSORS:
        model, _ = reduced(world, name, 1, 0.0002)
        if name in TOLERANCES:
            assert_near(model, one_process(), 2e-2, name)
        for key, tensor in gradients_of(model).items():
            bits[f"{name}: {key}"] = tensor.cpu()
    return bits


@pytest.mark.gpu
@pytest.mark.parametrize("size, local_size", [(2, 2), (4, 2)])           # the second has two levels
def test_gradients_on_gpus_are_those_of_one_process(tmp_path, size, local_size):
    check_same_bits(run_ranks(on_gpus, size, tmp_path, local_size=local_size, gpu=True))
