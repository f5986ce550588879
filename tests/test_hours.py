"""--hours: a schedule whose steps are as many as there is time for."""
import re

import pytest

import dist
import train
from tests.training import assert_same, last_state, metrics, plan_of, run

HOURS = 2 / 3600                     # two seconds
ARGV = ("--batch", 8, "--precision", "fp32", "--dropout", 0.1, "--workers", 0, "--eval-every", 1000,
        "--hours", HOURS)


def brief_trials(world):
    """Times the steps of a phase for a tenth of a second."""
    train.TRIAL_SECONDS = 0.1


def no_trial(world):
    """Fails if steps are timed again."""
    train.time_phases = None


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """A run of 2 s on two ranks: (its folder, the sums of its weights)."""
    out = tmp_path_factory.mktemp("hours") / "whole"
    return out, run(shards, out, *ARGV, size=2, sabotage=(brief_trials,))


def test_steps_fit_in_the_proportions_of_the_plan():
    plan = plan_of("--steps", 300, 100)
    assert train.steps_that_fit(plan, [2.0, 4.0], 2000.0) == [600 + 1, 200 + 1]
    assert train.steps_that_fit(plan, [2.0, 4.0], 0.0) == [1, 1]
    assert train.steps_that_fit(plan_of("--steps", 300, 0), [2.0, 4.0], 60.0) == [30 + 1, 0]


def test_the_time_that_timing_takes_is_part_of_the_hours(monkeypatch):
    def slowly(plan, world):
        clock[0] += 600
        return [0.5, 1.0]

    clock = [0.0]
    monkeypatch.setattr(train, "time_phases", slowly)
    monkeypatch.setattr(train.time, "monotonic", lambda: clock[0])
    plan = train.fit_to_hours(plan_of("--steps", 200, 100, "--hours", 1), dist.World(), None)
    assert plan.ends == [3000 + 1, 3000 + 1500 + 2]


def test_the_rate_ends_at_zero(whole):
    out, _ = whole
    steps = metrics(out)
    first, second = last_state(out)["phase_steps"]
    assert len(steps) == first + second
    for phase, count in (1, first), (2, second):
        rates = [line["lr"] for line in steps if line["phase"] == phase]
        assert len(rates) == count and rates[-1] < 1.5 * max(rates) / count


def test_timing_leaves_no_trace(whole, shards, tmp_path):
    out, sums = whole
    steps = last_state(out)["phase_steps"]
    argv = *ARGV[:-2], "--steps", *steps
    assert run(shards, tmp_path / "plain", *argv, size=2) == sums
    keys = "step", "loss", "lr", "grad_norm"
    timed, plain = ([[line[key] for key in keys] for line in metrics(folder)]
                    for folder in (out, tmp_path / "plain"))
    assert timed == plain


def test_a_resume_keeps_the_steps(shards, tmp_path):
    both = tmp_path / "both"
    run(shards, both, *ARGV, "--max-steps", 5, size=2, sabotage=(brief_trials,))
    steps = last_state(both)["phase_steps"]
    sums = run(shards, both, *ARGV, size=2, sabotage=(no_trial,))
    assert last_state(both)["phase_steps"] == steps and metrics(both)[-1]["step"] == sum(steps)
    plain = tmp_path / "plain"
    assert run(shards, plain, *ARGV[:-2], "--steps", *steps, size=2) == sums
    for key in "weights", "optimizer", "scaler":
        assert_same(last_state(both)[key], last_state(plain)[key], key)


def test_a_run_of_other_hours_is_refused(whole, shards):
    out, _ = whole
    argv = *ARGV[:-1], 2 * HOURS
    with pytest.raises(train.ConfigError, match="hours 0.0005.* \\(not 0.0011"):
        run(shards, out, *argv, size=2, sabotage=(no_trial,))


def test_a_plan_says_how_many_steps_hours_buy(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = ("--plan 1 --gpus-per-node 1 --tflops 0.3 --model tiny --recipe nvlamb-64k "
             "--vocab-size 30522 --precision fp16").split()
    for hours in 24, 48:
        train.print_plan(train.parse_arguments([*flags, "--hours", str(hours)]))
        taken = re.findall(r"steps take (\S+) h", capsys.readouterr().out)
        assert len(taken) == 2 and sum(map(float, taken)) == pytest.approx(hours, rel=0.05)
