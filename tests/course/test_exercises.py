"""Tests exercises.py: its table, copies, checks, hints, grades; verify, rewards, the open task."""
import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.course import compete, exercises, rewards, verify
from tests.course.exercises import EXERCISES
from tests.course.hints import HINTS
from tests.ranks import begin, together

HEAD = "def learning_rate(done, phase):\n"


@pytest.mark.parametrize("name", EXERCISES)
def test_the_table_fits_the_code(name):
    for path, function in exercises.functions_of(name):
        source = (ROOT / path).read_text()
        blanked = exercises.blank(source, function)
        node = exercises.find(blanked, function)
        assert ast.get_docstring(node) and len(node.body) == 2, (
            f"blanked, {function} must be a docstring and one statement, to write it from")
        text = exercises.text_of(source, function)
        assert exercises.with_function(blanked, function, text) == source
    assert sum(points for points, _, _ in exercises.ideas_of(name)) == 10
    assert HINTS[name].count("\n\n") == 2, f"{name} has not three hints"
    cases = verify.solutions(name)
    assert {"wrong", "right"} <= {kind for _, kind, _ in cases} <= {*verify.POINTS}
    assert len(cases) == verify.FILE.read_text().count(f"### {name}, ")
    for what, _, changed in cases:
        compile(*changed.values(), what, "exec")


def run(folder, *arguments):
    """Runs exercises.py in a folder. Returns its exit status, and its output as text."""
    done = subprocess.run([sys.executable, "tests/course/exercises.py", *arguments], cwd=folder,
                          capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_what_a_student_has_and_sees(tmp_path):
    """The copy has the exercises schedule and lamb blank."""
    folder = tmp_path / "copy"
    exercises.start(folder, ["schedule", "lamb"])
    right = shutil.copytree(folder, tmp_path / "right")
    exercises.release(right, ["schedule"])
    other = shutil.copytree(right, tmp_path / "other")
    path = other / "optim.py"
    path.write_text(exercises.with_function(
        path.read_text(), "learning_rate", f"{HEAD}    return 1e-9\n"))
    solved, wrong = (begin(run, copy, "check", "schedule") for copy in (right, other))

    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert not [name for name in names if name.startswith(exercises.NOT_FOR_STUDENTS)]
    assert "tests/course/README.md" not in names
    assert [name for name in EXERCISES if exercises.blank_in(folder, name)] == ["schedule", "lamb"]
    for command in ("start", "x"), ("verify",):
        refused = f"exercises.py: {command[0]} needs the solutions, which are not in this copy\n"
        assert run(folder, *command) == (1, refused)
    assert run(folder, "check", "schedule") == (
        1, "schedule: still blank: learning_rate, progress\n")
    # The variant LANS would give LAMB away.
    assert exercises.BLANK in (folder / "tests/variants/lans.py").read_text()
    for count in 1, 2, 3, 3:
        assert run(folder, "hint", "schedule")[1].count(" of 3: ") == count

    (status, said), (status_of_wrong, what_is_wrong) = solved.result(), wrong.result()
    assert status_of_wrong == 1 and "\n   5 of 10  points, the most" in what_is_wrong
    assert "; yours is 1e-09\n" in what_is_wrong and "AssertionError" not in what_is_wrong
    assert status == 0 and "\n  10 of 10  points\n" in said
    assert "nvidia-64k, phase 1" in said and "still blank in this folder: lamb" in said


SUBMISSIONS = [                # (points, what is wrong, the body of learning_rate)
    # The slowest is first.
    (5, "Failed: after 10 s it stands at test_graders.py:", "while True: time.sleep(0.1)"),
    (0, "the tests ended without a report", "import posix; posix._exit(0)"),
    (0, "'(' was never closed (optim.py, line", "return ("),
    (10, "", "return helper(done, phase)  # même"),
    (5, "NotImplementedError at optim.py:", None),              # no optim.py; `progress` is right
    (0, "optim.py is in it twice", "return 1"),
    (0, "not tested", "raise KeyboardInterrupt"),
    (0, "not tested: NameError: name 'Tensor' is not", "return 1\ndef f(x: Tensor): return x")]


def test_a_zip_beside_a_folder_with_its_name(tmp_path):
    """They hold two versions of a file, also where both are in another zip."""
    (tmp_path / "in/work").mkdir(parents=True)
    (tmp_path / "in/work/optim.py").write_text("1")
    shutil.make_archive(tmp_path / "work", "zip", tmp_path / "in/work")
    (tmp_path / "work.zip").rename(tmp_path / "in/work.ZIP")
    shutil.make_archive(tmp_path / "all", "zip", tmp_path / "in")
    for number, submission in enumerate([tmp_path / "in", tmp_path / "all.zip"]):
        place = tmp_path / str(number)
        exercises.unpack(submission, ["lamb"], place)
        with pytest.raises(exercises.CourseError, match="optim.py is in it twice"):
            exercises.handed_in(place, Path("optim.py"))


def test_folders_named_like_files(tmp_path):
    """One is no zip, and the other no program: what else is handed in counts."""
    for name in "in/all.zip", "in/optim.py":
        (tmp_path / name).mkdir(parents=True)
    for name in "all.zip/train.py", "optim.py/optim.py":
        (tmp_path / "in" / name).write_text("1")
    exercises.unpack(tmp_path / "in", ["schedule"], tmp_path / "out")
    for name in "train.py", "optim.py":
        assert exercises.handed_in(tmp_path / "out", Path(name)).read_text() == "1"


def test_grade(tmp_path, monkeypatch):
    source = (ROOT / "optim.py").read_text()
    helper = exercises.text_of(source, "learning_rate").replace("learning_rate", "helper")
    helper += "import time\n"
    folders = [tmp_path / str(number) for number in range(8)]
    for folder, (points, _, body) in zip(folders, SUBMISSIONS):
        inner = folder / "handed in/week"
        inner.mkdir(parents=True)
        shutil.copy(ROOT / "train.py", folder)
        text = exercises.with_function(source + helper, "learning_rate", f"{HEAD}    {body}\n")
        if points == 10:
            # An import that is needed when the file is read; and characters that end a line of text
            # but not of Python.
            text = "import fractions  # \f \x85\n" + text.replace(
                "(done, phase):", "(done: fractions.Fraction, phase):")
        if body:
            (inner / "optim.py").write_text(text, "latin-1" if points == 10 else "utf-8-sig")
    shutil.copytree(folders[5] / "handed in", folders[5] / "old")
    # A zip in a zip, beside a loose file.
    shutil.make_archive(tmp_path / "packed/week", "zip", folders[3] / "handed in")
    shutil.rmtree(folders[3] / "handed in")
    shutil.make_archive(folders[3] / "again", "zip", tmp_path / "packed")
    file, results = tmp_path / "points.csv", tmp_path / "results.json"
    exercises.grade(folders, ["schedule"], 50, 1, file, jobs=3)
    header, *rows = file.read_text().splitlines()
    assert header == "submission,schedule,total,\"first thing wrong in each, by seed 1\""
    for row, (points, wrong, _) in zip(rows, SUBMISSIONS, strict=True):
        said = f"{points},{points},{'schedule: ' * (points < 10)}{wrong}"
        assert said in row.replace('"', ""), row
        look = "look at it yourself: " in row
        assert look == ("without a report" in wrong), (
            "the lecturer must look at the submission that imports posix, and at no other")

    # After an interruption, grading goes on with submissions that have no row.
    file.write_text("\n".join([header, "", *rows[:3], *rows[4:]]) + "\n")
    monkeypatch.setattr(exercises, "marks_of", lambda *_: {"schedule": (["", "again"], "")})
    exercises.grade(folders, ["schedule"], 25, 1, file, gradescope=results)
    rows[3] = f"{folders[3]},5,5,schedule: again"
    assert file.read_text().splitlines() == [header, *rows]
    found = json.loads(results.read_text())
    scores = [(test["score"], test["output"]) for test in found["tests"]]
    assert found["score"] == 5 and scores == [(5, ""), (0, "again")]
    with pytest.raises(exercises.CourseError, match="nowhere: no file, no folder, no exercise"):
        exercises.grade([tmp_path / "nowhere"], ["schedule"], 25, 1, file)
    for there, absent in ((file, tmp_path / "none/x"), (tmp_path / "none/x", file)):
        with pytest.raises(exercises.CourseError, match="there is no folder for .*none/x"):
            exercises.grade(folders, ["schedule"], 25, 1, there, gradescope=absent)
    with pytest.raises(exercises.CourseError, match="has other columns"):
        exercises.grade(folders, ["lamb"], 25, 1, file)


OURS = """'Ours.'
import os
CLIP = 1.0

class A:
    'Has f.'
    size = 1

    @staticmethod
    def f(x):
        raise NotImplementedError

print(A.f(2))
"""
THEIRS = """'Ours.'
from __future__ import annotations
import os, math
CLIP = 9.0
TWO, THREE = 2, 3
os.sep = "long"
CLIP, FOUR = 9.0, 4
import fractions as CLIP

def os():
    raise ValueError

def twice(f):
    return lambda x: 2 * f(x)

class B:
    four = 4

class A:
    size = 5
    six = THREE * TWO

    @staticmethod
    @twice
    def f(x):
        return g(A.h(x)) + A.six + B.four

    @staticmethod
    def h(x):
        return 10 * x * CLIP * A.size

def g(x):
    return x + math.floor(0.5) + len(os.sep)
"""


def test_what_a_student_adds_counts_and_what_a_student_changes_does_not(capsys):
    added = exercises.with_additions(OURS, THEIRS)
    text = exercises.with_function(added, "A.f", exercises.text_of(THEIRS, "A.f"))
    exec(text, {"__name__": "program"})
    assert float(capsys.readouterr().out) == 2 * (10 * 2 + 0 + 1 + 6 + 4)
    assert exercises.with_function(added, "A.f", exercises.text_of(OURS, "A.f")) == added


@pytest.mark.parametrize("section", ["0. A first evening", "17. profile"])
def test_the_handout_s_programs_run(section, capsys):
    """The model and the messages are smaller than in the handout."""
    text = (ROOT / "tests/course/handout.md").read_text().partition(f"## {section}")[2]
    for large, small in ("512", "64"), ("600_000", "9_000"), ("mini", "tiny"), ("8192", "320"):
        text = text.replace(large, small)
    exec("".join(re.findall("```python\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)), {})
    assert capsys.readouterr().out.count(" ms ") >= 4


def test_a_slip_costs_a_point_and_all_else_half():
    assert exercises.points_in("precision", ["", "slip", "", ""]) == (9, "slip")
    assert exercises.points_in("precision", ["wrong", "", "", ""]) == (5, "wrong")


def test_what_is_unusual_is_told():
    text = ("def f(x):\n    import sys\n    # gc\n    @cached\n    def g(): return sys.argv\n"
            "    np.x = x\n")
    assert {*exercises.unusual(text)} == {
        "    import sys", "    @cached", "    np.x = x", "sys", "argv"}


def test_verify_says_what_is_not_as_it_should_be(monkeypatch, capsys):
    """Its tests find everything wrong."""
    red = exercises.no_marks("schedule", "red")
    monkeypatch.setattr(exercises, "try_out", lambda *_: red)
    assert verify.verify(["schedule"], 1, 1) == 1
    bad = re.findall("BAD.*schedule, (.*): red", capsys.readouterr().out)
    right = [f"right: {what}" for what, kind, _ in verify.solutions("schedule") if kind == "right"]
    assert bad == ["right: solved", *right]


@pytest.mark.parametrize("name", [name for name in EXERCISES if hasattr(rewards, name)])
def test_a_reward_is_shown(name, shards, monkeypatch, capsys):
    monkeypatch.setattr(rewards, "docs", lambda: shards)
    vars(rewards)[name]()
    assert capsys.readouterr().out.count("\n") >= 2


def test_the_open_task_counts_bytes_itself(shards, tmp_path, monkeypatch):
    """The file sends as much as "none", and rank 1 sends as much again; it returns wrong bytes."""
    monkeypatch.setattr(compete, "STEPS", 4)
    monkeypatch.setattr(compete, "SEEDS", [0])
    file = tmp_path / "mine.py"
    # The file leaves out the padding of `value`, since "none" has no padding.
    file.write_text(
        "import math\n"
        "from torch import distributed\n"
        "def compress(world, value, state):\n"
        "    mean = value / world.size\n"
        "    n = sum(math.prod(shape) for shape in state['shapes'])\n"
        "    distributed.all_reduce(mean[:n])\n"
        "    pass_on = distributed.send if world.rank == 1 else distributed.recv\n"
        "    pass_on(value[:n], 1 - world.rank)\n"
        "    return mean, value.zero_(), state, 1\n")
    (sent, loss), (sent_by_none, loss_of_none) = together(
        lambda: compete.score(shards, "mine", (compete.enter, str(file))),
        lambda: compete.score(shards, "none"))
    assert sent == 2 * sent_by_none, (
        f"{sent} bytes are counted, not the {2 * sent_by_none} of rank 1, which sends the most")
    assert loss == pytest.approx(loss_of_none, rel=1e-3)
