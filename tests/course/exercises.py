"""A course of fifteen exercises: blank a part of thriftbert, write it again, check your solution.

For students, in the folder that they were given:

    python tests/course/exercises.py list                # the exercises, and which are blank
    python tests/course/exercises.py check attention     # what is right, and points
    python tests/course/exercises.py hint attention      # a hint; one more each time
    python tests/course/exercises.py compete FILE...     # the open task, see compete.py

For lecturers, in the whole repository, and for anyone learning alone:

    python tests/course/exercises.py start FOLDER attention lamb    # a copy with these two blank
    python tests/course/exercises.py start FOLDER --track week      # with those of a week blank
    python tests/course/exercises.py release FOLDER attention       # puts its solution into a copy
    python tests/course/exercises.py grade FOLDER... --track week --csv points.csv --jobs 4
    python tests/course/exercises.py verify                         # checks the course itself

Without names, a command takes all exercises of --track, by default all fifteen; hint takes the
first. release and grade need a name or --track. Give a folder named like an exercise as ./lamb.

No git is needed. This file uses only Python's standard library; the checks use the packages in
requirements.txt. README.md beside this file is for lecturers.
"""
import argparse
import ast
import contextlib
import csv
import functools
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
SOLUTIONS = ROOT / "tests/course/wrong_solutions.md"  # exists only beside the solutions
COPIED = "*.py", "README.md", "requirements.txt", "tests/**/*.py", "tests/**/*.md", "tests/**/*.svg"
NOT_FOR_STUDENTS = (
    "tests/bench/", "tests/RESULTS.md", "tests/course/README.md", "tests/course/answers.md",
    "tests/course/test_exercises.py", "tests/course/verify.py", "tests/course/wrong_solutions.md")
GRADERS = "tests/course/test_graders.py"
LIMIT = 240            # seconds for the tests of an exercise; a single test may take a fifth
BLANK = "raise NotImplementedError"
# The most points while an idea of more than 1 point is wrong. Ideas of 1 point are slips.
MOST = 5
# Words that a computation does not need, but code that looks at its tests does.
UNUSUAL = """
    __builtins__ __class__ __code__ __globals__ __import__ __subclasses__ _exit _getframe argv
    atexit builtins compile conftest ctypes currentframe environ eval exec f_back gc getattr getenv
    globals importlib inspect kill listdir locals mock monkeypatch open popen proc pytest report
    request run_path SEED setattr settrace signal subprocess sys system test_graders tests
    THRIFTBERT_SEED traceback type unittest xml""".split()


class CourseError(Exception):
    """Why a command fails, or what is wrong with a solution, in one line."""


class Exercise(NamedTuple):
    """An exercise. Functions are named like data.PretrainingData.mask, with the folder of the file
    if it has one: tests/variants/powersgd.powersgd."""
    functions: str       # those that `start` blanks
    minutes: int
    learns: str
    like_it: str = ""    # functions that would give the solution away, blanked as well


EXERCISES = {
    "masking": Exercise(
        "data.PretrainingData.mask",
        60, "what a masked language model is asked, and why example i depends on i alone"),
    "pairs": Exercise(
        "data.PretrainingData.pair",
        60, "how next-sentence pairs are made, and what a classifier could cheat by"),
    "attention": Exercise(
        "bert.plain_attention bert.attention_by_length",
        90, "attention over examples that stand one after another, without padding or a mask",
        "bert.padded_attention"),
    "schedule": Exercise(
        "optim.learning_rate train.progress",
        40, "warm-up, decay, and how a run knows where it is: by steps or by the clock"),
    "precision": Exercise(
        "optim.cast_with_masters optim.copy_to_model optim.LossScaler.update "
        "optim.unscale_and_clip_",
        60, "why 16 bits need fp32 masters and a scaled loss, and in what order one unscales"),
    "lamb": Exercise(
        "optim.adam_update optim.LAMB._update",
        60, "what lets a batch of 64K learn: a step as long as the layer's weights ask for",
        "tests/variants/lans.LANS._update tests/variants/onebit_lamb.OneBitLAMB._update "
        "tests/variants/slow_momentum.SlowMomentum._update"),
    "dealing": Exercise(
        "data.micro_batches data.loader train.count_labels",
        60, "the same step on any number of ranks: who takes which example, and the divisor"),
    "buckets": Exercise(
        "dist.fill_buckets dist.Dense.average dist.Bucket.average",
        75, "why gradients travel in buckets, how a mean stays in range, two levels of network"),
    "overlap": Exercise(
        "dist.Reducer._ready dist.Reducer._launch dist.Reducer.finish",
        120, "how an all-reduce hides behind backward, and why order is all that ranks share"),
    "powersgd": Exercise(
        "tests/variants/powersgd.powersgd tests/variants/powersgd.first_factors",
        90, "a compressor that is linear, so that an all-reduce can add what it sends"),
    "feedback": Exercise(
        "dist.ErrorFeedback.average dist.ErrorFeedback.commit",
        50, "why a lossy mean still converges, and what a skipped step must leave as it was"),
    "resume": Exercise(
        "train.save train.restore",
        100, "all that the next step depends on, and a file that is whole or not there"),
    "sharding": Exercise(
        "tests/course/scale.scatter_mean tests/course/scale.ShardedAdamW.__init__ "
        "tests/course/scale.ShardedAdamW.step",
        60, "ZeRO-1: each rank keeps a part of the moments; the same weights, and no more bytes",
        "tests/variants/zero1.step_and_share"),
    "plan": Exercise(
        "tests/tools/plan.wire_bytes tests/tools/plan.flops_per_example "
        "tests/tools/plan.step_seconds",
        60, "how long a step takes, from bytes, operations and latency, before you measure it"),
    "profile": Exercise(
        "tests/course/scale.operations tests/course/scale.starts",
        45, "where a step's time goes, and what a faster part of it would change"),
}
TRACKS = {"week": ["schedule", "masking", "attention", "lamb", "overlap"], "term": [*EXERCISES]}


# ----- Functions in source text -----

def functions_of(name):
    """Returns the functions of an exercise, a list of (Path of the file, "Class.method")."""
    return [place_of(function) for function in EXERCISES[name].functions.split()]


def all_like(name):
    """Returns the functions of an exercise and those that would give it away, in the same form."""
    return functions_of(name) + [place_of(other) for other in EXERCISES[name].like_it.split()]


def place_of(function):
    """Returns (Path of the file, "Class.method") for "file.Class.method"."""
    file, _, inside = function.partition(".")
    return Path(f"{file}.py"), inside


parse = functools.cache(ast.parse)       # the same text is parsed many times


def load(folder, path):
    """Returns the text of a Python file; raises CourseError if it cannot be read or parsed."""
    try:
        text = decoded((folder / path).read_bytes())
        parse(text, path)                # its errors name the file and the line
        return text
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CourseError(str(error)) from None


def decoded(content):
    """Returns the text of bytes in UTF-8, with or without a byte order mark, or in Latin-1."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        # Python accepts Latin-1 only if the file declares it, but its functions go into our files.
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def find(source, function):
    """Returns the syntax tree of a function, such as "Bucket.average", in the text of a file."""
    node = parse(source)
    for part in function.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == part]
        if not found:
            raise CourseError(f"there is no function {function}")
        node = found[-1]                 # of two with one name, Python takes the last
    return node


def first_line(node):
    """Returns the number of the first line of a function, which may be a decorator's."""
    return min([node, *node.decorator_list], key=lambda part: part.lineno).lineno


def lines_of(source):
    """Returns the lines of a source, as Python counts them: str.splitlines also ends a line at a
    form feed and the like."""
    return list(io.StringIO(source))


def text_of(source, function):
    """Returns the text of a function, with its decorators."""
    node = find(source, function)
    return "".join(lines_of(source)[first_line(node) - 1:node.end_lineno])


def with_function(source, function, text):
    """Returns the source with `text` in place of a function."""
    node = find(source, function)
    lines = lines_of(source)
    return "".join([*lines[:first_line(node) - 1], text, *lines[node.end_lineno:]])


def blank(source, function):
    """Returns the source with a function reduced to its signature and docstring."""
    node = find(source, function)
    docstring = node.body[0]
    lines = lines_of(source)[first_line(node) - 1:docstring.end_lineno]
    lines.append(f"{' ' * docstring.col_offset}{BLANK}\n")
    return with_function(source, function, "".join(lines))


def is_blank(source, function):
    """Returns whether a function is as `blank` leaves it."""
    return text_of(source, function).endswith(f" {BLANK}\n")


def blank_in(folder, name):
    """Returns a list of the functions of an exercise that are blank in a folder."""
    return [function for path, function in functions_of(name)
            if is_blank(load(folder, path), function)]


IMPORTS = ast.Import, ast.ImportFrom


def names_in(node):
    """Returns the names that an import, a constant, a function or a class defines, a set, empty for
    another statement. What an assignment changes, such as os.sep, counts as a name."""
    if isinstance(node, IMPORTS):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        parts = [part for target in targets for part in ast.walk(target)]
        return {ast.unparse(part) for part in parts
                if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))}
    return {getattr(node, "name", "")} - {""}


def additions(ours, theirs):
    """Yields (line, text) for each import, constant, function, class or method whose names are only
    in the second of two lists of statements. It belongs after this line of the first: after
    whatever it follows in the second."""
    known = {name: node for node in ours for name in names_in(node)}
    line = ours[0].end_lineno
    for node in theirs:
        if getattr(node, "module", "") == "__future__":
            continue                             # allowed only at the very top
        names = names_in(node)
        old = [known[name] for name in names if name in known]
        if old:
            line = max(node.end_lineno for node in old)
        if isinstance(node, ast.ClassDef) and old and isinstance(old[0], ast.ClassDef):
            yield from additions(old[0].body, node.body)
        new = names - known.keys()
        if isinstance(node, IMPORTS):
            aliases = [alias for alias in node.names if (alias.asname or alias.name) in new]
            node = type(node)(**vars(node) | {"names": aliases})         # a copy with these alone
        elif old or any(re.search(r"[.[]", name) for name in new):
            new = {}                             # it changes something that is there already
        if new:
            yield line, textwrap.indent(f"{ast.unparse(node)}\n", " " * ours[0].col_offset)


def with_additions(ours, theirs):
    """Returns our source with the `additions` of theirs."""
    lines = lines_of(ours)
    for line, text in additions(parse(ours).body, parse(theirs).body):
        lines[line - 1] += text
    return "".join(lines)


def unusual(source):
    """Returns a Counter of the things in a source that a lecturer should look at: imports and
    classes inside functions, decorators, changes of a module, UNUSUAL words."""
    text = ast.unparse(parse(source))            # without comments
    lines = re.findall(r"^ +(?:import|from|class) .*|^ *@.*|^ *(?:torch|nn|F|np|math|os)\.\S+ = .*",
                       text, re.MULTILINE)
    return Counter(lines + [word for word in re.findall(r"\w+", text) if word in UNUSUAL])


# ----- Tests, in a process of their own -----

def ideas_of(name):
    """Returns the ideas of an exercise, a list of (points, what is right, its test in GRADERS)."""
    found = []
    for node in parse((ROOT / GRADERS).read_text()).body:
        if getattr(node, "name", "").startswith(f"test_{name}_"):
            points, _, idea = ast.get_docstring(node).partition(" points: ")
            found.append((int(points), " ".join(idea.split()), node.name))
    return found


# The marks of an exercise are a list with a text for each of its ideas: "", or what is wrong.

def no_marks(name, wrong):
    """Returns marks that give no points: every idea has the text `wrong`."""
    return [wrong for _ in ideas_of(name)]


def points_in(name, marks):
    """Returns (points, the first thing that is wrong, or ""). The points of the right ideas are
    added up, but count at most MOST while an idea of more than 1 point is wrong, because a solution
    that is right in parts does not train."""
    points = 0
    most = 10
    for (worth, _, _), wrong in zip(ideas_of(name), marks):
        if not wrong:
            points += worth
        elif worth > 1:
            most = MOST
    return min(points, most), next(filter(None, marks), "")


def run_tests(folder, name, limit, seed=0):
    """Returns the marks of an exercise in a folder. Only pytest's report counts: without it, as
    after os._exit, there are no points."""
    tests = [test for _, _, test in ideas_of(name)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        report = Path(place, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                   f"--junitxml={report}", *[f"{GRADERS}::{test}" for test in tests]]
        environment = os.environ | {"TMPDIR": place, "THRIFTBERT_SEED": str(seed),
                                    "THRIFTBERT_SECONDS": str(limit / 5)}
        said = run(command, folder, environment, limit)
        errors = re.findall(r"^(?:E  |ERROR:)\s*(.*)", said, re.MULTILINE)
        try:
            found = read_report(report)
        except (OSError, ElementTree.ParseError):
            return no_marks(name, errors[-1] if errors else "the tests ended without a report")
    untested = "not tested"
    if errors and found.keys().isdisjoint(tests):
        untested = f"not tested: {errors[0]}"                # what a broken file raised
    return [found.get(test, untested) for test in tests]


def run(command, folder, environment, limit):
    """Returns the output of a command, with "E   time is up" at the end if it takes more than
    `limit` seconds. In the end, kills everything that the command has started."""
    # A file, because a pipe would stay open until the server of the ranks has ended, too.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True,
                                   stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        timed_out = ""
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            timed_out = f"\nE   time is up, after {limit:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)         # its ranks, too
            process.wait()
        output.seek(0)
        return output.read() + timed_out


def read_report(path):
    """Returns {test: "" or the first thing that is wrong, in one sentence} from a report of pytest.
    The cases of a test count as one."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        test = (case.get("name") or "").partition("[")[0]      # after Ctrl-C there is no name
        found.setdefault(test, "")
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                line = child.get("message", "").strip().partition("\n")[0]
                # Where the error comes from: the innermost lines of the program
                places = re.findall(r"^(?:tests/(?:variants/|course/scale|tools/plan))?\w*\.py:\d+",
                                    child.text, re.MULTILINE)
                line = " at ".join([line, *dict.fromkeys(places[-2:])])
                found[test] = found[test] or line.removeprefix("AssertionError: ") or child.tag
    return found


# ----- For students -----

def show_list():
    """Prints a table of the exercises."""
    for name, exercise in EXERCISES.items():
        state = "  BLANK" if blank_in(ROOT, name) else ""
        print(f"{name:<10}{exercise.minutes:>4} min  {exercise.functions}{state}\n"
              f"    {exercise.learns}")


def check(name, limit):
    """Prints what is right and wrong, and a reward if all is right. Returns the exit status."""
    for path in sorted(ROOT.glob("*.py")):
        load(ROOT, path.name)            # the tests need all files: name a broken one
    empty = blank_in(ROOT, name)
    if empty:
        print(f"{name}: still blank: {', '.join(empty)}")
    if len(empty) == len(functions_of(name)):
        return 1
    print(f"{name}: the tests run, which takes up to a minute on an idle machine", flush=True)
    marks = run_tests(ROOT, name, limit)
    for (most, idea, test), wrong in zip(ideas_of(name), marks):
        print(f"  {0 if wrong else most:>2} of {most:>2}  {idea}")
        if wrong:
            print(f"            {wrong}\n            more:  python -m pytest {GRADERS} -k {test}")
    points, wrong = points_in(name, marks)
    why = ", the most while more than a slip of 1 point is wrong" * (points == MOST)
    print(f"  {points:>2} of 10  points{why}")
    left = [other for other in EXERCISES if blank_in(ROOT, other)]
    if not wrong:
        subprocess.run([sys.executable, "-m", "tests.course.rewards", name], cwd=ROOT)
    if left:
        print(f"\nstill blank in this folder: {', '.join(left)}")
    elif not wrong:
        print("\nNothing is left to write: `python train.py` trains a BERT with your functions,\n"
              "in minutes. Stop it by Ctrl-C, and call it again: it goes on. Functions that would\n"
              "have given a solution away may be blank in tests/variants and bert.py: their tests\n"
              "in `python -m pytest` stay red.")
    return points < 10


def hint(name):
    """Prints one more hint than last time."""
    from tests.course.hints import HINTS
    with open(ROOT / f".hints-{name}", "a") as file:         # a dot for each call
        file.write(".")
        shown = file.tell()
    hints = HINTS[name].strip().split("\n\n")
    for number, text in enumerate(hints[:shown], 1):
        print(f"{number} of {len(hints)}: {text}")


# ----- For lecturers -----

def copy_to(folder):
    """Copies the files for students, with all solutions, to a new or empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CourseError(f"{folder} is not empty")
    # Listed first, since the folder may be one of ours.
    for path in list(itertools.chain(*map(ROOT.glob, COPIED))):
        path = path.relative_to(ROOT)
        if not path.as_posix().startswith(NOT_FOR_STUDENTS):
            (folder / path.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)


def start(folder, names):
    """Writes a copy for students with these exercises blank and all others solved."""
    copy_to(folder)
    for name in names:
        for path, function in all_like(name):
            (folder / path).write_text(blank((folder / path).read_text(), function))
    hours = sum(EXERCISES[name].minutes for name in names) / 60
    print(f"{folder} is a copy of thriftbert. Blank in it, about {hours:.1f} hours of work:\n"
          f"    {', '.join(names)}\nAll else is solved. Next:\n"
          f"    cd {folder}\n    python tests/course/exercises.py list\n"
          f"    python tests/course/exercises.py check {names[0]}")


def release(folder, names):
    """Writes the solutions of exercises into a copy for students."""
    for name in names:
        for path, function in all_like(name):
            solution = text_of(load(ROOT, path), function)
            (folder / path).write_text(with_function(load(folder, path), function, solution))
            print(f"{folder / path}: {function} is solved")


def try_out(name, changed, limit, seed):
    """Returns the marks of a clean copy with the files in `changed`, {Path: text}, replaced."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        copy = Path(place, "thriftbert")
        copy_to(copy)
        for path, text in changed.items():
            (copy / path).write_text(text)
        return run_tests(copy, name, limit, seed)


def handed_in(folder, path):
    """Returns the path of the file with this name in a submission, or None if there is none. Of
    several in nested folders the outermost counts; raises CourseError if two are outermost."""
    found = filter(Path.is_file, folder.rglob(path.name))
    first, *others = sorted(found, key=lambda file: len(file.parts)) or [None]
    if others and len(first.parts) == len(others[0].parts):
        raise CourseError(f"{path.name} is in it twice; hand in one version")
    return first


def taken(name, folder):
    """Returns our files, {Path: text}, with the parts of a submission that count: the exercise's
    functions and the `additions`. All else is ours, including the tests. The functions of a missing
    file are blank."""
    changed = {}
    for path, function in functions_of(name):
        ours = load(ROOT, path)
        file = handed_in(folder, path)
        if file:
            theirs = load(file.parent, file.name)
            text = changed.get(path) or with_additions(ours, theirs)
            changed[path] = with_function(text, function, text_of(theirs, function))
        else:
            changed[path] = blank(changed.get(path, ours), function)
    return changed


def grade_one(name, folder, limit, seed):
    """Returns the marks of a submission, and as text what a lecturer should look at in it, or "".
    This finds only what is done openly; hiding is possible."""
    try:
        changed = taken(name, folder)
        if all(is_blank(changed[path], function) for path, function in functions_of(name)):
            return no_marks(name, "blank, or not there"), ""
        look_at = Counter()
        for path, text in changed.items():
            look_at += unusual(text) - unusual(load(ROOT, path))
        return try_out(name, changed, limit, seed), ", ".join(look_at)
    except (CourseError, SyntaxError) as error:
        return no_marks(name, str(error)), ""
    except Exception as error:                   # whatever it is, go on with the other exercises
        return no_marks(name, f"cannot be graded: {error!r}"), ""


def unpack(submission, names, place):
    """Copies the files handed in for these exercises, loose and in zips, to `place`."""
    if submission.is_file():
        return unzip(submission, place)
    files = {path.name for name in names for path, _ in functions_of(name)}
    for path in filter(Path.is_file, submission.rglob("*.*")):
        copy = place / path.relative_to(submission)
        if path.suffix.lower() == ".zip":
            unzip(path, copy)
        elif path.name in files:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)


def unzip(path, folder):
    """Extracts the Python files of a zip into a folder, those of zips inside it into folders with
    their names and "!": a folder with the name alone may be there, too."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.lower().endswith((".py", ".zip"))]
        archive.extractall(folder, names)
    for name in names:
        if name.lower().endswith(".zip"):
            unzip(folder / name, Path(f"{folder / name}!"))


def marks_of(submission, names, limit, seed):
    """Returns {exercise: (marks, what to look at)} for a submission."""
    with tempfile.TemporaryDirectory() as place:
        try:
            unpack(submission, names, Path(place))
            return {name: grade_one(name, Path(place), limit, seed) for name in names}
        except Exception as error:               # whatever it is, go on with the others
            return {name: (no_marks(name, f"cannot be graded: {error!r}"), "") for name in names}


def summary(all_marks):
    """Returns, for the result of `marks_of`, {exercise: points}, and a list of texts: the first
    thing that is wrong in each exercise, and what to look at."""
    points = {}
    all_wrong = []
    for name, (marks, words) in all_marks.items():
        points[name], wrong = points_in(name, marks)
        if wrong:
            all_wrong.append(f"{name}: {wrong}")
        if words:
            all_wrong.append(f"{name}: look at it yourself: {words}")
    return points, all_wrong


def grade(submissions, names, limit, seed, file, jobs=1, gradescope=None):
    """Prints a table of submissions and exercises, and grades `jobs` submissions at a time.

    file: a CSV file that gets each row as soon as it is known, and is whole at any moment.
    Submissions that are already in it are not graded again, so after an interruption the same
    command continues. gradescope: a file for the results of one submission.

    Each exercise of each submission runs in its own process and folder, with a time limit, so it
    cannot harm the next by accident. This is no sandbox: the code runs with your rights.
    """
    missing = [str(submission) for submission in submissions if not submission.exists()]
    if missing:
        raise CourseError(f"{', '.join(missing)}: no file, no folder, no exercise")
    for path in filter(None, (file, gradescope)):
        if not Path(path).absolute().parent.is_dir():
            raise CourseError(f"there is no folder for {path}")
    header = ["submission", *names, "total", f"first thing wrong in each, by seed {seed}"]
    rows = read_table(file, header)
    print("submission".ljust(20), *names, "total")
    pool = ThreadPoolExecutor(max(1, jobs))
    work = {}
    for submission in submissions:
        title = str(submission).encode(errors="replace").decode()
        if title in rows:
            print(f"{title}: was graded before, see {file}")
        else:
            work[pool.submit(marks_of, submission, names, limit, seed)] = title
    try:
        for done in as_completed(work):
            title = work[done]
            points, all_wrong = summary(done.result())
            columns = [f"{points[name]:>{len(name)}}" for name in names]
            total = sum(points.values())
            print(title.ljust(20), *columns, f"{total:>5}")
            print(*[f"    {wrong}\n" for wrong in all_wrong], sep="", end="", flush=True)
            rows[title] = [title, *points.values(), total, "; ".join(all_wrong)]
            write_table(file, [header, *sorted(rows.values())])
            write_gradescope(gradescope, done.result(), total)
    finally:
        pool.shutdown(cancel_futures=True)       # after Ctrl-C, start no more


def read_table(file, header):
    """Returns the rows that `grade` has written to a file, {submission: row}; {} if there is none.
    Raises CourseError if they are for other exercises or another seed."""
    if not file or not Path(file).exists():
        return {}
    with open(file, newline="", encoding="utf-8") as table:
        found, *rows = [row for row in csv.reader(table) if row] or [header]
    if found != header:
        raise CourseError(f"{file} has other columns, {', '.join(found)}: name another file")
    return {row[0]: row for row in rows}


def write_table(file, rows):
    """Writes rows to a CSV file, which at any moment is either the old or the new one."""
    if file:
        with open(f"{file}.new", "w", newline="", encoding="utf-8", errors="replace") as table:
            csv.writer(table).writerows(rows)
        os.replace(f"{file}.new", file)


def write_gradescope(file, all_marks, total):
    """Writes the result of `marks_of` as Gradescope's results.json, with a test for each idea."""
    tests = []
    for name, (marks, _) in all_marks.items():
        for (points, idea, _), wrong in zip(ideas_of(name), marks):
            tests.append({"name": f"{name}: {idea}", "max_score": points,
                          "score": 0 if wrong else points, "output": wrong})
    if file:
        Path(file).write_text(json.dumps({"score": total, "tests": tests}))


# ----- The command line -----

def do(command, names, paths, flags):
    """Runs a command; returns the exit status."""
    if command == "list":
        return show_list()
    if command == "check":
        return max(check(name, flags.limit) for name in names)
    if command == "hint":
        return hint(names[0])
    if command == "compete":
        from tests.course import compete
        return compete.compete(paths)
    if not SOLUTIONS.exists():
        raise CourseError(f"{command} needs the solutions, which are not in this copy")
    if command == "start":
        return start(paths[0], names)
    if command == "release":
        return release(paths[0], names)
    if command == "grade":
        return grade(paths, names, flags.limit, flags.seed, flags.csv, flags.jobs, flags.gradescope)
    from tests.course import verify
    return verify.verify(names, flags.limit, flags.seed)


# How many of a command's words are folders, not exercises; commands not listed take any number.
FOLDERS = {"list": 0, "check": 0, "hint": 0, "verify": 0, "start": 1, "release": 1}


def main():
    """Runs the program. An error is one line on stderr and status 1; a wrong command line, 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("command", choices=[*FOLDERS, "grade", "compete"])
    add("words", nargs="*", metavar="FOLDER or EXERCISE")
    add("--track", choices=TRACKS, help="if no exercise is named; term is all")
    add("--limit", type=float, default=LIMIT, help="seconds for the tests of an exercise")
    add("--seed", type=int, default=1, help="of what tests draw; those of students have 0")
    add("--csv", help="write the table of grade to this file, too")
    add("--jobs", type=int, default=1, help="submissions that are graded at the same time")
    add("--gradescope", help="write the results.json of one submission to this file")
    flags = parser.parse_args()
    names = [word for word in flags.words if word in EXERCISES]
    paths = [Path(word) for word in flags.words if word not in EXERCISES]
    unnamed = flags.command in ("grade", "release") and not (names or flags.track)
    if unnamed or len(paths) != FOLDERS.get(flags.command, len(paths)):
        parser.error(f"{flags.command} {' '.join(flags.words)}: too few or too many words, or none "
                     f"of {', '.join(EXERCISES)} (grade and release want one, or --track)")
    try:
        sys.exit(do(flags.command, names or TRACKS[flags.track or "term"], paths, flags))
    except CourseError as error:
        sys.exit(f"exercises.py: {error}")


if __name__ == "__main__":
    from tests.course import exercises   # as in verify.py: one CourseError, not two
    exercises.main()
