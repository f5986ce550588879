"""tests/tools/check.py, on a pretended program of ten steps: which question sees which fault."""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from tests.tools import check


def pretend(command, fault):
    """Does what a program with a fault does, in place of subprocess.run."""
    ranks = 2 if "--nproc_per_node=2" in command else 1
    out = Path(command[command.index("--out") + 1])
    if fault == "dies" and ranks == 2:
        noise = "W1128 torch/distributed/run.py\ntrain.py: rank 1: ValueError\nRoot Cause"
        return SimpleNamespace(returncode=1, stderr=noise)

    def flag(name, default):
        return command[command.index(name) + 1] if name in command else default

    (out / "model").mkdir(parents=True, exist_ok=True)
    path = out / "metrics.jsonl"
    before = path.read_text().splitlines() if path.exists() else []
    first = len(before) // 2
    last = 0 if "--init" in command else min(10, int(flag("--max-steps", 10)))
    wrong = {"seed": out.name == "again", "counter": before, "mean": "--micro-tokens" in command,
             "ranks": ranks == 2, "folder": "--init" in command,
             "rounding": "bf16" in command[5:], "nan": before}.get(fault)
    loss = 6.1 if wrong else 6.0
    if fault == "nan" and wrong:
        loss = None
    with open(path, "a") as file:
        for step in range(first, last + 1):
            for kind in "train", "eval":
                file.write(json.dumps({"kind": kind, "step": step, "mlm_loss": loss}) + "\n")
    average = "wrong" if fault == "average" and before else "right"
    (out / "model/model.safetensors").write_text(average)
    return SimpleNamespace(returncode=0, stderr="")


@pytest.mark.parametrize("fault, seen_by", [
    ("none", []),
    ("seed", [check.same_again]),
    ("counter", [check.same_after_resume, check.same_from_two_to_one]),
    ("nan", [check.same_after_resume, check.same_from_two_to_one]),
    ("average", [check.same_after_resume]),
    ("mean", [check.same_one_at_a_time]),
    ("ranks", [check.same_on_two_ranks, check.same_from_two_to_one]),
    ("dies", [check.same_on_two_ranks, check.same_from_two_to_one]),
    ("folder", [check.same_from_folder]),
    ("rounding", [check.near_in_bf16]),
])
def test_a_fault_is_seen(tmp_path, monkeypatch, capsys, fault, seen_by):
    monkeypatch.setattr(subprocess, "run", lambda command, **options: pretend(command, fault))
    monkeypatch.setattr(sys, "argv", ["check.py"])
    monkeypatch.setattr(check.optim, "choose_precision", lambda *arguments: "bf16")
    with pytest.raises(SystemExit) as end:
        check.main()
    lines = capsys.readouterr().out.splitlines()
    seen = [question for line, question in zip(lines, check.QUESTIONS.values())
            if not line.endswith("yes")]
    assert seen == seen_by, lines
    assert end.value.code == bool(seen_by)
    if fault == "dies":
        assert "NO: train.py: rank 1: ValueError" in lines[3], "the program's own line is not shown"


def test_what_does_not_run_at_all_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["check.py", "absent.py"])
    with pytest.raises(SystemExit, match="^check.py: absent.py .*: .*can't open file"):
        check.main()


def test_the_flags_are_those_of_train():
    assert [phase.steps for phase in train.parse_arguments(check.FLAGS).phases] == [5, 5]
