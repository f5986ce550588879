"""How a run of train.py ends before its last step: signals, minutes, ranks that fail."""
import os
import re
import signal
import subprocess
import time
from importlib.util import find_spec

import pytest

import dist
import optim
import train
from tests.conftest import ROOT
from tests.ranks import run_ranks, run_script, start_script, together
from tests.training import (LITTLE, SHORT, assert_same, last_state, metrics, run, steps_kept,
                            training)

# ----- Asked to stop -----

def stop_in_mid_step(world, calls):
    """Rank 1 is asked to stop, at its so-and-so-many-th look; a step of SHORT looks twice."""
    looks = []

    def asked_to_stop(_):
        looks.append(1)
        return world.rank == 1 and len(looks) == calls

    dist.asked_to_stop = asked_to_stop


def test_a_stop_leaves_the_step_undone_on_all_ranks(shards, tmp_path):
    argv = *SHORT, "--checkpoint-every", 100, "--precision", "fp32", "--dropout", 0.1
    whole, out = tmp_path / "whole", tmp_path / "out"

    def stopped_twice():
        for calls, step in (7, 3), (14, 10):      # before a second micro-batch, after a whole step
            run(shards, out, *argv, size=2, sabotage=(stop_in_mid_step, calls))
            assert steps_kept(out)[-1] == metrics(out)[-1]["step"] == step
        return run(shards, out, *argv, size=2)

    sums, sums_stopped = together(lambda: run(shards, whole, *argv, size=2), stopped_twice)
    assert sums == sums_stopped
    assert_same(last_state(whole), last_state(out))


def test_minutes_save_and_stop(shards, tmp_path):
    out = tmp_path / "out"
    run(shards, out, *SHORT, "--checkpoint-every", 100, "--max-steps", 5)
    assert steps_kept(out) == [5] and metrics(out)[-1]["minutes_left"] == 0
    run(shards, out, *SHORT, "--max-minutes", 0)
    assert metrics(out)[-1]["step"] == 5
    text = (out / "log.txt").read_text()
    assert re.search("Stopped by --max-minutes after step 5 of [0-9]+; the same command", text)


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


# ----- Under torchrun -----

def stop_under_torchrun(world, reason):
    dist.TORCHRUN = os.getppid()
    dist.asked_to_stop = lambda _: reason if world.rank else 0


@pytest.mark.parametrize("reason,kind", [(dist.SIGNALLED, dist.DistError),
                                         (dist.TORCHRUN_DIED, dist.RankLost)])
def test_a_stop_is_for_good_unless_a_torchrun_died(shards, tmp_path, reason, kind):
    outcomes = run(shards, tmp_path / "out", *SHORT, size=2, check=False,
                   sabotage=(stop_under_torchrun, reason))
    assert [type(outcome) for outcome in outcomes] == [kind] * 2
    assert "stopped after step 0; the same command resumes" in str(outcomes[0])


def stopped_while_rank_0_writes(world, argv, folder):
    """Rank 1 is sent SIGTERM in the first step, and rank 0 takes a second to write a checkpoint.
    Returns when this rank left the training."""
    dist.TORCHRUN = os.getppid()
    write, learning_rate = train.write_checkpoint, optim.learning_rate

    def write_slowly(*arguments, **options):
        time.sleep(1)
        write(*arguments, **options)
        (folder / "written").touch()

    def signalled(*arguments):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(*arguments)

    train.write_checkpoint, optim.learning_rate = write_slowly, signalled
    try:
        training(world, argv, None)
    except dist.DistError as error:
        assert "stopped after step" in str(error)
        return time.time()


def test_no_rank_leaves_before_the_last_checkpoint_is_written(shards, tmp_path):
    argv = ["--data", str(shards), "--out", str(tmp_path / "out"), *SHORT]
    moments = run_ranks(stopped_while_rank_0_writes, 2, tmp_path, argv, tmp_path)
    assert min(moments) >= (tmp_path / "written").stat().st_mtime


FAILS = """
import os, sys
sys.path.insert(0, {root!r})
import torch
import train

train.EVAL_EXAMPLES = 64
save = train.save

def fail(plan, world, log, state):
    lives_before = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if (state.step, world.rank, lives_before) == (2, 1, "0"):
        raise ZeroDivisionError("a bug in a checkpoint")
    save(plan, world, log, state)

train.save = fail
if __name__ == "__main__":
    train.main()
"""


def torchrun(*arguments):
    """Runs a program on two ranks under torchrun; returns (the completed process, its lines on
    stderr that say why it ended)."""
    options = "--standalone --max-restarts=1 --nproc_per_node=2".split()
    done = run_script(find_spec("torch.distributed.run").origin, *options, *arguments)
    return done, [line for line in done.stderr.splitlines() if line.startswith("train.py:")]


def test_the_rank_that_fails_says_why_and_all_start_again(shards, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "fails.py").write_text(FAILS.format(root=str(ROOT)))
    began = time.time()
    done, reasons = torchrun(
        tmp_path / "fails.py", "--data", shards, "--out", out, *LITTLE, "--workers", 0,
        *"--steps 4 0 --checkpoint-every 1 --compression bf16".split())
    assert done.returncode == 0 and time.time() - began < 60, done.stderr
    assert len(reasons) == 1 and reasons[0].startswith("train.py: rank 1:")
    assert "a bug in a checkpoint" in done.stderr
    assert done.stdout.count("2 rank(s) on 1 node(s)") == 2
    assert "checkpoint of step 1" in done.stdout
    assert done.stdout.count("Done after step 4 of 4") == 1
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4]
    assert all(line["bytes_sent"] > 0 for line in metrics(out))
    while not subprocess.run(["pgrep", "-f", tmp_path / "fails.py"]).returncode:
        assert time.time() - began < 60                      # none is left
        time.sleep(0.1)


def test_what_no_restart_can_mend_is_said_once_and_ends_torchrun(shards, tmp_path):
    done, reasons = torchrun(ROOT / "train.py", "--data", shards, "--out", tmp_path / "out",
                             "--steps", 1, 2, 3)
    assert done.returncode == 1 and len(reasons) == 1, done.stderr
    assert "--steps takes one number, or one for each of the 2 phases" in reasons[0]
