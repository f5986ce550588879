"""What a run of train.py says and writes: the log, metrics.jsonl, the end; the README's words."""
import errno
import math
import re
import sys
from types import SimpleNamespace

import pytest

import dist
import train
from tests.conftest import ROOT
from tests.ranks import run_script
from tests.training import LITTLE, metrics, plan_of, shrink

# ----- Whole programs, as the README has them -----

def test_the_readme_quotes_messages_that_the_code_has():
    table = (ROOT / "README.md").read_text().partition("| you see | do |")[2]
    code = "".join(path.read_text() for path in ROOT.glob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)                       # messages of two lines
    quotes = re.findall(r"^\| `(.+?)` \|", table.partition("\n\n")[0], re.M)
    assert len(quotes) > 5
    for quote in quotes:                      # but for the numbers and names that come into them
        for part in re.split(r"\d+|HOST|\.\.\.|: .*", quote):
            assert part.strip() in code, quote


def test_what_a_run_writes(shards, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(train, "EVAL_EXAMPLES", 64)
    monkeypatch.setattr(sys, "argv", ["", "--data", str(shards), "--out", str(out), *LITTLE,
                                      "--micro-batch", "3"])
    train.main()
    said = capsys.readouterr().out
    assert (out / "log.txt").read_text() == said
    assert "phase 1: 4 steps x 8 examples of 64 tokens; 1 rank(s) x micro-batch 3" in said

    header, = metrics(out, "run")
    assert header["world"] == 1 and header["parameters"] > 0
    lines = metrics(out)
    assert [(line["step"], line["phase"]) for line in lines] == [
        (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2)]
    fields = ("step phase seq_len loss mlm_loss nsp_loss lr grad_norm loss_scale skipped examples "
              "seconds examples_per_second tflops bytes_sent wait_seconds")
    assert set(fields.split()) <= set(lines[0])
    assert lines[-1]["minutes_left"] == 0 and 0.05 < lines[0]["memory_gb"] < 20
    assert lines[0]["minutes_left"] == pytest.approx(lines[0]["seconds"] / 60 * (3 + 4), rel=1e-6)
    results = metrics(out, "eval")
    assert lines[0]["mlm_loss"] == pytest.approx(results[0]["unigram_entropy"], abs=0.3)
    for result in results:
        fields = "step phase mlm_loss mlm_accuracy nsp_accuracy unigram_entropy"
        assert set(fields.split()) <= set(result)
    assert {"config.json", "model.safetensors", "tokenizer.model"} <= {
        path.name for path in (out / "model").iterdir()}

    train.main()                          # the same command again
    assert "Done after step 6 of 6" in capsys.readouterr().out and metrics(out) == lines
    assert metrics(out, "run") == [header]


def test_the_demo_fills_in_its_sentences(shards, tmp_path, monkeypatch, capsys):
    shrink(monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "docs").symlink_to(shards)
    argv = "--steps 2 2 --batch 4 --workers 0 --precision fp32".split()
    train.train(train.make_plan(train.parse_arguments(argv), dist.World()), dist.World())
    printed = capsys.readouterr().out
    for sentence in train.DEMO_SENTENCES:
        answer = printed.partition(f"\n{sentence}\n    ")[2].partition("\n")[0]
        assert answer.count("%") == 3


def test_own_text_is_prepared_on_the_spot(documents, tmp_path, refused, monkeypatch):
    (tmp_path / "my.txt").write_text("\n\n".join(documents))
    arguments = *"--corpus my.txt --pairs sop --vocab-size 300 --workers 0".split(), *LITTLE
    run = run_script(ROOT / "train.py", *arguments, "--steps", 4, 0, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "shards" / "my" / "manifest.json").exists()
    assert (tmp_path / "runs" / "my" / "model" / "config.json").exists()
    assert "SOP accuracy" in run.stdout and not re.search("NSP|three sentences", run.stdout)
    assert "another --out starts over" in run.stdout
    (tmp_path / "my.txt").write_text("Another text.\n")
    monkeypatch.chdir(tmp_path)
    code, line = refused(*arguments)
    assert code == 1 and "shards/my was prepared otherwise (corpus)" in line


CHINESE = "他们在城里，她看见一条河。", "这本书很好，他不知道！", "山上有雪。", "你的家人从哪里来？"
GERMAN = "Er kam am 21. März nach Wien.", "Der Fluss ist breit und tief.", "Wer weiß das schon?"


@pytest.mark.parametrize("sentences,between", [(CHINESE, ""), (GERMAN, " ")])
def test_text_of_other_languages(tmp_path, sentences, between):
    documents = []
    for k in range(200):
        some = [sentences[(k * i + i) % len(sentences)] for i in range(3, 12)]
        documents.append(between.join(some) + str(k))
    (tmp_path / "my.txt").write_text("\n\n".join(documents))
    arguments = *"--corpus my.txt --vocab-size 64 --workers 0".split(), *LITTLE
    run = run_script(ROOT / "train.py", *arguments, "--steps", 4, 0, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    found = re.search(r"200 of 200 documents .* ([\d,]+) sentences", run.stdout)
    assert abs(int(found.group(1).replace(",", "")) - 9 * 200) <= 200      # with the number behind
    assert "Done after step 4 of 4" in run.stdout


# ----- The log -----

def log_in(folder, *flags):
    return train.Log(plan_of("--out", folder, *flags), True)


def test_lines_that_found_no_room_are_written_later(tmp_path, capsys):
    log = log_in(tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()                     # as bad as a full disk
    log.metric("train", step=1)
    assert f"warning: {tmp_path}/metrics.jsonl: Is a directory" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").rmdir()
    log.metric("train", step=2, loss=math.nan)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    assert metrics(tmp_path)[1]["loss"] is None              # JSON has no NaN


def test_a_terminal_that_takes_no_more_does_not_end_a_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = log_in(tmp_path)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=full, flush=full))
    log.say("step 1")
    monkeypatch.setattr(sys, "stdout", None)      # as `>&-` has it
    log.say("step 2")
    assert (tmp_path / "log.txt").read_text() == "step 1\nstep 2\n"
