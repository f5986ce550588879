"""Tests race.py on logs made by hand: which run is first, and which runs may not race."""
import json
import sys

import pytest

from tests.course import race

START = {"kind": "run", "device": "cpu", "ranks": 1, "torch": "2.13", "python": "3.11",
         "phases": [{"seq_len": 64, "global_batch": 32}, {"seq_len": 128, "global_batch": 16}]}
FLAGS = {"shards": "20e7", "pairs": "nsp", "init": "None"}
BASE = [(100, 1, 5.0), (200, 1, 4.0), (300, 2, 4.5), (400, 2, 4.2)]


def write(name, evaluations, unigram=6.5, **changes):
    """Writes the metrics.jsonl of a run with evaluations (step, phase, loss), each after the lines
    of 50 steps and half a line. `seconds` grows by 0.6 with each step. changes: to START, FLAGS."""
    lines = [START | {"flags": FLAGS | changes} | changes]
    for step, phase, loss in evaluations:
        for number in range(step - 49, step + 1):
            lines.append({"kind": "train", "step": number, "phase": phase,
                          "seconds": 0.6 * len(lines)})
        lines.append({"kind": "eval", "step": step, "phase": phase, "mlm_loss": loss,
                      "unigram_loss": unigram + phase})
    name.mkdir()
    text = "\n".join(map(json.dumps, lines)).replace('{"kind": "eval"', '{"kin\n{"kind": "eval"')
    (name / "metrics.jsonl").write_text(text)


def test_the_first_evaluation_at_or_below_the_goal_counts(tmp_path, monkeypatch, capsys):
    write(tmp_path / "base", BASE)
    # In phase 1 it is below the goal at once, but at a different length. A crash has lost steps 101
    # to 150.
    write(tmp_path / "mine", [(50, 1, 3.0), (150, 2, 4.201), (100, 2, 4.2), (150, 2, 4.3)])
    write(tmp_path / "slow", [(100, 2, None), (200, 2, 4.3), (300, 2, 4.4)])
    write(tmp_path / "short", [(100, 1, 3.0)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["race.py", "base", "mine", "slow", "short"])
    race.main()
    goal, _, *rows = capsys.readouterr().out.splitlines()
    assert "4.200" in goal and "128" in goal
    assert [" ".join(row.split()) for row in rows] == [
        "400 2.03 1.000 4,800 1.000 4.200 base", "100 1.52 0.749 2,400 0.500 4.300 mine",
        "never: its best is 4.300 slow", "never: not evaluated at 128 tokens short"]


@pytest.mark.parametrize("words, changes", [
    ("has ranks 2, the baseline 1", {"ranks": 2}),
    ("has shards ffff, the baseline 20e7", {"shards": "ffff"}),
    ("began with trained weights", {"init": "runs/base/model"}),
    ("was evaluated on other tokens or masks", {"unigram": 6.50001})])
def test_runs_that_may_not_race(tmp_path, words, changes):
    write(tmp_path / "base", BASE)
    write(tmp_path / "other", BASE, **changes)
    base = race.read(tmp_path / "base")
    with pytest.raises(race.RaceError, match=f"other {words}"):
        race.check(base, race.read(tmp_path / "other"), base.points[-1])


@pytest.mark.parametrize("words, content", [
    ("IndexError", '{"kind": "ru'), ("IndexError", ""), ("'flags'", '{"kind": "run"}\n'),
    ("was never evaluated", json.dumps(START | {"flags": FLAGS}))])
def test_files_that_are_no_runs(tmp_path, words, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(race.RaceError, match=words):
        race.read(tmp_path)
