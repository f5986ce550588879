"""Tests of what a user of train.py sees: a run's lines and files, the messages that README quotes,
what follows from the flags, refusals in one line, the log."""
import errno
import json
import math
import re
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import dist
import optim
import train
from tests.conftest import ROOT
from tests.course import race
from tests.local_ranks import on_threads
from tests.ranks import no_room, run_script
from tests.training import SHORT, args_of, column, last_state, metrics, run

# ----- A whole program -----

NOTEBOOK = """
import sys, data, train
data.usable_cores = lambda: 3
train.EVAL_EXAMPLES = 256
train.LOG_SECONDS = -1          # each step is a line
for more in [], [], ["--data", "nowhere"]:
    sys.argv += more
    try:
        train.main()
        print("ended well")
    except SystemExit as end:
        print("ended with", end.code)
"""


def test_two_steps_of_the_demo_as_a_user_has_them(shards, tmp_path):
    """As in a notebook or under a profiler: the process lives on after a run, after its resume and
    after a refusal."""
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "demo").symlink_to(shards)
    (tmp_path / "x.py").write_text(NOTEBOOK)
    out = tmp_path / "runs" / "demo"
    done = run_script("x.py", "--steps", 1, "--batch", 8, "--precision", "fp32", cwd=tmp_path)
    ends = re.findall("ended .*", done.stdout)
    assert ends == ["ended well", "ended well", "ended with 1"], done
    assert re.fullmatch("train.py: nowhere/manifest.json is missing.*\n", done.stderr), done.stderr
    first, again, _ = done.stdout.split("ended well")
    for pattern in [
            "each with 3 CPU threads",
            r"phase 1: 1 steps \(up to 0.0\d+ times the text\), 8 examples of 64 tokens \(\d+% of "
            r"the text is long enough\) a step, lr 0.008",
            # In the middle of phase 1, not of the run, the rate is
            # 0.008 ((1 - 1/2) / (1 - 0.05))^0.5
            r"step +1  phase 1  mlm +\d\.\d+  nsp +0\.\d+  lr 5.8e-03  norm",
            r"step +1  held out, 1\d% masked: unigram \d\.\d+  mlm \d\.\d+ \(\d+\.\d% right\)  nsp",
            *(rf"\n{re.escape(sentence)}\n    (.*%){{3}}" for sentence in train.DEMO_SENTENCES),
            "Done after step 2; another --out starts over"]:
        assert re.search(pattern, first), f"{pattern} is not in:\n{first}"
    assert "warning" not in first, first
    assert "resuming from the checkpoint of step 2" in again, again
    assert "no whole checkpoint" not in again, again

    for line, evaluation in zip(metrics(out), metrics(out, "eval"), strict=True):
        assert line["step"] == evaluation["step"] == line["phase"] == evaluation["phase"]
        assert line["mlm_loss"] == pytest.approx(evaluation["unigram_loss"], abs=0.3), (
            "the loss does not begin near the unigram loss: is the bias set to the frequencies?")
        assert 0.5 < line["nsp_loss"] < 1 and 0 < line["data_share"] < 1, line
        assert line["masked_fraction"] == pytest.approx(0.3, abs=0.05)
        tokens = line["tokens_per_second"] / line["examples_per_second"] / 64 / line["phase"]
        assert 0.5 < tokens <= 1, f"the examples have {tokens:.0%} of the phase's length on average"
    assert {path.name for path in out.iterdir()} == {
        "metrics.jsonl", "model", "run", "step-00000001.pt", "step-00000002.pt"}
    config = json.loads((out / "model" / "tokenizer_config.json").read_text())
    longest = last_state(out)["counters"]["longest"]
    assert config["model_max_length"] == longest == 128, (
        "model_max_length is not the number of tokens in the longest example, here a full one")
    assert race.read(out).points[-1][2:4] == (16, 128), (
        "race.py does not find 16 examples and a length of 128 tokens")


def test_the_readme_quotes_messages_that_the_code_has():
    code = "".join(path.read_text() for path in ROOT.glob("*.py"))
    # Join messages over several lines, and drop the numbers and names in them.
    code = re.sub(r'"\s+f?"|\{[^{}]*\}', "", code)
    table = (ROOT / "README.md").read_text().partition("| you see | do |")[2]
    cells = re.findall(r"^\| (.+?) \|", table.partition("\n\n")[0], re.M)
    quotes = re.findall("`(.+?)`", " ".join(cells))
    assert len(quotes) > 5, f"README's table of messages quotes only {quotes}"
    for quote in quotes:
        for part in re.split(r"\d+|: .*", quote):
            assert part.strip() in code, quote


# ----- What follows from the flags -----

def test_the_published_recipes():
    nvidia = args_of("--recipe", "nvidia-64k")
    assert nvidia.betas == (0.9, 0.999)
    published = (128, 65536, 7038, 6e-3), (512, 32768, 1563, 4e-3)
    for phase, (*numbers, highest) in zip(nvidia.phases, published, strict=True):
        assert [phase.seq_len, phase.global_batch, phase.steps] == numbers
        assert phase.power == 0.5
        assert phase.lr == pytest.approx(highest * (1 - phase.warmup) ** 0.5, rel=1e-4)
    day = args_of("--recipe", "day")
    assert day.phases == [optim.Phase(128, 4096, 20900, lr=5e-4, warmup=0.06, power=1)]
    assert day.betas == args_of().betas == (0.9, 0.98)
    for args, expected in ((nvidia, ("lamb", "nsp", 0.15, 0.1)), (day, ("adamw", "none", 0.3, 0.1)),
                           (args_of(), ("lamb", "nsp", 0.3, 0))):
        found = args.optimizer, args.pairs, args.mask_fraction, args.dropout
        assert found == expected, f"{args.recipe} has {found}, README's table {expected}"


@pytest.mark.parametrize("found, precision", [("avx512_bf16", "bf16"), ("avx2", "fp32")])
def test_bf16_on_a_cpu_needs_instructions(monkeypatch, found, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {found: True}, raising=False)
    assert fitted("cpu") == (precision, 8192)
    assert fitted("cpu", "--precision", "fp16") == ("fp16", 8192)


def fitted(device, *flags):
    """Returns the (--precision, --micro-tokens) that train.py chooses for a device."""
    args = args_of(*flags)
    train.fit_to_device(args, torch.device(device))
    return args.precision, args.micro_tokens


# H100, A100, RTX 4090, V100. The V100 reports bf16, but only emulates it, slowly.
@pytest.mark.parametrize("gigabytes, major, precision, tokens", [
    (84.9, 9, "bf16", 32768), (42.4, 8, "bf16", 16384), (25.3, 8, "bf16", 8192),
    (16.9, 7, "fp16", 4096), (11.7, 6, "fp32", 2048)])           # the last one: GTX 1080 Ti
def test_a_gpu_takes_as_many_tokens_as_its_memory_allows(
        monkeypatch, gigabytes, major, precision, tokens):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 1))
    properties = SimpleNamespace(total_memory=int(gigabytes * 1e9), major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: including_emulation or major >= 8)
    assert fitted("cuda") == (precision, tokens)
    slower = tokens if precision == "fp32" else tokens // 2
    assert fitted("cuda", "--precision", "fp32") == ("fp32", slower)
    assert fitted("cuda", "--micro-tokens", 7) == (precision, 7)
    if precision != "bf16":
        with pytest.raises(train.ConfigError, match="no bf16; give --precision auto"):
            fitted("cuda", "--precision", "bf16")


# ----- What is refused in one line, before any training -----

@pytest.fixture
def refused(train_here, shards, tmp_path, monkeypatch, capsys):
    """A function that runs train.py in this process, where it must refuse to train, and returns
    (status, the only line on stderr)."""
    def run_main(*argv):
        words = "train.py", "--data", shards, "--out", tmp_path / "out", *SHORT, *argv
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        with pytest.raises(SystemExit) as end:
            train.main()
        line, = capsys.readouterr().err.splitlines()
        return end.value.code, line

    return run_main


@pytest.mark.parametrize("argv, message", [
    ("--optimizer sgd", r"--optimizer: invalid choice: 'sgd' \(choose from .*lamb"),
    ("--compression zip", "zip.*none.*fp16.*bf16.*int8"),
    ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    ("--save-every 0", r"--save-every: must be in .1, 1000000000\)"),
    ("--seed 1.5", "--seed: invalid .* value: '1.5'"),
    ("--seed 9223372036854775808", "--seed: must be in .0, 9223372036854775808.*, not 9223"),
    ("--timeout nan", r"--timeout: must be in .0.001, 1000000.0\), not nan"),
    ("--lr-scale 1e300", r"--lr-scale: must be in .0, 1000000000.0\), not 1e300"),
    ("--dropout 1.5", r"--dropout: must be in .0, 1\), not 1.5"),
    ("--batch 1 2 3", "--batch take one number, or one for each of 2 phases"),
    ("--data=", "--data: the path is empty"),
    ("--out=", "--out: the path is empty"),
    ("--init=", "--init: the path is empty")])
def test_wrong_flags_are_one_line_and_end_torchrun(refused, monkeypatch, argv, message):
    monkeypatch.setenv("RANK", "8")                  # the first rank of its node prints it, too
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(dist, "TORCHRUN", 1)
    monkeypatch.setattr(dist, "end_torchrun", Mock())
    status, line = refused(*argv.split())
    assert status == 2 and re.search(message, line), f"status {status}: {line}"
    assert dist.end_torchrun.called, "torchrun was not ended, and would restart the ranks"


def test_wrong_flags_are_said_once_a_node_and_other_ranks_wait_for_it(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")            # without torchrun: left over in a shell
    for said in True, False:
        with pytest.raises(SystemExit, match="2"):
            args_of("--batch=0")
        assert bool(capsys.readouterr().err) == said
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    does = Mock()
    monkeypatch.setattr(train, "time", does)
    monkeypatch.setattr(dist, "TORCHRUN", 1)
    monkeypatch.setattr(dist, "end_torchrun", does.end_torchrun)
    monkeypatch.setattr(sys, "argv", ["-", "--batch=0"])
    with pytest.raises(SystemExit, match="2"):
        train.main()
    assert [name for name, *_ in does.mock_calls] == ["sleep", "end_torchrun"], (
        "a rank that says nothing ends torchrun before another can say what is wrong")


def test_the_code_of_a_run_is_that_beside_train_py_not_beside_a_link_to_it(monkeypatch, tmp_path):
    digests = train.code_digests()
    (tmp_path / "train.py").symlink_to(train.__file__)
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    assert train.code_digests() == digests and "optim.py" in digests


@pytest.mark.parametrize("argv, message", [
    ("--data /nowhere", "/nowhere/manifest.json is missing"), ("--init /nowhere", "/nowhere"),
    ("--out /dev/null/out", "/dev/null")])
def test_what_cannot_be_used_is_one_line(refused, argv, message):
    status, line = refused(*argv.split())
    assert status == 1 and message in line, f"status {status}: {line}"


def test_a_phase_longer_than_the_model_is_refused(refused, monkeypatch):
    monkeypatch.setattr(optim.RECIPES["demo"]["phases"][1], "seq_len", 1024)
    assert "a phase has 1024 tokens, and the model 512" in refused()[1]


def test_a_damaged_shard_is_refused_before_anything_is_written(refused, shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "copy")
    (folder / "train-00001.tokens").write_bytes(b"")
    assert "train-00001.tokens is missing or damaged" in refused("--data", folder)[1]
    assert not (tmp_path / "out").exists(), "the refused run left a folder"


def start_differently(world):
    if world.rank == 1:
        parse = train.parse_arguments
        flags = "--lr-scale 2 --bucket-mb 7 --save-every 2 --max-steps 9 --micro-tokens 5"
        train.parse_arguments = lambda argv: parse([*argv, *flags.split()])
        torch.backends.cpu.get_cpu_capability = lambda: "NEON"
        torch.__version__ = "0"
        train.code_digests = lambda: {"data.py": "other code"}


def test_what_one_rank_refuses_all_refuse(shards, tmp_path):
    out = tmp_path / "out"
    for error in run(shards, out, *SHORT, size=2, check=False, sabotage=(start_differently,)):
        for words in ("rank 1 was started differently:", "processor NEON (not",
                      "lr_scale 2.0 (not 1.0)", "bucket_mb 7.0 (not 2.0)", "save_every 2 (not 3)",
                      "max_steps 9 (not inf)", "micro_tokens 5 (not 128)", "torch 0 (not",
                      "data.py other code (not"):
            assert words in str(error)
    for error in run(shards, out, *SHORT, "--batch", 9, 2, size=3, check=False):
        assert "a batch of 2 is too small for 3 ranks; raise --batch" in str(error)
    assert not out.exists(), "a refused run left a folder"


def test_a_gpu_of_two_ranks_is_said_by_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(
        major=8, minor=0, multi_processor_count=108, uuid=device.index // 2))

    def check(world):
        world.device = torch.device("cuda", world.rank)
        with pytest.raises(dist.DistError, match="have the same GPU; lower --nproc_per_node"):
            train.check_ranks(args_of(), world)

    on_threads(check, 3)


MEMORY = "out of memory; lower --micro-tokens"


@pytest.mark.parametrize("error, restart_helps, words", [
    (lambda *_: torch.empty(10 ** 15), False, MEMORY), (MemoryError(), False, MEMORY),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), False, MEMORY),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), False, MEMORY),
    (RuntimeError("could not create a primitive"), False, MEMORY),
    (KeyboardInterrupt(), False, "the same command starts again"),
    (optim.TrainingStopped("not finite at any scale"), False, "not finite at any scale"),
    (dist.DistError("rank 1 was started differently"), False, "rank 1 was started differently"),
    (dist.RankLost("rank 1 died"), True, "rank 1 died"),
    (OSError(errno.ESTALE, "Stale file handle"), True, "Stale"),
    (OSError(errno.ETIMEDOUT, "Connection timed out"), True, "timed out"),
    (OSError(errno.EIO, "Input/output error"), True, "Input/output error"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), True, "Traceback"),
    (ZeroDivisionError("a bug"), False, "Traceback")])
def test_a_restart_helps_after_lost_ranks_and_disks_and_errors_of_torch(
        train_here, shards, tmp_path, monkeypatch, error, restart_helps, words):
    init, leave = Mock(return_value=dist.World()), Mock()
    monkeypatch.setattr(dist, "init", init)
    monkeypatch.setattr(dist, "leave", leave)
    monkeypatch.setattr(train, "build", Mock(side_effect=error))
    keep = Mock()
    monkeypatch.setattr(train, "keep_freed_memory", keep)
    monkeypatch.setattr(sys, "argv", ["-", f"--data={shards}", f"--out={tmp_path}", "--timeout=7"])
    try:
        train.main()
    except KeyboardInterrupt:                    # it would end pytest
        pytest.fail("Ctrl-C ends in a traceback, not in a message")
    assert init.call_args.args == (7,), "dist.init does not get --timeout"
    assert keep.called, "freed memory is not kept, which makes small models slower on CPUs"
    said, helps, *_ = leave.call_args.args
    assert helps == restart_helps, f"after {said!r}, restart_helps is {helps}"
    assert ("Traceback" in said) == (words == "Traceback"), said
    assert words in said


def test_with_a_gpu_freed_memory_is_given_back(monkeypatch):
    keep = Mock()
    monkeypatch.setattr(train, "keep_freed_memory", keep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "init", Mock(side_effect=dist.DistError("it ends here")))
    monkeypatch.setattr(dist, "leave", Mock())
    monkeypatch.setattr(sys, "argv", ["-"])
    train.main()
    assert dist.leave.called and not keep.called


# ----- The log -----

def test_lines_that_found_no_room_are_written_later(tmp_path, capsys):
    log = train.Log(tmp_path, True)
    with no_room():
        for step in range(1, 1000):
            log.metric("train", step=step)
    assert capsys.readouterr().out == (
        "warning: metrics.jsonl: File too large; up to 1 MB of lines can wait\n"), (
        "a full disk is not said once")
    log.metric("train", step=1000, mlm_loss=math.nan)
    assert column(tmp_path, "step") == [*range(1, 1001)]
    assert metrics(tmp_path)[-1]["mlm_loss"] is None, "NaN is not written as null: JSON has no NaN"
    with no_room():
        log.metric("train", step=1001)
    assert "warning" in capsys.readouterr().out, "a disk that is full again is not said"


def test_steps_are_lines_now_and_then(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(train, "STEP_LINE", "{step}")
    clock = 0
    log = train.Log(tmp_path, True)
    for clock in 10, 11, 21, 22, 70:
        log.step({"step": clock})
    assert capsys.readouterr().out.split() == ["11", "22", "70"]
