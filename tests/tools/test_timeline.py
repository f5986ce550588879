"""Tests timeline.py: what it records of a step, and how it draws the step."""
import json
import os
import re
import sys
import tempfile
from types import SimpleNamespace

import pytest

import dist
from tests.ranks import run_ranks, run_script
from tests.tools import timeline
from tests.training import SHORT, shrink

# ----- Drawn -----

# As --save writes them. Rank 0 has two buckets, averaged by a thread; rank 1 has none with times.
LONG = """[
    ["rank 0  460 ms", "=w", [0, 200, 460]],
    ["  bucket 0.0  2.10 MB", ".#", [50, 50, 130]],
    ["  bucket 0.1  2.10 MB", ".#~#", [80, 130, 150, 190, 200]],
    ["  bucket 0.2  0.01 MB", ".#~#", [200, 200, 201, 202, 203]],
    ["rank 1  240 ms", "=w", [0, 200, 240]],
    ["  rank 1: all in finish", ".#", [200, 200, 240]]]"""
SHORTER = '[["rank 0  230 ms", "=w", [0, 100, 230]]]'
KEY = "= backward  w waiting  . complete, not begun  # averaging: computing  ~ in collectives"
TEXT = f"""\
shorter:  {KEY}
rank 0  230 ms          ==========wwwwwwwwwwwww
long:  {KEY}
rank 0  460 ms          ====================wwwwwwwwwwwwwwwwwwwwwwwwww
  bucket 0.0  2.10 MB        ########
  bucket 0.1  2.10 MB           .....##~~~~#
  bucket 0.2  0.01 MB                       #
rank 1  240 ms          ====================wwww
  rank 1: all in finish                     ####
"""


def test_saved_steps_are_drawn_on_one_scale(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.json").write_text(LONG)
    (tmp_path / "shorter.json").write_text(SHORTER)
    command = "- --draw shorter.json long.json --picture x.svg"
    monkeypatch.setattr(sys, "argv", command.split())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        timeline.main()
    without = "no picture without matplotlib: pip install matplotlib\n"
    assert capsys.readouterr().out == TEXT + without

    pytest.importorskip("matplotlib")
    timeline.main()
    assert capsys.readouterr().out == TEXT
    # Letters are drawn as curves; their text is in comments.
    written = re.findall("<!-- (.*) -->", (tmp_path / "x.svg").read_text())
    for label in ("long", "shorter", "rank 1  240 ms", *timeline.NAMES.values()):
        assert written.count(label) == 1, f"{label!r} occurs {written.count(label)} times, not once"

    (tmp_path / "b").mkdir()
    (tmp_path / "b/long.json").write_text(LONG)
    monkeypatch.setattr(sys, "argv", command.replace("shorter", "b/long").split())
    timeline.main()
    said = capsys.readouterr().out
    assert "\nlong:" in said and "b/long:" in said, "of two files of one name, one is not drawn"


# ----- Recorded -----

def test_a_rank_draws_what_was_noted_in_this_step(monkeypatch):
    # Start and end of two micro-batches' backward and of `finish`, in seconds.
    monkeypatch.setattr(timeline, "MOMENTS", [7, 8, 9, 9.25, 9.5, 10])
    # Collectives: one in the other, and one after `now`.
    monkeypatch.setattr(
        timeline, "COLLECTIVES", [(9.3125, 9.34375), (9.28125, 9.34375), (9.5, 9.75)])
    now = SimpleNamespace(bytes_sent=2.1e6, launched=9.125, began=9.25, ended=9.375)
    before = SimpleNamespace(began=6)
    of_rank = ("rank 3  1000 ms", "=w", [0, 500, 1000])
    of_bucket = ("  bucket 3.1  2.10 MB", ".#~#", [125, 250, 281.25, 343.75, 375])
    of_none = ("  rank 3: all in finish", ".#~#", [500, 500, 500, 750, 1000])
    assert timeline.rows_of(3, [before, now]) == [of_rank, of_bucket]
    untimed = SimpleNamespace()                      # as in a variant
    for buckets in [before, untimed], []:
        assert timeline.rows_of(3, buckets) == [of_rank, of_none], buckets


def record(world, folder, argv):
    """Runs timeline.py on this rank. Returns the temporary files that it leaves, as text, and the
    names of the steps that it draws."""
    shrink()
    drawn = []
    draw = timeline.draw

    def noted_draw(steps, picture):
        drawn.extend(steps)
        draw(steps, picture)

    timeline.draw = noted_draw
    tempfile.tempdir = tempfile.mkdtemp(dir=folder)
    dist.init = lambda timeout: world
    os._exit = lambda status: sys.exit(status or str(os.listdir(tempfile.tempdir)))
    sys.argv = ["timeline.py", *map(str, argv)]
    with pytest.raises(SystemExit) as end:
        timeline.main()
    return end.value.code, drawn


@pytest.mark.parametrize("size, step, variant, megabytes, in_a_bucket", [
    (2, 2, [], 0.64, 1),                    # 160,000 numbers of 4 bytes, by one all_reduce
    (2, 2, ["--variant", "topk"], 0.013, 2),    # a hundredth of them, and their indices
    (1, 1, [], 0, 0), (1, 2, [], 0, 0),
    (1, 1, ["--at-step", 9, "--steps", 1, 0], 0, 0),
    (1, 3, ["--steps", 1, 4], 0, 0)])                       # its first phase has one step
def test_a_step_of_a_training(
        shards, tmp_path, size, step, variant, megabytes, in_a_bucket):
    path = tmp_path / "step.json"
    argv = ["--data", shards, *SHORT, "--bucket-mb", 0.1, "--at-step", step, "--save", path,
            *variant]
    by_rank_0, *others = run_ranks(record, size, tmp_path, tmp_path, argv)
    assert by_rank_0 == ("[]", [f"step {step}"]), "files are left, or a different step is drawn"
    assert others == [("[]", [])] * (size - 1)
    rows = json.loads(path.read_text())
    ranks = []
    sent = 0                             # MB, by all ranks
    collectives = []                     # of each bucket
    for label, kinds, (begin, middle, *inner, end) in rows:
        if label.startswith("rank "):
            ranks.append(label.split()[1])
            assert 0 == begin < middle < end, label
            waits, ended = middle, end
            free = 0                     # when the communication thread gets free
        else:
            assert free <= middle < end <= ended, label
            assert 0 < begin < waits if size > 1 else waits <= begin == middle, label
            assert inner == sorted(inner) and len(inner) == 2 * kinds.count("~"), label
            collectives.append(kinds.count("~"))
            free = end
            sent += float(label.split()[2])
    assert ranks == ["0", "1"][:size] and len(rows) > 3 * size, rows
    assert sent == pytest.approx(size * megabytes, abs=0.03), rows
    assert set(collectives) == {in_a_bucket}, f"{collectives} collectives are drawn in the buckets"


@pytest.mark.parametrize("gbps, argv, said", [
    ("1", "--variant topk no-such-one", "unrecognized arguments: --variant=no-such-one"),
    ("1", "--variant synchronised", "unrecognized arguments: --variant=synchronised"),
    ("0", "", r"argument GBPS: must be in .*"),                # the variants' network is used
    ("1", "--picture=", "argument --picture: the path is empty.*"),
    ("1", "--picture=step.mp3", r"argument --picture: .*\.png, \.svg or \.pdf"),
    ("1", "--at-step=0", "argument --at-step: must be in .*"),
    ("1", "--draw nowhere.json", "no picture of what --save has written: .*nowhere.json.*"),
    ("1", "--draw TMP/other.json", "no picture of what --save has written: .*")])
def test_what_is_wrong_is_one_line(monkeypatch, tmp_path, gbps, argv, said):
    monkeypatch.setenv("GBPS", gbps)
    (tmp_path / "other.json").write_text("3")
    argv = argv.replace("TMP", str(tmp_path))
    process = run_script("tests/tools/timeline.py", *argv.split())
    assert process.returncode == 2, process.stderr
    assert re.fullmatch(rf"timeline.py: {said}\n", process.stderr), process.stderr
