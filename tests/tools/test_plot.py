"""tests/tools/plot.py: which lines count, where they stand, what is said without matplotlib."""
import json
import sys

import pytest

from tests.tools import plot

PHASES = [{"seq_len": 64, "global_batch": 10}, {"seq_len": 128, "global_batch": 5}]


def test_runs_are_read_and_drawn(tmp_path, monkeypatch):
    lines = [{"kind": "run", "phases": PHASES}]
    for step, phase, loss in (1, 1, 6.0), (2, 1, 9.0), (2, 1, 5.0), (3, 2, 4.0):
        lines.append({"kind": "train", "step": step, "phase": phase, "mlm_loss": loss,
                      "seconds": 1800 * step, "wait_seconds": None})
    lines.append({"kind": "eval", "step": 2, "mlm_loss": 5.5})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    steps = plot.read_run(tmp_path)
    found = [(line["mlm_loss"], line["tokens"], line["hours"]) for line in steps.values()]
    assert found == [(6.0, 640, 0.5), (5.0, 1280, 1.0), (4.0, 1920, 1.5)]
    assert steps[2]["held_out"] == 5.5

    pytest.importorskip("matplotlib")
    plot.draw({"a": steps, "b": steps}, "tokens", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path), "--picture", "a.png"])
    with pytest.raises(SystemExit, match="plot.py: ModuleNotFoundError: .*matplotlib"):
        plot.main()


@pytest.mark.parametrize("content", ["{", '{"kind": "train", "step": 1}', '{"kind": "eval"}'])
def test_what_is_no_run_is_one_line(tmp_path, monkeypatch, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path), "--picture", str(tmp_path / "a")])
    with pytest.raises(SystemExit, match="plot.py: .* train.py"):
        plot.main()
