"""Tests of train.py's checkpoints: which one a run resumes from, whose it refuses, when it saves;
then --init and the model folder. course/test_graders.py tests that a killed run, resumed, ends with
the same bits."""
import io
import itertools
import os
import re
import resource
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import bert
import data
import dist
import train
from tests.ranks import no_room
from tests.training import (SHORT, args_of, assert_same, built, column, fake_clock, last_state,
                            metrics, on_own_disk, run, steps_kept)

ARGV = [*SHORT, "--precision", "bf16", "--dropout", 0.1]
EIGHT = "--steps 8 0 --batch 8 --precision fp32".split()


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """The folder of a run of 14 steps, with the checkpoints of steps 12 and 14."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    run(shards, folder, *ARGV)
    return folder


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of `whole`, which a test may change."""
    return shutil.copytree(whole, tmp_path / "finished")


@pytest.fixture(scope="module")
def other_shards(documents, tmp_path_factory):
    """Shards of different text, with a vocabulary of the same size."""
    folder = tmp_path_factory.mktemp("other") / "shards"
    data.prepare(documents[:300], folder, vocab_size=320, shards=4)
    return folder


# ----- Which checkpoint -----

def pickled(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def evil(content):
    """Adds a function to a checkpoint. torch.load would accept it only without weights_only, which
    allows a file to run any code."""
    return pickled(torch.load(io.BytesIO(content)) | {"x": os.system})


DAMAGES = {
    "cut": lambda content: content[:len(content) // 2],
    "empty": lambda content: b"",
    "evil": evil,
    "foreign": lambda content: pickled({"weights": torch.zeros(3)})}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(finished, whole, train_here, capsys, how):
    path, other = finished / "step-00000014.pt", finished / "step-00000012-backup.pt"
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    other.write_bytes(b"not ours")
    (finished / "metrics.jsonl").write_bytes(b"\xff")           # a resume does not read it
    train_here(finished, *ARGV, "--max-steps", 13)
    said = capsys.readouterr().out
    assert f"warning: {path} is damaged" in said and "of step 12" in said, said
    assert "Done after step 13; without --max-steps the same command goes on." in said, said
    assert steps_kept(finished) == [12, 13], "the two newest whole checkpoints are not kept"
    assert other.exists(), "a file that is no checkpoint was removed"
    train_here(finished, *ARGV)
    assert_same(last_state(whole), last_state(finished))


def test_a_checkpoint_for_which_memory_is_missing_keeps_its_name(
        finished, train_here, monkeypatch, capsys):
    monkeypatch.setattr(train, "read_checkpoint", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        train_here(finished, *ARGV)
    assert "remove it" not in capsys.readouterr().out, "the file is whole: nothing may remove it"
    assert steps_kept(finished) == [12, 14]


def test_a_flipped_bit_is_found_or_changes_nothing(finished):
    path = finished / "step-00000014.pt"
    content, expected = path.read_bytes(), last_state(finished)
    size = len(content)
    positions = [*range(7, size, size // 20), *range(size - 50, size)]
    # Each entry of the zip's list has its attributes from byte 38 on; 16 there means "a folder".
    positions += [entry.start() + 38 for entry in re.finditer(b"PK\x01\x02", content)]
    found = 0
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 16
        path.write_bytes(damaged)
        try:
            checkpoint = train.read_checkpoint(path)
        except OSError as error:
            pytest.fail(f"damage at byte {position} is taken for a disk error: {error}")
        except Exception:
            found += 1
        else:
            assert_same(expected, checkpoint)
    assert found > 15, f"only {found} of {len(positions)} flipped bits are found"


def test_without_a_whole_checkpoint_nothing_is_trained(finished, train_here, capsys):
    newest = finished / "step-00000014.pt"
    newest.unlink()
    newest.mkdir()                       # unreadable now, but perhaps whole
    with pytest.raises(IsADirectoryError):
        train_here(finished, *ARGV)
    assert steps_kept(finished) == [12, 14], "a checkpoint that cannot be read now was renamed"
    assert f"{newest} cannot be read now" in capsys.readouterr().out
    newest.rmdir()
    (finished / "step-00000012.pt").write_bytes(b"")
    with pytest.raises(train.ConfigError, match=f"no checkpoint in {finished} is whole; they"):
        train_here(finished, *ARGV)
    assert not steps_kept(finished), "the damaged checkpoints were not renamed"
    with pytest.raises(train.ConfigError, match=f"{finished} has a model, but no checkpoint"):
        train_here(finished, *ARGV)
    (finished / "model").rename(finished / "old")
    train_here(finished, *ARGV, "--max-steps", 1)


# ----- Whose checkpoint -----

MAY_CHANGE = {"data", "out", "timeout", "micro_tokens", "bucket_mb", "max_steps", "save_every"}


def test_all_flags_but_these_make_another_run():
    args = args_of()
    settings = train.run_settings(args, {"sha256": "0" * 64})
    assert vars(args).keys() - settings.keys() == MAY_CHANGE | {"phases"}


def test_a_checkpoint_has_the_code_that_its_run_began_with(train_here, tmp_path, monkeypatch):
    versions = itertools.count(1)
    monkeypatch.setattr(train, "code_digests", lambda: {"train.py": str(next(versions))})
    train_here(tmp_path, "--steps", 2, 0)
    found = last_state(tmp_path)["code"]["train.py"]
    assert found == "1", f"an edit during the run changes the saved code to version {found}"


def test_another_run_in_the_same_folder_is_refused(
        finished, other_shards, train_here, monkeypatch, capsys):
    monkeypatch.setattr(train, "code_digests", lambda: {"train.py": "another"})
    train_here(finished, *ARGV, "--micro-tokens", 64, "--bucket-mb", 7)
    said = capsys.readouterr().out
    assert re.search(r"warning: the code has changed .*train.py another \(not \w+\)", said), said

    def assert_refused(name, *flags):
        pattern = rf"14.pt is from a different run: (.+, )?{name} .+ \(not .+; give the same"
        with pytest.raises(train.ConfigError, match=pattern):
            train_here(finished, *ARGV, *flags)
            pytest.fail(f"a run with a different {name} resumes: neither run_settings nor the "
                        "shapes in newest_checkpoint differ")

    before = (finished / "metrics.jsonl").read_bytes()
    assert_refused("seed", "--seed", 5)
    assert_refused("shards", "--data", other_shards)
    assert_refused("init", "--init", finished / "model")
    assert_refused("phase 1", "--lr-scale", 0.5)
    monkeypatch.setattr(bert, "PRESETS", bert.PRESETS | {"tiny": (3, 64)})
    assert_refused(r"blocks\.2\.\S+")
    assert (finished / "metrics.jsonl").read_bytes() == before, "the refused run wrote to the log"


@pytest.mark.parametrize("change", [
    lambda numbers: numbers["counters"].update(colour=1),
    lambda numbers: numbers["counters"].pop("phase_step"),
    lambda numbers: numbers["scaler"].pop("skipped"), lambda numbers: numbers["groups"].pop()])
def test_a_checkpoint_of_other_code_is_refused(finished, train_here, monkeypatch, change):
    """Its Counters have a field more or less, or its optimizer a different number of groups."""
    read_checkpoint = train.read_checkpoint

    def of_other_code(path):
        checkpoint = read_checkpoint(path)
        change(checkpoint)
        return checkpoint

    monkeypatch.setattr(train, "read_checkpoint", of_other_code)
    with pytest.raises(train.ConfigError, match="is from different code .*; give a new --out"):
        train_here(finished, *ARGV)


def test_moments_may_be_integers():
    weight = torch.ones(2)
    optimizer = SimpleNamespace(state={weight: {"codes": torch.ones(2, dtype=torch.uint8)}})
    train.check_weights(dist.World(), SimpleNamespace(
        masters={"weight": weight}, optimizer=optimizer, counters=train.Counters()))


def test_a_later_checkpoint_on_another_node_is_not_passed_over(shards, finished, tmp_path):
    later = shutil.copytree(finished, tmp_path / "out1")
    _, error = run(shards, tmp_path / "out", *ARGV, size=2, check=False, sabotage=(on_own_disk,))
    assert f"step 14 is in {later} here, and only 0 where rank 0 is;" in str(error)
    later.rename(tmp_path / "b0")            # rank 0 has it, and rank 1 has none
    run(shards, tmp_path / "b", *ARGV, size=2, sabotage=(on_own_disk,))


# ----- When it is saved -----

def test_a_run_saves_by_the_clock(train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SAVE_SECONDS", 200)
    for last in 4, 8:
        with monkeypatch.context() as patch:
            fake_clock(dist.World(), lambda step, rank: 80.0, patch.setattr)
            train_here(tmp_path, *EIGHT, "--max-steps", last)
    assert [line["step"] for line in metrics(tmp_path, "eval")] == [4, 7, 8]
    assert steps_kept(tmp_path) == [7, 8]


def test_a_disk_that_is_away_has_not_lost_its_checkpoints(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):      # or a run would start over and remove them
        train.checkpoints_in(tmp_path / "file")


def test_what_a_resume_could_not_read_is_not_saved(shards):
    """A student's own field in Counters can be of a type that JSON lacks."""
    _, state = built(shards)
    state.counters.seconds = np.float64(2.5)
    assert type(train.numbers_of(state)["counters"]["seconds"]) is float
    state.counters.seconds = torch.tensor(2.5)
    with pytest.raises(TypeError, match="not JSON serializable"):
        train.numbers_of(state)


def test_a_full_disk_costs_one_checkpoint(train_here, tmp_path, monkeypatch, capsys):
    save = train.save

    def full_at_steps_2_and_6(args, world, log, state):
        with no_room(20000 if state.counters.step in (2, 6) else resource.RLIM_INFINITY):
            save(args, world, log, state)
        assert not (args.out / "unfinished").exists(), "an incomplete file is left behind"

    monkeypatch.setattr(train, "save", full_at_steps_2_and_6)
    train_here(tmp_path, *EIGHT, "--save-every", 2)
    assert steps_kept(tmp_path) == [4, 8]
    warned = re.findall(r"warning: no checkpoint of step (\d): ", capsys.readouterr().out)
    assert warned == ["2", "6"]


def test_what_a_disk_neither_takes_nor_gives_up_stops_no_run(train_here, tmp_path, monkeypatch):
    log = train.Log(tmp_path, True)
    with no_room():
        log.claim(tmp_path)
    monkeypatch.setattr(train.Path, "unlink", Mock(side_effect=PermissionError))
    train_here(tmp_path / "out", *EIGHT, "--save-every", 3)
    assert steps_kept(tmp_path / "out") == [1, 3, 6, 8]


# ----- Model folders -----

def test_a_folder_holds_the_masters_and_init_begins_with_them(shards, train_here, tmp_path):
    argv = *EIGHT, "--precision", "bf16"
    train_here(tmp_path / "out", *argv, "--max-steps", 2)
    tensors, model = last_state(tmp_path / "out")["tensors"], tmp_path / "out" / "model"
    for name, p in bert.load_huggingface(model).named_parameters():
        assert torch.equal(p, tensors[name]), f"{name} in the folder is not the fp32 master"
    # And back: two ranks that take no step write the same file.
    run(shards, tmp_path / "again", *argv, "--steps", 0, "--init", model, size=2)
    files = [folder / "model.safetensors" for folder in (model, tmp_path / "again" / "model")]
    assert files[0].read_bytes() == files[1].read_bytes(), "--init did not restore all weights"


def test_rank_0_alone_reads_init(shards):
    args, _ = built(shards)
    args.init = "a disk of the first node"
    train.build_model(args, dist.World(rank=1, size=2))


def test_a_resumed_run_has_the_untrained_heads_of_init(finished, train_here, tmp_path):
    argv = *EIGHT, "--mask-fraction", 0.15, "--pairs", "none", "--init"
    moved = shutil.copytree(finished / "model", tmp_path / "moved")
    train_here(tmp_path / "out", *argv, finished / "model", "--max-steps", 2)
    train_here(tmp_path / "out", *argv, moved, "--max-steps", 4)
    assert column(tmp_path / "out", "step") == [1, 2, 3, 4]
    shutil.copy(tmp_path / "out" / "model" / "model.safetensors", moved)
    with pytest.raises(train.ConfigError, match="from a different run: init "):
        train_here(tmp_path / "out", *argv, moved)
        pytest.fail("a run goes on with the frozen weights of another model")
    for last in 1, 2:                                  # with pairs, nothing is frozen
        train_here(tmp_path / "pairs", *EIGHT, "--init", moved, "--max-steps", last)
        moved = moved.rename(tmp_path / f"moved{last}")
        shutil.copy(finished / "model" / "model.safetensors", moved)
    ours, theirs = map(bert.load_huggingface, (tmp_path / "out" / "model", finished / "model"))
    for head in "pooler.weight", "pooler.bias", "nsp.weight", "nsp.bias":
        assert torch.equal(ours.get_parameter(head), theirs.get_parameter(head)), head
    a, b = ours.embeddings.segments.weight
    assert not torch.equal(a, b), "the embedding of segment B from --init is lost"


def test_segment_b_stays_that_of_a_through_runs_without_pairs(train_here, tmp_path):
    argv = *EIGHT, "--pairs", "none", "--steps", 2, 0
    train_here(tmp_path / "first", *argv)
    train_here(tmp_path / "next", *argv, "--init", tmp_path / "first" / "model", "--seed", 1)
    for name in "first", "next":
        model = bert.load_huggingface(tmp_path / name / "model")
        assert torch.equal(*model.embeddings.segments.weight), f"{name}: B is not A"
    last, begun = metrics(tmp_path / "first", "eval")[-1], metrics(tmp_path / "next", "eval")[0]
    assert begun["step"] == 0 and begun["mlm_loss"] == pytest.approx(last["mlm_loss"]), (
        "a run with --init does not show the loss that its model begins with")


def test_init_from_a_folder_that_does_not_fit_is_refused(
        finished, other_shards, train_here, tmp_path):
    model = finished / "model"
    for flags, message in [(["--model", "mini"], f"{model} does not have the shape of --m"),
                           (["--data", other_shards], f"data.py --tokenizer {model}/token"),
                           (["--init", tmp_path], f"{tmp_path}/")]:
        with pytest.raises(bert.ModelError, match=message):
            train_here(tmp_path / "out", *EIGHT, "--init", model, *flags)
