"""How a run of train.py ends before its last step: signals, failing ranks, a torchrun that dies."""
import contextlib
import json
import os
import re
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import dist
from tests.conftest import ROOT
from tests.ranks import start_script

SIGNALS = "SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2 SIGXCPU SIGQUIT".split()
# So many steps that no run here comes to its end, of many micro-batches: signals come amid a step
LONG = "--batch 512 --micro-tokens 256 --steps 5000 --save-every 5000 --precision fp32".split()


def steps(out):
    """Returns the steps in a run's metrics.jsonl."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if '"kind": "train"' in line]


def wait_for(condition, what):
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, f"in 200 s {what}"
        time.sleep(0.05)


def alive(words):
    """Returns the numbers of the processes whose command lines have these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):                     # it has just ended
            if words in path.read_bytes().replace(b"\0", b" ").decode():
                found.append(int(path.parent.name))
    return found


# ----- Asked to stop -----

@pytest.fixture
def handlers():
    """Puts back what listens to signals, and what has come."""
    before = {name: signal.getsignal(signal.Signals[name]) for name in SIGNALS}
    yield
    dist.stop_requests.clear()
    for name, handler in before.items():
        signal.signal(signal.Signals[name], handler)


@pytest.mark.parametrize("torchrun, before, asks", [
    (None, print, True), (None, signal.SIG_IGN, False), (1, signal.SIG_IGN, True)])
@pytest.mark.parametrize("name", SIGNALS)
def test_signals_ask_to_stop_but_for_those_that_nohup_ignores(
        monkeypatch, handlers, torchrun, before, asks, name):
    monkeypatch.setattr(dist, "TORCHRUN", torchrun)
    signal.signal(signal.Signals[name], before)
    dist.listen_to_signals()
    assert dist.stop_requests == [], "before any signal there are requests"
    signal.raise_signal(signal.Signals[name])
    assert dist.stop_requests == [name] * asks
    if asks:
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL, "the next Ctrl-C does not end it"


def test_signals_stop_with_a_checkpoint(shards, tmp_path):
    cases = {"term": [signal.SIGTERM], "usr1": [signal.SIGUSR1], "twice": [signal.SIGINT] * 2}
    runs = {}
    for name in cases:                         # all at once, which takes less time
        out = tmp_path / name
        out.mkdir()
        runs[name] = start_script(out, "train.py", "--data", shards, "--out", out, *LONG)
    for name, signals in cases.items():
        wait_for(lambda: steps(tmp_path / name), f"{name} takes no step")
        for number in signals:
            os.killpg(runs[name].pid, number)
            time.sleep(0.1)
    for name, process in runs.items():
        process.join(60)
    assert runs.pop("twice").exitcode == -signal.SIGINT, "a second Ctrl-C does not end a run"
    for name, process in runs.items():
        out = tmp_path / name
        last = steps(out)[-1]
        stdout, stderr = ((out / file).read_text() for file in ("stdout", "stderr"))
        assert process.exitcode == 1, "whoever waits for the run shall know that it is not done"
        assert f"stopped after step {last}; the same command resumes" in stderr, stderr
        assert (out / f"step-{last:08d}.pt").exists() and (out / "model").exists(), os.listdir(out)
        assert "held out" not in stdout, "there may be no time for an evaluation"
        assert "Done" not in stdout


# ----- Under torchrun -----

FAILS = """
import os, sys
sys.path.insert(0, {root!r})
import train

save = train.save

def fail(args, world, log, state):
    lives_before = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if (state.counters.step, world.rank, lives_before) == (2, 1, "0"):
        raise ZeroDivisionError("a bug in a checkpoint")
    save(args, world, log, state)

train.save = fail
train.EVAL_EXAMPLES = 64
if __name__ == "__main__":
    train.main()
"""
TORCHRUN = [find_spec("torch.distributed.run").origin,
            *"--standalone --max-restarts=1 --nproc_per_node=2".split()]


@pytest.fixture(scope="module")
def torchruns(shards, tmp_path_factory):
    """Yields {name: (process, its folder)}: all at once, since they wait for one another and for
    their imports. What begins with --no-python is by way of a shell that stays."""
    folder = tmp_path_factory.mktemp("torchruns")
    (folder / "fails.py").write_text(FAILS.format(root=str(ROOT)))
    shell = ["--no-python", "bash", "-c", '"$@"; exit $?', "bash", sys.executable, "train.py"]
    words = {
        "dies": [*shell, *LONG],
        "fails": [folder / "fails.py",
                  *"--steps 4 0 --batch 2 --save-every 1 --compression onebit".split()],
        "refused": [*shell, "--batch=1"],
        "wrong": ["train.py", "--batch=0"]}
    runs = {}
    for name in words:
        out = folder / name
        out.mkdir()
        runs[name] = start_script(
            out, *TORCHRUN, *words[name], "--data", shards, "--out", out / "out"), out
    yield runs
    for process, out in runs.values():       # what no test has ended
        process.terminate()
        for pid in alive(f"--out {out}"):
            os.kill(pid, signal.SIGKILL)


def ended(torchrun):
    """Returns (status, stdout, stderr, its reasons) of a torchrun."""
    process, folder = torchrun
    process.join(240)
    stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
    reasons = [line for line in stderr.splitlines() if line.startswith("train.py:")]
    return process.exitcode, stdout, stderr, reasons


def test_ranks_do_not_train_on_without_their_torchrun(torchruns):
    process, folder = torchruns["dies"]
    out = folder / "out"
    wait_for(lambda: steps(out), "no step is taken")
    process.kill()
    wait_for(lambda: not alive(f"--out {out}"), "ranks train on")
    *_, (said,) = ended(torchruns["dies"])
    last = steps(out)[-1]
    assert f"stopped after step {last}; the same command resumes" in said
    assert (out / f"step-{last:08d}.pt").exists(), "ranks without torchrun do not save"


def test_the_rank_that_fails_says_why_and_all_start_again(torchruns):
    status, stdout, stderr, (said,) = ended(torchruns["fails"])
    assert status == 0, stderr
    assert said.startswith("train.py: rank 1:") and "a bug in a checkpoint" in stderr, stderr
    assert stdout.count("2 rank(s) on 1 node(s)") == 2, stdout
    assert stdout.count("Done after step 4") == 1, stdout
    out = torchruns["fails"][1] / "out"
    assert set(steps(out)) == {1, 2, 3, 4}
    assert not alive(f"--out {out}"), "ranks are left"


@pytest.mark.parametrize("name, reason", [
    ("refused", "a batch of 1 is too small for 2 ranks"), ("wrong", "--batch: must be in")])
def test_what_no_restart_can_mend_is_said_once_and_ends_torchrun(torchruns, name, reason):
    status, _, stderr, (said,) = ended(torchruns[name])
    assert status == 1 and reason in said
    assert "Traceback" not in stderr.split(said)[0]
