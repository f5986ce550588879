"""Tests check.py with a fake program of eight steps: which question finds which fault."""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import bert
import data
import dist
import optim
import train
from tests.tools import check


def pretend(command, wrong_in, loss):
    """Does what the program would do, in place of subprocess.run. wrong_in: where the fault is: a
    word of the command, "the run NAME", or "a resumed run". There the program "dies", "refuses"
    --init, has a loss that "drifts", or has this loss instead of 6.0 and a different model."""
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
                line = {"kind": kind, "step": step, "mlm_loss": 6.0, "nsp_loss": 0.7,
                        "grad_norm": 2.0, "skipped": 0}
                if run.name == "spoiled":
                    line["skipped"] = min(max(0, step - 4), 2)       # steps 5 and 6
                if wrong and loss == "drifts":
                    line["mlm_loss"] += step
                elif wrong and loss != "skips":
                    line |= loss if isinstance(loss, dict) else {"mlm_loss": loss}
                file.write(json.dumps(line) + "\n")
    weights = {"frozen": torch.ones(1), "trained": torch.tensor([float(last), wrong])}
    (run / "model/model.safetensors").write_bytes(bert.pack(weights))
    (run / "model/config.json").write_text('{"model_type": "bert"}')
    index = 7 if wrong and loss == "skips" else 2
    return SimpleNamespace(returncode=0, stdout=f"step 1\nread 0 1 0\nread 1 0\nread 0 {index}\n")


@pytest.mark.parametrize("wrong_in, loss, seen_by", [
    ("no run", 6.1, ""),
    ("the run again", 6.1, "same_again"),
    ("a resumed run", 6.1, "same_after_resume same_with_dropout same_from_two_to_one"),
    ("a resumed run", None, "same_after_resume same_with_dropout same_from_two_to_one"),
    ("the run dropout, resumed", 6.1, "same_with_dropout"),
    ("the run noted", "skips", "each_example_once"),
    ("the run compared", "dies", "same_as_huggingface"),
    ("a resumed run", 6.0, "same_after_resume"),
    ("--micro-tokens", 6.1, "same_one_at_a_time"),
    ("--nproc_per_node=2", 6.1, "same_on_two_ranks same_from_two_to_one"),
    ("--nproc_per_node=2", "dies", "same_on_two_ranks same_from_two_to_one"),
    ("--init", 6.001, "same_from_folder"),
    ("--init", "refuses", ""),
    ("--micro-tokens", {"grad_norm": 2.001}, "same_one_at_a_time"),
    ("the run spoiled", "drifts", "same_after_skipped_step"),
    ("the run rescaled", {"grad_norm": 2.000001}, "same_with_other_scales"),
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
    assert lines.pop().split("changes ")[1].split() == ["frozen"]
    others = [line for line in lines if not ("NO: " in line or line.endswith("yes"))]
    assert bool(others) == (loss == "refuses"), lines
    assert end.value.code == bool(seen)
    if loss == "dies":
        assert "NO: train.py: rank 1: ValueError" in "".join(lines), (
            "the program's own line is not shown")


def test_it_compares_as_much_as_it_says(monkeypatch):
    flags = dict(zip(check.FLAGS, check.FLAGS[1:]))
    assert int(flags["--batch"]) % 2, "two ranks have equal shares, which hides wrong divisors"
    losses = {("train", step): {"mlm_loss": 6.0} for step in range(1, 9)}
    assert [step for _, step in check.first_six(losses)] == [1, 2, 3, 4, 5, 6]
    other = losses | {("train", 5): {"mlm_loss": 6.00002}}
    said = check.difference(other, losses, check.TOLERANCE)
    assert said.startswith("NO: mlm_loss of step 5 is 6.00002")
    near = losses | {("train", 5): {"mlm_loss": 6.000001}}
    assert check.same_again(Mock(train=lambda name: near), losses), "other bits are the same to it"

    program = Mock(train=Mock(return_value=losses), model=Mock(return_value={}))
    assert not check.same_after_resume(program, losses)
    stops = [int(call.args[2]) for call in program.train.mock_calls if len(call.args) > 1]
    assert [stop // 4 for stop in stops] == [0, 1, 2], (
        f"it stops at {stops}, not in each of three phases")


@pytest.mark.parametrize("flags, loss, norm, wrong", [
    ("", 6.00001, 2, False), ("", 6.00002, 2, True), ("", 6, 2.0001, False), ("", 6, 2.0003, True),
    ("--compression int8", 6.05, 2.7, False), ("--compression=int8", 6.07, 2, True),
    ("--compression int8", 6, 4, True)])                 # a sum over two ranks, not a mean
def test_two_ranks_may_differ_more_with_compression(tmp_path, flags, loss, norm, wrong):
    program = check.Program(flags.split(), tmp_path)
    whole = {("train", 1): {"mlm_loss": 6, "grad_norm": 2}}
    program.train = Mock(return_value={("train", 1): {"mlm_loss": loss, "grad_norm": norm}})
    for question in check.same_on_two_ranks, check.same_from_two_to_one:
        assert bool(question(program, whole)) == wrong, question.__name__
    assert bool(check.same_one_at_a_time(program, whole)) == (wrong or bool(flags))
    assert check.same_again(program, whole), "a run again may differ"
    assert bool(check.same_with_other_scales(program, whole)) == (wrong or not flags)


@pytest.mark.parametrize("skipped, changed_by, answer", [
    ([5, 6], None, ""), ([5, 6], 5, "NO: mlm_loss of step 5"), ([5, 6], 6, "NO: mlm_loss of step"),
    ([3], 3, "NO: mlm_loss of step 3"),                  # two gradients in a step
    ([1, 5, 6], None, ""), ([1, 5, 6], 5, "NO: mlm_loss of step 5"),       # fp16's first overflow
    ([6, 7], None, ""),                                    # gradients applied a step late
    ([5, 6, 8], None, "NO: the gradients have an inf or NaN in later"), ([], None, "not tried: "),
    ([1, 2], None, "not tried: ")])
def test_what_a_skipped_step_must_not_do(skipped, changed_by, answer):
    lines, losses = [], {}
    for step in range(1, 9):
        lines.append({"kind": "train", "step": step, "skipped": sum(n <= step for n in skipped)})
        taken = sum(n not in skipped or n == changed_by for n in range(1, step + 1))
        if step > 1:
            losses["eval", step] = {"mlm_loss": 7 - taken}
    program = Mock(train=Mock(return_value=losses), lines=Mock(return_value=lines))
    found = check.same_after_skipped_step(program, None)
    assert found.startswith(answer) and bool(found) == bool(answer), found


def test_the_program_is_changed_before_it_runs(monkeypatch, tmp_path, capsys):
    (tmp_path / "program.py").write_text(
        "import sys, torch, dist, optim\n"
        "reducer = dist.Reducer(torch.nn.Linear(2, 2), dist.World())\n"
        "for step in range(1, 8):\n"
        "    reducer.zero_grad(1.0)\n"
        "    if not reducer.flats[0].isfinite().all():\n"
        "        print(step, *sys.argv[1:])\n"
        "scaler = optim.LossScaler(scale=1.0)\n"
        "for step in range(1, 4):\n"
        "    print(scaler.scale, scaler.update(False, step))\n")
    monkeypatch.setattr(dist.Reducer, "zero_grad", dist.Reducer.zero_grad)   # restored afterwards
    monkeypatch.setattr(optim.LossScaler, "update", optim.LossScaler.update)
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "program.py"), "--flag"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec(check.CHANGED.replace("CHANGE", check.SPOILED + check.RESCALED), {})
    assert capsys.readouterr().out == "5 --flag\n6 --flag\n1.0 True\n0.5 True\n1.0 True\n"


@pytest.mark.parametrize("said, answer", [
    ("read 0 1 0\nread 1 0\nread 0 2", ""), ("step 1", "not tried: "),
    ("read 0 0 1\nread 0 1 2", "NO: in phase 1 example 1 comes twice"),
    ("read 0 0\nread 1 0\nread 1 2", "NO: in phase 2 example 2 comes in place of 1"),
    ("read 0 3", "NO: in phase 1 example 3 comes in place of 0")])
def test_which_examples_a_phase_reads(said, answer):
    found = check.each_example_once(Mock(said={"noted": said}), None)
    assert found.startswith(answer) and bool(found) == bool(answer), found


def test_examples_are_noted_and_the_folder_is_compared(shards, monkeypatch, tmp_path, capsys):
    (tmp_path / "program.py").write_text(
        "import sys, torch, bert, data, dist\n"
        "from pathlib import Path\n"
        "shards, folder = map(Path, sys.argv[1:])\n"
        "for held_out in False, True, False:\n"
        "    batch = data.PretrainingData(shards, 32, held_out=held_out).batch([3, 4]).to('cpu')\n"
        "model = bert.BertForPreTraining(bert.BertConfig(2, 64, 2, 96, 320, dropout=0.5))\n"
        "for p in model.parameters():\n"
        "    p.data += 0.1 * torch.randn_like(p)\n"
        "forward = bert.Block.forward\n"
        "bert.save_huggingface(model, shards / 'tokenizer.model', folder, 32)\n"
        "dist.end(0)\n"
        "bert.Block.forward = lambda *inputs: 0.99 * forward(*inputs)\n"
        "try:\n"
        "    dist.end(0)\n"
        "except bert.ModelError as error:\n"
        "    print(error)\n"
        "bert.MODEL_TYPES[0] = 'other'\n"
        "bert.save_huggingface(model, shards / 'tokenizer.model', folder, 32)\n"
        "dist.end(0)\n")
    for module, name in ((data.PretrainingData, "batch"), (data.Batch, "to"), (dist, "end"),
                         (bert, "save_huggingface"), (bert.Block, "forward"),
                         (bert, "MODEL_TYPES")):
        monkeypatch.setattr(module, name, getattr(module, name))         # restored afterwards
    monkeypatch.setattr(bert, "MODEL_TYPES", [*bert.MODEL_TYPES])
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "program.py"), str(shards),
                                      str(tmp_path / "model")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec(check.CHANGED.replace("CHANGE", check.NOTED + check.COMPARED), {})
    *noted, error = capsys.readouterr().out.splitlines()
    assert noted == ["read 0 3 4", "read 1 3 4"]
    assert error.startswith("Hugging Face's BERT with these weights has other "), error


def test_what_does_not_run_at_all_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["check.py", "absent.py"])
    with pytest.raises(SystemExit, match="^check.py: absent.py .*: .*can't open file"):
        check.main()
    (tmp_path / "empty.py").touch()
    monkeypatch.setattr(sys, "argv", ["check.py", str(tmp_path / "empty.py")])
    with pytest.raises(SystemExit, match="^check.py: .* to its end: it has written no metr"):
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
