"""race.py on logs made by hand: who came first, and who may not race."""
import json
import sys

import pytest

from tests.course import race

START = {"kind": "run", "device": "cpu", "ranks": 1, "torch": "2.13", "python": "3.11"}
FLAGS = {"shards": "20e7", "pairs": "nsp", "init": "None", "phase1.seq_len": "64",
         "phase2.seq_len": "128", "phase1.global_batch": "32", "phase2.global_batch": "16"}
BASE = [(100, 1, 5.0), (200, 1, 4.0), (300, 2, 4.5), (400, 2, 4.2)]


@pytest.fixture
def race_of(tmp_path, monkeypatch, capsys):
    """Runs race.py on runs, {folder: (evaluations (step, phase, loss), what is changed in START and
    FLAGS, unigram loss)}; returns its lines, or what it ended with."""
    def run(**runs):
        monkeypatch.chdir(tmp_path)
        for name, (evaluations, changes, unigram) in runs.items():
            lines = [START | {"flags": FLAGS | changes} | changes]
            for step, phase, loss in evaluations:
                for number in range(step - 49, step + 1):
                    lines.append({"kind": "train", "step": number, "phase": phase,
                                  "seconds": 0.6 * number})
                lines.append({"kind": "eval", "step": step, "phase": phase, "mlm_loss": loss,
                              "unigram_entropy": unigram + phase})
            (tmp_path / name).mkdir()
            (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        monkeypatch.setattr(sys, "argv", ["race.py", *runs])
        try:
            race.main()
        except SystemExit as error:
            return [error.code]
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return run


def test_the_first_evaluation_at_or_below_the_goal_at_its_length_counts(race_of):
    # In phase 1 `mine` is below the goal at once, but at another length
    said = race_of(base=(BASE, {}, 6.5),
                   mine=([(50, 1, 3.0), (100, 2, 4.201), (150, 2, 4.2), (200, 2, 4.3)], {}, 6.5),
                   slow=([(100, 2, None), (200, 2, 4.3), (300, 2, 4.4)], {}, 6.5),
                   short=([(100, 1, 3.0)], {}, 6.5))
    assert "4.200" in said[0] and "128" in said[0]
    assert said[2:] == ["400 4.00 1.000 4,800 1.000 4.200 base",
                        "150 1.50 0.375 3,200 0.667 4.300 mine",
                        "never: its best is 4.300 slow",
                        "never: not evaluated at 128 tokens short"]


@pytest.mark.parametrize("words, changes, unigram", [
    ("has torch 2.14, the baseline 2.13", {"torch": "2.14"}, 6.5),
    ("has ranks 2, the baseline 1", {"ranks": 2}, 6.5),
    ("has shards ffff, the baseline 20e7", {"shards": "ffff"}, 6.5),
    ("began with trained weights", {"init": "runs/base/model"}, 6.5),
    ("was evaluated on other tokens or masks", {}, 6.50001)])
def test_runs_that_may_not_race(race_of, words, changes, unigram):
    said, = race_of(base=(BASE, {}, 6.5), other=(BASE, changes, unigram))
    assert said.startswith(f"race.py: other {words}")


@pytest.mark.parametrize("words, content", [
    ("No such file", None), ("is damaged", '{"kind": "ru'), ("is damaged", ""),
    ("lacks 'flags'", '{"kind": "run"}\n'),
    ("was never evaluated", json.dumps(START | {"flags": FLAGS}))])
def test_files_that_are_no_runs(tmp_path, words, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(race.RaceError, match=words):
        race.read(tmp_path)
