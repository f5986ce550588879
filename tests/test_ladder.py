"""The ladder of tests/variants up to train.py, its ring, and the slow network that shows the rungs.
"""
import math
import os
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dist
import optim
import train
from tests.ranks import run_ranks, run_script, together
from tests.test_variants import installed, name_of, train_here
from tests.training import assert_same, column, last_state
from tests.variants import buckets_after, one_by_one, ring, slow_network

RUNGS = {"train": dist.Reducer, "one_by_one": one_by_one.OneByOne,
         "buckets_after": buckets_after.BucketsAfter}
# Accumulation, both phases, a batch that two ranks cannot divide
FLAGS = "--steps 3 3 --batch 9 8 --micro-tokens 128 --save-every 4".split()


# ----- One step: gradients to the bit, and when they are averaged -----

def one_step(world, kind):
    """Returns gradients of a bf16 model, two micro-batches, and what the step tells of itself."""
    torch.manual_seed(world.rank)                          # rank 0's weights shall count
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    masters = optim.cast_with_masters(model, torch.bfloat16)
    reducer = kind(model, world, bucket_mb=0.01, masters=masters)
    for _ in range(2):                                     # the second step begins clean
        reducer.zero_grad()
        for number in range(2):
            reducer.last_micro_batch = number == 1
            model(torch.randn(16, 64).bfloat16()).square().sum().backward()
        backward_ended = time.perf_counter()
        reducer.finish()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        assert p.grad.data_ptr() == masters[name].grad.data_ptr()
    gradients = {name: master.grad for name, master in masters.items()}
    early = [bucket.launched < backward_ended for bucket in getattr(reducer, "buckets", [])]
    return gradients, early, reducer.bytes_sent, reducer.norm()


def steps(world):
    calls = []
    found = {}
    all_reduce = dist.World.all_reduce
    for name, kind in RUNGS.items():
        del calls[:]
        dist.World.all_reduce = lambda *given: calls.append(given) or all_reduce(*given)
        found[name] = *one_step(world, kind), len(calls)
        dist.World.all_reduce = all_reduce
    return found


def check_steps(found):
    gradients, early, sent, norm, _ = found["train"]
    assert all(early) and len(early) == 4 and sent == 4 * 4 * (64 * 64 + 64)
    for name in "one_by_one", "buckets_after":
        assert_same(gradients, found[name][0])
        assert not any(found[name][1]) and found[name][2] == sent
        assert found[name][3] == pytest.approx(norm, rel=1e-5)
    # The barrier at first, then two steps with 8 tensors or 4 buckets
    assert found["one_by_one"][4] == 1 + 2 * 8 and found["buckets_after"][4] == 1 + 2 * 4


# ----- Whole runs -----

def climb(world, shards, folder):
    """Takes a step on each rung. Then trains in fp32 and bf16 on each; and as train.py over the
    ring and a slow network."""
    found = steps(world)
    train_as("train", world, shards, folder)
    for rung in one_by_one, buckets_after:
        train_as(name_of(rung), world, shards, folder, rung.install)
        train_as("resumed_" + name_of(rung), world, shards, folder, rung.install)
    os.environ["GBPS"] = "0.1"
    ring.install()
    slow_network.install()
    train_as("ring", world, shards, folder)
    return found


def train_as(name, world, shards, folder, install=list):
    """Trains in fp32 and bf16. A name that begins with "resumed" begins where train.py was after
    step 4, in its second phase."""
    with installed(SimpleNamespace(install=install)):
        for precision in "fp32", "bf16":
            out = folder / name / precision
            if world.rank == 0 and name.startswith("resumed"):
                shutil.copytree(folder / "train" / precision, out)
                (out / "step-00000006.pt").unlink()
            world.barrier()
            train_here(world, shards, out, *FLAGS, "--precision", precision)


def test_the_rungs_give_the_losses_of_train_py(shards, tmp_path):
    for found in run_ranks(climb, 2, tmp_path, shards, tmp_path):
        check_steps(found)
    for precision, tolerance in ("fp32", 1e-6), ("bf16", 1e-3):
        losses = column(tmp_path / "train" / precision, "mlm_loss", "nsp_loss")
        assert len(losses) == 2 * 6
        for name in "one_by_one", "resumed_one_by_one":
            ours = column(tmp_path / name / precision, "mlm_loss", "nsp_loss")
            assert ours == pytest.approx(losses, rel=tolerance)
        whole = last_state(tmp_path / "train" / precision)
        for name in "buckets_after", "resumed_buckets_after", "ring":
            assert_same(whole, last_state(tmp_path / name / precision), name)


def test_tensors_one_by_one_are_sent_in_full():
    with pytest.raises(train.ConfigError, match="leave out --compression"):
        one_by_one.OneByOne(nn.Linear(2, 2), dist.World(), "int8")


# ----- The ring, on one to four ranks -----

SHAPES = (1,), (5,), (1000,), (10, 100), ()


def around(world):
    """Sums around the ring of each World that this rank has, this rank alone as well."""
    sent = []
    pass_on = ring.pass_on
    ring.pass_on = lambda outgoing, *given: sent.append(len(outgoing)) or pass_on(outgoing, *given)
    for each in [dist.World(), world, *(world.levels or [])]:
        for shape in SHAPES:
            generator = torch.Generator().manual_seed(each.rank)
            tensor = torch.randn(shape, generator=generator)
            expected = each.all_gather(tensor).double().sum(0)
            del sent[:]
            ring.all_reduce(each, tensor)
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
            everyone = each.all_gather(tensor)
            assert all(torch.equal(tensor, other) for other in everyone)
            assert len(sent) == 2 * (each.size - 1)
            assert sum(sent) <= 2 * (each.size - 1) * math.ceil(tensor.numel() / each.size)


def alone(world):
    """Rank 1 dies, rank 0 sums."""
    if world.rank == 1:
        os._exit(1)
    ring.all_reduce(world, torch.ones(1000))


def two_levels(world):
    around(world)
    return waits(world)


# ----- The slow network -----

# What is waited for, times the tensor given, of four ranks; of two, two of them in turns
SHARES = {4: {"all_reduce": 1.5, "all_to_all": 0.75, "all_gather": 3, "reduce": 1, "broadcast": 1},
          2: {"all_reduce": 1, "all_to_all": 2 * 0.5, "all_gather": 1.4, "reduce": 1,
              "broadcast": 1}}


def waits(world):
    """Returns the seconds over the modelled ones, of each collective over all four ranks, and
    across the two nodes."""
    within, across = world.levels
    teams = world, across
    tensor = torch.randn(4, 1000, generator=torch.Generator().manual_seed(world.rank))   # 16 KB
    fast = [called(team, name, tensor) for team in teams for name in SHARES[team.size]]
    os.environ["GBPS"] = "0.01"
    slow_network.install()
    over = []
    for team in teams:
        for name, share in SHARES[team.size].items():
            team.barrier()
            began = time.perf_counter()
            result = called(team, name, tensor)
            over.append(time.perf_counter() - began - share * 16000 * 8 / 0.01e9)
            expected = fast.pop(0)
            if name != "reduce" or team.rank == 0:         # elsewhere it is undefined
                assert torch.equal(result, expected)
    crosses = [slow_network.crosses_nodes(each) for each in (dist.World(), within, across, world)]
    assert crosses == [False, False, True, True]
    return over


def called(world, name, tensor):
    """Returns what a collective returns or makes of a copy of the tensor."""
    tensor = tensor.clone().view(world.size, -1)           # a row for each rank, for all_to_all
    result = getattr(world, name)(tensor)
    return tensor if result is None else result


def test_ring_and_slow_network(tmp_path):
    _, [lost, _], ranks = together(
        lambda: run_ranks(around, 3, tmp_path),
        lambda: run_ranks(alone, 2, tmp_path, check=False),
        lambda: run_ranks(two_levels, 4, tmp_path, local_size=2))
    assert isinstance(lost, dist.RankLost)
    for over in ranks:
        assert len(over) == 10 and min(over) >= 0


@pytest.mark.parametrize("program", ["slow_network", "one_by_one"])
def test_gbps_has_to_be_a_speed(monkeypatch, program):
    monkeypatch.setenv("GBPS", "0")
    # Without GBPS this would end by --steps
    done = run_script(f"tests/variants/{program}.py", "--steps", "none")
    assert done.returncode == 2 and "GBPS: must be in" in done.stderr
