"""Tests how a run of train.py ends early: signals, failing ranks, a torchrun that dies."""
import os
import signal

import pytest

import dist
from tests.ranks import script
from tests.training import LONG, alive, column, steps_kept, wait_for_a_step

SIGNALS = "SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2 SIGXCPU SIGQUIT".split()


def ended(process, folder, begun=None):
    """Waits for the future `begun`, if it is a run of `torchruns` in conftest.py, then for the
    process to end. Returns its exit status, stdout, stderr, and the only line of stderr that begins
    with "train.py:"."""
    if begun:
        begun.result()
    process.join(100)
    stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
    assert process.exitcode is not None, f"the run does not end. It has printed:\n{stdout}{stderr}"
    said = [line for line in stderr.splitlines() if line.startswith("train.py:")]
    assert len(said) == 1, f"the reason is not said once, but so: {said}"
    return process.exitcode, stdout, stderr, said[0]


def assert_stopped(out, said):
    last = column(out, "step")[-1]
    assert f"stopped after step {last}; the same command resumes" in said, said
    assert steps_kept(out)[-1] == last, f"step {last} is the last, but not saved"
    assert (out / "model").exists()


# ----- Asked to stop -----

@pytest.fixture
def handlers(monkeypatch):
    """Restores, after a test, the signal handlers and dist.stop_requests, which begins empty."""
    monkeypatch.setattr(dist, "stop_requests", [])
    before = {number: signal.getsignal(number) for number in dist.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("torchrun, before, asks", [
    (None, print, True), (None, signal.SIG_IGN, False), (1, signal.SIG_IGN, True)])
@pytest.mark.parametrize("name", SIGNALS)
def test_signals_ask_to_stop_but_for_those_that_nohup_ignores(
        monkeypatch, handlers, torchrun, before, asks, name):
    monkeypatch.setattr(dist, "TORCHRUN", torchrun)
    signal.signal(signal.Signals[name], before)
    dist.listen_to_signals()
    signal.raise_signal(signal.Signals[name])
    assert dist.stop_requests == [name] * asks
    if asks:
        ends = signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert ends == (not torchrun), (
            "the next Ctrl-C must end a process at once, but not a rank below torchrun")


def test_an_ignored_ctrl_c_stays_ignored_after_a_request(monkeypatch, handlers):
    monkeypatch.setattr(dist, "TORCHRUN", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dist.listen_to_signals()
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_signal_stops_a_run_with_a_checkpoint(shards, tmp_path):
    out = tmp_path / "out"
    process = script(tmp_path, "train.py", "--data", shards, "--out", out, *LONG)
    process.start()
    wait_for_a_step(out)
    os.killpg(process.pid, signal.SIGTERM)
    status, stdout, _, said = ended(process, tmp_path)
    assert status == 1, f"the exit status is {status}, not 1, so the run looks as if it were done"
    assert_stopped(out, said)
    assert "held out" not in stdout, "a stopped run evaluates: there may be no time for it"
    assert "Done" not in stdout


# ----- Under torchrun -----

def test_ranks_do_not_train_on_without_their_torchrun(torchruns):
    *_, said = ended(*torchruns["killed"])
    assert_stopped(torchruns["killed"][1] / "out", said)


def test_the_rank_that_fails_says_why_and_all_start_again(torchruns):
    _, folder, _ = torchruns["fails"]
    status, stdout, stderr, said = ended(*torchruns["fails"])
    assert status == 0, stderr
    assert said.startswith("train.py: rank 1:") and "CUDA error: in a checkpoint" in stderr, stderr
    for words, times in ("2 rank(s) on 1 node(s)", 2), ("held out", 4), ("Done after step 4", 1):
        assert stdout.count(words) == times, f"{words!r} is not printed {times} times:\n{stdout}"
    assert column(folder / "out", "step") == [1, 2, 3, 4]
    assert not alive(str(folder)), "ranks still run after their torchrun has ended"


def test_what_no_restart_can_mend_is_said_once_and_ends_torchrun(torchruns):
    status, _, stderr, said = ended(*torchruns["refused"])
    assert status == 1 and "a batch of 1 is too small for 2 ranks" in said
    assert "Traceback" not in stderr.split(said)[0]
