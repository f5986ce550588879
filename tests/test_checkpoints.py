"""Checkpoints of train.py: a run that was killed ends with the same bits; files that are damaged;
whose steps may be overwritten; --init."""
import errno
import hashlib
import os
import re
import resource
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

import bert
import data
import dist
import optim
import train
from tests.ranks import together
from tests.training import (SHORT, assert_same, last_state, metrics, plan_of, run, shrink,
                            steps_kept)

# ----- Killed and started again -----

def kill_after_update(world, rank, step):
    """kill -9 in the middle of a step: the weights are new, nothing of it is written."""
    copy = optim.copy_to_model
    calls = []

    def patched(masters, model):
        copy(masters, model)
        calls.append(1)
        if world.rank == rank and len(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    optim.copy_to_model = patched


def kill_after_checkpoint(world, step):
    """kill -9 right after the checkpoint of a step."""
    write = train.write_checkpoint

    def patched(folder, state, keep):
        write(folder, state, keep)
        if state["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train.write_checkpoint = patched


def assert_killed_runs_end_alike(shards, folder, argv, size, kills):
    """Trains without a kill, and with each of the kills and a new start after it."""
    whole, killed = folder / "whole", folder / "killed"
    folder.mkdir()

    def killed_run():
        for kill in kills:
            outcomes = run(shards, killed, *argv, size=size, sabotage=kill, check=False)
            assert None in outcomes, f"no rank was killed, but {outcomes} came of it"
            others = [outcome for outcome in outcomes if outcome is not None]
            assert all(isinstance(outcome, dist.RankLost) for outcome in others), (
                f"ranks end with {others} where another is killed")
        return run(shards, killed, *argv, size=size)

    sums, sums_killed = together(lambda: run(shards, whole, *argv, size=size), killed_run)
    for key in ("step", "loss", "lr", "examples", "grad_norm"):    # no step twice, none missing
        a, b = ([line[key] for line in metrics(out)] for out in (whole, killed))
        assert len(a) == 14, f"metrics.jsonl has {len(a)} lines of 14 steps"
        assert len(b) == 14, f"of a run that was killed, metrics.jsonl has {len(b)} lines of 14"
        for step, (one, other) in enumerate(zip(a, b), 1):
            assert one == other, (
                f"`{key}` of step {step} is {other} in a run that was killed and resumed, and "
                f"{one} in one that was not")
    assert sums == sums_killed, "the weights of a run that was killed end with other bits"
    assert_same(last_state(whole), last_state(killed))
    assert metrics(whole, "eval") == metrics(killed, "eval"), "the evaluations are not the same"


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
        assert any(residual.any() for residual in residuals), "all residuals are zeros, or none"

    together(lambda: killed_and_whole("onebit"), lambda: killed_and_whole("topk:0.1"))


def test_a_run_resumes_on_other_ranks(shards, tmp_path):
    argv = *SHORT, "--precision", "fp32", "--dropout", 0
    one, many = tmp_path / "one", tmp_path / "many"

    def on_two_four_and_three_ranks():
        run(shards, many, *argv, "--max-steps", 4, size=2)
        run(shards, many, *argv, "--max-steps", 9, size=4)
        run(shards, many, *argv, size=3)

    together(lambda: run(shards, one, *argv), on_two_four_and_three_ranks)
    expected, found = ([line["loss"] for line in metrics(out)] for out in (one, many))
    assert len(found) == 14 and found == pytest.approx(expected, rel=1e-4)   # the same examples
    for key in "mlm_loss", "nsp_loss", "unigram_entropy":                    # in evaluations, too
        expected, found = ([line[key] for line in metrics(out, "eval")] for out in (one, many))
        assert len(found) == 2 and found == pytest.approx(expected, rel=1e-4)
    assert metrics(many)[-1]["examples"] == 8 * 9 + 6 * 7
    rates = [optim.learning_rate(step, phase) for phase in plan_of(*argv).phases
             for step in range(phase.steps)]
    assert [line["lr"] for line in metrics(many)] == rates
    seconds = [line["seconds"] for line in metrics(many)]
    assert seconds == sorted(seconds)                    # they go on where they were


# ----- Which checkpoint, and what it may overwrite -----

def test_later_steps_are_never_overwritten(shards, tmp_path):
    out, new = tmp_path / "out", tmp_path / "new"
    run(shards, out, *SHORT)
    assert steps_kept(out) == [8, 12, 14]         # the newest two and the last of each phase
    before = (out / "metrics.jsonl").read_bytes()
    step_8 = out / "checkpoints" / "step-00000008.pt"
    outcome, = run(shards, out, *SHORT, "--resume", step_8, check=False)
    assert "holds step 14: resume from it" in str(outcome)
    assert steps_kept(out) == [8, 12, 14] and (out / "metrics.jsonl").read_bytes() == before
    new.mkdir()                                   # what died here before it saved anything
    (new / "metrics.jsonl").write_bytes(before * 2)
    run(shards, new, *SHORT, "--max-steps", 10, "--resume", step_8)
    assert steps_kept(new) == [9, 10]
    assert [line["step"] for line in metrics(new)] == [9, 10]


def on_own_disk(world):
    """Each rank is a node with a disk of its own."""
    make_plan = train.make_plan

    def with_own_out(flags, world):
        flags.out += str(world.rank)
        return make_plan(flags, world)

    train.make_plan = with_own_out


def test_a_later_checkpoint_on_another_node_is_not_passed_over(shards, tmp_path):
    run(shards, tmp_path / "out1", *SHORT, "--max-steps", 4)
    for outcome in run(shards, tmp_path / "out", *SHORT, size=2, check=False,
                       sabotage=(on_own_disk,)):
        assert isinstance(outcome, train.ConfigError), (
            f"rank 1's folder has a checkpoint of step 4, rank 0's none; it ends with {outcome!r}")
        assert re.search(r":\S+/out1 holds step 4, and rank 0's \S+/out0 step 0", str(outcome))


CHANGES = ("--model mini", "--seed 5", "--lr-scale 2", "--dropout 0.3", "--mask-fraction 0.2",
           "--optimizer lans", "--pairs sop", "--whole-words", "--batch 8 7",
           "--precision fp16", "--balance")


def test_another_run_in_the_same_folder_is_refused(documents, shards, tmp_path):
    out = tmp_path / "out"
    run(shards, out, *SHORT, "--max-steps", 1)
    before = (out / "metrics.jsonl").read_bytes()
    data.prepare(documents, tmp_path / "other", vocab_size=300, shards=4)
    changes = *CHANGES, f"--init {out}/model"
    outcomes = [run(shards, out, *SHORT, *change.split(), check=False)[0] for change in changes]
    outcomes += run(tmp_path / "other", out, *SHORT, check=False)
    for outcome in outcomes:
        assert isinstance(outcome, train.ConfigError)
        assert "of another run" in str(outcome) and "(not " in str(outcome)
    assert "the checkpoint is of another run: seed 0 (not 5);" in str(outcomes[1])
    assert "model.vocab_size 320 (not 320)" not in str(outcomes[-1])
    assert (out / "metrics.jsonl").read_bytes() == before


# ----- Files: whole or not there -----

def some_state(step=7):
    return {"step": step, "weights": {"w": torch.arange(5000.0)}, "run": {"seed": 1}}


def test_a_checkpoint_is_whole_or_is_not_there(tmp_path):
    train.write_checkpoint(tmp_path, some_state(), keep=set())
    path = tmp_path / "step-00000007.pt"
    assert path.exists(), f"of step 7 there are {[p.name for p in tmp_path.iterdir()]}"
    assert torch.equal(train.read_checkpoint(path)["weights"]["w"], torch.arange(5000.0)), (
        "read_checkpoint gives other weights than write_checkpoint took")
    assert torch.load(path, weights_only=True)["step"] == 7, "torch.load reads another step"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 100, 20000):                  # a full disk: at once, or half-way
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            with pytest.raises(OSError):          # a full disk is no success
                train.write_checkpoint(tmp_path, some_state(9), keep=set())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        names = [p.name for p in tmp_path.iterdir()]
        assert names == [path.name], (
            f"after a disk was full with {room} bytes of step 9, the folder has {names}, not step "
            "7's checkpoint alone")


class Silent:
    """A log that keeps what is said."""
    def __init__(self):
        self.said = []
        self.say = self.said.append


def find(folder, log=None):
    """Returns the state that a run in this folder resumes from."""
    flags = SimpleNamespace(resume="auto")
    plan = SimpleNamespace(out=folder, flags=flags, run={"seed": 1})
    return train.find_checkpoint(plan, log or Silent())


@pytest.mark.parametrize("how", ["cut", "flip", "empty", "folder"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, how):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (5, 6):
        train.write_checkpoint(folder, some_state(step), keep=set())
    newest = folder / "step-00000006.pt"
    content = bytearray(newest.read_bytes())
    if how == "cut":
        newest.write_bytes(content[:len(content) // 2])
    elif how == "flip":
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    elif how == "empty":
        newest.write_bytes(b"")
    else:
        newest.unlink()
        newest.mkdir()
    log = Silent()
    found = find(tmp_path, log)["step"]
    assert found == 5, f"step 6 is damaged, so it is 5 that counts, not {found}"
    assert len(log.said) == 1 and newest.name in log.said[0], f"the log says {log.said}"


def test_a_damaged_checkpoint_does_not_count_as_one_of_two(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (5, 6):
        train.write_checkpoint(folder, some_state(step), keep=set())
    (folder / "step-00000006.pt").write_bytes(b"damaged")
    (folder / "step-00000008-backup.pt").write_bytes(b"not ours")
    # Resumed from 5: of the two that are kept, neither may be the damaged one
    for step in (6, 7, 12):
        train.write_checkpoint(folder, some_state(step), keep=set())
        assert find(tmp_path)["step"] == step
    assert sorted(train.checkpoints_in(folder)) == [7, 12]
    assert (folder / "step-00000008-backup.pt").exists()
    for path in train.checkpoints_in(folder).values():
        path.write_bytes(b"x" * 100)
    with pytest.raises(train.ConfigError, match="no checkpoint in .* is whole"):
        find(tmp_path)


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_a_malicious_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.write_checkpoint(tmp_path, {"step": 1, "x": Evil()}, keep=set())
    with pytest.raises(train.CheckpointError, match="no checkpoint of ours"):
        train.read_checkpoint(tmp_path / "step-00000001.pt")
    assert not (tmp_path / "evil").exists()
    for content in b"", b"PK\3\4" + bytes(100):              # of right digest
        (tmp_path / "x").write_bytes(content + hashlib.sha256(content).hexdigest().encode())
        with pytest.raises(train.CheckpointError, match="no checkpoint of ours"):
            train.read_checkpoint(tmp_path / "x")


def disk_is_full_at_step_3(world):
    write = train.write_checkpoint

    def full(folder, state, keep):
        if state["step"] == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, state, keep)

    train.write_checkpoint = full


def test_a_full_disk_costs_one_checkpoint(shards, tmp_path):
    out = tmp_path / "out"
    run(shards, out, *SHORT, "--max-steps", 6, sabotage=(disk_is_full_at_step_3,))
    assert steps_kept(out) == [6]
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert ("warning: no checkpoint of step 3: No space left on device; training goes on"
            in (out / "log.txt").read_text())


def half_an_hour_is_over(world):
    """On rank 1 alone: the ranks' clocks differ, and all must save after the same step."""
    if world.rank == 1:
        train.CHECKPOINT_SECONDS = 0


def test_a_run_of_ones_own_saves_by_the_clock(shards, tmp_path):
    argv = "--batch 8 --workers 0 --precision fp32 --steps 3 0 --eval-every 100".split()
    run(shards, tmp_path / "seldom", *argv)
    assert steps_kept(tmp_path / "seldom") == [3]
    run(shards, tmp_path / "often", *argv, size=2, sabotage=(half_an_hour_is_over,))
    assert [line["step"] for line in metrics(tmp_path / "often", "eval")] == [1, 2, 3]
    assert steps_kept(tmp_path / "often") == [2, 3]


# ----- --init: begin with the weights of a model folder -----

INIT = "--batch 33 --dropout 0 --precision fp32 --workers 0 --steps 4 0".split()


def knows_by_heart(folder, shards, indices):
    """Trains the model of a folder on one batch until it knows it; returns (model, last loss)."""
    model = bert.load_huggingface(folder)
    batch = data.PretrainingData(shards, 32).batch(indices).to("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        losses = model(batch)
        masked = (batch.labels != data.IGNORED).sum()
        loss = losses.mlm_sum / masked + losses.nsp_sum / len(batch.pair_labels)
        loss.backward()
        optimizer.step()
    return model, loss.item()


def test_init_starts_from_a_folders_weights(shards, tmp_path):
    fresh, out, model = tmp_path / "fresh", tmp_path / "second", tmp_path / "model"
    argv = *INIT, "--mask-fraction", 0.15
    run(shards, fresh, *argv)
    trained, loss = knows_by_heart(fresh / "model", shards, range(33))
    bert.save_huggingface(trained, shards / "tokenizer.model", model)
    run(shards, out, *argv, "--init", model, "--max-steps", 2, size=2)
    first = metrics(out)[0]["loss"]
    assert first < 0.5 * metrics(fresh)[0]["loss"]
    assert first == pytest.approx(loss, rel=0.1)          # that of one step before
    run(shards, out, *argv, "--init", model)
    assert metrics(out)[0]["loss"] == first and metrics(out)[-1]["step"] == 4


def test_init_from_a_folder_that_does_not_fit_is_refused(
        refused, documents, shards, tmp_path, monkeypatch):
    shrink(monkeypatch.setattr)
    torch.manual_seed(0)
    model = tmp_path / "model"
    config = bert.BertConfig.preset("tiny", 320, dropout=0.0)
    bert.save_huggingface(bert.BertForPreTraining(config), shards / "tokenizer.model", model)

    def refused_start(folder, shards, *argv):
        return refused("--out", tmp_path / folder, "--data", shards, "--init", model, *argv)

    code, line = refused_start("out1", shards, "--model", "mini")
    assert code == 1 and "has layers 2, not 4" in line
    data.prepare(documents, tmp_path / "other", vocab_size=319, shards=4)
    code, line = refused_start("out2", tmp_path / "other")
    assert code == 1 and f"data.py --tokenizer {model}/tokenizer.model" in line
    shutil.rmtree(model)
    code, line = refused_start("out3", shards)
    assert code == 1 and f"{model} is no model folder" in line


def heads_that_nobody_trains(folder):
    model = bert.load_huggingface(folder)
    return [model.pooler.weight, model.pooler.bias, model.nsp.weight, model.nsp.bias]


def test_init_gives_a_resumed_run_its_untrained_heads(shards, tmp_path):
    argv = *INIT, "--pairs", "none"
    run(shards, tmp_path / "first", *argv, "--seed", 1)
    init = *argv, "--init", tmp_path / "first" / "model"
    run(shards, tmp_path / "second", *init, "--max-steps", 2)
    run(shards, tmp_path / "second", *init)
    first, second = (heads_that_nobody_trains(tmp_path / name / "model")
                     for name in ("first", "second"))
    assert all(map(torch.equal, first, second)) and first[0].any()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_folder_of_16_bits_holds_the_masters(shards, tmp_path, precision):
    argv = "--batch 8 --workers 0 --max-steps 2 --checkpoint-every 2".split()
    run(shards, tmp_path / "out", *argv, "--precision", precision, size=2)
    weights = last_state(tmp_path / "out")["weights"]
    model = bert.load_huggingface(tmp_path / "out" / "model")
    for name, master in weights.items():
        assert torch.equal(model.get_parameter(name), master), name
    assert not torch.equal(master, master.to(optim.PRECISIONS[precision]).float())

    # And back: no step, the same file
    run(shards, tmp_path / "again", *"--batch 8 --workers 0 --steps 0 0".split(),
        "--precision", precision, "--init", tmp_path / "out" / "model", size=2)
    files = [tmp_path / name / "model" / "model.safetensors" for name in ("out", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


# ----- Checkpoints that are whole, but not ours -----

def without(checkpoint, key):
    del checkpoint[key]


def with_value(checkpoint, key, value):
    checkpoint[key] = value


def with_weight(checkpoint, weight):
    checkpoint["weights"]["mlm_bias"] = weight


CRAFTED = [
    (without, "weights"), (without, "optimizer"), (without, "scaler"), (without, "residuals"),
    (with_value, "weights", {}), (with_value, "weights", None), (with_value, "optimizer", {}),
    (with_value, "scaler", {"no": 1}), (with_value, "run", None), (with_value, "seconds", None),
    (with_weight, torch.zeros(1)), (with_weight, torch.zeros(2, 160)), (with_weight, None)]


def test_checkpoints_of_another_content_are_one_line(shards, tmp_path):
    argv = *INIT, "--max-steps", 1
    run(shards, tmp_path / "out", *argv)
    path, = (tmp_path / "out" / "checkpoints").glob("step-*.pt")
    content = path.read_bytes()
    for change, *arguments in CRAFTED:
        path.write_bytes(content)
        checkpoint = train.read_checkpoint(path)
        change(checkpoint, *arguments)
        train.write_checkpoint(path.parent, checkpoint, [])
        outcome, = run(shards, tmp_path / "out", *INIT, check=False)
        assert isinstance(outcome, (train.CheckpointError, train.ConfigError)), (change, arguments)
        assert "\n" not in str(outcome)


def test_a_link_in_the_place_of_the_unfinished_checkpoint_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "unfinished").symlink_to(tmp_path / "precious")
    train.write_checkpoint(tmp_path / "checkpoints", {"step": 1, "run": {}}, [])
    assert (tmp_path / "precious").read_text() == "kept"
    assert train.read_checkpoint(tmp_path / "checkpoints" / "step-00000001.pt")["step"] == 1
