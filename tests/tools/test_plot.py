"""Tests plot.py: which lines count, where it draws them, its message without matplotlib."""
import os
import sys

import pytest

from tests.tools import plot

# Step 2 occurs twice, one line is cut off, one of a kind of its own, and a crash has lost steps 3
# to 5.
METRICS = """\
{"kind": "run", "phases": [{"seq_len": 64, "global_batch": 8}, {"seq_len": 128, "global_batch": 5}]}
{"kind": "train", "step": 1, "phase": 1, "seconds": 1800, "mlm_loss": 6.0, "wait_seconds": null}
{"kind": "train", "step": 2, "phase": 1, "seconds": 3600, "mlm_loss": 9.0}
{"kind": "tr
{"kind": "train", "step": 2, "phase": 1, "seconds": 3600, "mlm_loss": 5.0}
{"kind": "eval", "step": 2, "mlm_loss": 5.5}
{"kind": "of a variant", "step": 2, "mlm_loss": 99.0}
{"kind": "train", "step": 3, "phase": 2, "seconds": 9000, "mlm_loss": 9.0}
{"kind": "train", "step": 4, "phase": 2, "seconds": 9000, "mlm_loss": 9.0}
{"kind": "train", "step": 5, "phase": 2, "seconds": 9000, "mlm_loss": 9.0}
{"kind": "train", "step": 3, "phase": 2, "seconds": 5400, "mlm_loss": 4.0}
"""


@pytest.fixture
def plot_run(tmp_path, monkeypatch):
    """Returns a function that runs plot.py on a folder, by two of its names, with this text as its
    metrics.jsonl."""
    monkeypatch.chdir(tmp_path)

    def run(text):
        (tmp_path / "metrics.jsonl").write_text(text)
        flags = "--against tokens --picture x.svg"
        monkeypatch.setattr(sys, "argv", f"- . ../{tmp_path.name} {flags}".split())
        plot.main()

    return run


def test_what_a_crash_has_lost_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    steps = plot.read_run(tmp_path)
    found = [(line["mlm_loss"], line["tokens"], line["hours"]) for line in steps.values()]
    assert found == [(6.0, 512, 0.5), (5.0, 1024, 1.0), (4.0, 1664, 1.5)]
    assert steps[2]["held_out"] == 5.5


def test_lines_that_a_crash_has_lost_before_a_resume_are_no_error(tmp_path):
    text = METRICS.replace('"train", "step": 2', '"train", "step": 1')
    (tmp_path / "metrics.jsonl").write_text(text)
    steps = plot.read_run(tmp_path)
    assert {step: line["tokens"] for step, line in steps.items()} == {1: 512, 3: 512 + 2 * 640}


def test_a_run_is_drawn(plot_run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "module://of_a_notebook")
    plot_run(METRICS)
    assert "MPLBACKEND" not in os.environ, "matplotlib refuses the backend of a notebook's kernel"
    assert "<!-- tokens -->" in (tmp_path / "x.svg").read_text(), (
        "no axis is labelled tokens, as --against says")


def test_each_panel_has_its_field_of_each_run(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, picture: drawn.extend(self.axes))
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    steps = plot.read_run(tmp_path)
    plot.draw({"one": steps, "two": steps}, "hours", tmp_path / "x.svg")
    for axes, (field, title) in zip(drawn, plot.PANELS.items(), strict=True):
        assert axes.get_title() == title
        assert len({line.get_color() for line in axes.lines}) == 2, "the two runs look alike"
        for line in axes.lines:
            assert [*line.get_xdata()] == [0.5, 1.0, 1.5], title
            assert [*line.get_ydata()] == [step.get(field) for step in steps.values()], title


def test_without_matplotlib_it_says_so(plot_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="plot.py: ModuleNotFoundError: .*matplotlib"):
        plot_run(METRICS)


@pytest.mark.parametrize("text", [
    "{", METRICS.replace('"step": 1,', '"step": 0,'), '{"kind": "train", "step": 0}',
    '{"kind": "train", "step": 1}', '{"kind": "eval"}'])
def test_what_is_no_run_is_one_line(plot_run, text):
    with pytest.raises(SystemExit, match="plot.py: .* train.py"):
        plot_run(text)
