"""What a user of train.py sees: a run's lines and files, what is refused in one line, the README's
words."""
import errno
import io
import json
import math
import os
import re
import resource
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import dist
import train
from tests.conftest import ROOT
from tests.course import race
from tests.ranks import run_ranks, run_script
from tests.training import SHORT, args_of, column, metrics, run

# ----- A whole program -----

FIELDS = {
    "run": "command flags phases code python torch ranks device parameters",
    "train": "step phase mlm_loss nsp_loss lr grad_norm loss_scale skipped seconds "
             "examples_per_second data_share wait_seconds bytes_sent minutes_left",
    "eval": "step phase mlm_loss mlm_accuracy unigram_loss nsp_loss nsp_accuracy"}


def test_two_steps_of_the_demo_as_a_user_has_them(shards, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "demo").symlink_to(shards)
    out = tmp_path / "runs" / "demo"
    argv = ROOT / "train.py", "--steps", 1, "--batch", 8, "--precision", "fp32"
    first = run_script(*argv, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert "phase 1: 1 steps, 8 examples of 64 tokens a step, lr 0.008" in first.stdout
    line = train.step_line(metrics(out)[0])          # printed after ten seconds
    assert re.match(r"step +1  phase 1  mlm +\d\.\d+  nsp +0\.\d+  lr 5.8e-03  norm", line)
    assert re.search(r"step +1  held out, 15% masked: unigram \d\.\d+  "
                     r"mlm \d\.\d+ \(\d+\.\d% right\)  nsp 0\.\d+ \(", first.stdout)
    for sentence in train.DEMO_SENTENCES:
        answer = first.stdout.partition(f"\n{sentence}\n    ")[2].partition("\n")[0]
        assert answer.count("%") == 3

    for kind, fields in FIELDS.items():
        for line in metrics(out, kind):
            assert set(fields.split()) <= set(line), kind
    for line, evaluation in zip(metrics(out), metrics(out, "eval")):
        assert line["step"] == evaluation["step"] == line["phase"] == evaluation["phase"]
        # The bias begins at the frequencies
        assert line["mlm_loss"] == pytest.approx(evaluation["unigram_loss"], abs=0.3)
        assert 0 < line["data_share"] < 1 and 0.5 < line["nsp_loss"] < 1
    # Phase 1 has a third of the tokens
    minutes = metrics(out)[0]["seconds"] / 60
    assert column(out, "minutes_left") == pytest.approx([2 * minutes, 0])
    assert {path.name for path in out.iterdir()} == {
        "metrics.jsonl", "model", "step-00000001.pt", "step-00000002.pt"}
    config = json.loads((out / "model" / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 128

    assert race.read(out).points[-1][2:4] == (16, 128)        # examples, tokens of one
    before = metrics(out)
    again = run_script(*argv, cwd=tmp_path)               # the same command again
    assert again.returncode == 0 and metrics(out) == before
    assert "resuming from the checkpoint of step 2" in again.stdout
    assert "Done after step 2; another --out starts over" in again.stdout


def test_the_readme_quotes_messages_that_the_code_has():
    table = (ROOT / "README.md").read_text().partition("| you see | do |")[2]
    code = "".join(path.read_text() for path in ROOT.glob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)                       # messages of two lines
    code = re.sub(r"\{[^{}]*\}", "", code)                    # numbers and names
    cells = re.findall(r"^\| (.+?) \|", table.partition("\n\n")[0], re.M)
    quotes = [quote for cell in cells for quote in re.findall("`(.+?)`", cell)]
    assert len(quotes) > 5
    for quote in quotes:
        for part in re.split(r"\d+|: .*", quote):
            assert part.strip() in code, quote


# ----- What is refused, beside the flags of test_plan.py -----

@pytest.fixture
def refused(train_here, shards, tmp_path, monkeypatch, capsys):
    """Runs train.py in this process, to be refused; returns its only line on stderr."""
    def run_main(*argv):
        words = "train.py", "--data", shards, "--out", tmp_path / "out", *SHORT, *argv
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        with pytest.raises(SystemExit, match="^1$"):
            train.main()
        line, = capsys.readouterr().err.splitlines()
        return line

    return run_main


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


def of_an_older_program(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 1}))


@pytest.mark.parametrize("name,change,message", [
    ("train-00001.tokens", flip, "{path} is damaged on "),
    ("train-00002.documents", os.remove, "{path}"),
    ("tokenizer.model", flip, "{path} is damaged on "),
    ("manifest.json", of_an_older_program, "{path} is missing, damaged or of an older program"),
    ("manifest.json", os.remove, "{path} is missing, damaged or of an older program")])
def test_shards_that_are_not_whole_are_refused(refused, shards, tmp_path, name, change, message):
    shutil.copytree(shards, tmp_path / "copy")
    change(tmp_path / "copy" / name)
    line = refused("--data", tmp_path / "copy")
    assert message.format(path=tmp_path / "copy" / name) in line
    assert not (tmp_path / "out").exists()


def test_two_runs_in_one_folder_are_refused(refused, tmp_path):
    _locked = train.Log(tmp_path / "out", True)
    assert f"train.py: another run writes to {tmp_path}/out" in refused()


def start_differently(world):
    if world.rank == 1:
        parse = train.parse_arguments
        flags = "--lr-scale 2 --bucket-mb 7 --save-every 2 --max-steps 9".split()
        train.parse_arguments = lambda argv: parse([*argv, *flags])
        torch.backends.cpu.get_cpu_capability = lambda: "NEON"
        torch.__version__ = "0"


def test_what_one_rank_refuses_all_refuse(shards, tmp_path):
    out = tmp_path / "out"
    for outcome in run(shards, out, *SHORT, size=2, check=False, sabotage=(start_differently,)):
        assert isinstance(outcome, dist.DistError)
        assert "rank 1 was started differently:" in str(outcome)
        for differs in ("processor NEON (not", "lr_scale 2.0 (not 1.0)", "bucket_mb 7.0 (not 2.0)",
                        "save_every 2 (not 3)", "max_steps 9 (not inf)", "torch 0 (not"):
            assert differs in str(outcome)
    for outcome in run(shards, out, *SHORT, "--batch", 2, size=3, check=False):
        assert "a batch of 2 is too small for 3 ranks; raise --batch" in str(outcome)
    assert not out.exists()


def two_of_three_share_a_gpu(world):
    gpu = SimpleNamespace(major=8, minor=0, multi_processor_count=108, uuid=world.rank // 2)
    torch.cuda.get_device_properties = lambda device: gpu
    world.device = torch.device("cuda")
    train.check_ranks(args_of(), world)


def test_a_gpu_of_two_ranks_is_said_by_all(tmp_path):
    for error in run_ranks(two_of_three_share_a_gpu, 3, tmp_path, check=False):
        assert "several ranks have the same GPU; lower --nproc_per_node" in str(error)


@pytest.mark.parametrize("error", [
    None, MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    OSError(errno.ESTALE, "Stale file handle")])
def test_a_restart_helps_where_a_disk_was_away_but_not_memory(refused, monkeypatch, error):
    def build(args, world):
        if error:
            raise error
        torch.empty(10 ** 15)

    monkeypatch.setattr(train, "build", build)
    leave, ends = dist.leave, []
    monkeypatch.setattr(dist, "leave", lambda *said: ends.append(said) or leave(*said))
    line = refused()
    assert ends[0][1] == isinstance(error, OSError)          # whether a restart helps
    assert line.startswith("train.py: out of memory; lower --micro-tokens") != ends[0][1]


def test_a_bug_has_its_traceback(monkeypatch, capsys, tmp_path, shards):
    monkeypatch.setattr(train, "build", lambda args, world: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["train.py", f"--data={shards}", f"--out={tmp_path}"])
    with pytest.raises(SystemExit, match="^1$"):
        train.main()
    assert re.match("(?s)train.py: Traceback.*ZeroDivisionError", capsys.readouterr().err)


# ----- The log -----

def test_lines_that_found_no_room_are_written_later(tmp_path, capsys):
    log = train.Log(tmp_path, True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))             # as bad as a full disk
    log.metric("train", step=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "warning: metrics.jsonl: File too large" in capsys.readouterr().out
    log.metric("train", step=2, mlm_loss=math.nan)
    assert column(tmp_path, "step") == [1, 2]
    assert metrics(tmp_path)[1]["mlm_loss"] is None              # JSON has no NaN


def test_a_terminal_that_takes_no_more_or_no_utf_8_does_not_end_a_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = train.Log(tmp_path, True)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=full, flush=full))
    log.say("step 1")
    monkeypatch.setattr(sys, "stdout", None)      # as `>&-` has it
    log.say("step 2")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    log.say("ü")


def test_steps_are_lines_now_and_then(tmp_path, capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(train, "STEP_LINE", "{step}")
    log = train.Log(tmp_path, True)
    for step in range(1, 101):
        clock[0] += 1.0 if step < 90 else 40.0
        log.step({"step": step})
    assert column(tmp_path, "step") == list(range(1, 101))
    said = [int(line) for line in capsys.readouterr().out.split()]
    assert said == [*range(11, 90, 11), *range(90, 101)]


def test_the_other_ranks_are_silent(tmp_path, capsys):
    log = train.Log(tmp_path / "out", False)
    log.say("a line")
    log.metric("train", step=1)
    assert not capsys.readouterr().out and not (tmp_path / "out").exists()
