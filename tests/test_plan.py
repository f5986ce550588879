"""What train.py decides before it trains: derived numbers, what it refuses, --plan."""
import fcntl
import os
import re
import shutil
import sys

import pytest
import sentencepiece
import torch

import bert
import data
import dist
import optim
import train
from tests.ranks import run_ranks
from tests.training import SHORT, plan_of, run, training

# ----- What is refused: one line, before any training -----

WRONG = [
    ("--model huge", 2, "--model: invalid choice: 'huge' (choose from .*tiny.*large"),
    ("--recipe x", 2, "--recipe: invalid choice: 'x' (choose from .*demo.*nvlamb-64k"),
    ("--optimizer sgd", 2, "--optimizer: invalid choice: 'sgd' (choose from .*lamb"),
    ("--compression zip", 2, "zip.*none, fp16, bf16, int8, onebit, topk"),
    ("--compression topk:2", 2, "topk"),
    ("--no-such-flag", 2, "unrecognized arguments: --no-such-flag"),
    ("--eval-every 0", 2, "--eval-every: must be in .1, 1000000000)"),
    ("--seed 1.5", 2, "--seed: invalid .* value: '1.5'"),
    ("--seed 9223372036854775808", 2, "--seed: must be in .0, 9223372036854775808.*, not 9223"),
    ("--timeout nan", 2, "--timeout: must be in .0.001, 1000000.0), not nan"),
    ("--dropout 1.5", 2, "--dropout: must be in .0, 1), not 1.5"),
    ("--steps 1 2 3", 1, "--steps takes one number, or one for each of the 2 phases"),
    ("--resume /nowhere.pt", 1, "/nowhere.pt is no file; checkpoints are in"),
    ("--vocab-size 300", 1, "has 320 pieces: remove it, or leave out --vocab-size"),
    ("--data /nowhere", 1, "/nowhere/manifest.json is missing"),
    ("--corpus /nowhere.txt", 1, "--data is a folder of shards, --corpus text to make them of"),
]


@pytest.mark.parametrize("flag", ["--data", "--corpus", "--out", "--resume", "--init"])
def test_an_empty_path_is_refused(refused, flag):
    code, line = refused(flag, "")
    assert code == 2 and f"{flag}: the path is empty" in line


@pytest.mark.parametrize("argv,status,message", WRONG)
def test_wrong_arguments_are_one_line(refused, shards, tmp_path, argv, status, message):
    code, line = refused("--data", shards, "--out", tmp_path / "out", *argv.split())
    assert code == status and re.search(message.replace("(", r"\(").replace(")", r"\)"), line), line


def test_each_node_says_once_what_is_wrong_with_its_flags(monkeypatch, capsys):
    for local_rank, said in ("0", 1), ("1", 0):
        monkeypatch.setenv("RANK", "8")
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit):
            train.parse_arguments(["--steps", "-1"])
        assert capsys.readouterr().err.count("--steps: must be in [0, 1000000000)") == said


def test_damaged_shards_are_named(refused, shards, tmp_path):
    shutil.copytree(shards, tmp_path / "copy")
    path = next((tmp_path / "copy").glob("train-00001.tokens*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    code, line = refused("--data", tmp_path / "copy", "--out", tmp_path / "out")
    assert code == 1 and f"{path} is missing or damaged" in line


def test_a_tokenizer_that_cannot_be_exported_is_refused(documents, refused, tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents[:40]), model_prefix=str(tmp_path / "bpe"), vocab_size=310,
        minloglevel=2, model_type="bpe", pad_id=0, pad_piece="[PAD]", unk_id=1, unk_piece="[UNK]",
        bos_id=-1, eos_id=-1, control_symbols=data.SPECIALS[2:])
    data.prepare(documents, tmp_path / "bpe", shards=4, tokenizer=tmp_path / "bpe.model")
    code, line = refused("--data", tmp_path / "bpe", "--out", tmp_path / "out")
    assert code == 1 and "no plain unigram model; make one with data.py" in line


def test_a_folder_that_cannot_be_written_is_refused(refused, shards, tmp_path):
    (tmp_path / "file").write_text("")    # a file where a folder must go: fails for root too
    code, line = refused("--data", shards, "--out", tmp_path / "file" / "out")
    assert code == 1 and str(tmp_path / "file") in line


def test_two_runs_in_one_folder_are_refused(shards, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with open(out / "log.txt", "a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        outcome, = run(shards, out, *SHORT, check=False)
        assert f"another run writes to {out}" in str(outcome)
    run(shards, out, *SHORT, "--max-steps", 1)


def start_differently(world):
    if world.rank == 1:
        parse = train.parse_arguments
        flags = "--lr-scale 2 --bucket-mb 5 --checkpoint-every 2 --max-steps 9 --eval-every 7"
        train.parse_arguments = lambda argv: parse([*argv, *flags.split()])


def test_what_one_rank_refuses_all_refuse(shards, tmp_path):
    out = tmp_path / "out"
    for outcome in run(shards, out, *SHORT, "--resume", "/nowhere.pt", size=2, check=False):
        assert isinstance(outcome, train.CheckpointError) and "/nowhere.pt" in str(outcome)
    for outcome in run(shards, out, *SHORT, size=2, check=False, sabotage=(start_differently,)):
        assert isinstance(outcome, dist.DistError)
        assert "rank 1 was started differently:" in str(outcome)
        for flag in ("lr_scale 2.0 (not 1.0)", "bucket_mb 5.0 (not None)",
                     "checkpoint_every 2 (not 3)", "max_steps 9 (not None)",
                     "eval_every 7 (not 100)"):
            assert flag in str(outcome)
    for outcome in run(shards, out, *SHORT, "--batch", 2, size=3, check=False):
        assert "a batch of 2 is too small for 3 ranks" in str(outcome)


def test_memory_that_is_not_there_names_the_flag():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10 ** 15)
    for error in (caught.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried"),
                  RuntimeError("CUDA error: out of memory"),
                  RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")):
        assert train.explain(error).startswith("out of memory; set --micro-batch lower")
    assert "out of memory" not in train.explain(RuntimeError("another"))


# ----- What is prepared -----

def on_a_machine_of_its_own(world, folder):
    os.chdir(folder / f"node{world.rank}")


def test_each_node_prepares_the_same_shards(documents, tmp_path):
    (tmp_path / "my.txt").write_text("\n\n".join(documents))
    for node in 0, 1:
        (tmp_path / f"node{node}").mkdir()
    argv = [*"--corpus ../my.txt --vocab-size 300 --max-steps 1".split(), *SHORT]
    run_ranks(training, 2, tmp_path, argv, (on_a_machine_of_its_own, tmp_path), local_size=1)
    files = [{path.name: path.read_bytes() for path in folder.iterdir()}
             for folder in sorted(tmp_path.glob("node*/shards/my"))]
    assert len(files) == 2 and files[0] == files[1] and "tokenizer.model" in files[0]


# ----- Derived numbers -----

def test_micro_batches_are_equal_parts_of_about_8192_tokens():
    def micro_batches(size, *argv):
        return [phase.micro_batch for phase in plan_of(*argv, world=dist.World(size=size)).phases]

    for size, batch, micro_batch in [(1, 96, 96), (1, 200, 100), (2, 200, 100), (3, 1000, 112)]:
        assert micro_batches(size, "--batch", batch)[0] == micro_batch
    assert micro_batches(3, "--batch", 90, "--micro-batch", 8, 4) == [8, 4]
    assert micro_batches(4, "--micro-batch", 100)[1] == 8    # no more than a rank's share


def test_a_gpus_memory_decides_its_micro_batch(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)                   # without shards of other pieces
    argv = "--model base --precision bf16 --vocab-size 30522 --recipe nvlamb-64k".split()

    def fit(gigabytes, *more):
        plan = plan_of(*argv, "--gpu-memory", gigabytes, *more, world=dist.World(size=8))
        return plan.phases[0].micro_batch

    # 110 million parameters take 18 bytes each; 8192 examples a rank in equal parts
    config = bert.BertConfig.preset("base", 30522)
    one_example = bert.activation_bytes(config, 128, 0.15 * 128, 2)
    for gigabytes in (8, 16):
        most = (0.8e9 * gigabytes - 18 * 110e6) / one_example
        assert 0.9 * most < fit(gigabytes) <= most
    assert fit(16, "--recompute") > 4 * fit(16)


def test_dropout_is_the_recipes_or_the_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, dropout in ((), 0.1), (("--dropout", "0"), 0):
        plan = plan_of("--recipe", "nvlamb-64k", *flags)
        assert plan.config.dropout == plan.config.attention_dropout == dropout


def test_the_published_recipes():
    nvidia, lans = optim.RECIPES["nvlamb-64k"].phases, optim.RECIPES["lans-96k"].phases
    assert [(p.seq_len, p.global_batch, p.steps, p.lr) for p in nvidia] == [
        (128, 65536, 7038, 6e-3), (512, 32768, 1563, 4e-3)]
    assert sum(p.steps for p in lans) == 4301 and [p.global_batch for p in lans] == [98304, 33792]
    assert [p.power for p in nvidia] == [0.5, 0.5] and optim.RECIPES["lans-96k"].optimizer == "lans"


def test_auto_precision_needs_hardware(monkeypatch):
    cpu = torch.device("cpu")
    for found, precision in (({"avx512_bf16": True}, "bf16"), ({"avx2": True}, "fp32"),
                             ({"bf16": True}, "bf16")):                          # ARM
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
        assert optim.choose_precision("auto", cpu) == precision
    assert optim.choose_precision("fp16", cpu) == "fp16"
    # A V100 has no bf16, and emulates it slowly
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True:
                        including_emulation)
    assert optim.choose_precision("auto", torch.device("cuda")) == "fp16"
    with pytest.raises(optim.TrainingStopped, match="--precision fp16"):
        optim.choose_precision("bf16", torch.device("cuda"))


# ----- --plan -----

def test_the_plan_counts_hours_and_starts_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    argv = ("--plan 4 --gpus-per-node 2 --tflops 10 --gbps 1 --model base --recipe nvlamb-64k "
            "--vocab-size 30522")
    monkeypatch.setattr(sys, "argv", ["train.py", *argv.split()])
    train.main()
    printed = capsys.readouterr().out
    assert not list(tmp_path.iterdir())                 # nothing is started
    config = bert.BertConfig.preset("base", 30522)
    phases = optim.RECIPES["nvlamb-64k"].phases
    flops = sum(p.steps * p.global_batch
                * bert.flops_per_example(config, p.seq_len, 0.15 * p.seq_len) for p in phases)
    # NCCL's ring goes through the 8 GPUs of 4 nodes: 2 x 7/8 of 4 bytes a parameter at 1 Gb/s
    parameters, exchange = re.search(r"base: (\S+) .*?exchanges (\S+) s", printed, re.S).groups()
    assert float(exchange) == pytest.approx(56e-9 * int(parameters.replace(",", "")), rel=0.01)
    # What is not hidden is added to the compute, in each phase
    found = re.findall(r"computes (\S+) s\n.*exchanges (\S+) s, (\S+) s of it not hidden\n"
                       r".*steps take (\S+) h", printed)
    assert len(found) == 2
    compute_hours = 0.0
    for phase, words in zip(phases, found):
        compute, exchange, late, hours = map(float, words)
        assert 0 < late < exchange
        assert hours == pytest.approx(phase.steps * (compute + late) / 3600, rel=0.01)
        compute_hours += phase.steps * compute / 3600
    assert compute_hours == pytest.approx(flops / 8 / 1e13 / 3600, rel=0.01)


def test_the_plan_needs_the_rate_of_a_gpu(refused):
    code, line = refused("--plan", 4)
    assert code == 1 and "--plan needs --gpu" in line and "--tflops" in line


def test_the_plan_knows_gpus_and_says_nothing_of_a_network_within_a_node(monkeypatch, capsys):
    flags = "--plan 1 --gpus-per-node 1 --gpu rtx4090 --model base --vocab-size 30522".split()
    train.print_plan(train.parse_arguments([*flags, "--recipe", "day", "--precision", "bf16"]))
    printed = capsys.readouterr().out
    assert "69 TFLOP/s" in printed and "fit 24 GB" in printed and "Gb/s" not in printed
    assert "20,900 steps take 24.04 h\n" in printed and "take another --recipe" not in printed
    train.print_plan(train.parse_arguments([*flags, "--plan", "2"]))
    printed = capsys.readouterr().out
    assert "at 10 Gb/s" in printed and "take another --recipe" in printed       # of the demo's


def test_the_plan_may_be_of_a_text_still_to_come(shards):
    assert plan_of("--plan", 4, "--data", shards, "--vocab-size", 512).config.vocab_size == 512
