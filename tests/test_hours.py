"""--hours: the rate and the phases follow the clock. Here a clock that the test turns on."""
import pytest

import dist
import optim
from tests.training import assert_same, column, fake_clock, last_state, metrics, run

# Of the 3600 s, 3564 are for steps, and 2376 of them for phase 1: it has two thirds of the tokens.
ARGV = "--hours 1 --steps 600 150 --batch 4 --precision fp32 --save-every 20".split()


def slower(step, rank):
    """Returns the seconds of a step: another program takes a core halfway."""
    return 80.0 if step < 20 else 160.0


def unlike(step, rank):
    return 120.0 if rank == 0 else 200.0


def test_phases_share_the_time_and_a_resume_goes_on(train_here, monkeypatch, tmp_path):
    def train_by_clock(out, *argv):
        with monkeypatch.context() as patch:
            fake_clock(dist.World(), slower, patch.setattr)
            return train_here(out, *ARGV, *argv)

    args = train_by_clock(tmp_path / "whole")
    lines = metrics(tmp_path / "whole")
    before = 0.0                                 # the seconds when a step begins
    for number, phase, begin, end in (1, args.phases[0], 0, 2376), (2, args.phases[1], 2376, 3564):
        for line in lines:
            if line["phase"] == number:
                done = (before - begin) / (end - begin)
                assert line["lr"] == pytest.approx(optim.learning_rate(done, phase), abs=5e-4), line
                before = line["seconds"]
        assert end <= before < end + 160, f"phase {number} ends after {before} s, not {end}"
    for line in lines[:-1]:
        assert 60 * line["minutes_left"] + line["seconds"] == pytest.approx(3564), line

    for more in ("--max-steps", 15), ("--max-steps", 30), (), ():
        train_by_clock(tmp_path / "parts", *more)
    names = "step", "phase", "seconds", "mlm_loss", "lr", "grad_norm"
    assert column(tmp_path / "parts", *names) == column(tmp_path / "whole", *names)
    whole, parts = (last_state(tmp_path / name) for name in ("whole", "parts"))
    assert_same(whole, parts)
    assert whole["counters"] == parts["counters"], "seconds differ"


def test_ranks_agree_on_the_time(shards, tmp_path):
    sums = run(shards, tmp_path / "out", *ARGV, size=2, sabotage=(fake_clock, unlike))
    assert sums[0] == sums[1], "ranks have other weights"
    assert column(tmp_path / "out", "seconds") == [160.0 * step for step in range(1, 24)]
