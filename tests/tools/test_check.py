"""Tests check.py with a fake program of eight steps: which question finds which fault."""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import train
from tests.tools import check


def pretend(command, wrong_in, loss):
    """Does what the program would do, in place of subprocess.run. wrong_in: where the fault is: a
    word of the command, "the run NAME", or "a resumed run". There the program "dies", "refuses"
    --init, or has this loss instead of 6.0 and a different model."""
    flags = dict(zip(command, command[1:]))          # {word: the next word}
    program = next(word for word in command if word.endswith("train.py"))
    assert Path(program).is_absolute(), "in another folder train.py is not found"
    run = Path(flags["--out"])
    log = run / "metrics.jsonl"
    (run / "model").mkdir(parents=True, exist_ok=True)
    log.touch()
    before = log.read_text().splitlines()
    words = [*command, f"the run {run.name}"]
    if before:
        words.append("a resumed run")
    wrong = wrong_in in words
    if wrong and loss == "dies":
        noise = "W1128 torch/distributed/run.py\ntrain.py: rank 1: ValueError\nRoot Cause"
        return SimpleNamespace(returncode=1, stderr=noise)
    if wrong and loss == "refuses":
        return SimpleNamespace(returncode=1, stderr="train.py: other blocks: leave out --init")

    last = min(2 * int(flags["--steps"]), int(flags.get("--max-steps", 8)))
    with open(log, "a") as file:
        for step in range(len(before) // 2, last + 1):
            for kind in "train", "eval":
                line = {"kind": kind, "step": step, "mlm_loss": 6.0, "nsp_loss": 0.7}
                if wrong:
                    line |= loss if isinstance(loss, dict) else {"mlm_loss": loss}
                file.write(json.dumps(line) + "\n")
    (run / "model/model.safetensors").write_text("wrong" if wrong else "right")
    return SimpleNamespace(returncode=0)


@pytest.mark.parametrize("wrong_in, loss, seen_by", [
    ("no run", 6.1, ""),
    ("the run again", 6.1, "same_again"),
    ("a resumed run", 6.1, "same_after_resume same_from_two_to_one"),
    ("a resumed run", None, "same_after_resume same_from_two_to_one"),
    ("a resumed run", 6.0, "same_after_resume"),
    ("--micro-tokens", 6.1, "same_one_at_a_time"),
    ("--nproc_per_node=2", 6.1, "same_on_two_ranks same_from_two_to_one"),
    ("--nproc_per_node=2", "dies", "same_on_two_ranks same_from_two_to_one"),
    ("--init", 6.001, "same_from_folder"),
    ("--init", "refuses", ""),
    ("bf16", 6.1, "near_in_bf16"),
    ("bf16", {"nsp_loss": 0.73}, "near_in_bf16")])
def test_a_fault_is_seen_by_these_questions_alone(monkeypatch, capsys, wrong_in, loss, seen_by):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: pretend(command, wrong_in, loss))
    monkeypatch.setattr(sys, "argv", ["check.py"])
    monkeypatch.setattr(check.optim, "choose_precision", lambda *_: "bf16")
    with pytest.raises(SystemExit) as end:
        check.main()
    lines = capsys.readouterr().out.splitlines()
    seen = [question.__name__ for question, line in zip(check.QUESTIONS.values(), lines)
            if "NO: " in line]
    assert seen == seen_by.split(), lines
    others = [line for line in lines if not ("NO: " in line or line.endswith("yes"))]
    assert bool(others) == (loss == "refuses"), lines
    assert end.value.code == bool(seen)
    if loss == "dies":
        assert "NO: train.py: rank 1: ValueError" in lines[3], "the program's own line is not shown"


def test_it_compares_as_much_as_it_says(monkeypatch):
    flags = dict(zip(check.FLAGS, check.FLAGS[1:]))
    assert int(flags["--batch"]) % 2, "two ranks have equal shares, which hides wrong divisors"
    losses = {("train", step): {"mlm_loss": 6.0} for step in range(1, 9)}
    assert [step for _, step in check.first_six(losses)] == [1, 2, 3, 4, 5, 6]
    other = losses | {("train", 5): {"mlm_loss": 6.00002}}
    assert check.difference(other, losses).startswith("NO: mlm_loss of step 5 is 6.00002")
    near = losses | {("train", 5): {"mlm_loss": 6.000001}}
    assert check.same_again(Mock(train=lambda name: near), losses), "other bits are the same to it"

    program = Mock(train=Mock(return_value=losses), model=Mock(return_value=b""))
    assert not check.same_after_resume(program, losses)
    stops = [int(call.args[2]) for call in program.train.mock_calls if len(call.args) > 1]
    assert [stop // 4 for stop in stops] == [0, 1, 2], (
        f"it stops at {stops}, not in each of three phases")


def test_what_does_not_run_at_all_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check.py", "absent.py"])
    with pytest.raises(SystemExit, match="^check.py: absent.py .*: .*can't open file"):
        check.main()


def test_the_flags_are_those_of_train():
    assert [phase.steps for phase in train.parse_arguments(check.FLAGS).phases] == [4, 4]


@pytest.mark.parametrize("words, first, later, wrong", [
    ([], 0.7, 0.73, True), (["--model", "mini"], 0.7, 0.73, False),      # as it is, unchanged
    (["--model=mini"], 0.7, 0.73, False),
    (["--model", "mini"], 0.73, 0.7, True), (["--model", "mini"], 0.7, 0.8, True)])
def test_pairs_of_larger_models_differ_more_in_later_steps(words, first, later, wrong):
    """In bf16 the loss of pairs, 0.7, is `first` in two steps, then `later`."""
    def train(name, *_):
        pairs = [first] * 2 + [later] * 4 if "bf16" in name else [0.7] * 6
        return {("train", step): {"nsp_loss": loss} for step, loss in enumerate(pairs, 1)}

    program = SimpleNamespace(words=words, train=train)
    assert bool(check.near_in_bf16(program, None)) == wrong
