"""timeline.py: what it records of a step, and how it draws it."""
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
from tests.training import SHORT, shrink

# ----- Drawn -----

STEPS = {
    # Rank 0: two buckets, which a thread has averaged. Rank 1: none has noted times.
    "long": [
        ("rank 0  460 ms", "=w", [0, 200, 460]),
        ("  bucket 0.0  2.10 MB", ".#", [50, 50, 130]),
        ("  bucket 0.1  2.10 MB", ".#", [80, 130, 131]),
        ("rank 1  240 ms", "=w", [0, 200, 240]),
        ("  rank 1: all in finish", ".#", [200, 200, 240])],
    "short": [("rank 0  230 ms", "=w", [0, 100, 230])]}
TEXT = """\
long:  = backward  w waiting  . complete, not begun  # averaging
rank 0  460 ms          ====================wwwwwwwwwwwwwwwwwwwwwwwwww
  bucket 0.0  2.10 MB        ########
  bucket 0.1  2.10 MB           .....#
rank 1  240 ms          ====================wwww
  rank 1: all in finish                     ####
short:  = backward  w waiting  . complete, not begun  # averaging
rank 0  230 ms          ==========wwwwwwwwwwwww
"""


@pytest.mark.parametrize("with_matplotlib", [True, False])
def test_saved_steps_are_drawn_on_one_scale(monkeypatch, capsys, tmp_path, with_matplotlib):
    monkeypatch.chdir(tmp_path)
    for title, rows in STEPS.items():
        (tmp_path / f"{title}.json").write_text(json.dumps(rows))
    expected = TEXT
    if with_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        expected += "no picture without matplotlib: pip install matplotlib\n"
    monkeypatch.setattr(sys, "argv", "- --draw long.json short.json --picture x.svg".split())
    timeline.main()
    assert capsys.readouterr().out == expected
    if with_matplotlib:
        written = re.findall("<!-- (.*) -->", (tmp_path / "x.svg").read_text())     # as curves
        for label in ("long", "short", "rank 1  240 ms", "backward", "waiting in finish",
                      "bucket complete, not begun", "averaging"):
            assert written.count(label) == 1, f"{label!r} stands {written.count(label)} times"


# ----- Recorded -----

def test_a_rank_draws_what_was_noted_in_this_step(monkeypatch):
    # Backward of two micro-batches and `finish`, in seconds.
    monkeypatch.setattr(timeline, "MOMENTS", [7, 8, 9, 9.25, 9.5, 10])
    now = SimpleNamespace(bytes_sent=2.1e6, launched=9.125, began=9.25, ended=9.375)
    before = SimpleNamespace(bytes_sent=2.1e6, launched=5, began=6, ended=7)
    of_rank = ("rank 3  1000 ms", "=w", [0, 500, 1000])
    assert timeline.rows_of(3, [before, now]) == [
        of_rank, ("  bucket 3.1  2.10 MB", ".#", [125, 250, 375])]
    for untimed in [], [before]:                     # a variant's buckets, or steps
        assert timeline.rows_of(3, untimed) == [
            of_rank, ("  rank 3: all in finish", ".#", [500, 500, 1000])]


def record(world, folder, argv):
    """Runs timeline.py on this rank. Returns the temporary files that are left when it ends."""
    shrink()
    train.STARTED = time.monotonic()
    tempfile.tempdir = tempfile.mkdtemp(dir=folder)
    dist.init = lambda timeout: world
    os._exit = lambda status: sys.exit(status or str(os.listdir(tempfile.tempdir)))
    sys.argv = ["timeline.py", *map(str, argv)]
    with pytest.raises(SystemExit) as end:
        timeline.main()
    return end.value.code


@pytest.mark.parametrize("size, variant, megabytes", [
    (2, [], 0.64),                       # 160,000 numbers of 4 bytes
    (2, ["--variant", "topk"], 0.013),   # a hundredth of them, and where they were
    (1, [], 0)])
def test_the_second_step_of_a_training(shards, tmp_path, size, variant, megabytes):
    path = tmp_path / "step.json"
    argv = ["--data", shards, *SHORT, "--bucket-mb", 0.1, "--at-step", 2, "--save", path, *variant]
    assert run_ranks(record, size, tmp_path, tmp_path, argv) == ["[]"] * size
    rows = json.loads(path.read_text())
    starts = [number for number, (label, *_) in enumerate(rows) if label.startswith("rank ")]
    assert len(starts) == size, rows
    for begin, end in zip(starts, [*starts[1:], None]):
        (_, _, (start, waits, ended)), *of_buckets = rows[begin:end]
        assert 0 == start < waits < ended and len(of_buckets) > 2, rows
        free = sent = 0                              # when the communication thread is; MB
        for label, _, (launched, began, averaged) in of_buckets:
            assert start < launched <= began < averaged <= ended and free <= began, label
            assert launched < waits if size > 1 else waits <= launched == began, label
            free = averaged
            sent += float(label.split()[2])
        assert sent == pytest.approx(megabytes, abs=0.02), of_buckets


def test_a_wrong_variant_is_one_line():
    process = run_script("tests/tools/timeline.py", "--variant", "topk", "no-such-one")
    assert (process.returncode, process.stderr) == (
        2, "timeline.py: unrecognized arguments: --variant=no-such-one\n")
