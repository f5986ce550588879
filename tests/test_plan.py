"""What is decided or told before any training: flags of train.py, tests/tools/plan.py, show.py."""
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import bert
import data
import dist
import optim
import train
from tests.ranks import run_script
from tests.tools import plan, show


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a program's main() with bad arguments; returns (status, its only line on stderr)."""
    def run(main, *argv):
        monkeypatch.setattr(sys, "argv", ["program.py", *map(str, argv)])
        with pytest.raises(SystemExit) as caught:
            main()
        line, = capsys.readouterr().err.splitlines()
        return caught.value.code, line

    return run


# ----- What train.py refuses: one line, before any training -----

WRONG = [
    ("--model huge", 2, r"--model: invalid choice: 'huge' \(choose from .*tiny.*large"),
    ("--recipe x", 2, r"--recipe: invalid choice: 'x' \(choose from .*demo.*nvidia-64k"),
    ("--optimizer sgd", 2, r"--optimizer: invalid choice: 'sgd' \(choose from .*lamb"),
    ("--compression zip", 2, "zip.*none.*fp16.*bf16.*int8.*onebit"),
    ("--no-such-flag", 2, "unrecognized arguments: --no-such-flag"),
    ("--save-every 0", 2, r"--save-every: must be in .1, 1000000000\)"),
    ("--seed 1.5", 2, "--seed: invalid .* value: '1.5'"),
    ("--seed 9223372036854775808", 2, "--seed: must be in .0, 9223372036854775808.*, not 9223"),
    ("--timeout nan", 2, r"--timeout: must be in .0.001, 1000000.0\), not nan"),
    ("--dropout 1.5", 2, r"--dropout: must be in .0, 1\), not 1.5"),
    ("--steps 1 2 3", 2, "--steps .*take one number, or one for each of 2 phases"),
    ("--data /nowhere", 1, "/nowhere/manifest.json is missing"),
    ("--init /nowhere", 1, "/nowhere"),
    ("--out /dev/null/out", 1, "/dev/null"),
]


@pytest.mark.parametrize("flag", ["--data", "--out", "--init"])
def test_an_empty_path_is_refused(refused, flag):
    code, line = refused(train.main, flag, "")
    assert code == 2
    assert f"{flag}: the path is empty" in line


@pytest.mark.parametrize("argv,status,message", WRONG)
def test_wrong_arguments_are_one_line(
        refused, shards, tmp_path, monkeypatch, argv, status, message):
    if status == 2:
        monkeypatch.setenv("RANK", "8")              # the first of its node says it, too
    code, line = refused(train.main, "--data", shards, "--out", tmp_path, *argv.split())
    assert code == status
    assert re.search(message, line), line


# ----- What follows from the flags -----

def test_the_published_recipes():
    nvidia = train.parse_arguments(["--recipe", "nvidia-64k"])
    short, long = nvidia.phases
    assert (short.seq_len, short.global_batch, short.steps) == (128, 65536, 7038)
    assert (long.seq_len, long.global_batch, long.steps) == (512, 32768, 1563)
    for phase, highest in (short, 6e-3), (long, 4e-3):
        after_warmup = highest * (1 - phase.warmup) ** phase.power
        assert phase.power == 0.5 and phase.lr == pytest.approx(after_warmup, rel=1e-4)
    assert (nvidia.optimizer, nvidia.dropout) == ("lamb", 0.1)
    assert train.parse_arguments(["--recipe", "day"]).phases[0].power == 1


@pytest.mark.parametrize("found,precision", [
    ("avx512_bf16", "bf16"),
    ("avx2", "fp32")])
def test_bf16_on_a_cpu_needs_instructions(monkeypatch, found, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {found: True}, raising=False)
    assert optim.choose_precision("auto", torch.device("cpu")) == precision
    assert optim.choose_precision("fp16", torch.device("cpu")) == "fp16"


def test_bf16_is_not_emulated_on_a_gpu(monkeypatch):
    # A V100 says that it has bf16, and emulates it slowly.
    def is_supported(including_emulation=True):
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert optim.choose_precision("auto", torch.device("cuda")) == "fp16"


@pytest.mark.parametrize("gigabytes, tokens", [
    (84.9, 32768), (149.6, 32768), (42.4, 16384), (25.3, 8192), (16.9, 4096), (15.8, 4096)])
def test_a_gpu_takes_as_many_tokens_as_its_memory_allows(monkeypatch, gigabytes, tokens):
    """H100, H200, A100, RTX 4090, V100, T4. The last two have no bf16; fp32 takes half."""
    newer = gigabytes not in (16.9, 15.8)
    properties = SimpleNamespace(total_memory=int(gigabytes * 1e9), major=7 + newer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: newer)
    args = train.parse_arguments([])
    assert args.bucket_mb == 2.0
    train.fit_to_device(args, torch.device("cuda"))
    assert (args.micro_tokens, args.precision) == (tokens, "bf16" if newer else "fp16")
    args = train.parse_arguments(["--precision", "fp32"])
    train.fit_to_device(args, torch.device("cuda"))
    assert args.micro_tokens == tokens // 2
    args = train.parse_arguments(["--micro-tokens", "7", "--precision", "bf16"])
    if newer:
        train.fit_to_device(args, torch.device("cuda"))
        assert args.micro_tokens == 7
    else:
        with pytest.raises(train.ConfigError, match="no bf16; give --precision fp16"):
            train.fit_to_device(args, torch.device("cuda"))
    args = train.parse_arguments([])
    train.fit_to_device(args, torch.device("cpu"))
    assert args.micro_tokens == 8192


# ----- plan.py: seconds, beside those that were published and measured -----

def step(argv, phase=0):
    """Returns plan.step_seconds of a phase, for plan.py's flags."""
    args = plan.parse_arguments(argv.split())
    return plan.step_seconds(args, args.phases[phase])


# Sequences a second of BERT-large on nodes of 8 V100, four cards of 100 Gb/s each, fp16, without
# accumulation (NVIDIA DeepLearningExamples). From that of one node follow the TFLOP/s of a GPU.
# Theirs averages when backward is over; the plan lets it overlap, so it promises more.
@pytest.mark.parametrize("phase,examples,rates", [
    (0, 16, {1: 874, 4: 3090, 16: 12145}),
    (1, 4, {1: 196, 4: 700, 16: 2746})])
def test_published_steps_of_up_to_sixteen_nodes(phase, examples, rates):
    large = ("--model large --recipe nvidia-64k --precision fp16 --compression fp16 --gbps 400 "
             "--micro-tokens 2048")
    compute, *_ = step(f"{large} --tflops 1 --batch {8 * examples}", phase)
    tflops = compute * rates[1] / (8 * examples)
    for nodes, published in rates.items():
        batch = 8 * examples * nodes
        *_, seconds = step(f"{large} --tflops {tflops} --nodes {nodes} --batch {batch}", phase)
        assert 0.99 < batch / seconds / published < 1.15


# Milliseconds of a step of mini, 8 x 128 on each of two hosts, that tests/bench/bench_network.py
# has measured. From the first one, over a link without a limit, follow the TFLOP/s.
@pytest.mark.parametrize("gbps,compression,measured", [
    (100, "none", 333), (100, "bf16", 342),
    (1, "none", 420), (1, "bf16", 379),
    (0.1, "none", 1984), (0.1, "bf16", 1141)])
def test_measured_steps_of_two_hosts(gbps, compression, measured):
    mini = ("--nodes 2 --gpus-per-node 1 --model mini --vocab-size 8192 --batch 16 --steps 0 1 "
            "--micro-tokens 1024 --mask-fraction 0.15 --precision fp32")
    compute, *_ = step(f"{mini} --tflops 1", phase=1)
    tflops = compute / 0.333
    link = f"--gbps {gbps} --compression {compression}"
    *_, seconds = step(f"{mini} --tflops {tflops} {link}", phase=1)
    assert 0.87 < 1e3 * seconds / measured < 1.01


def test_the_last_micro_batch_hides_its_part_of_the_exchange():
    compute, exchange, seconds = step("--model large --recipe nvidia-64k --tflops 50 --nodes 24 "
                                      "--micro-tokens 8192")
    # 57 of a rank's 342 examples, and backward is two thirds.
    assert compute + exchange - seconds == pytest.approx(compute / 9)


class Unplugged(dist.World):
    """Ranks that exchange nothing."""

    def _run(self, *arguments, **options):
        pass


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "int8", "onebit"])
def test_the_bytes_are_those_that_a_bucket_sends(nodes, compression):
    world = Unplugged(size=nodes, nodes=nodes)
    bucket = dist.Bucket({"matrix": (512, 2048)}, world, compression)
    sent = bucket.average(1.0)
    assert plan.wire_bytes(compression, 512 * 2048, nodes) == pytest.approx(sent, rel=0.01)
    assert plan.wire_bytes(compression, 512 * 2048, 1) == 0


# ----- plan.py: memory, and what it prints -----

@pytest.mark.parametrize("dropout", ["0", "0.1"])
def test_activations_are_about_what_autograd_keeps(shards, dropout):
    argv = "--model mini --vocab-size 320 --recipe nvidia-64k --precision fp32 --tflops 1".split()
    args = plan.parse_arguments([*argv, "--dropout", dropout])
    model = bert.BertForPreTraining(args.config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # The tensor is held as well, or its memory would be used again.
            kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    batch = data.PretrainingData(shards, 64).batch(range(8)).to("cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.cross_entropy(model(batch)["mlm"], batch.labels["mlm"])
    found = sum(size for _, size in kept.values())
    # A CPU keeps a copy of what attention returns as well, made by torch.cat.
    copies = args.itemsize * args.config.layers * args.config.width
    expected = (1e9 * plan.token_gigabytes(args) + copies) * len(batch.tokens)
    assert found == pytest.approx(expected, rel=0.25)


@pytest.fixture
def printed(capsys, monkeypatch, tmp_path):
    """Returns what plan.py prints with these flags. It leaves no file."""
    monkeypatch.chdir(tmp_path)

    def run(argv):
        plan.main(argv.split())
        assert not list(tmp_path.iterdir())
        return capsys.readouterr().out

    return run


def test_the_seconds_add_up(printed):
    text = printed("--nodes 4 --gpus-per-node 2 --tflops 10 --gbps 1 --model small --recipe "
                   "nvidia-64k")
    config = bert.BertConfig.preset("small", 30522)
    parameters = sum(p.numel() for p in bert.BertForPreTraining(config).parameters())
    assert f"small: {parameters:,} parameters" in text
    found = re.findall(r"computes (\S+) s\n.*exchanges (\S+) s, (\S+) s of it not hidden\n"
                       r".*steps take (\S+) h", text)
    for phase, words in zip(optim.RECIPES["nvidia-64k"]["phases"], found, strict=True):
        compute, exchange, late, hours = map(float, words)
        flops = plan.flops_per_example(config, phase.seq_len, 0.15 * phase.seq_len)
        assert compute == pytest.approx(phase.global_batch / 8 * flops / 1e13, rel=0.01)
        # NCCL's ring goes through the 8 GPUs of 4 nodes: 2 x 7/8 of 4 bytes a parameter at 1 Gb/s
        assert exchange == pytest.approx(56e-9 * parameters, rel=0.01)
        # What is not hidden is added to the compute.
        assert 0 < late < exchange
        assert hours == pytest.approx(phase.steps * (compute + late) / 3600, rel=0.01)


@pytest.mark.parametrize("flags,bytes_each", [
    ("", 18), ("--precision fp32", 16), ("--compression onebit", 26)])
def test_the_memory_adds_up(printed, flags, bytes_each):
    text = printed(f"--tflops 10 --model base --recipe nvidia-64k --gpu-memory 8 "
                   f"--micro-tokens 8192 {flags}")
    parameters = int(re.search(r"base: (\S+) param", text)[1].replace(",", ""))
    parts = re.search(r"GB of a rank in .. bits: (.*)", text)[1]
    state = sum(float(part.split()[1]) for part in parts.split(", "))
    assert state == pytest.approx(1e-9 * bytes_each * parameters, rel=0.02)

    fit = int(re.search(r"(\S+) tokens fit 8 GB", text)[1].replace(",", ""))
    activations = float(re.search(r"8,192 tokens, .*: (\S+)", text)[1])
    assert fit * activations / 8192 == pytest.approx(0.8 * 8 - state, rel=0.02)
    assert ("lower --micro-tokens" in text) == (fit < 8192)


def test_the_plan_knows_gpus_and_hours(printed):
    base = "--nodes 1 --gpus-per-node 1 --gpu rtx4090 --model base"
    text = printed(f"{base} --recipe day")
    assert "69 TFLOP/s" in text and "fit 24 GB" in text and "20,900 steps take 24" in text
    assert "Gb/s" not in text and "take another --recipe" not in text
    assert "take another --recipe" in printed(base)          # of the demo's

    text = printed(f"{base} --recipe nvidia-64k --hours 1000")
    short, long = map(float, re.findall(r"steps take (\S+) h", text))
    assert short + long == pytest.approx(1000, rel=0.01)
    # By the phases' tokens: (128 x 65,536 x 7,038) / (512 x 32,768 x 1,563)
    assert short / long == pytest.approx(2.251, rel=0.01)


@pytest.mark.parametrize("argv,message", [
    ("--nodes 4", "give --tflops"),
    ("--gpu v100 --precision fp32", "give --tflops"),
    ("--gpu v100 --nodes 32", "a batch of 32 is too small for 256 ranks; raise --batch"),
    ("--gpu tpu", "--gpu: invalid choice: 'tpu'"),
    ("--tflops nan", "--tflops: must be in"),
    ("--gpu v100 --no-such-flag", "unrecognized arguments: --no-such-flag")])
def test_what_cannot_be_planned_is_one_line(refused, argv, message):
    code, line = refused(plan.main, *argv.split())
    assert code == 2
    assert message in line


# ----- show.py -----

def test_shards_are_shown_as_words(monkeypatch, shards):
    text = run_script("tests/tools/show.py", shards).stdout
    assert "documents held out" in text
    answers = re.findall(r"B follows A: (\w+)\n +\[CLS\]", text)
    assert sorted(answers) == ["False", "False", "True"]

    # Each token that was chosen is followed by what stood there.
    batch = data.PretrainingData(shards, 64, held_out=True).batch([2, 3, 4])
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    for label in set(batch.labels["mlm"].tolist()) - {data.IGNORED}:
        stood_there = tokenizer.id_to_piece(label).replace("▁", " ")
        assert f"({stood_there})" in text

    monkeypatch.setattr(sys, "argv", ["show.py", "/nowhere"])
    with pytest.raises(SystemExit, match="^show.py: /nowhere/manifest.json is missing"):
        show.main()
