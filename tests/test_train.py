"""train.py: the same training on any number of ranks, after any kill, and what it refuses."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import bert
import dist
import optim
import train
from tests.conftest import ROOT
from tests.ranks import run_ranks

SHORT = (
    "--phase1-steps 8 --phase2-steps 6 --phase1-batch 8 --phase2-batch 8 --micro-batch 2 "
    "--workers 0 --checkpoint-every 3 --eval-every 100"
).split()


def metrics(out, kind="train"):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def training(world, argv, sabotage=None):
    """Trains on one rank of several; `sabotage` may patch this process first. Returns what the bits
    of the rank's weights add up to."""
    train.EVAL_EXAMPLES = 32
    recipe = train.RECIPES["demo"]
    train.RECIPES["demo"] = recipe._replace(
        phases=[dataclasses.replace(phase, seq_len=phase.seq_len // 2) for phase in recipe.phases]
    )
    built = []
    build = train.build
    train.build = lambda *args: built.append(build(*args)) or built[0]
    if sabotage:
        sabotage[0](world, *sabotage[1:])
    train.train(train.parse_arguments(argv), world)
    return sum(
        int(master.detach().view(torch.int32).long().sum()) for master in built[0][2].values()
    )


def run(shards, out, tmp_path, *argv, size=1, sabotage=None, check=True, gpu=False):
    arguments = ["--data", str(shards), "--out", str(out), *map(str, argv)]
    return run_ranks(training, size, tmp_path, arguments, sabotage, check=check, gpu=gpu)


def last_state(out):
    path = sorted((out / "checkpoints").glob("step-*.pt"))[-1]
    return train.read_checkpoint(path)


def assert_same_state(a, b):
    assert a["step"] == b["step"] and a["scaler"] == b["scaler"] and a["examples"] == b["examples"]
    for name, weight in a["weights"].items():
        assert torch.equal(weight, b["weights"][name]), name
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    for key, state in a["optimizer"]["state"].items():
        for name, value in state.items():
            other = b["optimizer"]["state"][key][name]
            assert torch.equal(value, other) if torch.is_tensor(value) else value == other, (
                key,
                name,
            )


# The same training on any number of ranks


@pytest.fixture(scope="module")
def one_rank(shards, tmp_path_factory):
    """Losses of 20 steps on one rank, for each phase alone."""
    found = {}
    for phase in (1, 2):
        out = tmp_path_factory.mktemp("one") / "out"
        run(shards, out, out.parent, *equal_training(phase), "--micro-batch", 16)
        found[phase] = [line["loss"] for line in metrics(out)]
    return found


def equal_training(phase):
    steps = (
        "--phase1-steps 20 --phase2-steps 0" if phase == 1 else "--phase1-steps 0 --phase2-steps 20"
    )
    rest = "--phase1-batch 64 --phase2-batch 64 --dropout 0 --precision fp32 --workers 0"
    return f"{steps} {rest}".split()


@pytest.mark.parametrize("phase", [1, 2])
@pytest.mark.parametrize(
    "size,micro", [(1, 4), (1, 8), (2, 4), (2, 8), (2, 16), (4, 4), (4, 8), (4, 16)]
)
def test_losses_do_not_depend_on_ranks_or_micro_batches(
    shards, tmp_path, one_rank, phase, size, micro
):
    sums = run(
        shards,
        tmp_path / "out",
        tmp_path,
        *equal_training(phase),
        "--micro-batch",
        micro,
        size=size,
    )
    losses = [line["loss"] for line in metrics(tmp_path / "out")]
    assert len(losses) == 20 and len(set(sums)) == 1
    assert losses[0] == pytest.approx(one_rank[phase][0], rel=1e-6)
    assert losses == pytest.approx(one_rank[phase], rel=1e-4)
    assert len(set(losses)) == 20


# Killed and started again


@pytest.mark.parametrize("size", [1, 2])
def test_balance_changes_the_padding_and_not_the_losses(shards, tmp_path, one_rank, size):
    argv = *equal_training(2), "--micro-batch", 4, "--balance"
    run(shards, tmp_path / "out", tmp_path, *argv, size=size)
    run(shards, tmp_path / "plain", tmp_path, *argv[:-1], "--max-steps", 5, size=size)
    lines, plain = metrics(tmp_path / "out"), metrics(tmp_path / "plain")
    balanced, padding = (sum(line["padding"] for line in some[:5]) for some in (lines, plain))
    assert balanced < 0.8 * padding
    assert [line["loss"] for line in lines] == pytest.approx(one_rank[2], rel=1e-5)
    for line, other in zip(lines, plain):
        assert line["padding"] <= other["padding"]
        assert 1 <= line["imbalance"] < 1.03 and (
            size == 1 or line["imbalance"] < other["imbalance"]
        )
    log = (tmp_path / "out" / "log.txt").read_text()
    assert re.search(
        r"phase 2: \d\.\d% of a batch is padding, the busiest rank has 1\.0\d\d times", log
    )


def take_share(world, folder, nodes):
    """Makes this rank a node that holds only its share of the shards."""
    parse = train.parse_arguments

    def with_share(argv):
        args = parse(argv)
        args.data = f"{folder}-node-{world.rank % nodes}"
        return args

    train.parse_arguments = with_share


def test_nodes_with_their_shares_train_as_with_all_shards(shards, tmp_path, one_rank):
    shutil.copytree(shards, tmp_path / "wiki")
    train.data.split_folder(tmp_path / "wiki", nodes=2)
    share = take_share, tmp_path / "wiki", 2
    argv = *equal_training(1), "--micro-batch", 4
    run(shards, tmp_path / "out", tmp_path, *argv, size=2, sabotage=share)
    losses = [line["loss"] for line in metrics(tmp_path / "out")]
    assert losses == pytest.approx(one_rank[1], rel=1e-5)
    outcomes = run(shards, tmp_path / "no", tmp_path, *argv, "--balance", size=2, sabotage=share,
                   check=False)  # fmt: skip
    (tmp_path / "wiki-node-1" / "train-00003.tokens.npy").unlink()
    outcomes += run(shards, tmp_path / "no", tmp_path, *argv, size=2, sabotage=share, check=False)
    assert all(isinstance(outcome, train.Refused) for outcome in outcomes)
    assert re.search("wiki-node-.*.npy is missing; all shards are needed", str(outcomes[1]))
    assert re.search("wiki-node-1.train-00003.tokens.npy is missing; rank 1", str(outcomes[2]))


def test_other_masks_and_pairs(shards, tmp_path):
    shorter = "--phase1-steps", 3, "--phase2-steps", 0
    for name, *argv in (("none", "--pairs", "none", "--whole-words"),
                        ("sop", "--pairs", "sop", "--mask-fraction", 0.4)):  # fmt: skip
        run(shards, tmp_path / name, tmp_path, *SHORT, *shorter, *argv)
    evals = {name: metrics(tmp_path / name, "eval")[-1] for name in ("none", "sop")}
    assert evals["none"]["nsp_accuracy"] is None and evals["none"]["nsp_loss"] == 0
    assert evals["sop"]["nsp_loss"] > 0.5 and 0 < evals["sop"]["nsp_error"] < 0.1
    assert "NSP accuracy none" in (tmp_path / "none" / "log.txt").read_text()
    for name, trained in (("none", False), ("sop", True)):  # else decay would wear it away
        assert ("pooler.weight" in last_state(tmp_path / name)["weights"]) == trained
    with pytest.raises(train.Refused, match=r"mask_fraction 0.15 \(was 0.4\), pairs nsp \(was sop"):
        run(shards, tmp_path / "sop", tmp_path, *SHORT, *shorter)


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
    checkpoint = train.checkpoint

    def patched(state, *rest):
        checkpoint(state, *rest)
        if state["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train.checkpoint = patched


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_run_ends_with_the_same_bits(shards, tmp_path, precision, size):
    argv = [*SHORT, "--precision", precision, "--dropout", 0.1]
    whole = run(shards, tmp_path / "whole", tmp_path, *argv, size=size)
    kills = [
        (kill_after_update, size - 1, 5),  # in phase 1; from the checkpoint of step 3
        (kill_after_checkpoint, 8),  # between the phases
        (kill_after_update, 0, 5),
    ]  # in phase 2, after a resume from step 8
    for kill in kills:
        outcomes = run(
            shards, tmp_path / "killed", tmp_path, *argv, size=size, sabotage=kill, check=False
        )
        assert None in outcomes
        assert all(outcome is None or isinstance(outcome, dist.RankLost) for outcome in outcomes)
    rest = run(shards, tmp_path / "killed", tmp_path, *argv, size=size)
    assert rest == whole
    assert_same_state(last_state(tmp_path / "whole"), last_state(tmp_path / "killed"))
    for key in ("step", "loss", "lr", "examples", "grad_norm"):  # no step twice, none missing
        assert [line[key] for line in metrics(tmp_path / "whole")] == [
            line[key] for line in metrics(tmp_path / "killed")
        ]
    assert metrics(tmp_path / "whole", "eval")[-1] == metrics(tmp_path / "killed", "eval")[-1]


@pytest.mark.parametrize("compression", ["int8", "onebit", "topk", "chunk", "powersgd"])
def test_a_run_with_lossy_compression_resumes_with_the_same_bits(shards, tmp_path, compression):
    argv = [*SHORT, "--compression", compression, "--precision", "fp32"]
    whole = run(shards, tmp_path / "whole", tmp_path, *argv, size=2)
    kill = kill_after_update, 1, 8
    run(shards, tmp_path / "killed", tmp_path, *argv, size=2, sabotage=kill, check=False)
    assert run(shards, tmp_path / "killed", tmp_path, *argv, size=2) == whole
    a, b = last_state(tmp_path / "whole"), last_state(tmp_path / "killed")
    assert_same_state(a, b)
    for name, residual in a["compression"]["residual"].items():
        assert torch.equal(residual, b["compression"]["residual"][name])


FREEZES = [*SHORT, "--freeze", 0.5, "--precision", "fp32", "--optimizer"]  # after 4 of 8, 3 of 6


@pytest.mark.parametrize("optimizer", ["lans", "onebit-adam", "onebit-lamb", "zeroone-adam"])
def test_each_optimizer_resumes_in_both_phases_with_the_same_bits(shards, tmp_path, optimizer):
    argv = [*(FREEZES if "-" in optimizer else [*SHORT, "--optimizer"]), optimizer]
    whole = run(shards, tmp_path / "whole", tmp_path, *argv, size=2)
    for step in (7, 6):  # in the second stage of phase 1, and from step 6 in that of phase 2
        kill = kill_after_update, 1, step
        run(shards, tmp_path / "killed", tmp_path, *argv, size=2, sabotage=kill, check=False)
    assert run(shards, tmp_path / "killed", tmp_path, *argv, size=2) == whole
    a, b = last_state(tmp_path / "whole"), last_state(tmp_path / "killed")
    assert_same_state(a, b)
    assert a["exchange"].keys() == b["exchange"].keys()
    assert all(torch.equal(value, b["exchange"][name]) for name, value in a["exchange"].items())
    assert [line["loss"] for line in metrics(tmp_path / "whole")] == [
        line["loss"] for line in metrics(tmp_path / "killed")
    ]
    if a["exchange"]:
        sent = [line["bytes_sent"] for line in metrics(tmp_path / "whole")]
        signs = [*sent[5:8], *sent[11:14]]
        if optimizer == "zeroone-adam":  # the variance's second step is the fourth exact one
            assert max(signs) < sent[0] / 10
        else:  # no gradient crosses the wire
            assert set(sent[:4] + sent[8:11]) == {sent[0]} and len(set(signs)) == 1
            assert signs[0] < sent[0] / 25


def test_an_exchanging_run_goes_on_with_other_ranks(shards, tmp_path):
    argv = [*FREEZES, "onebit-lamb", "--dropout", 0, "--phase2-steps", 0]
    run(shards, tmp_path / "one", tmp_path, *argv)
    run(shards, tmp_path / "two", tmp_path, *argv, "--max-steps", 6, size=2)
    run(shards, tmp_path / "two", tmp_path, *argv, size=4)
    one, two = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "two"))
    assert two[:5] == pytest.approx(one[:5], rel=1e-4)  # before the first exchange
    assert two == pytest.approx(one, rel=0.05) and len(two) == 8
    state = last_state(tmp_path / "two")
    moments = [entry["exp_avg"] for entry in state["optimizer"]["state"].values()]
    positions = [m for m in moments if m.shape == (512, 128) and not m[32:].any()]
    assert len(positions) == 1 and positions[0][:32].any()  # those not seen stay masked


def test_a_run_goes_on_with_other_ranks(shards, tmp_path):
    argv = [*SHORT, "--precision", "fp32", "--dropout", 0]
    run(shards, tmp_path / "one", tmp_path, *argv)
    run(shards, tmp_path / "two", tmp_path, *argv, "--max-steps", 9, size=2)
    run(shards, tmp_path / "two", tmp_path, *argv, size=4)
    one, two = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)


# Checkpoints


def test_what_lies_behind_the_start_is_forgotten(shards, tmp_path):
    out = tmp_path / "out"

    def steps():
        return [int(path.stem[5:]) for path in sorted((out / "checkpoints").iterdir())]

    run(shards, out, tmp_path, *SHORT)
    assert steps() == [8, 12, 14]
    shutil.copy(out / "checkpoints" / "step-000008.pt", tmp_path / "eight.pt")
    run(shards, out, tmp_path, *SHORT, "--resume", tmp_path / "eight.pt", "--max-steps", 10)
    assert steps() == [8, 9, 10] and metrics(out)[-1]["step"] == 10
    run(shards, out, tmp_path, *SHORT, "--resume", "never", "--max-steps", 4)
    assert steps() == [3, 4] and [line["step"] for line in metrics(out)] == [1, 2, 3, 4]
    assert len(metrics(out, "run")) == 1


def test_the_newest_two_are_kept_and_the_last_of_each_phase(shards, tmp_path):
    run(shards, tmp_path / "out", tmp_path, *SHORT, "--checkpoint-every", 2)
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["step-000008.pt", "step-000012.pt", "step-000014.pt"]


def some_state():
    return {"step": 7, "weights": {"w": torch.arange(5000.0)}, "run": {"seed": 1, "model": "x"}}


def test_a_checkpoint_is_whole_or_is_not_there(tmp_path, monkeypatch):
    path = tmp_path / "step-000007.pt"
    train.save_checkpoint(path, some_state(), keep=[])
    assert torch.equal(train.read_checkpoint(path)["weights"]["w"], torch.arange(5000.0))
    assert torch.load(path, weights_only=True)["step"] == 7  # an ordinary torch file too

    class FullDisk:
        def __init__(self, file, room):
            self.file, self.room = file, room

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, part):
            self.room -= len(part)
            if self.room < 0:
                raise OSError(28, "No space left on device")
            return self.file.write(part)

    make = train.HashingFile.__init__
    for room in (0, 100, 5000, 20000):  # it is full at once, or half-way
        monkeypatch.setattr(
            train.HashingFile, "__init__", lambda self, file: make(self, FullDisk(file, room))
        )
        with pytest.raises(OSError, match="No space left"):
            train.save_checkpoint(tmp_path / "step-000009.pt", some_state(), keep=[])
        assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_checkpoints_are_ordered_by_step_not_by_name(tmp_path):
    for step in (999_700, 1_000_000, 1_000_300):
        path = tmp_path / f"step-{step:06d}.pt"
        train.save_checkpoint(path, {**some_state(), "step": step}, keep=[])
    assert [train.step_of(path) for path in train.checkpoints_in(tmp_path)] == [
        1_000_000,
        1_000_300,
    ]
    assert train.find_checkpoint(tmp_path, "auto", print)["step"] == 1_000_300


@pytest.mark.parametrize("how", ["cut", "flip", "empty"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, how):
    for step in (5, 6):
        train.save_checkpoint(
            tmp_path / f"step-{step:06d}.pt", {**some_state(), "step": step}, keep=[]
        )
    newest, said = tmp_path / "step-000006.pt", []
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes({"cut": content[: len(content) // 2], "flip": content, "empty": b""}[how])
    (tmp_path / "step-000007.pt.tmp").write_bytes(b"half")
    assert train.find_checkpoint(tmp_path, "auto", said.append)["step"] == 5
    assert len(said) == 1 and "step-000006.pt is cut or damaged" in said[0]
    assert not (tmp_path / "step-000007.pt.tmp").exists()
    assert train.find_checkpoint(tmp_path, "never", said.append) is None
    (tmp_path / "step-000005.pt").write_bytes(b"x" * 100)
    with pytest.raises(train.Refused, match="no checkpoint in .* is whole"):
        train.find_checkpoint(tmp_path, "auto", said.append)


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_a_malicious_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.save_checkpoint(tmp_path / "step-000001.pt", {"step": Evil()}, keep=[])
    with pytest.raises(train.Refused, match="not one of our checkpoints"):
        train.read_checkpoint(tmp_path / "step-000001.pt")
    assert not (tmp_path / "evil").exists()


# fp16 and steps that do not count


def spoil_loss(world, rank, steps):
    """The loss of one rank becomes infinite in some steps (counted from 1)."""
    forward, calls = bert.BertForPreTraining.forward, []

    def patched(self, batch):
        losses = forward(self, batch)
        if self.training:
            calls.append(1)
            if world.rank == rank and len(calls) in steps:
                losses = losses._replace(mlm_sum=losses.mlm_sum * float("inf"))
        return losses

    bert.BertForPreTraining.forward = patched


@pytest.mark.parametrize(
    "precision,scale,optimizer",
    [
        ("fp16", 65536.0, "lamb"),
        ("fp32", 1.0, "lamb"),
        ("fp32", 1.0, "onebit-lamb --freeze 0.1"),  # the fourth step is in the second stage
        ("bf16", 1.0, "zeroone-adam --freeze 0.1"),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    shards, tmp_path, precision, scale, optimizer
):
    argv = "--phase1-steps 20 --phase1-batch 4 --phase2-batch 4 --micro-batch 2 --workers 0".split()
    argv += ["--precision", precision, "--checkpoint-every", 1]
    argv += ["--optimizer", *optimizer.split()]
    out = tmp_path / "out"
    before = run(shards, out, tmp_path, *argv, "--max-steps", 3, size=2)
    state = last_state(out)
    spoil = (spoil_loss, 1, {1})
    after = run(shards, out, tmp_path, *argv, "--max-steps", 4, size=2, sabotage=spoil)
    assert after == before and before[0] == before[1]  # the weights, on both ranks
    skipped = last_state(out)
    assert skipped["step"] == 4 and skipped["scaler"]["scale"] == state["scaler"]["scale"] / 2
    assert_same_state(
        {**skipped, "step": 3, "examples": 0, "scaler": 0}, {**state, "examples": 0, "scaler": 0}
    )
    assert [line["skipped"] for line in metrics(out)] == [0, 0, 0, 1]
    moved = run(shards, out, tmp_path, *argv, "--max-steps", 5, size=2)
    assert moved != after and metrics(out)[-1]["loss_scale"] == scale / 2


@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_each_optimizer_in_16_bits_follows_fp32(shards, tmp_path, monkeypatch, optimizer):
    """With accumulation, through both stages of two phases; fp16 with its loss scale."""
    recipe = train.RECIPES["demo"]
    short = [dataclasses.replace(phase, seq_len=16) for phase in recipe.phases]
    monkeypatch.setitem(train.RECIPES, "demo", recipe._replace(phases=short))
    monkeypatch.setattr(train, "EVAL_EXAMPLES", 4)
    argv = "--phase1-steps 6 --phase2-steps 4 --phase1-batch 4 --phase2-batch 4".split()
    argv += ["--micro-batch", "2", "--workers", "0", "--dropout", "0", "--data", str(shards)]
    argv += ["--optimizer", optimizer]
    argv += ["--lr-scale", "0.1"] + (["--freeze", "0.5"] if optimizer in train.EXCHANGING else [])
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        out = tmp_path / precision
        options = [*argv, "--precision", precision, "--out", str(out)]
        train.train(train.parse_arguments(options), dist.World())
        losses[precision] = [line["loss"] for line in metrics(out)]
        assert {line["skipped"] for line in metrics(out)} == {0}
        assert {line["loss_scale"] for line in metrics(out)} == {
            65536 if precision == "fp16" else 1
        }
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=3e-3)
    assert len(losses["fp16"]) == 10 and losses["fp16"] != losses["fp32"]


def test_training_stops_at_the_floor_and_says_where(shards, tmp_path):
    outcomes = run(
        shards,
        tmp_path / "out",
        tmp_path,
        *SHORT,
        "--precision",
        "fp32",
        "--phase1-steps",
        90,
        sabotage=(spoil_loss, 0, range(9, 10000)),
        check=False,
    )
    assert isinstance(outcomes[0], optim.TrainingStopped)
    assert re.match(
        r"step \d+: the gradient of \S+ is not finite.*floor of 6.1\S*e-05", str(outcomes[0])
    )
    assert all(torch.isfinite(w).all() for w in last_state(tmp_path / "out")["weights"].values())


def drift(world, rank):
    """One weight of one rank changes a little, as a bad memory would do it."""
    copy = optim.copy_to_model

    def patched(masters, model):
        if world.rank == rank:
            next(iter(masters.values())).data.view(-1)[0] += 1e-3
        copy(masters, model)

    optim.copy_to_model = patched


def test_weights_that_drift_apart_stop_the_training(shards, tmp_path):
    outcomes = run(
        shards, tmp_path / "out", tmp_path, *SHORT, size=2, sabotage=(drift, 1), check=False
    )
    assert all(isinstance(outcome, optim.TrainingStopped) for outcome in outcomes)
    assert "step 3: the weights of rank 1 are not those of rank 0" in str(outcomes[0])
    assert not list((tmp_path / "out" / "checkpoints").glob("step-*"))


# What is refused before any training


@pytest.fixture
def refused(shards, tmp_path, monkeypatch, capsys):
    """Runs train.py in this process with bad arguments; returns (status, stderr)."""

    def run_main(*argv):
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, argv)])
        with pytest.raises(SystemExit) as caught:
            train.main()
        stderr = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py")
        ]
        assert not (tmp_path / "out" / "metrics.jsonl").exists()
        return caught.value.code, stderr

    return run_main


DOES_NOT_DIVIDE = (
    "phase 1: a global batch of 100 does not divide into 1 ranks x micro-batches of 8; "
    "the nearest that does is --phase1-batch 96"
)
WRONG = [
    ("--model huge", 2, "--model: invalid choice: 'huge' (choose from .*tiny.*large"),
    ("--recipe x", 2, "--recipe: invalid choice: 'x' (choose from .*demo.*nvlamb-64k"),
    ("--precision fp8", 2, "--precision: invalid choice: 'fp8' (choose from .*bf16"),
    ("--optimizer sgd", 2, "--optimizer: invalid choice: 'sgd' (choose from .*lamb"),
    ("--compression zip", 2, "--compression: invalid choice: 'zip' (choose from .*fp16"),
    ("--no-such-flag", 2, "unrecognized arguments: --no-such-flag"),
    ("--log-every 0", 2, "--log-every must be at least 1"),
    ("--phase1-batch 100 --micro-batch 8", 1, DOES_NOT_DIVIDE),
    ("--phase1-steps 0 --phase2-steps 0", 1, "no steps are left"),
    ("--workers -1", 2, "--workers must be at least 0"),
    ("--micro-batch 0", 2, "--micro-batch must be at least 1"),
    ("--dropout 1.5", 2, "--dropout below 1"),
    ("--resume /nowhere.pt", 1, "/nowhere.pt: No such file"),
    ("--compression powersgd --powersgd-rank 0", 1, "--powersgd-rank to 1 or more"),
    ("--freeze 0.5", 1, "--freeze means nothing to lamb; it is for onebit-adam"),
    ("--optimizer onebit-adam --freeze 1", 1, "a share of the steps"),
    ("--optimizer onebit-adam --freeze nan", 1, "a share of the steps"),
    ("--optimizer onebit-lamb --phase2-steps 2", 1, "phase 2: onebit-lamb .* after 0 of 2 steps"),
    ("--optimizer onebit-lamb --compression topk", 1, "--compression topk would spoil"),
    ("--bucket-mb -1", 1, "set --bucket-mb above 0"),
    ("--data /nowhere", 1, "/nowhere/manifest.json is missing"),
    ("--corpus /nowhere.txt --data /nowhere", 1, "/nowhere.txt: No such file"),
]


@pytest.mark.parametrize("argv,status,message", WRONG)
def test_wrong_arguments_are_one_line(refused, shards, tmp_path, argv, status, message):
    code, stderr = refused("--data", shards, "--out", tmp_path / "out", *argv.split())
    assert code == status and len(stderr) == 1
    assert re.search(message.replace("(", r"\("), stderr[0]), stderr


def test_damaged_shards_are_named_before_training(refused, shards, tmp_path):
    shutil.copytree(shards, tmp_path / "copy")
    path = tmp_path / "copy" / "train-00001.tokens.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    code, stderr = refused("--data", tmp_path / "copy", "--out", tmp_path / "out")
    assert code == 1 and len(stderr) == 1 and f"{path} is damaged" in stderr[0]


def test_no_permission_to_write_is_said_before_training(shards, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")  # a file where a folder must go: fails for root too
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--data", str(shards), "--out", str(tmp_path / "file" / "out")]
    )
    with pytest.raises(SystemExit):
        train.main()
    stderr = capsys.readouterr().err
    assert (
        stderr.startswith("train.py: ")
        and str(tmp_path / "file") in stderr
        and stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    "change", [["--model", "mini"], ["--seed", "5"], ["--lr-scale", "2"], ["--dropout", "0.3"]]
)
def test_another_run_in_the_same_folder_is_refused(shards, tmp_path, change):
    run(shards, tmp_path / "out", tmp_path, *SHORT, "--max-steps", 1)
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    (outcome,) = run(shards, tmp_path / "out", tmp_path, *SHORT, *change, check=False)
    assert (
        isinstance(outcome, train.Refused)
        and "of another run" in str(outcome)
        and "(was " in str(outcome)
    )
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before


def test_shards_of_another_vocabulary_are_refused(documents, shards, tmp_path):
    run(shards, tmp_path / "out", tmp_path, *SHORT, "--max-steps", 1)
    train.data.prepare(
        train.data.Corpus(documents=documents), tmp_path / "other", vocab_size=300, shards=4
    )
    (outcome,) = run(tmp_path / "other", tmp_path / "out", tmp_path, *SHORT, check=False)
    assert isinstance(outcome, train.Refused)
    assert "model.vocab_size" in str(outcome) or "tokenizer" in str(outcome)


def other_seed(world):
    if world.rank == 1:
        parse = train.parse_arguments
        train.parse_arguments = lambda argv: parse([*argv, "--lr-scale", "2"])


def test_a_refusal_of_rank_0_is_everybodys(shards, tmp_path):
    argv = [*SHORT, "--resume", "/nowhere.pt"]
    for outcome in run(shards, tmp_path / "out", tmp_path, *argv, size=2, check=False):
        assert isinstance(outcome, train.Refused) and "/nowhere.pt" in str(outcome)


def test_a_phase_without_steps_need_not_divide(shards, tmp_path):
    argv = "--phase1-steps 1 --phase1-batch 6 --phase2-steps 0 --workers 0".split()
    run(shards, tmp_path / "out", tmp_path, *argv, size=3)  # phase 2 has 32 examples


def test_ranks_that_were_started_differently_are_told(shards, tmp_path):
    outcomes = run(
        shards, tmp_path / "out", tmp_path, *SHORT, size=2, sabotage=(other_seed,), check=False
    )
    assert all(isinstance(outcome, train.Refused) for outcome in outcomes)
    assert "rank 1 was started differently: phase1.lr" in str(outcomes[0])


# Derived numbers


def test_phases_are_looked_up_in_one_place():
    phases = [train.Phase(64, 8, steps, 1e-3, 0.1) for steps in (3, 0, 2)]
    assert [
        (number, local) for number, _, local in (train.phase_at(phases, step) for step in range(5))
    ] == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    with pytest.raises(IndexError):
        train.phase_at(phases, 5)


def test_micro_batches_are_derived():
    cpu, phase = torch.device("cpu"), train.Phase(128, 96, 1, 1e-3, 0.1)
    assert train.micro_batch_of(phase, 0, None, 1, cpu) == 48  # 64 would be 8,192 tokens
    assert train.micro_batch_of(phase, 0, None, 2, cpu) == 48
    assert train.micro_batch_of(phase, 0, None, 3, cpu) == 32
    assert train.micro_batch_of(phase, 1, [8, 4], 3, cpu) == 4
    with pytest.raises(train.Refused, match="nearest that does is --phase1-batch 95"):
        train.micro_batch_of(phase, 0, None, 5, cpu)


def test_the_published_recipes():
    nvidia, lans = train.RECIPES["nvlamb-64k"].phases, train.RECIPES["lans-96k"].phases
    assert [(p.seq_len, p.global_batch, p.steps, p.lr) for p in nvidia] == [
        (128, 65536, 7038, 6e-3),
        (512, 32768, 1563, 4e-3),
    ]
    assert sum(p.steps for p in lans) == 4301 and [p.global_batch for p in lans] == [98304, 33792]


def test_auto_precision_needs_hardware(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert (
        train.choose_precision("auto", cpu) == "bf16"
        and train.choose_precision("fp16", cpu) == "fp16"
    )
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)
    assert train.choose_precision("auto", cpu) == "fp32"


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
    argv = (
        "--phase1-steps 500 --phase2-steps 0 --phase1-batch 16 --workers 0 --checkpoint-every 200"
    )
    sabotage = log_memory, tmp_path / "rss"
    run(shards, tmp_path / "out", tmp_path, *argv.split(), sabotage=sabotage)
    rss = [
        int(line.split()[1])
        for line in (tmp_path / "rss").read_text().splitlines()
        if line.startswith("train")
    ]
    assert len(rss) == 500 and rss[-1] <= 1.02 * rss[49]


# The programs, as the README has them

LITTLE = "--phase1-steps 4 --phase2-steps 2 --phase1-batch 8 --phase2-batch 8 --log-every 2".split()


def test_python_train_py(shards, tmp_path, program):
    arguments = ["train.py", "--data", shards, "--out", tmp_path / "out", *LITTLE]
    first = program(*arguments)
    assert first.returncode == 0, first.stderr
    out = tmp_path / "out"
    lines = metrics(out)
    assert lines[0]["mlm_loss"] == pytest.approx(
        metrics(out, "eval")[0]["unigram_entropy"], abs=0.3
    )
    fields = (
        "step phase seq_len loss mlm_loss nsp_loss lr grad_norm loss_scale skipped examples "
        "seconds examples_per_second mfu bytes_sent wait_seconds"
    )
    assert set(fields.split()) <= set(lines[0])
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["phase"] for line in lines] == [1, 1, 1, 1, 2, 2]
    header = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert header["kind"] == "run" and header["world"] == 1 and header["parameters"] > 0
    for result in metrics(out, "eval"):
        fields = "step phase mlm_loss mlm_accuracy nsp_accuracy unigram_entropy"
        assert set(fields.split()) <= set(result)
    assert (out / "log.txt").read_text() == first.stdout
    plan = "4 steps x 8 examples of 64 tokens = 1 rank(s) x micro-batch 8 x accumulation 1"
    assert f"phase 1: {plan}" in first.stdout
    assert sorted(path.name for path in (out / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.model",
    ]
    again = program(*arguments)
    assert again.returncode == 0 and "Done after step 6 of 6" in again.stdout
    assert metrics(out) == lines


def test_torchrun_train_py(shards, tmp_path, program):
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2".split()
    arguments = ["--data", shards, "--out", tmp_path / "out", "--compression", "bf16", *LITTLE]
    run = program(*torchrun, "train.py", *arguments)
    assert run.returncode == 0, run.stderr
    assert (
        "2 rank(s) on 1 node(s)" in run.stdout and run.stdout.count("Done after step 6 of 6") == 1
    )
    assert all(line["bytes_sent"] > 0 for line in metrics(tmp_path / "out"))


def test_own_text_is_prepared_on_the_spot(documents, tmp_path, program):
    (tmp_path / "my.txt").write_text("\n\n".join("\n".join(d) for d in documents))
    arguments = "--corpus my.txt --out runs/mine --vocab-size 300".split() + LITTLE
    arguments = [ROOT / "train.py", *arguments]
    run = program(*arguments, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "shards" / "my" / "manifest.json").exists()
    assert (tmp_path / "runs" / "mine" / "model" / "config.json").exists()
    (tmp_path / "my.txt").write_text("Another text.\n")
    run = program(*arguments, cwd=tmp_path)
    assert run.returncode == 1 and "shards/my holds another corpus" in run.stderr


def test_sigterm_stops_with_a_checkpoint(shards, tmp_path):
    out = tmp_path / "out"
    rare = "--phase1-batch 8 --checkpoint-every 1000 --eval-every 1000".split()
    arguments = [sys.executable, "train.py", "--data", shards, "--out", out, *rare]
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.time() + 60
    while time.time() < deadline and not (
        (out / "metrics.jsonl").exists() and len(metrics(out)) >= 3
    ):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)  # as torchrun does: workers get it as well
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped by SIGTERM after step" in stdout
    assert last_state(out)["step"] == metrics(out)[-1]["step"] >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_trains_and_resumes_with_the_same_bits(shards, tmp_path, precision):
    argv = [*SHORT, "--precision", precision, "--dropout", 0.1]
    run(shards, tmp_path / "whole", tmp_path, *argv, gpu=True)
    run(shards, tmp_path / "parts", tmp_path, *argv, "--max-steps", 7, gpu=True)
    run(shards, tmp_path / "parts", tmp_path, *argv, gpu=True)
    assert_same_state(last_state(tmp_path / "whole"), last_state(tmp_path / "parts"))
