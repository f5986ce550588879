"""Tests of what other people's machines do: locks, clocks, cores, networks, terminals, disks."""
import errno
import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import bert
import data
import train
from tests.conftest import ROOT
from tests.local_ranks import LocalWorld, on_threads
from tests.ranks import run_script
from tests.training import LITTLE, column, steps_kept

# ----- The folder of a run -----

@pytest.fixture
def after_step_3(monkeypatch):
    """A function that sets an action to run once, when a run has taken its third step."""
    step = train.Log.step

    def set_action(action):
        def patched(log, figures):
            step(log, figures)
            if figures["step"] == 3:
                monkeypatch.setattr(train.Log, "step", step)
                action()

        monkeypatch.setattr(train.Log, "step", patched)

    return set_action


def test_a_run_waits_for_the_lock_of_another_one(tmp_path, monkeypatch, capsys, train_here):
    real_sleep = time.sleep

    def sleep_by(action):
        # The clocks of earlier runs still sleep in threads of their own.
        in_main = threading.main_thread()
        monkeypatch.setattr(time, "sleep", lambda seconds: (
            action if threading.current_thread() is in_main else real_sleep)(seconds))

    other = train.Log(tmp_path, True)
    sleep_by(lambda seconds: other.file.close())
    log = train.Log(tmp_path, True)
    assert f"another run writes to {tmp_path}; waiting" in capsys.readouterr().out
    for timeout, seconds in (600, 120), (60, 30):        # others wait in a collective
        waited = Mock()
        sleep_by(waited)
        with pytest.raises(train.ConfigError, match=f"another run writes to {tmp_path}; wait"):
            train.Log(tmp_path, True, timeout)
        assert waited.call_count == seconds, (
            f"with a timeout of {timeout} s it waits for {waited.call_count} s, not {seconds}")
    with pytest.raises(train.ConfigError):
        train_here(tmp_path, *LITTLE, "--timeout", 80)
    assert waited.call_count == 30 + 40, "training does not tell the log its --timeout"
    log.file.close()


def test_without_locks_a_warning_is_all(tmp_path, monkeypatch, capsys, train_here):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    train_here(tmp_path / "out", *LITTLE)
    assert "has no locks (No locks available)" in capsys.readouterr().out
    assert steps_kept(tmp_path / "out")[-1] == 6, "the run did not train to the end, step 6"


def test_a_run_in_whose_folder_another_one_has_begun_stops(train_here, tmp_path, after_step_3):
    """Each node may keep its own locks, or the folder may have been removed and recreated."""
    after_step_3(lambda: (tmp_path / "run").write_text("another number"))
    with pytest.raises(train.ConfigError, match=f"another run has begun in {tmp_path}"):
        train_here(tmp_path, *LITTLE)
    assert steps_kept(tmp_path) == [1], "the run saved among the other's checkpoints"


def test_a_run_that_cannot_write_its_number_goes_on_saving(train_here, tmp_path, monkeypatch):
    train_here(tmp_path, *LITTLE, "--max-steps", 2)
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError(errno.EIO, "Input/output")))
    train_here(tmp_path, *LITTLE)
    assert steps_kept(tmp_path)[-1] == 6, "it took its own old number for that of another run"


@pytest.mark.parametrize("damage", [
    lambda path: path.unlink(), lambda path: path.write_bytes(b"\xff")])
def test_without_its_number_a_run_goes_on_saving(train_here, tmp_path, after_step_3, damage):
    """Somebody may have removed the file `run`, or the disk was full at the start."""
    after_step_3(lambda: damage(tmp_path / "run"))
    train_here(tmp_path, *LITTLE)
    assert steps_kept(tmp_path) == [4, 6], "the run trained on without checkpoints"


def test_a_start_that_is_refused_does_not_stop_the_run_in_its_folder(
        train_here, tmp_path, monkeypatch, after_step_3):
    def start_another():
        with pytest.raises(train.ConfigError, match=r"is from a different run: seed 0 \(not 1"):
            train_here(tmp_path, *LITTLE, "--seed", 1)

    monkeypatch.setattr(fcntl, "flock", Mock())                    # as if on another node
    after_step_3(start_another)
    train_here(tmp_path, *LITTLE)
    assert steps_kept(tmp_path)[-1] == 6


def test_a_run_whose_shards_are_replaced_stops(
        documents, shards, train_here, tmp_path, after_step_3):
    folder = shutil.copytree(shards, tmp_path / "shards")

    def replace():
        folder.rename(tmp_path / "old")
        data.prepare(documents[:300], folder, tokenizer=shards / "tokenizer.model", shards=4)

    after_step_3(replace)
    with pytest.raises(train.ConfigError, match="have changed since the start"):
        train_here(tmp_path / "out", *LITTLE, "--data", folder)
    # The old shards are still open, and the model has learned from them alone.
    assert steps_kept(tmp_path / "out") == [1, 4], "the checkpoint of step 4 is not kept"


def test_a_start_says_what_was_not_saved_and_what_does_not_fit(
        train_here, tmp_path, capsys, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run"}\n{"kin')     # of a killed run
    monkeypatch.setattr(bert, "unlike_huggingface", lambda model: ["gate"])
    monkeypatch.setitem(bert.PRESETS, "tiny", (5, 64))
    train_here(tmp_path, *LITTLE, "--max-steps", 2, "--optimizer=adamw")
    said = capsys.readouterr().out
    assert "left no whole checkpoint: this one starts over" in said
    assert "warning: the recipe's rates and betas are for lamb" in said
    assert "warning: the recipe demo is for tiny and mini" in said
    assert "Hugging Face's BERT differs in gate: only bert.py will load" in said
    assert steps_kept(tmp_path) == [1, 2]
    assert '\n{"kin\n{"kind": "run"' in (tmp_path / "metrics.jsonl").read_text(), (
        "the first line after half a line cannot be read")


@pytest.mark.parametrize("place", [(os, "fsync"), (os, "replace"), (torch, "save")])
def test_a_disk_that_cannot_keep_a_checkpoint_is_known_at_once(
        train_here, tmp_path, monkeypatch, place):
    """Some network disks have no fsync, some no rename. torch raises an error of its own, before or
    after that of the disk."""
    errors = [RuntimeError("unexpected pos"), OSError(errno.ENOSYS, "Function not implemented")]
    if place[0] is torch:
        errors.reverse()

    def refuse(*arguments):
        try:
            raise errors[0]
        except Exception:
            raise errors[1]

    monkeypatch.setattr(*place, refuse)
    with pytest.raises(train.ConfigError,
                       match=f"no checkpoint can be saved in {tmp_path}: .*not implemented"):
        train_here(tmp_path, *LITTLE)
    assert column(tmp_path, "step") == [1], "the run trained on without a checkpoint"


def test_results_of_the_current_folder_have_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert train.parse_arguments(["--data", "."]).out == train.Path("runs", tmp_path.name)
    monkeypatch.setenv("HOME", "/home/me")
    assert str(train.parse_arguments(["--out=~/x"]).out) == "/home/me/x"


# ----- The clock -----

def test_a_suspended_job_does_not_lose_its_time(monkeypatch):
    """Of five sleeps of a second, one takes ten hours, a pause. The others, up to 20 s, count."""
    seconds = iter([1, 1.5, 36000, 20, 1])
    time = SimpleNamespace(now=100.0)
    time.monotonic = lambda: time.now

    def sleep(_):
        time.now += next(seconds)                # finally StopIteration, which ends the thread

    time.sleep = sleep
    thread = Mock()
    monkeypatch.setattr(train.threading, "Thread", thread)
    monkeypatch.setattr(train, "time", time)
    monkeypatch.setattr(train, "STARTED", 90.0)
    clock = train.Clock(50.0)
    with pytest.raises(StopIteration):
        thread.call_args.kwargs["target"]()
    assert clock.read() == pytest.approx(50 + 10 + 1 + 1.5 + 20 + 1), (
        "the clock counts the pause, or leaves out a sleep that is no pause")


# ----- Cores -----

@pytest.mark.parametrize("limit, cores", [
    ("150000 100000", 2), ("max 100000", 64), ("10000 100000", 1), ("100000 50000", 2),
    ("9900000 100000", 64)])
def test_threads_follow_the_share_of_a_container(monkeypatch, limit, cores):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(data.Path, "read_text", lambda path: limit + "\n")
    assert data.usable_cores() == cores


@pytest.mark.parametrize("given, expected", [("", "1000 false"), ("GOMP_SPINCOUNT=5", "5 false")])
def test_threads_do_not_spin_for_long_and_are_not_bound(given, expected):
    """Both must be set before torch is imported."""
    code = """
import os, sys
sys.modules["torch"] = None
try:
    import train
except ImportError:
    print(os.environ["GOMP_SPINCOUNT"], os.environ["OMP_PROC_BIND"])
"""
    command = "env", "-u", "GOMP_SPINCOUNT", "OMP_PROC_BIND=true", *given.split(), sys.executable
    done = subprocess.run([*command, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == expected, done


CUT = """
import os, data, train
batch = data.PretrainingData.batch
def cut_and_read(self, indices):
    for number, path in enumerate(self.paths):
        self.shard(number)                                   # opens it
        os.truncate(f"{path}.tokens", 0)
    return batch(self, indices)
data.PretrainingData.batch = cut_and_read
train.main()
"""


def test_a_shard_that_is_cut_while_it_is_read_says_where(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "shards")
    (tmp_path / "x.py").write_text(CUT)
    done = run_script(tmp_path / "x.py", "--data", folder, "--out", tmp_path / "out")
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr and "data.py" in done.stderr, done.stderr


# ----- Two nodes -----

def test_a_broadcast_crosses_the_network_once_for_each_node(monkeypatch):
    sizes = []                                   # of the group, once for each rank in a broadcast
    run = LocalWorld._run

    def noted(self, *arguments, **options):
        sizes.append(self.size)
        run(self, *arguments, **options)

    def send(world):
        tensor = torch.full((3,), float(world.rank))
        world.broadcast(tensor)
        return tensor.tolist()

    monkeypatch.setattr(LocalWorld, "_run", noted)
    assert on_threads(send, 6, local_size=3) == [[0.0] * 3] * 6, (
        "some rank does not receive rank 0's tensor")
    assert sorted(sizes) == [2] * 2 + [3] * 6, (
        "there is not one broadcast between the nodes' first ranks and then one in each node")


# ----- Terminals -----

def test_a_terminal_without_utf_8_gets_escapes_and_none_gets_nothing(monkeypatch):
    plain = io.TextIOWrapper(io.BytesIO(), "ascii")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None)
    for terminal in None, closed, plain:                     # None: as after `>&-`
        monkeypatch.setattr(sys, "stdout", terminal)
        data.say("ü")
        data.end_terminal()
    assert plain.buffer.getvalue() == b"\\xfc\n"
    assert list(data.blocks(["a"])) == [["a"]], "a progress bar without a terminal stops the work"


class Full(io.StringIO):
    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_terminal_refuses_in_a_run_is_not_written_again_at_exit(monkeypatch):
    monkeypatch.setattr(train, "train", lambda *_: data.say("a line"))
    monkeypatch.setattr(train, "keep_freed_memory", Mock())
    monkeypatch.setattr(data, "usable_cores", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["-"])
    monkeypatch.setattr(sys, "stdout", Full())
    train.main()
    if sys.stdout:
        sys.stdout.flush()


def test_a_terminal_that_takes_nothing_ends_nothing(documents, shards, tmp_path):
    """Refused output stays in Python's buffer, which Python would write again when it exits."""
    (tmp_path / "a.txt").write_text("\n\n".join(documents[:200]))
    command = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, ROOT / "data.py", "a.txt",
               "--out", "out", "--shards", "1", "--tokenizer", shards / "tokenizer.model"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done
