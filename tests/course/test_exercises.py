"""exercises.py: its table, copies, checks, hints and grades; the rewards and the open task."""
import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.course import compete, exercises, rewards
from tests.course.exercises import EXERCISES
from tests.course.hints import HINTS
from tests.course.wrong_solutions import RIGHT, WRONG, spoil, verify

HEAD = "def learning_rate(phase_step, phase):\n"


def body_of(source, function):
    """The lines of a function after its docstring."""
    node = exercises.find(source, function)
    return source.splitlines()[node.body[0].end_lineno:node.end_lineno]


@pytest.mark.parametrize("name", EXERCISES)
def test_the_table_fits_the_code(name, request):
    lines = 0
    for path, function in exercises.functions_of(name):
        source = (ROOT / path).read_text()
        docstring = ast.get_docstring(exercises.find(source, function))
        assert docstring, f"{function} has no docstring to write it from"
        body = [line.strip() for line in body_of(source, function)]
        lines += sum(line[:1] not in ("", "#") for line in body)
        blanked = exercises.blank(source, function)
        assert body_of(blanked, function)[0].strip() == exercises.BLANK
        assert ast.get_docstring(exercises.find(blanked, function)) == docstring
        text = exercises.text_of(source, function)
        assert exercises.with_function(blanked, function, text) == source
    assert lines == pytest.approx(EXERCISES[name].lines, rel=0.2)
    assert len(HINTS[name]) == 3 and len(WRONG[name]) >= 2 and RIGHT[name]
    assert sum(points for points, _, _ in EXERCISES[name].ideas) == 10
    for test in " ".join(tests for _, _, tests in EXERCISES[name].ideas).split():
        file, _, inside = test.partition("::")
        assert f"def {inside.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()
        # Where the function's cases are run as well: the very case, or the function as a whole
        cases = [item.nodeid for item in request.session.items
                 if item.nodeid.partition("[")[0] == f"tests/{test.partition('[')[0]}"]
        assert not cases or any(case.startswith(f"tests/{test}") for case in cases), test
    for where, *changes in [*WRONG[name].values(), *RIGHT[name].values()]:
        path, function = exercises.place_of(where)
        ast.parse(spoil((ROOT / path).read_text(), function, changes))


# ----- Copies, and what students do in them -----

@pytest.fixture
def copy(tmp_path):
    """A copy in which schedule and lamb are blank, and a function that runs exercises.py in it."""
    folder = tmp_path / "copy"
    exercises.start(folder, ["schedule", "lamb"])

    def run(*arguments):
        done = subprocess.run([sys.executable, "tests/course/exercises.py", *arguments], cwd=folder,
                              capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return folder, run


def test_a_copy_has_what_is_asked_for(copy):
    folder, run = copy
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", "train.py", "tests/course/hints.py", "tests/variants/came.py"} <= names
    assert not [name for name in names if name.startswith(exercises.NOT_FOR_STUDENTS)]
    assert not [name for name in names if "pycache" in name or name.startswith((".git", "runs"))]
    blank = [name for name in EXERCISES if exercises.blank_in(folder, name)]
    assert blank == ["schedule", "lamb"]
    everything = "".join((folder / name).read_text() for name in names)
    for name in EXERCISES:
        for path, function in exercises.functions_of(name):
            body = "\n".join(body_of((ROOT / path).read_text(), function))
            assert (body in everything) == (name not in blank)
    for command in ("start", "x"), ("release", "x"), ("grade", "x"), ("verify",), ("compete",):
        status, said = run(*command)
        assert status == 1 and "needs the solutions, which are not in this copy" in said
    for command in ("check", "lamp"), ("start",), ("start", "x", "lamp"):
        status, said = run(*command)
        assert status == 2 and "none of masking, pairs" in said
    with pytest.raises(exercises.CourseError, match="is not empty"):
        exercises.start(folder, ["lamb"])


def test_what_a_student_sees(copy):
    folder, run = copy
    assert run("check", "schedule") == (1, "schedule: still blank: learning_rate\n")
    assert run("list")[1].count("  BLANK\n") == 2
    for count in 1, 2, 3, 3:
        assert run("hint", "schedule")[1].count(" of 3: ") == count
    path = folder / "optim.py"
    blanked = path.read_text()
    line = blanked[:blanked.index(HEAD)].count("\n") + 2
    path.write_text(exercises.with_function(blanked, "learning_rate", HEAD + "    return 1)\n"))
    assert run("check", "schedule") == (1, f"exercises.py: unmatched ')' (optim.py, line {line})\n")

    wrong = HEAD + "    return phase.lr * 1e-9\n"
    path.write_text(exercises.with_function(blanked, "learning_rate", wrong))
    status, said = run("check", "schedule")
    assert status == 1 and "\n   0 of 10  points\n" in said and "Traceback" not in said
    assert "the highest rate is" in said and "more:  python -m pytest 'tests/test_optim.py" in said

    exercises.release(folder, ["schedule"])
    status, said = run("check", "schedule")
    assert status == 0 and "\n  10 of 10  points\n" in said
    assert "lans-96k, phase 1" in said and "still blank in this folder: lamb" in said


# ----- Grades -----

SUBMISSIONS = {                # body of learning_rate: the first thing wrong
    None: "",
    "    return helper(phase_step, phase)\n": "",
    "    import posix\n    posix._exit(0)\n": "the tests ended without a report",
    "    raise SystemExit(0)\n": "SystemExit: 0",
    "    return (\n": "'(' was never closed (optim.py, line",
    "    print('3 passed in 0.1s')\n": "TypeError",
    "    import os, shutil\n    shutil.rmtree(os.getcwd())\n": "the tests ended",
}


def submit(folder, body):
    """A submission of schedule: of its files one counts."""
    folder.mkdir()
    source = (ROOT / "optim.py").read_text()
    helper = exercises.text_of(source, "learning_rate").replace("learning_rate", "helper")
    if body:
        source = exercises.with_function(source + helper, "learning_rate", HEAD + body)
    (folder / "optim.py").write_text(source)
    return folder


def test_grade(tmp_path):
    folders = [submit(tmp_path / f"{k}", body) for k, body in enumerate(SUBMISSIONS)]
    folders.append(tmp_path / "empty")
    exercises.grade(folders, ["schedule"], 240, 1, tmp_path / "points.csv")
    header, *rows = (tmp_path / "points.csv").read_text().splitlines()
    assert header == "submission,schedule,total,first thing wrong in each"
    for row, wrong in zip(rows, [*SUBMISSIONS.values(), "[Errno 2] No such file"], strict=True):
        _, points, total, said = row.split(",", 3)
        assert points == total == ("0" if wrong else "10"), row
        assert said.strip('"').startswith(f"schedule: {wrong}" if wrong else ""), row


def test_an_endless_solution_is_stopped(tmp_path):
    folder = submit(tmp_path / "endless", "    while True:\n        pass\n")
    began = time.monotonic()
    marks = exercises.grade_one("schedule", folder, 6, 1)
    assert exercises.points_in("schedule", marks) == (0, "time is up, after 6 s")
    assert time.monotonic() - began < 60


def test_all_that_a_command_has_started_is_ended(tmp_path):
    script = ("import subprocess, time\n"
              "other = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
              "print(other.pid, flush=True)\n"
              "time.sleep(60)\n")
    said = exercises.run([sys.executable, "-c", script], tmp_path, os.environ, 3)
    time.sleep(0.5)
    state = subprocess.run(["ps", "-o", "state=", "-p", said.split()[0]], capture_output=True)
    assert state.stdout.strip() in (b"", b"Z")


def test_verify_says_what_is_not_as_it_should_be(monkeypatch, capsys):
    """With tests that find all wrong but our own solution."""
    ours = (ROOT / "optim.py").read_text()

    def try_out(name, changed, *rest, **options):
        return exercises.no_marks(name, "" if changed[Path("optim.py")] == ours else "a sentence")

    monkeypatch.setattr(exercises, "try_out", try_out)
    assert verify(["schedule"], 1, 1) == 1
    good, bad = [], []
    for line in capsys.readouterr().out.splitlines():
        (bad if line.startswith("BAD") else good).append(line)
    assert len(bad) == len(RIGHT["schedule"]) and len(good) == 2 + len(WRONG["schedule"])
    assert good[0].endswith("schedule, blanked: a sentence") and good[1].endswith("solved: green")


# ----- Rewards and the open task -----

@pytest.mark.parametrize("name", EXERCISES)
def test_a_reward_is_shown(name, shards, monkeypatch, capsys):
    monkeypatch.setattr(rewards, "docs", lambda: shards)
    vars(rewards)[name]()
    assert capsys.readouterr().out.count("\n") >= 2


def test_the_open_task_counts_bytes_itself(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(compete, "STEPS", 4)
    (tmp_path / "mine.py").write_text(
        "def compress(world, value, mean, state, argument):\n"
        "    value.div_(world.size)\n"
        "    world.all_reduce(value)\n"
        "    mean.copy_(value)\n"
        "    value.zero_()\n"
        "    return 0\n")
    mine = compete.score(shards, "mine", (compete.enter, str(tmp_path / "mine.py")))
    assert mine == pytest.approx(compete.score(shards, "none"), rel=1e-3)
