"""tests/tools/timeline.py: what it records of a step, and how it draws it."""
import json
import os
import re
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest

import dist
import train
from tests.ranks import run_ranks, run_script
from tests.tools import timeline
from tests.training import LITTLE, shrink

# Rank 0 of a step: two buckets, which a thread has averaged. Rank 1: none has noted times.
RECORD = [
    ("rank 0  460 ms", "=w", [0, 200, 460]),
    ("  bucket 0.0  2.10 MB", ".#", [50, 50, 130]),
    ("  bucket 0.1  2.10 MB", ".#", [80, 130, 131]),
    ("rank 1  240 ms", "=w", [0, 200, 240]),
    ("  rank 1: all in finish", ".#", [200, 200, 240]),
]
TEXT = """\
:  = backward  w waiting  . complete, not begun  # averaging
rank 0  460 ms          ====================wwwwwwwwwwwwwwwwwwwwwwwwww
  bucket 0.0  2.10 MB        ########
  bucket 0.1  2.10 MB           .....#
rank 1  240 ms          ====================wwww
  rank 1: all in finish                     ####
"""


@pytest.fixture
def drawn(monkeypatch, capsys, tmp_path):
    """Saves steps, {title: record}, draws them by --draw, and returns what that prints."""
    def run(steps, *argv):
        files = [tmp_path / f"{title}.json" for title in steps]
        for file, rows in zip(files, steps.values()):
            file.write_text(json.dumps(rows))
        monkeypatch.setattr(sys, "argv", ["timeline.py", "--draw", *map(str, files), *argv])
        timeline.main()
        return capsys.readouterr().out

    return run


def test_a_recorded_step_as_text(drawn):
    assert drawn({"none": RECORD}) == "none" + TEXT


def test_steps_have_one_scale(drawn):
    short = [("rank 0  230 ms", "=w", [0, 100, 230])]
    text = drawn({"long": RECORD, "short": short})
    assert text.startswith("long" + TEXT + "short:")
    assert text.endswith("\nrank 0  230 ms          ==========wwwwwwwwwwwww\n")


def test_a_rank_draws_what_was_noted_in_this_step(monkeypatch):
    def bucket(*moments):
        launched, began, ended = moments
        return SimpleNamespace(bytes_sent=2.1e6, launched=launched, began=began, ended=ended)

    # Backward of two micro-batches and `finish`, in seconds.
    monkeypatch.setattr(timeline, "MOMENTS", [7, 8, 9, 9.25, 9.5, 10])
    buckets = [bucket(9.125, 9.25, 9.375), bucket(5, 6, 7), bucket(9.25, 9.5, 9.75)]
    of_rank = ("rank 3  1000 ms", "=w", [0, 500, 1000])
    assert timeline.rows_of(3, buckets) == [
        of_rank,
        ("  bucket 3.0  2.10 MB", ".#", [125, 250, 375]),
        ("  bucket 3.2  2.10 MB", ".#", [250, 500, 750])]
    # Of one rank, which launches nothing
    assert timeline.rows_of(3, [SimpleNamespace(bytes_sent=0, began=9.5, ended=9.75)]) == [
        of_rank, ("  bucket 3.0  0.00 MB", ".#", [500, 500, 750])]
    # Of a variant without buckets; of one that averages in other steps.
    for untimed in [], [bucket(5, 6, 7)]:
        assert timeline.rows_of(3, untimed) == [
            of_rank, ("  rank 3: all in finish", ".#", [500, 500, 1000])]


def test_a_picture_has_a_panel_for_each_step(drawn, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.svg"
    drawn({"one": RECORD, "two": RECORD}, "--picture", str(path))
    written = re.findall("<!-- (.*) -->", path.read_text())      # SVG has text as curves
    for label in "one", "two", "rank 1  240 ms":
        assert label in written
    for legend in "backward", "waiting in finish", "bucket complete, not begun", "averaging":
        assert written.count(legend) == 1


def test_without_matplotlib_one_line_says_so(drawn, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = drawn({"none": RECORD}, "--picture", str(tmp_path / "steps.png"))
    assert text == "none" + TEXT + "no picture without matplotlib: pip install matplotlib\n"


def draw_here(world, folder, argv):
    """Runs timeline.py on one rank of several. Returns, of the moment when it ends the process: how
    many calls it has noted, whether the last backward began after the last loss was there, and
    which temporary files are left."""
    shrink()
    train.STARTED = time.monotonic()
    tempfile.tempdir = tempfile.mkdtemp(dir=folder)
    losses = []
    loss_sum = train.loss_sum

    def noted_loss(logits, labels):
        loss = loss_sum(logits, labels)
        losses.append(time.perf_counter())
        return loss

    def leave(status):
        began = timeline.MOMENTS[-4]
        sys.exit((len(timeline.MOMENTS) // 2, began > losses[-1], os.listdir(tempfile.tempdir)))

    train.loss_sum = noted_loss
    dist.init = lambda timeout: world
    os._exit = leave
    sys.argv = ["timeline.py", *map(str, argv)]
    with pytest.raises(SystemExit) as end:
        timeline.main()
    return end.value.code


@pytest.fixture
def recorded(shards, tmp_path):
    """Returns the rows of the second step of a short training, which leaves no temporary files."""
    def run(ranks, *argv):
        path = tmp_path / "step.json"
        argv = [*LITTLE, "--bucket-mb", 0.1, "--at-step", 2, "--save", path, *argv]
        ended = run_ranks(draw_here, ranks, tmp_path, tmp_path, ["--data", shards, *argv])
        # Each step has a call of backward and one of finish.
        assert ended == [(4, True, [])] * ranks
        return json.loads(path.read_text())

    return run


@pytest.mark.parametrize("argv,megabytes", [([], 0.64), (["--variant", "topk"], 0.013)])
def test_a_step_of_two_ranks(recorded, argv, megabytes):
    rows = recorded(2, *argv)
    half = len(rows) // 2
    for rank, ((label, kinds, moments), *of_buckets) in enumerate([rows[:half], rows[half:]]):
        start, waits, ended = moments
        assert re.fullmatch(rf"rank {rank}  \d+ ms", label) and kinds == "=w"
        assert 0 == start < waits < ended
        assert len(of_buckets) > 2
        sent = 0
        free = 0                                     # when the communication thread is
        for number, (label, kinds, (launched, began, averaged)) in enumerate(of_buckets):
            name, size = re.fullmatch(r"  bucket (\S+)  (\S+) MB", label).groups()
            assert name == f"{rank}.{number}" and kinds == ".#"
            assert start < launched < waits
            assert max(launched, free) <= began < averaged <= ended
            free = averaged
            sent += float(size)
        # 160,000 numbers of 4 bytes; topk sends a hundredth of them, and where they were.
        assert sent == pytest.approx(megabytes, abs=0.02)


def test_one_rank_averages_in_finish(recorded):
    (_, _, (start, waits, ended)), *buckets = recorded(1)
    assert 0 == start < waits < ended and len(buckets) > 1
    for _, _, (launched, began, averaged) in buckets:
        assert waits <= launched == began <= averaged <= ended


def test_a_wrong_variant_is_one_line():
    process = run_script("tests/tools/timeline.py", "--variant", "topk", "no-such-one")
    assert process.returncode == 2
    line, = process.stderr.splitlines()
    assert line == "timeline.py: unrecognized arguments: --variant=no-such-one"
