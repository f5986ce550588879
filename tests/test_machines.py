"""What other people's machines do: locks, clocks, cores, terminals, disks."""
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import data
import train
from tests.conftest import ROOT
from tests.local_ranks import LocalWorld, on_threads
from tests.ranks import run_script
from tests.training import LITTLE, column, steps_kept

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


def test_without_its_number_a_run_goes_on_saving(train_here, tmp_path, monkeypatch):
    """Somebody tidies up, or the disk was full at the start."""
    step = train.Log.step

    def tidy_up(log, figures):
        step(log, figures)
        (tmp_path / "run").unlink(missing_ok=True)

    monkeypatch.setattr(train.Log, "step", tidy_up)
    train_here(tmp_path, *LITTLE)
    assert steps_kept(tmp_path) == [4, 6], "it has trained on without checkpoints"


def test_a_start_that_is_refused_does_not_stop_the_run_in_its_folder(
        train_here, tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)    # as if of another node
    step = train.Log.step

    def another_is_refused(log, figures):
        step(log, figures)
        if figures["step"] == 3:
            with monkeypatch.context() as patch:
                patch.setattr(train.Log, "step", step)
                with pytest.raises(train.ConfigError, match=r"is of another run: seed 0 \(not 1"):
                    train_here(tmp_path, *LITTLE, "--seed", 1)

    monkeypatch.setattr(train.Log, "step", another_is_refused)
    train_here(tmp_path, *LITTLE)
    assert steps_kept(tmp_path)[-1] == 6


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
    # The old shards are open still: what was learned until now is of them.
    assert steps_kept(tmp_path / "out") == [1, 4], "what was right is lost"


def test_the_first_step_is_saved_and_what_was_not_is_said(train_here, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run"}\n')     # of one that was killed
    train_here(tmp_path, *LITTLE, "--max-steps", 2)
    assert "has ended before its first checkpoint: this one begins anew" in capsys.readouterr().out
    assert steps_kept(tmp_path) == [1, 2]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_cannot_keep_a_checkpoint_is_known_at_once(
        train_here, tmp_path, monkeypatch, call):
    """Some network disks know no fsync, some no rename."""
    def refuse(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(train.ConfigError, match=f"no checkpoint can be saved in {tmp_path}"):
        train_here(tmp_path, *LITTLE)
    assert column(tmp_path, "step") == [1], "it has trained on without a checkpoint"


def test_results_of_the_current_folder_have_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert train.parse_arguments(["--data", "."]).out == train.Path("runs", tmp_path.name)


# ----- The clock -----

def test_a_suspended_job_does_not_lose_its_time(monkeypatch):
    """A clock whose seconds pass as they do, but for a pause of ten hours in the third one."""
    class Time:
        now = 100.0
        left = [1, 1.5, 36000, 20, 1]

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            if not self.left:
                raise SystemExit                         # ends the thread
            self.now += self.left.pop(0)

    monkeypatch.setattr(train, "time", Time())
    monkeypatch.setattr(train, "STARTED", 90.0)
    clock = train.Clock.__new__(train.Clock)
    clock.start = 90.0 - 50.0
    train.time.left = [1, 1.5, 36000, 20, 1]
    with pytest.raises(SystemExit):
        clock.leave_out_pauses()
    assert clock.read() == pytest.approx(train.time.now - 40.0 - 36000.0), "the pause has counted"


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


def test_a_run_takes_the_threads_that_it_may_use(shards, tmp_path):
    (tmp_path / "x.py").write_text(
        "import data, train\ndata.usable_cores = lambda: 3\ntrain.main()")
    done = run_script(tmp_path / "x.py", "--data", shards, "--out", tmp_path / "out", "--steps", 0)
    assert "each with 3 CPU threads" in done.stdout, done


def test_a_shard_that_is_cut_while_it_is_read_says_where(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "shards")
    code = """
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
    (tmp_path / "x.py").write_text(code)
    done = run_script(tmp_path / "x.py", "--data", folder, "--out", tmp_path / "out")
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr and "data.py" in done.stderr, done.stderr


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


def test_a_profiler_and_a_notebook_live_on(shards, tmp_path):
    """train.py ends there as any program, well and with a wrong flag."""
    code = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
for folder in {str(shards)!r}, "nowhere":
    sys.argv = ["train.py", "--data", folder, "--out", "out", *"--steps 1 0 --batch 4".split()]
    try:
        runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
        print("ended well")
    except SystemExit as end:
        print("ended with", end.code)
"""
    (tmp_path / "x.py").write_text(code)
    done = run_script(tmp_path / "x.py", cwd=tmp_path)
    assert re.findall("ended .*", done.stdout) == ["ended well", "ended with 1"], done
