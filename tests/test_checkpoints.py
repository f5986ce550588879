"""Checkpoints of train.py: a run that was killed ends with the same bits; files that are damaged;
whose steps may be overwritten; --init; the folder that a run leaves."""
import os
import re
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bert
import data
import dist
import optim
import train
from tests.training import (SHORT, assert_same, column, last_state, losses_of, metrics, run,
                            steps_kept)

# ----- Killed and started again -----

RUNS = {                                    # name: (ranks, flags)
    "bf16": (1, [*SHORT, "--precision", "bf16", "--dropout", 0.1]),
    "onebit": (2, [*SHORT, "--precision", "fp32", "--dropout", 0.1, "--compression", "onebit"])}


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """Returns (the folder of RUNS that nothing disturbed, {name: the sums of its weights})."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, {name: run(shards, folder / name, *argv, size=size)
                    for name, (size, argv) in RUNS.items()}


def kill_after_update(world, rank, step):
    """kill -9 in the middle of a step: the weights are new, nothing of it is written."""
    update = optim.LAMB.step

    def patched(self):
        update(self)
        if world.rank == rank and self.param_groups[0]["step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    optim.LAMB.step = patched


def kill_after_checkpoint(world, rank, step):
    """kill -9 right after the checkpoint of a step."""
    save = train.save

    def patched(args, world, log, state):
        save(args, world, log, state)
        if (world.rank, state.counters.step) == (rank, step):
            os.kill(os.getpid(), signal.SIGKILL)

    train.save = patched


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_with_the_same_bits(shards, whole, tmp_path, name):
    folder, sums = whole
    size, argv = RUNS[name]
    for kill in (
            (kill_after_update, size - 1, 5),     # in phase 1; from the checkpoint of step 3
            (kill_after_checkpoint, 0, 8),        # between the phases
            (kill_after_update, 0, 11)):          # in phase 2; from the checkpoint of step 9
        outcomes = run(shards, tmp_path / "out", *argv, size=size, sabotage=kill, check=False)
        assert None in outcomes, f"no rank was killed, but {outcomes} came of it"
        assert all(isinstance(outcome, (dist.RankLost, type(None))) for outcome in outcomes), (
            f"ranks end with {outcomes} where one is killed")
    found = run(shards, tmp_path / "out", *argv, size=size)
    for key in "step", "phase", "mlm_loss", "lr", "grad_norm":
        expected, values = column(folder / name, key), column(tmp_path / "out", key)
        assert len(values) == 14, f"metrics.jsonl has {len(values)} of 14 steps"
        assert values == expected, f"`{key}` is {values} in a run that was killed, not {expected}"
    assert found == sums[name], "the weights of a run that was killed end with other bits"
    assert_same(last_state(folder / name), last_state(tmp_path / "out"))
    expected, evaluations = metrics(folder / name, "eval"), metrics(tmp_path / "out", "eval")
    # All but that of step 8, before which it was killed
    assert [line for line in expected if line in evaluations] == evaluations
    assert len(evaluations) >= len(expected) - 1


def test_a_run_resumes_on_other_ranks(shards, tmp_path):
    argv = *SHORT, "--precision", "fp32", "--dropout", 0
    one, many = tmp_path / "one", tmp_path / "many"
    run(shards, one, *argv)
    for size, *more in (2, "--max-steps", 4), (4, "--max-steps", 9), (3,):
        run(shards, many, *argv, *more, size=size)
    for key in "mlm_loss", "nsp_loss", "lr":                         # the same examples
        expected, found = column(one, key), column(many, key)
        assert len(found) == 14 and found == pytest.approx(expected, rel=1e-4)
    results = [{line["step"]: line["mlm_loss"] + line["nsp_loss"] for line in metrics(out, "eval")}
               for out in (one, many)]
    for step, loss in results[0].items():                            # in evaluations, too
        assert results[1][step] == pytest.approx(loss, rel=1e-4)
    seconds = column(many, "seconds")
    assert seconds == sorted(seconds)                                # they go on where they were


# ----- In this process: which checkpoint, and what it may overwrite -----

@pytest.fixture
def finished(whole, tmp_path):
    """A copy of the folder of a run of 14 steps, with the checkpoints of 12 and 14."""
    shutil.copytree(whole[0] / "bf16", tmp_path / "finished")
    assert steps_kept(tmp_path / "finished") == [12, 14]
    return tmp_path / "finished"


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def damage(path, how):
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half] ^= 1
    ends = {"flip": None, "cut": half}                       # None: nothing is cut off
    path.write_bytes(content[:ends.get(how, 0)])
    if how == "evil":
        torch.save({"settings": {}, "x": Evil()}, path)
    if how == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)        # whole, but not of train.py


def newest(folder, like):
    """Returns the newest checkpoint of a folder that is whole, and what is said of others. like: a
    checkpoint of the same run."""
    said = []
    args = SimpleNamespace(out=folder, settings=like["settings"])
    log = SimpleNamespace(say=said.append)
    return train.newest_checkpoint(args, log, like["tensors"]), said


def test_a_damaged_checkpoint_is_passed_over(
        finished, whole, train_here, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (finished / "step-00000012-backup.pt").write_bytes(b"not ours")
    path = finished / "step-00000014.pt"
    content = path.read_bytes()
    expected = last_state(finished)
    for how in "flip", "empty", "evil", "foreign", "cut":
        path.write_bytes(content)
        damage(path, how)
        checkpoint, (said,) = newest(finished, expected)
        assert checkpoint["counters"]["step"] == 12 and "step-00000014.pt is damaged" in said, how
    assert not Path("evil").exists()
    path.with_suffix(".pt.damaged").rename(path)
    damage(finished / "metrics.jsonl", "flip")               # which a resume does not read
    train_here(finished, *RUNS["bf16"][1])
    said = capsys.readouterr().out
    assert said.count("warning:") == 1 and "step-00000014.pt is damaged" in said
    assert "resuming from the checkpoint of step 12" in said
    assert_same(last_state(finished), last_state(whole[0] / "bf16"))
    assert (finished / "step-00000012-backup.pt").exists()


def test_a_flipped_bit_is_found_or_changes_nothing(finished):
    path = finished / "step-00000014.pt"
    content = path.read_bytes()
    expected = last_state(finished)
    found = []
    for position in range(7, len(content), len(content) // 20):
        flipped = bytearray(content)
        flipped[position] ^= 16
        path.write_bytes(flipped)
        checkpoint, _ = newest(finished, expected)
        found.append(checkpoint["counters"]["step"] == 12)
        if not found[-1]:
            assert_same(checkpoint, expected)
    assert sum(found) > 15


def test_a_checkpoint_that_the_disk_does_not_give_keeps_its_name(finished, monkeypatch):
    def lost(path):
        raise OSError("lost")

    monkeypatch.setattr(train.Path, "read_bytes", lost)
    with pytest.raises(OSError, match="lost"):
        newest(finished, {"settings": {}, "tensors": {}})
    assert steps_kept(finished)[-1] == 14


def test_without_a_whole_checkpoint_nothing_is_trained(finished, train_here):
    for path in finished.glob("step-*.pt"):
        damage(path, "cut")
    with pytest.raises(train.ConfigError, match=f"no checkpoint in {finished} is whole; now"):
        train_here(finished, *RUNS["bf16"][1])
    assert not steps_kept(finished)


def test_a_damaged_checkpoint_does_not_count_as_one_of_two(finished, train_here):
    """After a resume from 12, of the two that are kept neither may be a damaged later one."""
    damage(finished / "step-00000014.pt", "cut")
    train_here(finished, *RUNS["bf16"][1], "--max-steps", 13)
    assert steps_kept(finished) == [12, 13]


CHANGES = ("--model mini", "--seed 5", "--lr-scale 2", "--dropout 0.3", "--mask-fraction 0.2",
           "--optimizer adamw", "--pairs none", "--batch 8 7", "--steps 9 6", "--precision fp16",
           "--compression int8", "--hours 1")


def test_another_run_in_the_same_folder_is_refused(documents, finished, train_here, tmp_path):
    # What changes no result may change.
    train_here(finished, *RUNS["bf16"][1], "--micro-tokens", 64, "--save-every", 7,
               "--timeout", 9, "--bucket-mb", 7)
    before = (finished / "metrics.jsonl").read_bytes()
    data.prepare(documents[:300], tmp_path / "other", vocab_size=320, shards=4)
    changes = *CHANGES, f"--init {finished}/model", f"--data {tmp_path}/other"
    for change in changes:
        with pytest.raises(train.ConfigError) as raised:
            train_here(finished, *RUNS["bf16"][1], *change.split())
        said = str(raised.value)
        flag = change.split()[0].replace("--data", "--shards")
        field = flag.removeprefix("--").replace("-", "_")
        assert re.search("step-00000014.pt is of another run: (.+, )?"
                         rf"{field} .+ \(not .+\); give", said), said
        assert change != "--seed 5" or ": seed 0 (not 5); give the flags of before, or" in said
    assert (finished / "metrics.jsonl").read_bytes() == before


def on_own_disk(world):
    """Each rank is a node with a disk of its own."""
    parse = train.parse_arguments
    train.parse_arguments = lambda argv: parse([*argv, "--out", f"{argv[3]}{world.rank}"])


def test_a_later_checkpoint_on_another_node_is_not_passed_over(shards, finished, tmp_path):
    finished.rename(tmp_path / "out1")
    # Rank 1 finds it, and rank 0 has then lost rank 1.
    _, outcome = run(shards, tmp_path / "out", *SHORT, size=2, check=False, sabotage=(on_own_disk,))
    assert isinstance(outcome, train.ConfigError)
    assert re.search(r"step 14 is in \S+out1 here, and only 0 where rank 0 is;", str(outcome))
    # On rank 0's disk it is found, and rank 1 has none.
    (tmp_path / "out1").rename(tmp_path / "b0")
    run(shards, tmp_path / "b", *RUNS["bf16"][1], size=2, sabotage=(on_own_disk,))


@pytest.mark.parametrize("room", [0, 20000])             # at once, or half-way
def test_a_full_disk_costs_one_checkpoint(train_here, tmp_path, monkeypatch, capsys, room):
    save = train.save
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full_at_step_6(args, world, log, state):
        if state.counters.step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            save(args, world, log, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if state.counters.step == 6:
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {"metrics.jsonl", "step-00000002.pt", "step-00000004.pt"}

    monkeypatch.setattr(train, "save", full_at_step_6)
    train_here(tmp_path, *SHORT, "--save-every", 2, "--max-steps", 8)
    assert steps_kept(tmp_path) == [4, 8] and column(tmp_path, "step") == [*range(1, 9)]
    assert "warning: no checkpoint of step 6: " in capsys.readouterr().out


def test_a_run_saves_by_the_clock(train_here, tmp_path, monkeypatch):
    argv = "--batch 8 --precision fp32 --steps 3 0".split()
    train_here(tmp_path / "seldom", *argv)
    assert steps_kept(tmp_path / "seldom") == [3]
    monkeypatch.setattr(train, "SAVE_SECONDS", 0)
    train_here(tmp_path / "often", *argv)
    assert [line["step"] for line in metrics(tmp_path / "often", "eval")] == [1, 2, 3]
    assert steps_kept(tmp_path / "often") == [2, 3]


# ----- Model folders: --init, and what a run leaves -----

def knows_by_heart(folder, shards, indices):
    """Trains the model of a folder on one batch until it knows it; returns (model, last MLM loss).
    """
    model = bert.load_huggingface(folder)
    batch = data.PretrainingData(shards, 32, mask_fraction=0.15).batch(indices).to("cpu")
    masked = (batch.labels["mlm"] != data.IGNORED).sum()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        losses = losses_of(model(batch), batch)
        mlm_loss = losses["mlm"] / masked
        (mlm_loss + losses["nsp"] / len(indices)).backward()
        optimizer.step()
    return model, mlm_loss.item()


INIT = "--batch 9 --dropout 0 --mask-fraction 0.15 --precision fp32 --steps 4 0".split()


def test_init_starts_from_a_folders_weights(shards, finished, tmp_path):
    out, model = tmp_path / "out", tmp_path / "model"
    trained, loss = knows_by_heart(finished / "model", shards, range(9))
    bert.save_huggingface(trained, shards / "tokenizer.model", model, 32)
    argv = *INIT, "--precision", "bf16", "--init", model
    run(shards, out, *argv, "--max-steps", 2, size=2)
    first = metrics(out)[0]["mlm_loss"]
    assert first < 1.2 * loss < 1              # `loss` is of a step before, and with dropout
    run(shards, out, *argv)
    assert column(out, "step") == [1, 2, 3, 4] and metrics(out)[0]["mlm_loss"] == first


def test_init_from_a_folder_that_does_not_fit_is_refused(
        documents, finished, train_here, tmp_path):
    init = *INIT, "--init", finished / "model"
    with pytest.raises(bert.ModelError, match=f"{finished}/model is not of the shape of --m"):
        train_here(tmp_path / "a", *init, "--model", "mini")
    data.prepare(documents, tmp_path / "other", vocab_size=319, shards=4)
    with pytest.raises(bert.ModelError, match=f"data.py --tokenizer {finished}/model/tokenizer.mo"):
        train_here(tmp_path / "b", *init, "--data", tmp_path / "other")
    (finished / "model" / "config.json").unlink()
    with pytest.raises(bert.ModelError, match=f"{finished}/model is no model folder"):
        train_here(tmp_path / "c", *init)


def heads_that_nobody_trains(folder):
    model = bert.load_huggingface(folder)
    return [model.pooler.weight, model.pooler.bias, model.nsp.weight, model.nsp.bias]


def test_init_gives_a_resumed_run_its_untrained_heads(finished, train_here, tmp_path):
    argv = *INIT, "--pairs", "none", "--init", finished / "model"
    train_here(tmp_path / "out", *argv, "--max-steps", 2)
    train_here(tmp_path / "out", *argv)
    first, second = map(heads_that_nobody_trains, (finished / "model", tmp_path / "out" / "model"))
    assert all(map(torch.equal, first, second)) and first[0].any()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_folder_of_16_bits_holds_the_masters(train_here, tmp_path, precision):
    argv = "--batch 8", "--max-steps 2", f"--precision {precision}"
    train_here(tmp_path / "out", *" ".join(argv).split())
    tensors = last_state(tmp_path / "out")["tensors"]
    model = bert.load_huggingface(tmp_path / "out" / "model")
    for name, p in model.named_parameters():
        assert torch.equal(p, tensors[name]), name
    assert not torch.equal(p, p.to(optim.PRECISIONS[precision]).float())

    # And back: no step, the same file
    train_here(tmp_path / "again", "--steps", 0, "--init", tmp_path / "out" / "model",
               "--precision", precision)
    files = [tmp_path / name / "model" / "pytorch_model.bin" for name in ("out", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
