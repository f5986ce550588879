"""race.py on logs made by hand: who came first, and who may not race."""
import json
import sys

import pytest

from tests.course import race

START = {"kind": "run", "device": "cpu", "world": 1, "nodes": 1, "threads": 2, "torch": "2.13",
         "python": "3.11"}
SETTINGS = {"shards": "20e7", "pairs": "nsp", "whole_words": False, "init": None,
            "phase1.seq_len": 64, "phase2.seq_len": 128}
BASE = [(100, 1, 5.0), (200, 1, 4.0), (300, 2, 4.5), (400, 2, 4.2)]


def write(folder, evaluations, seconds=0.6, batch=32, unigram=6.5, start=START, **settings):
    """Writes the metrics.jsonl of a run with evaluations (step, phase, loss); returns its folder as
    text. seconds: of a step."""
    lines = [start | {"run": SETTINGS | settings}]
    losses = {step: (phase, loss) for step, phase, loss in evaluations}
    for step in range(1, max(losses) + 1):
        lines.append({"kind": "train", "step": step, "seconds": seconds * step,
                      "examples": batch * step})
        if step in losses:
            phase, loss = losses[step]
            lines.append({"kind": "eval", "step": step, "phase": phase, "mlm_loss": loss,
                          "unigram_entropy": unigram + phase})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture
def race_of(monkeypatch, capsys):
    """Runs race.py; returns its lines, split at spaces, or what it ended with."""
    def run(*folders):
        monkeypatch.setattr(sys, "argv", ["race.py", *folders])
        try:
            race.main()
        except SystemExit as error:
            return error.code
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    return run


def test_the_first_evaluation_at_or_below_the_goal_at_its_length_counts(tmp_path, race_of):
    base = write(tmp_path / "base", BASE)
    # In phase 1 it is below the goal at once, but at another length
    mine = write(tmp_path / "mine", [(50, 1, 3.0), (100, 2, 4.201), (150, 2, 4.2), (200, 2, 4.3)],
                 seconds=0.8, batch=64)
    goal, _, *rows = race_of(base, mine)
    assert "4.200" in goal and "128" in goal
    assert rows == [["400", "4.00", "1.000", "12,800", "1.000", "4.200", base],
                    ["150", "2.00", "0.500", "9,600", "0.750", "4.300", mine]]


def test_a_baseline_that_was_better_before_is_measured_there(tmp_path, race_of):
    base = write(tmp_path / "base", [(100, 2, 4.1), (400, 2, 4.2)])
    mine = write(tmp_path / "mine", [(150, 2, 4.15)])
    rows = race_of(base, mine)[2:]
    assert [row[2] for row in rows] == ["1.000", "1.500"]


def test_runs_that_never_reached_it(tmp_path, race_of):
    base = write(tmp_path / "base", BASE)
    slow = write(tmp_path / "slow", [(100, 2, None), (200, 2, 4.3), (300, 2, 4.4)])
    short = write(tmp_path / "short", [(100, 1, 3.0)])
    rows = race_of(base, slow, short)[3:]
    assert " ".join(rows[0]) == f"never: its best is 4.300 {slow}"
    assert " ".join(rows[1]) == f"never: not evaluated at 128 tokens {short}"


@pytest.mark.parametrize("said, changes", [
    ("has threads 4, the baseline 2", {"start": START | {"threads": 4}}),
    ("has torch 2.14, the baseline 2.13", {"start": START | {"torch": "2.14"}}),
    ("has world 2, the baseline 1", {"start": START | {"world": 2}}),
    ("has shards ffff, the baseline 20e7", {"shards": "ffff"}),
    ("has pairs none, the baseline nsp", {"pairs": "none"}),
    ("began with trained weights", {"init": "runs/base/model"}),
    ("was evaluated on other tokens or masks", {"unigram": 6.50001})])
def test_runs_that_may_not_race(tmp_path, race_of, said, changes):
    base = write(tmp_path / "base", BASE)
    other = write(tmp_path / "other", BASE, **changes)
    told = race_of(base, other)
    assert told.startswith(f"race.py: {other} {said}") and "\n" not in told
    # What it may change: as the seconds of a step, or masks in training
    same = write(tmp_path / "same", BASE, unigram=6.5 + 1e-9, mask_fraction=0.15)
    assert len(race_of(base, same)) == 4


@pytest.mark.parametrize("said, content", [
    ("No such file", None),
    ("is damaged, or the run has not ended", '{"kind": "ru'),
    ("is damaged", ""),
    ("is damaged", '{"kind": "train", "step": 1}\n'),
    ("is damaged", "[1]\n"),
    ("lacks 'step'", json.dumps(START | {"run": SETTINGS}) + '\n{"kind": "eval", "phase": 1, '
                                                           '"mlm_loss": 4}\n'),
    ("lacks 'run'", '{"kind": "run"}\n'),
    ("was never evaluated", json.dumps(START | {"run": SETTINGS}) + "\n")])
def test_files_that_are_no_runs(tmp_path, race_of, said, content):
    base = write(tmp_path / "base", BASE)
    folder = tmp_path / "other"
    folder.mkdir()
    if content is not None:
        (folder / "metrics.jsonl").write_text(content)
    told = race_of(base, str(folder))
    assert told.startswith("race.py: ") and said in told and "\n" not in told
