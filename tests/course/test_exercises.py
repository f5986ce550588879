"""exercises.py: its table fits the code; blanked is red, solved is green; the copy for students."""
import ast
from pathlib import Path

import pytest

from tests.course import exercises
from tests.conftest import ROOT
from tests.course.exercises import EXERCISES
from tests.course.wrong_solutions import WRONG

in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git repository")


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
        assert body_of(blanked, function)[0].strip() == "raise NotImplementedError"
        assert ast.get_docstring(exercises.find(blanked, function)) == docstring
        text = exercises.text_of(source, function)
        assert exercises.with_function(blanked, function, text) == source
    assert lines == pytest.approx(EXERCISES[name].lines, rel=0.2)
    assert len(EXERCISES[name].hints) == 3 and len(WRONG[name]) >= 2
    for test in EXERCISES[name].tests.split():
        file, _, inside = test.partition("::")
        assert f"def {inside.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()
        # Where the function's cases are run as well: the very case, or the function as a whole
        cases = [item.nodeid for item in request.session.items
                 if item.nodeid.partition("[")[0] == f"tests/{test.partition('[')[0]}"]
        assert not cases or any(case.startswith(f"tests/{test}") for case in cases), test
    for where, *changes in WRONG[name].values():
        path, function = exercises.place_of(where)
        ast.parse(exercises.spoil((ROOT / path).read_text(), function, changes))


@in_git
def test_blanked_is_red_and_solved_green(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exercises.copy_repository(tmp_path / "copy")
    source = Path("optim.py").read_text()
    exercises.start("schedule")
    assert exercises.is_blank("schedule") and not exercises.is_blank("precision")
    with pytest.raises(SystemExit, match="optim.py has uncommitted changes; commit or stash"):
        exercises.start("precision")
    red, line = exercises.check("schedule")
    assert red is False and line.startswith("schedule: 0 of 3 tests pass; to see why: "), line
    assert line.endswith("-m pytest 'tests/test_optim.py::test_learning_rate_with_decay_"
                         "from_0_is_nvidias'")
    for count in 1, 2, 3, 3:
        exercises.hint("schedule")
        assert capsys.readouterr().out.count(" of 3: ") == count
    exercises.solve("schedule")
    assert Path("optim.py").read_text() == source
    green, line = exercises.check("schedule")
    assert green and line.startswith("schedule: all 3 tests pass ("), line


@in_git
def test_a_copy_for_students_has_no_solution(tmp_path, monkeypatch, program):
    run = program("tests/course/exercises.py", "start", "--all", tmp_path / "copy")
    assert run.returncode == 0, run.stderr
    monkeypatch.chdir(tmp_path / "copy")
    assert exercises.git("rev-list", "--all", "--count") == "1\n"
    assert exercises.git("status", "--porcelain") == ""
    names = exercises.git("ls-files").splitlines()
    assert {"README.md", "train.py", "tests/course/exercises.py", "tests/test_dist.py"} <= {*names}
    everything = "".join(Path(name).read_text() for name in names)
    for name in EXERCISES:
        for path, function in exercises.functions_of(name):
            body = body_of((ROOT / path).read_text(), function)
            left, = body_of(path.read_text(), function)
            assert left.strip() == "raise NotImplementedError"
            assert "\n".join(body) not in everything
    for what in ("solve", "schedule"), ("verify",):
        run = program("tests/course/exercises.py", *what, cwd=tmp_path / "copy")
        assert run.returncode == 1 and "the solutions are not in this copy" in run.stderr
