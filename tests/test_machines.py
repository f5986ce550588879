"""What other people's machines do: locks, clocks, cores, terminals, disks."""
import errno
import fcntl
import os
import subprocess
import sys

import pytest
import torch

import data
import dist
import train
from tests.conftest import ROOT
from tests.local_ranks import LocalWorld, on_threads
from tests.ranks import run_script
from tests.training import LITTLE, column, fake_clock, last_state, metrics, steps_kept

# ----- The folder of a run -----

def test_a_run_waits_for_the_lock_of_one_that_ends(tmp_path, monkeypatch, capsys):
    other = train.Log(tmp_path, True)
    monkeypatch.setattr(train.time, "sleep", lambda seconds: other.file.close())
    train.Log(tmp_path, True)
    assert f"another run writes to {tmp_path}; waiting" in capsys.readouterr().out


def test_without_locks_a_warning_is_all(tmp_path, monkeypatch, capsys, train_here):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    train_here(tmp_path / "out", *LITTLE)
    assert "has no locks (No locks available)" in capsys.readouterr().out
    assert steps_kept(tmp_path / "out")[-1] == 6, "it has not trained to the end"


def test_a_run_in_whose_folder_another_one_has_begun_stops(train_here, tmp_path, monkeypatch):
    """Locks that each node keeps for itself, or a folder that was removed and begun anew."""
    step = train.Log.step

    def another_begins(log, figures):
        step(log, figures)
        if figures["step"] == 3:
            (tmp_path / "run").write_text("another number")

    monkeypatch.setattr(train.Log, "step", another_begins)
    with pytest.raises(train.ConfigError, match=f"another run has begun in {tmp_path}"):
        train_here(tmp_path, *LITTLE)
    assert steps_kept(tmp_path) == [1], "it has saved among the other's checkpoints"


def test_a_run_whose_shards_are_replaced_stops(
        documents, shards, train_here, tmp_path, monkeypatch):
    folder = tmp_path / "shards"
    tokenizer = shards / "tokenizer.model"
    data.prepare(documents, folder, tokenizer=tokenizer, shards=4)
    step = train.Log.step

    def replace(log, figures):
        step(log, figures)
        if figures["step"] == 3:
            folder.rename(tmp_path / "old")
            data.prepare(documents[:300], folder, tokenizer=tokenizer, shards=4)

    monkeypatch.setattr(train.Log, "step", replace)
    with pytest.raises(train.ConfigError, match="are others than at the start"):
        train_here(tmp_path / "out", *LITTLE, "--data", folder)
    assert steps_kept(tmp_path / "out") == [1]


def test_the_first_step_is_saved_and_what_was_not_is_said(train_here, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run"}\n')     # of one that was killed
    train_here(tmp_path, *LITTLE, "--max-steps", 2)
    assert "has ended before its first checkpoint: this one begins anew" in capsys.readouterr().out
    assert steps_kept(tmp_path) == [1, 2]


def test_a_disk_without_fsync_keeps_checkpoints(train_here, tmp_path, monkeypatch):
    def no_fsync(number):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", no_fsync)
    train_here(tmp_path, *LITTLE)
    assert steps_kept(tmp_path)[-1] == 6


def test_results_of_the_current_folder_have_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert train.parse_arguments(["--data", "."]).out == train.Path("runs", tmp_path.name)


# ----- The clock -----

def test_a_suspended_job_does_not_lose_its_time(train_here, monkeypatch, tmp_path):
    def seconds(step, rank):
        return 36000.0 if step == 4 else 80.0        # longer than the whole training

    fake_clock(dist.World(), seconds, monkeypatch.setattr)
    train_here(tmp_path, *"--hours 1 --batch 4 --precision fp32 --save-every 20".split())
    found = column(tmp_path, "seconds")
    assert found[3] == found[4] == 320, "the pause has counted"
    assert found[-1] >= 3564 and metrics(tmp_path)[-1]["phase"] == 2


# ----- Cores -----

@pytest.mark.parametrize("limit, cores", [
    ("150000 100000", 2), ("max 100000", 64), ("10000 100000", 1), ("9900000 100000", 64)])
def test_threads_follow_the_share_of_a_container(monkeypatch, limit, cores):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(data.Path, "read_text", lambda path: limit + "\n")
    assert data.usable_cores() == cores


def test_threads_do_not_spin_for_long_and_are_not_bound():
    """Both have to be set before torch is imported."""
    code = "import sys, os; sys.modules['torch'] = None\ntry: import train\nexcept ImportError: " \
           "print(os.environ['GOMP_SPINCOUNT'], os.environ['OMP_PROC_BIND'])"
    for given, expected in (None, "1000 false"), ("5", "5 false"):
        environment = os.environ | {"OMP_PROC_BIND": "true"}
        environment.pop("GOMP_SPINCOUNT", None)
        if given:
            environment["GOMP_SPINCOUNT"] = given
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True,
                              text=True, env=environment)
        assert done.stdout.strip() == expected, done


# ----- Two nodes -----

def test_a_broadcast_crosses_the_network_once_for_each_node():
    def send(world):
        sizes = []                               # of the groups that this rank broadcasts in
        run = LocalWorld._run

        def note(self, collective, *arguments, **options):
            sizes.append(self.size)
            run(self, collective, *arguments, **options)

        for level in world, *world.levels:
            level._run = note.__get__(level)
        tensor = torch.full((3,), float(world.rank))
        world.broadcast(tensor)
        return sizes, tensor.tolist()

    for rank, (sizes, tensor) in enumerate(on_threads(send, 6, local_size=3)):
        assert tensor == [0.0] * 3, f"rank {rank} has {tensor}, not what rank 0 has"
        assert sizes == ([2, 3] if rank % 3 == 0 else [3]), f"rank {rank} is in groups of {sizes}"


# ----- Terminals -----

def test_a_terminal_that_closes_or_has_no_utf_8_ends_nothing(documents, shards, tmp_path):
    (tmp_path / "ü.txt").write_text("\n\n".join(documents[:200]))
    command = [sys.executable, ROOT / "data.py", "ü.txt", "--out", "out", "--shards", "1",
               "--tokenizer", shards / "tokenizer.model"]
    read, write = os.pipe()
    os.close(read)                                           # nobody reads what is printed
    closed = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (closed.returncode, closed.stderr) == (0, ""), closed
    command[4] = "ü"
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                           env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert plain.stdout.endswith("\n\\xfc is ready\n") and not plain.stderr, plain


def test_a_notebook_that_has_computed_begins_the_clock_now():
    code = "import time; time.process_time = lambda: 9999.0; import train; " \
           "print(time.monotonic() - train.STARTED)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert float(done.stdout) < 60, done.stderr
