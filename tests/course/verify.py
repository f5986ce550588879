"""Grades the solutions in wrong_solutions.md: do they get the points that they should?

There, a heading gives the exercise, the kind of solution, a key of POINTS, and what is peculiar
about it. A diff of the function follows: lines that begin with a space or - are in our solution,
lines that begin with a space or + in the other one. A change begins with @@, and the first @@ names
the function.
"""
import re
import time
from pathlib import Path

from tests.course import exercises

FILE = Path(__file__).with_name("wrong_solutions.md")
POINTS = {"wrong": range(6), "slip": range(8, 10), "right": range(10, 11)}


def solutions(name):
    """Returns the solutions of an exercise, a list of (what is peculiar, kind, {Path: text})."""
    found = []
    pattern = rf"### {name}, (\w+): ([^\n]*)\n+```diff\n@@ (\S+)\n(.*?)```"
    for kind, what, function, diff in re.findall(pattern, FILE.read_text(), re.DOTALL):
        path, inside = exercises.place_of(function)
        source = exercises.load(exercises.ROOT, path)
        text = exercises.text_of(source, inside)
        for change in re.split(r"^@@\n", diff, flags=re.MULTILINE):
            lines = change.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] != "+")
            if f"\n{text}".count(f"\n{old}") != 1:
                raise exercises.CourseError(f"{name}, {what}: not once in {function}:\n{old}")
            text = text.replace(old, "".join(line[1:] for line in lines if line[0] != "-"))
        changed = exercises.with_function(source, inside, text)
        found.append((what, kind, {path: changed}))
    return found


def verify(names, limit, seed):
    """Grades each exercise blank, solved and as in `solutions`, with all other exercises solved.
    Returns the exit status, 0 if every solution gets points as in POINTS."""
    status = 0
    for name in names:
        texts = {}
        blanked = {}
        for path, function in exercises.functions_of(name):
            texts[path] = exercises.load(exercises.ROOT, path)
            blanked[path] = exercises.blank(blanked.get(path, texts[path]), function)
        for what, kind, changed in [
                ("blanked", "wrong", blanked), ("solved", "right", texts), *solutions(name)]:
            began = time.monotonic()
            marks = exercises.try_out(name, changed, limit, seed)
            points, wrong = exercises.points_in(name, marks)
            good = points in POINTS[kind]
            status |= not good
            seconds = time.monotonic() - began
            print(f"{'ok ' if good else 'BAD'} {seconds:>4.0f} s  {points:>2} of 10  {name}, "
                  f"{kind}: {what}: {wrong or 'green'}", flush=True)
    return status
