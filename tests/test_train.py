"""train.py: the same training on any number of ranks, after any kill, and what it refuses."""
import dataclasses
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import sentencepiece
import torch

import bert
import data
import dist
import optim
import train
from tests.conftest import ROOT
from tests.ranks import run_ranks, run_script, start_script, together

# Batches that 2, 3 and 4 ranks cannot divide, accumulation, both phases
SHORT = ("--steps 8 6 --batch 9 7 --micro-batch 2 --workers 0 --checkpoint-every 3 "
         "--eval-every 100").split()


def metrics(out, kind="train"):
    """Returns the lines of a run's metrics.jsonl that are of a kind."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def shrink(patch=setattr):
    """Makes all of this process's training so small that a CPU without bf16 instructions does not
    notice: a model of 2 x 64, half the lengths, few held-out examples."""
    recipe = optim.RECIPES["demo"]
    short = [dataclasses.replace(p, seq_len=p.seq_len // 2) for p in recipe.phases]
    patch(optim, "RECIPES", optim.RECIPES | {"demo": recipe._replace(phases=short)})
    patch(train, "EVAL_EXAMPLES", 32)
    patch(bert, "PRESETS", bert.PRESETS | {"tiny": (2, 64)})


def training(world, argv, sabotage=None):
    """Trains on one rank of several; `sabotage` may patch this process first. Returns what the bits
    of the rank's weights add up to."""
    shrink()
    built, build = [], train.build
    train.build = lambda *args: built.append(build(*args)) or built[0]
    if sabotage:
        sabotage[0](world, *sabotage[1:])
    train.train(train.make_plan(train.parse_arguments(argv), world), world)
    return sum(int(w.detach().view(torch.int32).long().sum()) for w in built[0][2].values())


def run(shards, out, tmp_path, *argv, size=1, sabotage=None, check=True, gpu=False):
    """Returns what `training` returns on each of `size` ranks."""
    arguments = ["--data", str(shards), "--out", str(out), *map(str, argv)]
    return run_ranks(training, size, tmp_path, arguments, sabotage, check=check, gpu=gpu)


def steps_kept(out):
    return sorted(optim.checkpoints_in(out / "checkpoints"))


def last_state(out):
    return optim.read_checkpoint(max((out / "checkpoints").glob("step-*.pt")))


def assert_same(a, b, where=""):
    """Compares all of two checkpoints, tensors bit for bit; but not the seconds."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a.keys() - {"seconds", "log_bytes"}:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, pair in enumerate(zip(a, b)):
            assert_same(*pair, f"{where}[{i}]")
    else:
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b, where


# The same training on any number of ranks

EQUAL = "--batch 33 32 --dropout 0 --precision fp32 --workers 0".split()
PHASES = {1: ["--steps", 10, 0], 2: ["--steps", 0, 10]}


@pytest.fixture(scope="module")
def one_rank(shards, tmp_path_factory):
    """`curve` of 10 steps on one rank, for each phase alone."""
    outs = {phase: tmp_path_factory.mktemp("one") / "out" for phase in PHASES}
    together(*(functools.partial(run, shards, out, out.parent, *EQUAL, *PHASES[phase])
               for phase, out in outs.items()))
    return {phase: curve(out) for phase, out in outs.items()}


def curve(out):
    """Returns the loss, then the norm of the gradient, of each step."""
    return [line[key] for line in metrics(out) for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("phase,size,micro", [
    (1, 1, 4), (1, 2, 16), (1, 3, 5), (1, 4, 4), (2, 2, 3), (2, 4, 16)])
def test_losses_do_not_depend_on_ranks_or_micro_batches(
        shards, tmp_path, one_rank, phase, size, micro):
    sums = run(shards, tmp_path / "out", tmp_path, *EQUAL, *PHASES[phase], "--micro-batch", micro,
               size=size)
    found = curve(tmp_path / "out")
    assert len(set(found)) == 20 and len(set(sums)) == 1
    assert found[:2] == pytest.approx(one_rank[phase][:2], rel=1e-6)
    assert found == pytest.approx(one_rank[phase], rel=1e-4)


def test_the_divisor_is_that_of_the_whole_step(shards):
    """As rank 1 of 2 in a world where every sum is ten times this rank's own number."""
    world = SimpleNamespace(rank=1, size=2, sum=lambda values: [10 * value for value in values])
    batches = [data.PretrainingData(shards, 32).batch(indices) for indices in ([0, 1, 2], [3])]
    labels = torch.cat([batch.labels for batch in batches])
    tokens = sum(int(batch.lengths[:-1].sum()) for batch in batches)
    rows = sum(len(batch.tokens) for batch in batches)
    assert (labels == data.IGNORED).any() and rows > tokens
    expected = (labels != data.IGNORED).sum(), rows, 2, True, 0, tokens
    assert train.step_totals(batches, (2, True), world) == [10 * int(x) for x in expected]


@pytest.mark.parametrize("size", [1, 3])
def test_balance_evens_the_ranks_and_keeps_the_losses(shards, tmp_path, one_rank, size):
    argv = *EQUAL, *PHASES[2], "--micro-batch", 2
    together(lambda: run(shards, tmp_path / "out", tmp_path, *argv, "--balance", size=size),
             lambda: run(shards, tmp_path / "plain", tmp_path, *argv, "--max-steps", 5, size=size))
    lines, plain = metrics(tmp_path / "out"), metrics(tmp_path / "plain")
    assert curve(tmp_path / "out") == pytest.approx(one_rank[2], rel=1e-5)
    balanced, dealt = [[line["imbalance"] for line in some[:5]] for some in (lines, plain)]
    assert balanced == dealt == [1.0] * 5 if size == 1 else sum(balanced) < sum(dealt) - 0.1
    assert all(0 < line["padding"] < 0.2 for line in lines[:5])       # up to a multiple of 64
    log = (tmp_path / "out" / "log.txt").read_text()
    assert re.search(r"padding \d\.\d% of the batches, busiest rank 1\.\d\d\d times", log)


def take_share(world, folder, nodes):
    """Makes this rank a node that holds only its share of the shards."""
    make_plan = train.make_plan

    def with_share(args, world):
        args.data = f"{folder}-node-{world.rank % nodes}"
        return make_plan(args, world)

    train.make_plan = with_share


def test_nodes_with_their_shares_train_as_with_all_shards(shards, tmp_path, one_rank):
    for node in range(2):
        (tmp_path / f"wiki-node-{node}").mkdir()
        for name in data.node_files(shards, node, 2):
            shutil.copy(shards / name, tmp_path / f"wiki-node-{node}")
    share = take_share, tmp_path / "wiki", 2
    argv = *EQUAL, *PHASES[1]
    run(shards, tmp_path / "out", tmp_path, *argv, size=2, sabotage=share)
    assert curve(tmp_path / "out") == pytest.approx(one_rank[1], rel=1e-5)
    outcomes = run(shards, tmp_path / "no", tmp_path, *argv, "--balance", size=2, sabotage=share,
                   check=False)
    assert all(isinstance(outcome, train.ConfigError) for outcome in outcomes)
    assert re.search(r"wiki-node-\d/train-\S+ is not on", str(outcomes[1]))


def test_other_masks_and_pairs(shards, tmp_path):
    for name, *argv in (("none", "--whole-words"), ("sop", "--mask-fraction", 0.4)):
        run(shards, tmp_path / name, tmp_path, *SHORT, "--steps", 3, 0, "--pairs", name, *argv)
    evals = {name: metrics(tmp_path / name, "eval")[-1] for name in ("none", "sop")}
    assert evals["none"]["nsp_accuracy"] is None and evals["none"]["nsp_loss"] == 0
    assert evals["sop"]["nsp_loss"] > 0.5 and 0 < evals["sop"]["nsp_error"] < 0.1
    for name, trained in (("none", False), ("sop", True)):    # else decay would wear it away
        assert ("pooler.weight" in last_state(tmp_path / name)["weights"]) == trained


# Killed and started again


def kill_after_update(world, rank, step):
    """kill -9 in the middle of a step: the weights are new, nothing of it is written."""
    copy, calls = optim.copy_to_model, []

    def patched(masters, model):
        copy(masters, model)
        calls.append(1)
        if world.rank == rank and len(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    optim.copy_to_model = patched


def kill_after_checkpoint(world, step):
    """kill -9 right after the checkpoint of a step."""
    write = optim.write_checkpoint

    def patched(folder, state, keep):
        write(folder, state, keep)
        if state["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    optim.write_checkpoint = patched


def assert_killed_runs_end_alike(shards, tmp_path, argv, size, kills):
    """Trains without a kill, and with each of the kills and a new start after it."""
    tmp_path.mkdir()

    def killed():
        for kill in kills:
            outcomes = run(shards, tmp_path / "killed", tmp_path, *argv, size=size, sabotage=kill,
                           check=False)
            assert None in outcomes
            assert all(outcome is None or isinstance(outcome, dist.RankLost)
                       for outcome in outcomes)
        return run(shards, tmp_path / "killed", tmp_path, *argv, size=size)

    whole, resumed = together(
        lambda: run(shards, tmp_path / "whole", tmp_path, *argv, size=size), killed)
    assert whole == resumed
    assert_same(last_state(tmp_path / "whole"), last_state(tmp_path / "killed"))
    for key in ("step", "loss", "lr", "examples", "grad_norm"):    # no step twice, none missing
        a, b = ([line[key] for line in metrics(tmp_path / name)] for name in ("whole", "killed"))
        assert a == b and len(a) == 14
    assert metrics(tmp_path / "whole", "eval") == metrics(tmp_path / "killed", "eval")


def test_a_killed_run_ends_with_the_same_bits(shards, tmp_path):
    def killed_and_whole(precision, size):
        kills = [(kill_after_update, size - 1, 5),    # in phase 1; from the checkpoint of step 3
                 (kill_after_checkpoint, 8),          # between the phases
                 (kill_after_update, 0, 5)]           # in phase 2, after a resume from step 8
        argv = *SHORT, "--precision", precision, "--dropout", 0.1
        assert_killed_runs_end_alike(shards, tmp_path / precision, argv, size, kills)

    together(lambda: killed_and_whole("fp32", 1), lambda: killed_and_whole("bf16", 3))


def test_a_run_with_lossy_compression_resumes_with_the_same_bits(shards, tmp_path):
    def killed_and_whole(compression):
        argv = *SHORT, "--compression", compression, "--precision", "fp32"
        folder = tmp_path / compression
        assert_killed_runs_end_alike(shards, folder, argv, 2, [(kill_after_update, 1, 8)])
        residuals = last_state(folder / "whole")["residuals"].values()
        assert any(residual.any() for residual in residuals)

    together(lambda: killed_and_whole("onebit"), lambda: killed_and_whole("powersgd:2"))


FREEZES = *SHORT, "--freeze", 0.5, "--precision", "fp32", "--optimizer"    # after 4 of 8, 3 of 6


def test_one_bit_optimizers_resume_in_both_phases_with_the_same_bits(shards, tmp_path):
    def killed_and_whole(optimizer):
        kills = [(kill_after_update, 1, 7),           # in the second stage of phase 1
                 (kill_after_update, 1, 6)]           # from step 6, in that of phase 2
        assert_killed_runs_end_alike(shards, tmp_path / optimizer, (*FREEZES, optimizer), 2, kills)
        sent = [line["bytes_sent"] for line in metrics(tmp_path / optimizer / "whole")]
        return sent, [*sent[5:8], *sent[11:14]]

    (sent, signs), (dense, rare) = together(lambda: killed_and_whole("onebit-lamb"),
                                            lambda: killed_and_whole("zeroone-adam"))
    assert set(sent[:4] + sent[8:11]) == {sent[0]} and len(set(signs)) == 1
    assert signs[0] < sent[0] / 25                # no gradient crosses the wire
    assert max(rare) < dense[0] / 10              # the variance's second step is the fourth one


def test_a_save_makes_weights_equal_that_ranks_step_alone(shards, tmp_path):
    """0/1 Adam, frozen after step 3, agrees after steps 4, 5 and 7; after step 8 weights differ,
    and a save compares them."""
    argv = "--steps 9 0 --batch 8 --workers 0 --checkpoint-every 8 --optimizer zeroone-adam"
    sums = run(shards, tmp_path / "out", tmp_path, *argv.split(), "--freeze", 0.34, size=2)
    assert steps_kept(tmp_path / "out") == [8, 9] and sums[0] == sums[1]


def test_a_run_resumes_on_other_ranks(shards, tmp_path):
    argv = *SHORT, "--precision", "fp32", "--dropout", 0

    def two():
        run(shards, tmp_path / "two", tmp_path, *argv, "--max-steps", 4, size=2)
        run(shards, tmp_path / "two", tmp_path, *argv, "--max-steps", 9, size=4)
        run(shards, tmp_path / "two", tmp_path, *argv, size=3)

    together(lambda: run(shards, tmp_path / "one", tmp_path, *argv), two)
    one, two = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "two"))
    assert len(two) == 14 and two == pytest.approx(one, rel=1e-4)    # so the same examples, too
    for key in "mlm_loss", "nsp_loss", "unigram_entropy":            # also in evaluations
        one, two = ([line[key] for line in metrics(tmp_path / name, "eval")]
                    for name in ("one", "two"))
        assert len(two) == 2 and two == pytest.approx(one, rel=1e-4)
    assert metrics(tmp_path / "two")[-1]["examples"] == 8 * 9 + 6 * 7
    rates = [optim.learning_rate(k, p) for p in planned(1, *argv) for k in range(p.steps)]
    assert [line["lr"] for line in metrics(tmp_path / "two")] == rates
    seconds = [line["seconds"] for line in metrics(tmp_path / "two")]
    assert seconds == sorted(seconds)                        # they go on where they were


def test_a_one_bit_run_resumes_on_other_ranks(shards, tmp_path):
    argv = *FREEZES, "onebit-lamb", "--dropout", 0, "--steps", 8, 0

    def two():
        run(shards, tmp_path / "two", tmp_path, *argv, "--max-steps", 6, size=2)
        run(shards, tmp_path / "two", tmp_path, *argv, size=4)

    together(lambda: run(shards, tmp_path / "one", tmp_path, *argv), two)
    one, two = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "two"))
    assert two[:5] == pytest.approx(one[:5], rel=1e-4)    # before the first compressed mean
    assert len(two) == 8 and two == pytest.approx(one, rel=0.05)
    moments = [entry["exp_avg"] for entry in last_state(tmp_path / "two")["optimizer"]["state"]
               .values()]
    positions = [m for m in moments if m.shape == (512, 64) and not m[32:].any()]
    assert len(positions) == 1 and positions[0][:32].any()    # those not seen stay masked


def stop_in_mid_step(world, calls):
    """One rank is asked to stop, at its so-and-so-many-th look; a step of SHORT looks twice."""
    looks = []
    dist.asked_to_stop = lambda _: looks.append(1) or world.rank == 1 and len(looks) == calls


def test_a_stop_leaves_the_step_undone_on_all_ranks(shards, tmp_path):
    argv = *SHORT, "--checkpoint-every", 100, "--precision", "fp32", "--dropout", 0.1

    def stopped():
        for calls, step in (8, 3), (15, 10):      # each before the second micro-batch, or the first
            run(shards, tmp_path / "out", tmp_path, *argv, size=2,
                sabotage=(stop_in_mid_step, calls))
            assert steps_kept(tmp_path / "out")[-1] == metrics(tmp_path / "out")[-1]["step"] == step
        return run(shards, tmp_path / "out", tmp_path, *argv, size=2)

    whole, resumed = together(
        lambda: run(shards, tmp_path / "whole", tmp_path, *argv, size=2), stopped)
    assert whole == resumed
    assert_same(last_state(tmp_path / "whole"), last_state(tmp_path / "out"))


def stop_under_torchrun(world, reason):
    dist.TORCHRUN = os.getppid()
    dist.asked_to_stop = lambda _: reason if world.rank else 0


@pytest.mark.parametrize("reason,kind", [(dist.SIGNALLED, dist.DistError),
                                         (math.inf, dist.RankLost)])     # whose torchrun is dead
def test_a_stop_is_for_good_unless_a_torchrun_died(shards, tmp_path, reason, kind):
    outcomes = run(shards, tmp_path / "out", tmp_path, *SHORT, size=2, check=False,
                   sabotage=(stop_under_torchrun, reason))
    assert [type(outcome) for outcome in outcomes] == [kind] * 2
    assert "stopped after step 0; the same command resumes" in str(outcomes[0])


def test_minutes_save_and_stop(shards, tmp_path):
    run(shards, tmp_path / "out", tmp_path, *SHORT, "--checkpoint-every", 100,
        "--checkpoint-minutes", 0, "--max-steps", 5)
    assert steps_kept(tmp_path / "out") == [4, 5]
    assert metrics(tmp_path / "out")[-1]["minutes_left"] == 0
    run(shards, tmp_path / "out", tmp_path, *SHORT, "--max-minutes", 0)
    assert metrics(tmp_path / "out")[-1]["step"] == 5
    assert "Stopped by --max-minutes after step 5" in (tmp_path / "out" / "log.txt").read_text()


def tick(world):
    """A minute passes whenever train.py asks for the time: once a step, and after each save."""
    minutes = itertools.count(0, 60)
    train.time = SimpleNamespace(monotonic=lambda: next(minutes), perf_counter=time.perf_counter)


def test_minutes_between_saves(shards, tmp_path):
    run(shards, tmp_path / "out", tmp_path, *SHORT, "--checkpoint-every", 100,
        "--checkpoint-minutes", 2.5, "--max-steps", 8, sabotage=(tick,))
    assert steps_kept(tmp_path / "out") == [6, 8]            # after 3, 3 more, and the end


# Checkpoints


def test_later_steps_are_never_overwritten(shards, tmp_path):
    out = tmp_path / "out"
    run(shards, out, tmp_path, *SHORT)
    assert steps_kept(out) == [8, 12, 14]         # the newest two and the last of each phase
    before = (out / "metrics.jsonl").read_bytes()
    for resume in ("never", out / "checkpoints" / "step-00000008.pt"):
        outcome, = run(shards, out, tmp_path, *SHORT, "--resume", resume, check=False)
        assert re.search("holds step 14: resume from it", str(outcome))
    assert steps_kept(out) == [8, 12, 14] and (out / "metrics.jsonl").read_bytes() == before
    (tmp_path / "new").mkdir()                    # what died here before it saved anything
    (tmp_path / "new" / "metrics.jsonl").write_bytes(before * 2)
    run(shards, tmp_path / "new", tmp_path, *SHORT, "--max-steps", 10, "--resume",
        out / "checkpoints" / "step-00000008.pt")
    assert steps_kept(tmp_path / "new") == [9, 10]
    assert [line["step"] for line in metrics(tmp_path / "new")] == [9, 10]
    newest = tmp_path / "new" / "checkpoints" / "step-00000010.pt"
    shutil.copy(newest, tmp_path / "kept.pt")
    newest.write_bytes(b"damaged")                # and a copy elsewhere goes on with the same log
    run(shards, tmp_path / "new", tmp_path, *SHORT, "--max-steps", 11, "--resume",
        tmp_path / "kept.pt")
    assert [line["step"] for line in metrics(tmp_path / "new")] == [9, 10, 11]


def some_state(step=7):
    return {"step": step, "weights": {"w": torch.arange(5000.0)}, "run": {"seed": 1}}


def test_a_checkpoint_is_whole_or_is_not_there(tmp_path):
    optim.write_checkpoint(tmp_path, some_state(), keep=set())
    path = tmp_path / "step-00000007.pt"
    assert torch.equal(optim.read_checkpoint(path)["weights"]["w"], torch.arange(5000.0))
    assert torch.load(path, weights_only=True)["step"] == 7    # an ordinary torch file too
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 100, 20000):                  # a full disk: at once, or half-way
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(OSError):
                optim.write_checkpoint(tmp_path, some_state(9), keep=set())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]


class Silent:
    """A log that keeps what is said."""
    def __init__(self):
        self.said = []
        self.say = self.said.append


def find(folder, resume="auto", log=None):
    plan = train.argparse.Namespace(out=folder, resume=resume, same_run={"seed": 1})
    return train.find_checkpoint(plan, log or Silent())


@pytest.mark.parametrize("how", ["cut", "flip", "empty", "renamed"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, how):
    folder, log = tmp_path / "checkpoints", Silent()
    folder.mkdir()
    for step in (5, 6):
        optim.write_checkpoint(folder, some_state(step), keep=set())
    newest = folder / "step-00000006.pt"
    content = bytearray(newest.read_bytes())
    if how == "renamed":
        newest = newest.rename(folder / "step-00000009.pt")
    else:
        content[len(content) // 2] ^= 1
        newest.write_bytes({"cut": content[:len(content) // 2], "flip": content, "empty": b""}[how])
    (folder / "unfinished").write_bytes(b"half")
    (folder / "step-00000008-backup.pt").write_bytes(b"not ours")
    assert find(tmp_path, log=log)["step"] == 5
    assert len(log.said) == 1 and newest.name in log.said[0]
    # The damaged one never pushes out a whole one, nor is it ever the one before
    for step in (6, 7, 12):
        optim.write_checkpoint(folder, some_state(step), keep=set())
        assert find(tmp_path)["step"] == step
    assert sorted(optim.checkpoints_in(folder)) == [7, 12]
    assert not (folder / "unfinished").exists()
    assert (folder / "step-00000008-backup.pt").exists()
    for path in optim.checkpoints_in(folder).values():
        path.write_bytes(b"x" * 100)
    with pytest.raises(train.ConfigError, match="no checkpoint in .* is whole"):
        find(tmp_path)


def disk_is_full_at_step_3(world):
    write = optim.write_checkpoint

    def full(folder, state, keep):
        if state["step"] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, state, keep)

    optim.write_checkpoint = full


def test_a_full_disk_costs_one_checkpoint(shards, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')   # died before a save
    run(shards, tmp_path, tmp_path, *SHORT, "--max-steps", 6, sabotage=(disk_is_full_at_step_3,))
    assert steps_kept(tmp_path) == [6] and [line["step"] for line in metrics(tmp_path)] == [
        1, 2, 3, 4, 5, 6]
    assert ("warning: no checkpoint of step 3: No space left on device; training goes on"
            in (tmp_path / "log.txt").read_text())


def test_a_checkpoint_that_cannot_be_read_is_passed_over(tmp_path):
    (folder := tmp_path / "checkpoints").mkdir()
    optim.write_checkpoint(folder, some_state(5), keep=set())
    (folder / "step-00000006.pt").mkdir()
    assert find(tmp_path, log=(log := Silent()))["step"] == 5 and "step-00000006" in log.said[0]


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_a_malicious_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    optim.write_checkpoint(tmp_path, {"step": 1, "x": Evil()}, keep=set())
    with pytest.raises(optim.CheckpointError, match="no checkpoint of ours"):
        optim.read_checkpoint(tmp_path / "step-00000001.pt")
    assert not (tmp_path / "evil").exists()
    for content in b"", b"PK\3\4" + bytes(100):              # of right digest
        (tmp_path / "x").write_bytes(content + hashlib.sha256(content).hexdigest().encode())
        with pytest.raises(optim.CheckpointError, match="no checkpoint of ours"):
            optim.read_checkpoint(tmp_path / "x")


# fp16 and steps that are not taken


def spoil_loss(world, rank, steps):
    """The loss of one rank becomes infinite in some of its micro-batches (counted from 1)."""
    forward, calls = bert.BertForPreTraining.forward, []

    def patched(self, batch):
        losses = forward(self, batch)
        if self.training:
            calls.append(1)
            if world.rank == rank and len(calls) in steps:
                losses = losses._replace(mlm_sum=losses.mlm_sum * float("inf"))
        return losses

    bert.BertForPreTraining.forward = patched


OVERFLOWS = [
    ("fp16", "--optimizer lamb"),
    ("fp32", "--optimizer lamb --compression onebit"),
    ("fp32", "--optimizer onebit-lamb --freeze 0.1"),    # the fourth step is in the second stage
    ("bf16", "--optimizer zeroone-adam --freeze 0.1")]


def test_an_overflow_on_one_rank_skips_the_step_on_all(shards, tmp_path):
    def skip_the_fourth_step(precision, options):
        argv = "--steps 20 --batch 4 --micro-batch 2 --workers 0 --checkpoint-every 1".split()
        argv += ["--precision", precision, *options.split()]
        out = tmp_path / f"{precision} {options}"
        before = run(shards, out, tmp_path, *argv, "--max-steps", 3, size=2)
        state = last_state(out)
        spoil = spoil_loss, 1, {1}
        after = run(shards, out, tmp_path, *argv, "--max-steps", 4, size=2, sabotage=spoil)
        assert after == before and before[0] == before[1]    # the weights, on both ranks
        skipped = last_state(out)
        assert skipped["step"] == 4 and skipped["scaler"]["scale"] == state["scaler"]["scale"] / 2
        for key in ("weights", "optimizer", "residuals"):
            assert_same(skipped[key], state[key], f"{out}: {key}")
        assert [line["skipped"] for line in metrics(out)] == [0, 0, 0, 1]
        moved = run(shards, out, tmp_path, *argv, "--max-steps", 5, size=2)
        assert moved != after
        assert metrics(out)[-1]["loss_scale"] == (32768 if precision == "fp16" else 0.5)

    together(*(functools.partial(skip_the_fourth_step, *case) for case in OVERFLOWS))


def note(world, folder):
    """Appends the seed of each training forward pass, and each norm of gradients, to files."""
    forward, global_norm = bert.BertForPreTraining.forward, optim.global_norm

    def append(name, number):
        with open(folder / f"{name}-{world.rank}", "a") as file:
            file.write(f"{number}\n")

    def noted_forward(self, batch):
        if self.training:
            append("seeds", torch.initial_seed())
        return forward(self, batch)

    def noted_norm(tensors):
        norm = global_norm(tensors)
        append("norms", norm.item())
        return norm

    bert.BertForPreTraining.forward, optim.global_norm = noted_forward, noted_norm


def test_ranks_have_their_own_dropout_and_in_the_second_stage_their_own_gradients(shards, tmp_path):
    argv = "--steps 2 0 --batch 8 --micro-batch 2 --workers 0 --precision fp32".split()
    run(shards, tmp_path / "out", tmp_path, *argv, "--optimizer", "onebit-adam", "--freeze", 0.5,
        size=2, sabotage=(note, tmp_path))
    seeds, norms = ([(tmp_path / f"{name}-{rank}").read_text().split() for rank in (0, 1)]
                    for name in ("seeds", "norms"))
    assert len({*seeds[0], *seeds[1]}) == 2 * 2 * 2          # steps, micro-batches, ranks
    own, other = (float(norm[1]) for norm in norms)          # of step 2, sqrt(2) times noisier
    expected = math.sqrt((own ** 2 + other ** 2) / 2) / math.sqrt(2)
    assert own != other and metrics(tmp_path / "out")[1]["grad_norm"] == pytest.approx(expected)


def test_evaluation_masks_15_percent_however_many_training_does(shards, monkeypatch):
    monkeypatch.setattr(train, "EVAL_EXAMPLES", 32)
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 320))
    phase = dataclasses.replace(optim.RECIPES["demo"].phases[0], micro_batch=16)
    plan = train.argparse.Namespace(data=shards, pairs="nsp", example_options={"pairs": "nsp"})
    plan.mask_fraction = 0.15
    usual = train.evaluate(model, plan, phase, dist.World())
    plan.mask_fraction = 0.6
    assert train.evaluate(model, plan, phase, dist.World()) == usual and model.training


class Guesser(torch.nn.Module):
    """A model of loss 2 a masked token and 0.5 a pair, right in 3 tokens and 1 pair of a batch."""
    def forward(self, batch):
        predicted = (batch.labels != data.IGNORED).sum()
        return bert.Losses(2.0 * predicted, 0.5 * torch.tensor(len(batch.pair_labels)),
                           torch.tensor(3), torch.tensor(1))


def test_an_evaluation_adds_up_its_batches(shards, monkeypatch):
    monkeypatch.setattr(train, "EVAL_EXAMPLES", 32)
    phase = dataclasses.replace(optim.RECIPES["demo"].phases[0], micro_batch=8)
    plan = train.argparse.Namespace(data=shards, pairs="nsp", example_options={"pairs": "nsp"})
    found = train.evaluate(Guesser(), plan, phase, dist.World())
    examples = data.PretrainingData(shards, 64, held_out=True)
    masked = sum(len(examples[i].labels) for i in range(32))
    assert found["mlm_loss"] == 2 and found["nsp_loss"] == 0.5
    assert found["mlm_accuracy"] == pytest.approx(4 * 3 / masked)
    assert found["nsp_accuracy"] == 4 / 32 and found["nsp_error"] == pytest.approx(
        math.sqrt(0.125 * 0.875 / 32))


def test_the_figures_of_a_step():
    plan = train.argparse.Namespace(config=bert.BertConfig.preset("tiny", 320))
    phase = SimpleNamespace(global_batch=10)
    found = train.step_figures(plan, phase, [60.0, 7.0], 20, 800, [300, 100], 0.5)
    assert (found["mlm_loss"], found["nsp_loss"], found["loss"]) == (3.0, 0.7, 3.7)
    assert (found["padding"], found["imbalance"], found["examples_per_second"]) == (0.5, 1.5, 20)
    flops = 10 * bert.flops_per_example(plan.config, 40, 2)          # on two ranks, in 0.5 s
    assert found["tflops"] == pytest.approx(1e-12 * flops / 2 / 0.5)


def first_batches(shards, *flags):
    """The first batch of each phase."""
    plan = train.fill_in(train.parse_arguments(["--data", str(shards), "--workers", "0", *flags]),
                         dist.World())
    return [next(train.open_phase(plan, dist.World(), phase, begin)[0])[0]
            for phase, begin in enumerate([0, *plan.ends[:-1]])]


def test_phases_take_other_examples_as_the_flags_say(shards, monkeypatch):
    recipe = optim.RECIPES["demo"]
    equal = [dataclasses.replace(phase, seq_len=32) for phase in recipe.phases]
    monkeypatch.setattr(optim, "RECIPES", {"demo": recipe._replace(phases=equal)})
    first, second = first_batches(shards)
    more, _ = first_batches(shards, "--mask-fraction", "0.6")
    sop, _ = first_batches(shards, "--pairs", "sop")
    other, _ = first_batches(shards, "--seed", "1")
    assert len({str(batch.bounds.tolist()) for batch in (first, second, other, sop)}) == 4
    counts = [int((batch.labels != data.IGNORED).sum()) for batch in (first, more)]
    assert counts[1] == pytest.approx(2 * counts[0], rel=0.1)


def test_what_a_plan_takes_from_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def planned(*flags):
        argv = ["--recipe", "nvlamb-64k", *flags]
        return train.fill_in(train.parse_arguments(argv), dist.World())

    assert planned().dropout == planned().config.dropout == 0.1
    assert planned("--dropout", "0").dropout == planned("--dropout", "0").config.dropout == 0
    frozen = planned("--optimizer", "onebit-lamb")           # after the warm-up, or a fifth
    assert [p.freeze for p in frozen.phases] == [round(0.2843 * 7038), round(0.2 * 1563)]
    demo = train.fill_in(train.parse_arguments(["--optimizer", "onebit-lamb"]), dist.World())
    assert demo.betas == (0.9, 0.999)


def test_the_optimizer_gets_the_rate_and_clipped_gradients(shards, tmp_path, monkeypatch):
    shrink(monkeypatch.setattr)
    seen, step = [], optim.LAMB.step

    def noted(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        seen.append((self.param_groups[-1]["lr"], float(optim.global_norm(gradients))))
        step(self)

    monkeypatch.setattr(optim.LAMB, "step", noted)
    argv = f"--data {shards} --out {tmp_path} --steps 3 2 --batch 4 --precision fp32 --workers 0"
    plan = train.make_plan(train.parse_arguments(argv.split()), dist.World())
    train.train(plan, dist.World())
    lines = metrics(tmp_path)
    assert seen == [(line["lr"], pytest.approx(min(1, line["grad_norm"]), rel=1e-3))
                    for line in lines]
    assert max(line["grad_norm"] for line in lines) > 1


def test_each_nodes_first_rank_prepares_and_with_balance_checks_all(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(data, "prepare", lambda *words: calls.append("prepare"))
    monkeypatch.setattr(data, "open_corpus", lambda paths: paths)
    monkeypatch.setattr(data, "describe", str)
    monkeypatch.setattr(data, "verify", lambda folder, *words: calls.append(words))
    monkeypatch.setattr(dist.World, "on_all_ranks", lambda self, expected, job: job())
    plan = SimpleNamespace(out=tmp_path, data=tmp_path, corpus=["x"], arguments={"data": None},
                           pieces=320, balance=True)
    for rank in 2, 3:
        train.prepare_folders(plan, dist.World(rank, 4, rank - 2, 2, 2))
    assert calls == ["prepare", (2, 4, True), (3, 4, False)]


class Told(dist.World):
    """Keeps what all ranks have to agree about."""
    def check_same(self, values, otherwise):
        vars(self).update(told=values)


def test_how_a_run_is_built_and_what_ranks_must_have_equal(shards, tmp_path):
    argv = f"--data {shards} --out {tmp_path}/out --recompute --compression fp16 --precision fp32"
    argv += " --optimizer zeroone-adam"
    plan = train.make_plan(train.parse_arguments(argv.split()), world := Told())
    assert {"seed", "lr_scale", "precision", "shards", "torch", "code"} <= {*world.told}
    assert not {"out", "workers", "timeout", "log_every"} & {*world.told}
    model, reducer, _, optimizer, scaler = train.build(plan, world)
    reducer.close()
    assert optimizer.param_groups[0]["interval_steps"] == 2700 * 32678 // 125000
    assert model.recompute and scaler.scale == 65536         # fp16 overflows on the wire, too


def test_a_tokenizer_that_cannot_be_exported_is_refused_before_training(
        documents, refused, tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents[:40]), model_prefix=str(tmp_path / "bpe"), vocab_size=310,
        minloglevel=2, model_type="bpe", pad_id=0, pad_piece="[PAD]", unk_id=1, unk_piece="[UNK]",
        bos_id=-1, eos_id=-1, control_symbols=data.SPECIALS[2:])
    data.prepare(documents, tmp_path / "bpe", shards=4, tokenizer=tmp_path / "bpe.model")
    code, line = refused("--data", tmp_path / "bpe", "--out", tmp_path / "out")
    assert code == 1 and "no plain unigram model; make one with data.py" in line


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_each_optimizer_in_16_bits_follows_fp32(shards, tmp_path, optimizer):
    """With accumulation, through both stages of two phases; fp16 with its loss scale."""
    argv = "--steps 4 2 --batch 4 --micro-batch 2 --workers 0 --lr-scale 0.03"
    argv += f" --optimizer {optimizer}" + " --freeze 0.5" * (optimizer in optim.ONE_BIT)
    precisions, losses, norms = ("fp32", "bf16", "fp16"), {}, {}
    together(*(functools.partial(run, shards, tmp_path / precision, tmp_path, *argv.split(),
                                 "--precision", precision) for precision in precisions))
    for precision in precisions:
        out = tmp_path / precision
        losses[precision], norms[precision] = (
            [line[key] for line in metrics(out)] for key in ("loss", "grad_norm"))
        scale = 65536 if precision == "fp16" else 1
        assert {(line["skipped"], line["loss_scale"]) for line in metrics(out)} == {(0, scale)}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=3e-3)
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=0.1)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.1)
    assert len(losses["fp16"]) == 6 and losses["fp16"] != losses["fp32"]


def test_compiled_layers_complete_gradients_in_turn(shards, tmp_path, monkeypatch):
    """By a backend that calls no C++ compiler, which would take half a minute."""
    shrink(monkeypatch.setattr)
    ready, order, compiled = dist.Reducer._ready, [], torch.nn.Module.compile
    monkeypatch.setattr(dist.Reducer, "_ready", lambda self, name, p: (
        order.append(name.split(".")[:2]) or ready(self, name, p)))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compiled(
        module, backend="aot_eager", **options))
    batch = train.data.PretrainingData(shards, 32).batch([0, 1])
    argv, found = f"--precision fp32 --data {shards} --out {tmp_path}/".split(), []
    for flags in [], ["--compile"]:
        argv[-1] += "out"                                    # another folder: the first is locked
        plan = train.make_plan(train.parse_arguments([*argv, *flags]), dist.World())
        model, reducer, *_ = train.build(plan, dist.World())
        order.clear()
        losses = model(batch)
        (losses.mlm_sum + losses.nsp_sum).backward()
        reducer.finish()
        # What a layer is to the reducer: one stretch, with none of another layer in it
        turns = [name for name, _ in itertools.groupby(order)]
        found.append((float(losses.mlm_sum.detach()), turns, torch.cat(reducer.buckets)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[1][1] == found[0][1] and ["blocks", "1"] in found[0][1]
    assert torch.allclose(found[1][2], found[0][2], rtol=1e-4, atol=1e-6)


def test_a_model_begins_at_the_frequencies_with_a_bias_around_0(documents, tmp_path, monkeypatch):
    """NVLAMB and LANS step in proportion to a tensor's norm, most of which would be the mean."""
    shrink(monkeypatch.setattr)
    data.prepare(documents, tmp_path / "shards", vocab_size=319, shards=4)
    argv = f"--precision fp32 --data {tmp_path}/shards --out {tmp_path}/out".split()
    plan = train.make_plan(train.parse_arguments(argv), dist.World())
    bias = train.build(plan, dist.World())[0].mlm_bias.detach()
    expected = torch.from_numpy(train.data.unigram_losses(tmp_path / "shards")).float()
    pieces, padding = bias[:319], bias[319:]
    assert torch.allclose(pieces.log_softmax(0), -expected, atol=1e-5) and len(padding) == 1
    assert padding == pieces.min() and abs(pieces.mean()) < 1e-5


def test_profile_writes_the_ten_costliest_operations(shards, tmp_path, monkeypatch):
    shrink(monkeypatch.setattr)
    argv = f"--steps 11 8 --batch 2 --workers 0 --precision fp32 --profile --data {shards}".split()
    plan = train.parse_arguments([*argv, "--out", str(tmp_path / "out")])
    train.train(train.make_plan(plan, dist.World()), dist.World())
    table = (tmp_path / "out" / "profile-1.txt").read_text()
    shares = [*map(float, re.findall(r"^ *\S+ +([\d.]+)% ", table, re.M))]      # of their own time
    assert len(shares) == 10 and shares == sorted(shares, reverse=True) and "aten::" in table
    first, second = (sum(event["name"] == "aten::embedding" for event in json.loads(
        (tmp_path / "out" / f"profile-{phase}.json").read_text())["traceEvents"])
        for phase in (1, 2))
    assert 0 < first <= 5 * 3                                # five steps, three embeddings each
    assert second >= 3 * 3                                   # the phase ends amid the five


def test_training_stops_at_the_floor_and_says_where(shards, tmp_path):
    outcome, = run(shards, tmp_path / "out", tmp_path, *SHORT, "--steps", 90, "--batch", 4,
                   "--precision", "fp32", sabotage=(spoil_loss, 0, range(9, 10000)), check=False)
    assert isinstance(outcome, optim.TrainingStopped)
    assert re.match(r"step \d+: gradient of \S+ is not finite.*floor of 6.1\S*e-05",
                    str(outcome))
    assert all(w.isfinite().all() for w in last_state(tmp_path / "out")["weights"].values())


def drift(world, rank):
    """One weight of one rank changes a little, as a bad memory would do it."""
    copy = optim.copy_to_model

    def patched(masters, model):
        if world.rank == rank:
            next(iter(masters.values())).data.view(-1)[0] += 1e-3
        copy(masters, model)

    optim.copy_to_model = patched


def spoil_moments(world, rank, moment):
    """An element of a moment of one rank is NaN."""
    step = optim.Optimizer.step

    def patched(self):
        step(self)
        if world.rank == rank:
            next(iter(self.state.values()))[moment].view(-1)[0] = float("nan")

    optim.LAMB.step = patched


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_moments_that_are_not_finite_are_not_saved(shards, tmp_path, moment):
    outcomes = run(shards, tmp_path / "out", tmp_path, *SHORT, "--checkpoint-every", 1, size=2,
                   sabotage=(spoil_moments, 1, moment), check=False)
    assert all(isinstance(outcome, optim.TrainingStopped) for outcome in outcomes)
    assert "step 1: weights or moments are not finite" in str(outcomes[0])
    assert not steps_kept(tmp_path / "out")


def test_weights_that_drift_apart_stop_the_training(shards, tmp_path):
    outcomes = run(shards, tmp_path / "out", tmp_path, *SHORT, size=2, sabotage=(drift, 1),
                   check=False)
    assert all(isinstance(outcome, dist.DistError) for outcome in outcomes)
    assert "rank 1 has other weights after step 3" in str(outcomes[0])
    assert not steps_kept(tmp_path / "out")


# What is refused before any training


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs train.py in this process with bad arguments; returns (status, its line on stderr)."""
    def run_main(*argv):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, argv)])
        monkeypatch.setattr(os, "_exit", sys.exit)
        with pytest.raises(SystemExit) as caught:
            train.main()
        line, = [line for line in capsys.readouterr().err.splitlines() if "train.py" in line]
        assert not (tmp_path / "out" / "metrics.jsonl").exists()
        return caught.value.code, line

    return run_main


WRONG = [
    ("--model huge", 2, "--model: invalid choice: 'huge' (choose from .*tiny.*large"),
    ("--recipe x", 2, "--recipe: invalid choice: 'x' (choose from .*demo.*nvlamb-64k"),
    ("--optimizer sgd", 2, "--optimizer: invalid choice: 'sgd' (choose from .*lamb"),
    ("--compression zip", 1, "zip.*none, fp16, bf16, int8, onebit, topk, chunk, powersgd"),
    ("--compression topk:2", 1, "topk"),
    ("--no-such-flag", 2, "unrecognized arguments: --no-such-flag"),
    ("--log-every 0", 2, "--log-every: must be in .1, inf)"),
    ("--seed 1.5", 2, "--seed: invalid number value: '1.5'"),
    ("--seed 9223372036854775808", 2, "--seed: must be in .0, 9223372036854775808.*, not 9223"),
    ("--timeout nan", 2, "--timeout: must be in .0.001, inf), not nan"),
    ("--micro-batch 0", 2, "--micro-batch: must be in .1, inf), not 0"),
    ("--dropout 1.5", 2, "--dropout: must be in .0, 1), not 1.5"),
    ("--bucket-mb -1", 2, "--bucket-mb: must be in .1e-06, inf), not -1"),
    ("--steps 1 2 3", 1, "--steps, --batch, --micro-batch: give one number, or 2"),
    ("--resume /nowhere.pt", 1, "No such file or directory: '/nowhere.pt'"),
    ("--vocab-size 300", 1, "has 320 pieces: remove it or set no --vocab-size"),
    ("--freeze 0.5", 1, "--freeze means nothing to lamb"),
    ("--optimizer onebit-lamb --steps 9 2", 1, "no freeze after 0 of 2 steps; change --freeze"),
    ("--optimizer onebit-lamb --compression topk", 1, "needs --compression none, fp16 or bf16"),
    ("--data /nowhere", 1, "/nowhere/manifest.json is missing"),
    ("--corpus /nowhere.txt --data /nowhere", 1, "No such file or directory: '/nowhere.txt'"),
]


@pytest.mark.parametrize("argv,status,message", WRONG)
def test_wrong_arguments_are_one_line(refused, shards, tmp_path, argv, status, message):
    code, line = refused("--data", shards, "--out", tmp_path / "out", *argv.split())
    assert code == status and re.search(message.replace("(", r"\(").replace(")", r"\)"), line), line


def test_damaged_shards_are_named_before_training(refused, shards, tmp_path):
    shutil.copytree(shards, tmp_path / "copy")
    path = next((tmp_path / "copy").glob("train-00001.tokens*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    code, line = refused("--data", tmp_path / "copy", "--out", tmp_path / "out")
    assert code == 1 and f"{path} is damaged" in line


def test_a_folder_that_cannot_be_written_is_said_before_training(refused, shards, tmp_path):
    (tmp_path / "file").write_text("")    # a file where a folder must go: fails for root too
    code, line = refused("--data", shards, "--out", tmp_path / "file" / "out")
    assert code == 1 and str(tmp_path / "file") in line


CHANGES = ("--model mini", "--seed 5", "--lr-scale 2", "--dropout 0.3", "--mask-fraction 0.2",
           "--init another", "--optimizer lans", "--pairs sop", "--whole-words", "--batch 8 7",
           "--precision fp16", "--balance")


def test_another_run_in_the_same_folder_is_refused(documents, shards, tmp_path):
    out = tmp_path / "out"
    run(shards, out, tmp_path, *SHORT, "--max-steps", 1)
    before = (out / "metrics.jsonl").read_bytes()
    train.data.prepare(documents, tmp_path / "other", vocab_size=300, shards=4)
    outcomes = [run(shards, out, tmp_path, *SHORT, *change.split(), check=False)[0]
                for change in CHANGES]
    outcomes += run(tmp_path / "other", out, tmp_path, *SHORT, check=False)
    for outcome in outcomes:
        assert isinstance(outcome, train.ConfigError)
        assert "of another run" in str(outcome) and "(not " in str(outcome)
    assert "the checkpoint is of another run: seed 0 (not 5);" in str(outcomes[1])
    assert "model.vocab_size 320 (not 320)" not in str(outcomes[-1])
    assert (out / "metrics.jsonl").read_bytes() == before


def start_differently(world):
    if world.rank == 1:
        parse = train.parse_arguments
        flags = "--lr-scale 2 --bucket-mb 5 --checkpoint-every 2 --max-steps 9 --eval-every 7"
        train.parse_arguments = lambda argv: parse([*argv, *flags.split()])


def test_what_one_rank_refuses_all_refuse(shards, tmp_path):
    argv = [*SHORT, "--resume", "/nowhere.pt"]
    for outcome in run(shards, tmp_path / "out", tmp_path, *argv, size=2, check=False):
        assert isinstance(outcome, train.ConfigError) and "/nowhere.pt" in str(outcome)
    for outcome in run(shards, tmp_path / "out", tmp_path, *SHORT, size=2, check=False,
                       sabotage=(start_differently,)):
        assert isinstance(outcome, dist.DistError)
        assert "rank 1 was started differently:" in str(outcome)
        assert "lr_scale 2.0 (not 1.0), max_steps" in str(outcome)
    for flag in ("bucket_mb 5.0 (not None)", "checkpoint_every 2 (not 3)", "max_steps 9 (not None)",
                 "eval_every 7 (not 100)"):
        assert flag in str(outcome)
    outcome, = {str(error) for error in run(shards, tmp_path / "out", tmp_path, *SHORT, "--batch",
                                            2, size=3, check=False)}
    assert "a batch of 2 is too small for 3 ranks" in outcome


def on_own_disk(world):
    """Each rank is a node with a disk of its own."""
    make_plan = train.make_plan

    def with_own_out(args, world):
        args.out += str(world.rank)
        return make_plan(args, world)

    train.make_plan = with_own_out


def test_a_later_checkpoint_on_another_node_is_not_passed_over(shards, tmp_path):
    run(shards, tmp_path / "out1", tmp_path, *SHORT, "--max-steps", 4)
    for outcome in run(shards, tmp_path / "out", tmp_path, *SHORT, size=2, check=False,
                       sabotage=(on_own_disk,)):
        assert isinstance(outcome, train.ConfigError)
        assert re.search(r":\S+/out1 holds step 4, and rank 0's \S+/out0 step 0", str(outcome))


def test_two_runs_in_one_folder_are_refused(shards, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with open(out / "log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        outcome, = run(shards, out, tmp_path, *SHORT, check=False)
        assert f"another run writes to {out}, or its disk has no locks (Res" in str(outcome)
    run(shards, out, tmp_path, *SHORT, "--max-steps", 1)


def test_memory_that_is_not_there_names_the_flag():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10 ** 15)
    for error in (caught.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried"),
                  RuntimeError("CUDA error: out of memory"),
                  RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")):
        assert train.explain(error).startswith("out of memory; set --micro-batch lower")
    assert "out of memory" not in train.explain(RuntimeError("another"))


def test_each_node_says_what_is_wrong_with_its_flags(monkeypatch, capsys):
    for local_rank, said in ("0", 1), ("1", 0):
        monkeypatch.setenv("RANK", "8")
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit):
            train.parse_arguments(["--steps", "-1"])
        assert capsys.readouterr().err.count("--steps: must be in [0, inf)") == said


# Derived numbers


def planned(size, *argv):
    """Returns the phases of a plan on `size` ranks."""
    return train.fill_in(train.parse_arguments([*map(str, argv)]), dist.World(size=size)).phases


def test_micro_batches_are_equal_parts_of_about_8192_tokens():
    for size, batch, micro in [(1, 96, 96), (1, 200, 100), (2, 200, 100), (3, 1000, 112)]:
        assert planned(size, "--batch", batch)[0].micro_batch == micro
    assert [p.micro_batch for p in planned(3, "--batch", 90, "--micro-batch", 8, 4)] == [8, 4]
    assert planned(4, "--micro-batch", 100)[1].micro_batch == 8    # no more than a rank's share


def test_a_gpus_memory_decides_its_micro_batch(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)                   # without shards of other pieces
    argv = "--model base --precision bf16 --vocab-size 30522 --recipe nvlamb-64k".split()
    few, many, most, one_bit = (
        planned(8, *argv, "--gpu-memory", gb, *more)[0].micro_batch for gb, more in (
            (8, ()), (16, ()), (16, ["--recompute"]), (8, ["--optimizer", "onebit-lamb"])))
    # 110 million parameters take 18 bytes each, 34 with a 1-bit optimizer; 8192 examples a rank in
    # equal parts
    config = bert.BertConfig.preset("base", 30522)
    one = bert.activation_bytes(config, 128, 0.15 * 128, 2)
    for gb, each, found in (8, 18, few), (16, 18, many), (8, 34, one_bit):
        fit = (0.8e9 * gb - each * 110e6) / one
        assert 0.9 * fit < found <= fit
    assert most > 4 * many


def test_the_plan_counts_days_and_starts_nothing(monkeypatch, capsys, shards, tmp_path):
    argv = "--plan", "4", "--data", str(shards), "--vocab-size", "512"    # of a text still to come
    assert train.fill_in(train.parse_arguments(argv), dist.World()).config.vocab_size == 512
    monkeypatch.chdir(tmp_path)
    argv = "--plan 4 --gpus-per-node 2 --tflops 10 --gbps 1 --model base --recipe nvlamb-64k"
    monkeypatch.setattr(sys, "argv", ["train.py", *argv.split(), "--vocab-size", "30522"])
    train.main()
    printed = capsys.readouterr().out
    assert not list(tmp_path.iterdir()) and printed.endswith(" GPU hours\n")     # no price, no bill
    config = bert.BertConfig.preset("base", 30522)
    phases = optim.RECIPES["nvlamb-64k"].phases
    flops = sum(p.steps * p.global_batch
                * bert.flops_per_example(config, p.seq_len, 0.15 * p.seq_len) for p in phases)
    days = {line.split()[2]: [*map(float, line.split()[3:])] for line in printed.splitlines()
            if line.startswith("   1 Gb/s")}
    assert days.keys() == dist.COMPRESSORS.keys()
    assert all(row[0] == pytest.approx(flops / 2e13 / 86400, rel=0.01) for row in days.values())
    # NCCL's ring goes through the 8 GPUs of 4 nodes
    parameters, exchange = re.search(r"base: (\S+) .*?exchanges (\S+) s", printed, re.S).groups()
    assert float(exchange) == pytest.approx(56e-9 * int(parameters.replace(",", "")), rel=0.01)
    # On 64 nodes most of an exchange of 110 million gradients, 6.9 s, does not hide
    exchanges = sum(p.steps for p in phases) * 6.9 / 86400
    assert 0.6 < (days["none"][-1] - days["none"][0] / 64) / exchanges < 1
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--model", "tiny", "--price-per-gpu-hour", "2"])
    train.main()
    told = re.search(r" ([\d,]+) GPU hours, at ([\d,]+)\n$", capsys.readouterr().out).groups()
    hours, bill = (int(number.replace(",", "")) for number in told)
    assert hours > 10 and abs(bill - 2 * hours) <= 1
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--optimizer", "onebit-lamb"])
    train.main()               # nothing that this optimizer would refuse
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[2] for line in lines if "Gb/s  " in line} == {"none", "fp16", "bf16"}


def test_the_published_recipes():
    nvidia, lans = optim.RECIPES["nvlamb-64k"].phases, optim.RECIPES["lans-96k"].phases
    assert [(p.seq_len, p.global_batch, p.steps, p.lr) for p in nvidia] == [
        (128, 65536, 7038, 6e-3), (512, 32768, 1563, 4e-3)]
    assert sum(p.steps for p in lans) == 4301 and [p.global_batch for p in lans] == [98304, 33792]
    assert [p.power for p in nvidia] == [0.5, 0.5] and optim.RECIPES["lans-96k"].optimizer == "lans"
    assert [p.freeze for p in planned(1, "--optimizer", "onebit-lamb")] == [460, 80]


def test_auto_precision_needs_hardware(monkeypatch):
    cpu = torch.device("cpu")
    for found, precision in (({"avx512_bf16": True}, "bf16"), ({"avx2": True}, "fp32"),
                             ({"bf16": True}, "bf16")):                          # ARM
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
        assert optim.choose_precision("auto", cpu) == precision
    assert optim.choose_precision("fp16", cpu) == "fp16"
    # A V100 has no bf16, and emulates it slowly
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True:
                        including_emulation)
    assert optim.choose_precision("auto", torch.device("cuda")) == "fp16"


# Memory


def log_memory(world, path):
    metric = train.Log.metric

    def patched(self, kind, **fields):
        metric(self, kind, **fields)
        with open("/proc/self/statm") as file, open(path, "a") as log:
            log.write(f"{kind} {int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')}\n")

    train.Log.metric = patched


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_memory_does_not_grow(shards, tmp_path):
    argv = "--steps 300 0 --batch 4 --workers 0 --checkpoint-every 50 --precision fp32".split()
    run(shards, tmp_path / "out", tmp_path, *argv, sabotage=(log_memory, tmp_path / "rss"))
    lines = [line.split() for line in (tmp_path / "rss").read_text().splitlines()]
    rss = [int(size) for kind, size in lines if kind == "train"]
    # From one checkpoint to the next, but for the worst: one of them takes 2 MB, mostly the first
    growth = sorted(after - before for before, after in zip(rss[99::50], rss[149::50]))
    assert len(rss) == 300 and len(growth) == 4 and sum(growth[:3]) <= 0.005 * 3 / 4 * rss[99]


# The programs, as the README has them

LITTLE = "--steps 4 2 --batch 8 --log-every 2 --precision fp32".split()


def test_the_readme_quotes_messages_that_the_code_has():
    section = (ROOT / "README.md").read_text().partition("## When something goes wrong")[2]
    code = "".join(path.read_text() for path in ROOT.glob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)                       # messages of two lines
    quotes = re.findall(r"^\| `(.+?)` \|", section.partition("\n## ")[0], re.M)
    assert len(quotes) > 5
    for quote in quotes:                      # but for the numbers and names that come into them
        for part in re.split(r"\d+|HOST|\.\.\.|: .*", quote):
            assert part.strip() in code, quote


def test_what_a_run_writes(shards, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(train, "EVAL_EXAMPLES", 64)
    monkeypatch.setattr(sys, "argv", ["", "--data", str(shards), "--out", str(out), *LITTLE,
                                      "--micro-batch", "3"])
    train.main()
    said = capsys.readouterr().out
    lines, results = metrics(out), metrics(out, "eval")
    assert lines[0]["mlm_loss"] == pytest.approx(results[0]["unigram_entropy"], abs=0.3)
    assert lines[-1]["minutes_left"] == 0 and 0.05 < lines[0]["memory_gb"] < 20
    assert lines[0]["minutes_left"] == pytest.approx(lines[0]["seconds"] / 60 * (3 + 4), rel=1e-6)
    fields = ("step phase seq_len loss mlm_loss nsp_loss lr grad_norm loss_scale skipped examples "
              "seconds examples_per_second tflops bytes_sent wait_seconds")
    assert set(fields.split()) <= set(lines[0])
    assert [(line["step"], line["phase"]) for line in lines] == [
        (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    header, = metrics(out, "run")
    assert header["world"] == 1 and header["parameters"] > 0
    for result in results:
        fields = "step phase mlm_loss mlm_accuracy nsp_accuracy unigram_entropy"
        assert set(fields.split()) <= set(result)
    assert (out / "log.txt").read_text() == said
    plan = "4 steps x 8 examples of 64 tokens; 1 rank(s) x micro-batch 3 x accumulation 3"
    assert f"phase 1: {plan}" in said
    assert {"config.json", "model.safetensors", "tokenizer.model"} <= {
        path.name for path in (out / "model").iterdir()}
    train.main()                          # the same command again
    assert "Done after step 6 of 6" in capsys.readouterr().out and metrics(out) == lines
    assert metrics(out, "run") == [header]


def test_the_demo_fills_in_its_sentences_and_draws_its_losses(
        documents, shards, tmp_path, monkeypatch, capsys):
    shrink(monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "docs").symlink_to(shards)
    argv = "--steps 2 2 --batch 4 --workers 0 --precision fp32 --eval-every 1".split()
    train.train(train.make_plan(train.parse_arguments(argv), dist.World()), dist.World())
    printed = capsys.readouterr().out
    words = re.findall(r"\[MASK\] of the three sentences: (.*)", printed)
    assert len(words) == 4 and all(line.count(";") == 2 and line.count("%") == 9 for line in words)
    assert all(sentence in printed for sentence in train.DEMO_SENTENCES)
    evals = metrics(tmp_path / "runs" / "demo", "eval")
    rows = [line for line in printed.splitlines() if re.match(r" *\d\.\d{3} \|", line)]
    losses = [line["mlm_loss"] for line in evals] + [line["unigram_entropy"] for line in evals]
    assert float(rows[0].split("|")[0]) == pytest.approx(max(losses), abs=1e-3)
    assert float(rows[-1].split("|")[0]) == pytest.approx(min(losses), abs=1e-3)
    drawn = "".join(rows)
    assert drawn.count("1") - "".join(row.split("|")[0] for row in rows).count("1") == 2


def test_curve_puts_each_loss_on_its_row():
    evaluations = [{"step": step, "phase": phase, "mlm_loss": loss, "unigram_entropy": 6.0}
                   for step, phase, loss in ((10, 1, 5.5), (20, 1, 5.0), (30, 2, 5.25))]
    assert train.curve(evaluations, width=3, height=4).splitlines() == [
        "  6.000 | ---", "  5.750 |    ", "  5.500 | 1  ", "  5.250 |   2", "  5.000 |  1 "]


@pytest.mark.parametrize("damage", [{"step": 0}, {"step": -5}, {"phase": "x"}, {"phase": 99},
                                    {"mlm_loss": None}, {"mlm_loss": float("inf")}])
def test_a_damaged_log_does_not_stop_the_end_of_a_run(tmp_path, damage):
    line = {"kind": "eval", "step": 3, "phase": 1, "mlm_loss": 5.0, "unigram_entropy": 6.0,
            "mlm_accuracy": 0.1, "nsp_accuracy": 0.5, "nsp_error": 0.01}
    step = {"kind": "train", "phase": 1, "padding": 0.0, "imbalance": 1.0, "data_share": 0.0}
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(line | damage)}\n{json.dumps(step)}\n")
    plan = train.argparse.Namespace(phases=optim.RECIPES["demo"].phases, ends=[3], out=tmp_path,
                                    reads_docs=False, pairs="nsp", tensorboard=False)
    train.report(plan, train.Log(plan, True), None, 3, [])
    assert "Done after step 3 of 3" in (tmp_path / "log.txt").read_text()


def test_the_report_is_of_each_phases_own_end(tmp_path):
    lines = [{"kind": "eval", "step": step, "phase": phase, "mlm_loss": step / 2, "mlm_accuracy":
              0.1, "nsp_accuracy": 0.5, "nsp_error": 0.01, "unigram_entropy": 6.0}
             for step, phase in ((1, 1), (3, 1), (5, 2), (8, 2))]
    lines += [{"kind": "train", "phase": phase, "padding": phase / 10, "imbalance": phase,
               "data_share": phase / 4} for phase in (1, 1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    plan = train.argparse.Namespace(phases=optim.RECIPES["demo"].phases, ends=[3, 8], out=tmp_path,
                                    reads_docs=False, pairs="nsp", tensorboard=False)
    train.report(plan, train.Log(plan, True), None, 8, [])
    said = (tmp_path / "log.txt").read_text()
    for phase, tokens, end, figures in ((1, 64, 3, r"10.0% .* 1.000 .* 25.0%"),
                                        (2, 128, 8, r"20.0% .* 2.000 .* 50.0%")):
        assert re.search(rf"phase {phase}, {tokens} tokens, after step {end}: MLM loss {end / 2}00 "
                         rf".*\n *padding {figures}(?s:.*)", said)


def test_lines_that_found_no_room_are_written_later(tmp_path, capsys):
    log = train.Log(train.argparse.Namespace(out=tmp_path, tensorboard=False), True)
    (tmp_path / "metrics.jsonl").mkdir()                     # as bad as a full disk
    log.metric("train", step=1)
    assert f"warning: {tmp_path}/metrics.jsonl: Is a directory" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").rmdir()
    log.metric("train", step=2, loss=math.nan)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    assert metrics(tmp_path)[1]["loss"] is None              # JSON has no NaN


def test_a_terminal_that_takes_no_more_does_not_end_a_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=full, flush=full))
    log = train.Log(train.argparse.Namespace(out=tmp_path, tensorboard=False), True)
    log.say("step 1")
    monkeypatch.setattr(train, "open", full, raising=False)
    log.say("step 2")                             # nor does a warning that cannot be printed
    assert (tmp_path / "log.txt").read_text() == "step 1\n" and log.unwritten
    monkeypatch.setattr(sys, "stdout", None)      # as `>&-` has it
    log.say("step 3")


def test_tensorboard_gets_every_number_or_says_what_is_missing(tmp_path, monkeypatch):
    scalars = []
    board = type("Board", (), {"__init__": lambda self, folder: scalars.append(folder),
                               "add_scalar": lambda self, *scalar: scalars.append(scalar)})
    plan = train.argparse.Namespace(out=tmp_path, tensorboard=True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard",
                        train.argparse.Namespace(SummaryWriter=board))
    train.Log(plan, True).metric("train", step=3, loss=1.5, name="x")
    assert scalars == [tmp_path, ("train/step", 3, 3), ("train/loss", 1.5, 3)]
    assert train.explain(ModuleNotFoundError("No module named 'tensorboard'")) == (
        "No module named 'tensorboard'")


FAILS = """
import os, sys
sys.path.insert(0, {root!r})
import torch
import train

train.EVAL_EXAMPLES = 64
compare = train.compare_weights

def fail(*arguments):
    lives_before = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if (arguments[-1], os.environ["RANK"], lives_before) == (2, "1", "0"):
        raise ZeroDivisionError("a bug in a checkpoint")
    compare(*arguments)

train.compare_weights = fail
if __name__ == "__main__":
    train.main()
"""


def test_under_torchrun_the_rank_that_fails_says_why_and_all_start_again(shards, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS.format(root=str(ROOT)))
    torchrun = "--standalone --max-restarts=1 --nproc_per_node=2".split()
    began = time.time()
    run = run_script(find_spec("torch.distributed.run").origin, *torchrun,
                     tmp_path / "fails.py", "--data", shards,
                     "--out", tmp_path / "out", *LITTLE, "--workers", 0,
                     *"--steps 4 0 --checkpoint-every 1 --compression bf16".split())
    assert run.returncode == 0 and time.time() - began < 60, run.stderr
    reason, = [line for line in run.stderr.splitlines() if line.startswith("train.py:")]
    assert reason.startswith("train.py: rank 1:") and "a bug in a checkpoint" in run.stderr
    assert run.stdout.count("2 rank(s) on 1 node(s)") == 2 and "checkpoint of step 1" in run.stdout
    assert run.stdout.count("Done after step 4 of 4") == 1
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2, 3, 4]
    assert all(line["bytes_sent"] > 0 for line in metrics(tmp_path / "out"))
    while not subprocess.run(["pgrep", "-f", tmp_path / "fails.py"]).returncode:
        assert time.time() - began < 60                      # none is left
        time.sleep(0.1)


@pytest.mark.parametrize("error,restarts,ends", [
    (dist.DistError("stopped after step 3"), "1", True), (train.ConfigError("flags"), "1", True),
    (train.ConfigError("flags"), "0", False), (dist.RankLost("rank 1 died"), "1", False),
    (OSError("disk full"), "1", False), (MemoryError(), "1", False)])
def test_what_no_restart_can_mend_ends_torchrun(refused, monkeypatch, error, restarts, ends):
    def fails(timeout):
        raise error

    signals = []
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setattr(dist, "TORCHRUN", os.getppid())
    monkeypatch.setattr(dist, "init", fails)
    monkeypatch.setattr(os, "kill", lambda *what: signals.append(what))
    assert refused()[0] == 1 and signals == [(os.getppid(), signal.SIGTERM)] * ends


def test_own_text_is_prepared_on_the_spot(documents, tmp_path, refused, monkeypatch):
    (tmp_path / "my.txt").write_text("\n\n".join(documents))
    arguments = *"--corpus my.txt --pairs sop --vocab-size 300 --workers 0".split(), *LITTLE
    run = run_script(ROOT / "train.py", *arguments, "--steps", 4, 0, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "shards" / "my" / "manifest.json").exists()
    assert (tmp_path / "runs" / "my" / "model" / "config.json").exists()
    assert "SOP accuracy" in run.stdout and not re.search("NSP|three sentences", run.stdout)
    assert "to start over, remove runs/my" in run.stdout
    (tmp_path / "my.txt").write_text("Another text.\n")
    monkeypatch.chdir(tmp_path)
    code, line = refused(*arguments)
    assert code == 1 and "shards/my was prepared with another corpus" in line


def test_init_starts_from_a_folders_weights(refused, documents, shards, tmp_path, monkeypatch):
    shrink(monkeypatch.setattr)
    fresh, out, model = tmp_path / "fresh", tmp_path / "second", tmp_path / "model"
    run(shards, fresh, tmp_path, *EQUAL, "--steps", 4, 0, "--mask-fraction", 0.15)
    # A model that knows the first step's batch by heart
    trained = bert.load_huggingface(fresh / "model")
    batch = data.PretrainingData(shards, 32).batch(range(33))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        losses = trained(batch)
        loss = losses.mlm_sum / (batch.labels != data.IGNORED).sum() + losses.nsp_sum / 33
        loss.backward()
        optimizer.step()
    bert.save_huggingface(trained, shards / "tokenizer.model", model)
    argv = *EQUAL, "--steps", 4, 0, "--mask-fraction", 0.15, "--init", model
    run(shards, out, tmp_path, *argv, "--max-steps", 2, size=2)
    assert metrics(out)[0]["loss"] < 0.5 * metrics(fresh)[0]["loss"]
    assert metrics(out)[0]["loss"] == pytest.approx(loss.item(), rel=0.1)    # a step before
    code, line = refused("--data", shards, "--out", tmp_path / "out", "--init", model, "--model",
                         "mini")
    assert code == 1 and "is (2, 64, 1, 256, 320, 512), the plan (4, 256" in line
    data.prepare(documents, tmp_path / "other", vocab_size=319, shards=4)
    code, line = refused("--data", tmp_path / "other", "--out", tmp_path / "out", "--init", model)
    assert code == 1 and f"data.py --tokenizer {model}/tokenizer.model" in line
    for name in "tokenizer.model", "SHA256SUMS":              # as of another's BERT
        (model / name).unlink()
    code, line = refused("--data", shards, "--out", tmp_path / "out", "--init", model)
    assert code == 1 and f"is not {model}/tokenizer.model" in line
    before = metrics(out)[0]["loss"]
    shutil.rmtree(model)                  # a run that resumes does not need it
    run(shards, out, tmp_path, *argv)
    assert metrics(out)[0]["loss"] == before and metrics(out)[-1]["step"] == 4
    code, line = refused("--data", shards, "--out", tmp_path / "out", "--init", model)
    assert code == 1 and f"{model} is no model folder" in line


def heads_that_nobody_trains(folder):
    model = bert.load_huggingface(folder)
    return [model.pooler.weight, model.pooler.bias, model.nsp.weight, model.nsp.bias]


def test_init_gives_a_resumed_run_its_untrained_heads(shards, tmp_path):
    argv = *EQUAL, "--steps", 4, 0, "--pairs", "none"
    run(shards, tmp_path / "first", tmp_path, *argv, "--seed", 1)
    init = *argv, "--init", tmp_path / "first" / "model"
    run(shards, tmp_path / "second", tmp_path, *init, "--max-steps", 2)
    run(shards, tmp_path / "second", tmp_path, *init)
    first, second = (heads_that_nobody_trains(tmp_path / name / "model")
                     for name in ("first", "second"))
    assert all(map(torch.equal, first, second)) and first[0].any()


def stop_rank_1_while_rank_0_writes_slowly(world, moments):
    dist.TORCHRUN, write, rate = os.getppid(), optim.write_checkpoint, optim.learning_rate

    def write_slowly(*arguments, **options):
        time.sleep(1)
        write(*arguments, **options)
        (moments / "written").touch()

    def signalled(*arguments):
        if world.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(*arguments)

    optim.write_checkpoint, optim.learning_rate = write_slowly, signalled
    leave = dist.DistError.__init__
    dist.DistError.__init__ = lambda self, *words: (
        (moments / f"{world.rank}: {(moments / 'written').exists()}").touch()
        or leave(self, *words))


def test_no_rank_leaves_before_the_last_checkpoint_is_written(shards, tmp_path):
    (moments := tmp_path / "moments").mkdir()
    outcomes = run(shards, tmp_path / "out", tmp_path, *SHORT, size=2, check=False,
                   sabotage=(stop_rank_1_while_rank_0_writes_slowly, moments))
    assert all("stopped after step" in str(outcome) for outcome in outcomes)
    assert {path.name for path in moments.iterdir()} == {"written", "0: True", "1: True"}


def test_signals_stop_with_a_checkpoint(shards, tmp_path):
    # A step of half a second, in 64 micro-batches: the signals come in the middle of a step
    rare = "--batch 256 --micro-batch 4 --checkpoint-every 1000 --precision fp32".split()
    cases = {tmp_path / "term": [signal.SIGTERM], tmp_path / "int": [signal.SIGINT],
             tmp_path / "twice": [signal.SIGINT] * 2}
    processes = []
    for out in cases:                          # all at once, which takes less time
        out.mkdir()
        processes.append(start_script(out, "train.py", "--data", shards, "--out", out, *rare))
    for process, (out, signals) in zip(processes, cases.items()):
        deadline = time.time() + 60
        while time.time() < deadline and not ((out / "metrics.jsonl").exists() and metrics(out)):
            time.sleep(0.05)
        time.sleep(0.1)
        for number in signals:
            os.killpg(process.pid, number)     # as torchrun and a terminal do: workers get it, too
            time.sleep(0.02)                   # it saves for 0.1 s
    for process, (out, signals) in zip(processes, cases.items()):
        process.join(30)
        stdout = (out / "stdout").read_text()
        with pytest.raises(ProcessLookupError):    # no worker is left
            for _ in range(100):
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        if len(signals) == 1:
            assert process.exitcode == 0 and f"Stopped by {signals[0].name} after step" in stdout
            assert last_state(out)["step"] == metrics(out)[-1]["step"]
        else:
            assert process.exitcode == -signal.SIGINT


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_trains_and_resumes_with_the_same_bits(shards, tmp_path, precision):
    argv = [*SHORT, "--precision", precision, "--dropout", 0.1]
    run(shards, tmp_path / "whole", tmp_path, *argv, gpu=True)
    run(shards, tmp_path / "parts", tmp_path, *argv, "--max-steps", 7, gpu=True)
    run(shards, tmp_path / "parts", tmp_path, *argv, gpu=True)
    assert_same(last_state(tmp_path / "whole"), last_state(tmp_path / "parts"))
