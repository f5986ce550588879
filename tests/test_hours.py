"""Tests --hours: the learning rate and the phases follow the clock, here one that the test sets."""
import pytest

import dist
import optim
from tests.training import assert_same, column, fake_clock, last_state, metrics, run

# Of 3600 s, 3564 are for steps; phase 1 gets two thirds of them, as it does of the tokens.
PARTS = {1: (0, 2376), 2: (2376, 3564)}
ARGV = "--hours 1 --steps 600 150 --batch 4 --precision fp32 --save-every 20".split()


def slower(step, rank):
    """Returns the seconds of a step; about halfway they double, as if another program took a core.
    """
    return 80.0 if step < 20 else 160.0


def unlike(step, rank):
    return 120.0 if rank == 0 else 200.0


def test_phases_share_the_time_and_a_resume_goes_on(train_here, monkeypatch, tmp_path):
    def train_by_clock(out, *argv):
        with monkeypatch.context() as patch:
            fake_clock(dist.World(), slower, patch.setattr)
            return train_here(out, *ARGV, *argv)

    args = train_by_clock(tmp_path / "whole")
    before = 0.0                                 # seconds at the beginning of a step
    for line in metrics(tmp_path / "whole"):
        begin, end = PARTS[line["phase"]]
        assert begin <= before < end, (
            f"a step that begins after {before} s is in phase {line['phase']}, from {begin} to "
            f"{end} s")
        done = (before - begin) / (end - begin)
        rate = optim.learning_rate(done, args.phases[line["phase"] - 1])
        assert line["lr"] == pytest.approx(rate, abs=1e-6), line
        before = line["seconds"]
        left = 60 * line["minutes_left"]
        assert left == pytest.approx(max(0, 3564 - before), rel=1e-6), line
    assert 3564 <= before < 3564 + 160, (
        f"the last step ends after {before} s, not in the step of 160 s that reaches 3564 s")
    last_steps = {line["phase"]: line["step"] for line in metrics(tmp_path / "whole")}
    evaluated = {line["step"] for line in metrics(tmp_path / "whole", "eval")}
    assert {*last_steps.values()} <= evaluated, (
        f"a phase ends without an evaluation: only steps {evaluated} have one")

    for more in ("--max-steps", 15), ("--max-steps", 30), (), ():
        train_by_clock(tmp_path / "parts", *more)
    names = "step", "phase", "seconds", "lr"
    assert column(tmp_path / "parts", *names) == column(tmp_path / "whole", *names)
    assert_same(last_state(tmp_path / "whole"), last_state(tmp_path / "parts"))


def test_a_phase_without_steps_gets_no_time(train_here, monkeypatch, tmp_path, capsys):
    fake_clock(dist.World(), lambda step, rank: 900.0, monkeypatch.setattr)
    train_here(tmp_path, *ARGV, "--steps", 1, 0)
    assert column(tmp_path, "phase") == [1] * 4
    said = capsys.readouterr().out
    assert "phase 1: by the clock" in said and "phase 2: 0 steps" in said, said


def test_ranks_agree_on_the_time(shards, tmp_path):
    run(shards, tmp_path / "out", *ARGV, size=2, sabotage=(fake_clock, unlike))
    assert column(tmp_path / "out", "seconds") == [160.0 * step for step in range(1, 24)]
