"""Compares plan.py with published and measured numbers and with the program; tests show.py."""
import io
import itertools
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import bert
import data
import dist
from tests.conftest import SEED
from tests.ranks import one_of_two
from tests.tools import plan, show
from tests.training import random_batch


def step(argv, phase=0):
    """Returns plan.step_seconds of a phase, with these flags of plan.py."""
    args = plan.parse_arguments(argv.split())
    return plan.step_seconds(args, args.phases[phase])


# Sequences per second of BERT-large in fp16, without accumulation, on nodes of 8 V100 with four
# network cards of 100 Gb/s each (NVIDIA DeepLearningExamples). The rate of one node gives the
# TFLOP/s of a GPU. NVIDIA averages after backward; the plan overlaps the two, so it promises more.
@pytest.mark.parametrize("phase, examples, rates", [
    (0, 16, {1: 874, 4: 3090, 16: 12145}), (1, 4, {1: 196, 4: 700, 16: 2746})])
def test_published_steps_of_up_to_sixteen_nodes(phase, examples, rates):
    large = ("--model large --recipe nvidia-64k --precision fp16 --compression fp16 --gbps 400 "
             "--micro-tokens 2048")
    compute, *_ = step(f"{large} --tflops 1 --batch {8 * examples}", phase)
    tflops = compute * rates[1] / (8 * examples)
    for nodes, published in rates.items():
        batch = 8 * examples * nodes
        *_, seconds = step(f"{large} --tflops {tflops} --nodes {nodes} --batch {batch}", phase)
        assert 0.99 < batch / seconds / published < 1.15, (
            f"the plan has {batch / seconds:.0f} sequences per second on {nodes} nodes; published "
            f"are {published}")


# Milliseconds of a step of mini, with 8 x 128 tokens on each of two hosts, as measured by
# tests/bench/bench_network.py. The first, over a link without a limit, gives the TFLOP/s.
@pytest.mark.parametrize("gbps, compression, measured", [
    (100, "none", 333), (100, "bf16", 342), (1, "none", 420), (1, "bf16", 379),
    (0.1, "none", 1984), (0.1, "bf16", 1141)])
def test_measured_steps_of_two_hosts(gbps, compression, measured):
    mini = ("--nodes 2 --gpus-per-node 1 --model mini --vocab-size 8192 --batch 16 --steps 0 1 "
            "--micro-tokens 1024 --mask-fraction 0.15 --precision fp32")
    compute, *_ = step(f"{mini} --tflops 1", phase=1)
    link = f"--tflops {compute / 0.333} --gbps {gbps} --compression {compression}"
    *_, seconds = step(f"{mini} {link}", phase=1)
    assert 0.87 < 1e3 * seconds / measured < 1.01, (
        f"the plan has {1e3 * seconds:.0f} ms, measured were {measured}")


def test_a_step_hides_what_it_can(monkeypatch):
    monkeypatch.setattr(
        plan, "flops_per_example", lambda _, length, masked: 1e8 * (length + masked))
    monkeypatch.setattr(plan, "wire_bytes", lambda _, elements, ranks: elements * (ranks - 1))
    # NCCL's ring has all ranks, int8's the nodes; one node sends nothing over the network.
    share = math.ceil((200 + SEED % 80) / 6)              # in three micro-batches, or one by one
    for nodes, gbps, latency, compression, ring, micro, parts in (
            (2, 10, 0, "none", 6, 1024, 3), (2, 10, 9, "int8", 2, 1024, 3),
            (2, 0.1, 9, "none", 6, 1024, 3), (1, 10, 9, "none", 1, 1024, 3),
            (2, 0.1, 9, "none", 6, 40, share)):
        args = plan.parse_arguments(
            f"--nodes {nodes} --gpus-per-node {6 // nodes} --compression {compression} "
            f"--model mini --batch {200 + SEED % 80} --micro-tokens {micro} "
            f"--tflops 0.1 --gbps {gbps} --latency {latency} --bucket-mb 4".split())
        each = 1e-3 * 64 * (1 + args.mask_fraction)
        compute = share * each
        backward = 2 / 3 * each * (share // parts)
        exchange = 8e-9 * (ring - 1) * args.parameters / gbps
        exchange += (nodes > 1) * 1e-3 * latency * math.ceil(args.parameters / 1e6)
        late = exchange * args.config.vocab_size * args.config.width / args.parameters
        right = compute, exchange, compute + max(late, exchange - backward)
        found = plan.step_seconds(args, args.phases[0])
        assert found == pytest.approx(right), (
            f"with {compression} on {nodes} nodes of {6 // nodes} GPUs, at {gbps} Gb/s and a "
            f"latency of {latency} ms, the seconds of compute, exchange and step should be "
            f"{right}, not {found}")


@pytest.mark.parametrize("compression", dist.COMPRESSORS)
def test_the_bytes_are_those_that_a_bucket_sends(compression):
    # Blocks divide evenly in the second; the parts of the third are 175 elements on four nodes, a
    # block each.
    sizes = 512 * (2048 + SEED), 2048 * (512 + SEED), 700 + SEED
    for elements, nodes in itertools.product(sizes, (1, 2, 4)):
        world = one_of_two()                         # which exchanges nothing
        world.size = nodes
        sent = dist.Bucket({"matrix": (elements,)}, world, compression).average(1.0)
        found = plan.wire_bytes(compression, elements, nodes)
        # A part may be rounded up to a whole element: 4 bytes, sent twice to each other rank.
        assert found == pytest.approx(sent, abs=8 * (nodes - 1)), (
            f"{compression}: for {elements} elements, each of {nodes} ranks sends {sent} bytes, "
            f"not {found:.0f}")


@pytest.mark.parametrize("dropout", [0, 0.1])
def test_activations_are_about_what_autograd_keeps(dropout):
    args = plan.parse_arguments(
        f"--model mini --vocab-size 8192 --recipe nvidia-64k --precision fp32 --dropout {dropout} "
        "--tflops 1".split())
    model = bert.BertForPreTraining(args.config)
    batch = random_batch(8192, examples=8, length=64)
    kept = {}                                        # storages, so that their memory is not reused

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.cross_entropy(model(batch)["mlm"], batch.labels["mlm"])
    weights = {p.data_ptr() for p in model.parameters()}
    found = sum(kept[address].nbytes() for address in kept.keys() - weights)
    expected = 1e9 * plan.token_gigabytes(args) * len(batch.tokens)
    assert found == pytest.approx(expected, rel=0.15)


# ----- What they print -----

@pytest.fixture
def printed(capsys):
    """Returns a function that returns what plan.py prints with some flags, without commas."""
    def run(flags):
        plan.main(flags.split())
        return capsys.readouterr().out.replace(",", "")

    return run


def test_the_seconds_add_up(printed):
    text = printed("--nodes 4 --gpus-per-node 2 --gpu v100 --gbps 1 --model large "
                   "--recipe nvidia-64k --hours 1000")
    # BERT-large has 336,226,108; here the vocabulary of 30,522 is rounded up to 30,528 rows.
    assert "large: 336232258 parameters" in text
    found = re.findall(r"computes (\S+) s\n.*exchanges (\S+) s (\S+) s of it not hidden "
                       r"(\d+)% of the step\n +(\S+) steps take (\S+) h", text)
    # 990 hours, since train.py keeps a hundredth for the end, in proportion to the phases' tokens:
    # 128 x 65,536 x 7,038 and 512 x 32,768 x 1,563.
    for words, expected in zip(found, [685, 305], strict=True):
        compute, exchange, late, part, steps, hours = map(float, words)
        assert part == pytest.approx(100 * late / (compute + late), abs=1)
        assert hours == pytest.approx(expected, rel=0.004)
        assert hours == pytest.approx(steps * (compute + late) / 3600, rel=0.01)
        # NCCL's ring goes through the 8 GPUs of 4 nodes: 2 x 7/8 of 4 bytes a parameter, at 1 Gb/s.
        assert exchange == pytest.approx(56e-9 * 336232258, rel=0.01)
        assert 0 < late < exchange, f"{late} of {exchange} s of exchange are not hidden"
    gigaflops = float(re.search(r"(\S+) GFLOP an example", text)[1])
    assert gigaflops == pytest.approx(38e3 * float(found[0][0]) / (65536 / 8), rel=0.01)
    rate = 65536 / 8 / float(found[0][0])
    assert rate == pytest.approx(164, rel=0.02), (
        f"a V100 takes {rate:.0f} examples per second; NVIDIA published 164")


@pytest.mark.parametrize("flags, bits, bytes_each", [
    ("", 16, 18), ("--precision fp32", 32, 16), ("--compression int8", 16, 26),
    ("--model small", 16, 18), ("--batch 65536 8", 16, 18)])
def test_the_memory_adds_up(printed, flags, bits, bytes_each):
    text = printed("--tflops 10 --model base --recipe nvidia-64k --gpu-memory 8 "
                   f"--micro-tokens 8192 {flags}")
    parameters, parts, activations, fit = re.search(
        rf": (\d+) parameters(?s:.*) in {bits} bits: (.*)\n.* 8192 tokens .*: (\S+)\n"
        r" +(\d+) tokens fit 8 GB", text).groups()
    state = sum(map(float, re.findall(r"\d\S+", parts)))
    assert state == pytest.approx(1e-9 * bytes_each * int(parameters), rel=0.02)
    needed = int(fit) * float(activations) / 8192
    assert needed == pytest.approx(0.8 * 8 - state, rel=0.02)
    assert ("lower --micro-tokens" in text) == (int(fit) < 8192), text


def test_a_phase_of_no_steps_takes_no_memory(printed):
    text = printed("--tflops 10 --recipe nvidia-64k --micro-tokens 8192 --batch 16 64 --steps 9 0")
    assert "of 256 tokens the most in a micro-batch" in text, text


def test_the_plan_knows_gpus_and_recipes(printed):
    base = "--nodes 1 --gpus-per-node 1 --gpu rtx4090 --model base"
    text = printed(f"{base} --recipe day")
    assert re.search("(?s)69 TFLOP/s.*fit 24 GB.*20900 steps take 24", text), text
    assert not re.search("Gb/s|take another --recipe", text), text
    assert "take another --recipe" in printed(base), "no advice for base with the demo's recipe"
    assert plan.parse_arguments(base.split()).bucket_mb == 25, "the default is not that of a GPU"


@pytest.mark.parametrize("argv, message", [
    ("--gpu v100 --precision fp32", "give --tflops"),
    ("--gpu v100 --gpu-memory 1e300", "--gpu-memory: must be in"),
    ("--gpu v100 --vocab-size 65536", "--vocab-size: must be in"),
    ("--gpu v100 --nodes 32", "a batch of 32 is too small for 256 ranks; raise --batch"),
    ("--gpu v100 --no-such-flag", "unrecognized arguments: --no-such-flag")])
def test_what_cannot_be_planned_is_one_line(capsys, argv, message):
    with pytest.raises(SystemExit, match="^2$"):
        plan.main(argv.split())
    assert re.fullmatch(f".*{message}.*\n", capsys.readouterr().err)


def test_shards_are_shown_as_words(shards, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["show.py", str(shards)])
    show.main()
    text = capsys.readouterr().out
    assert "documents held out" in text
    answers = re.findall(r"B follows A: (\w+)\n +\[CLS\]", text)
    assert sorted(answers) == ["False", "False", "True"]
    assert text.count("[CLS]") == 3, "an example runs on into the next"
    assert text.count("[SEP]") == 6, "an example ends before its last [SEP]"
    # Each chosen token is followed by the original token.
    labels = data.PretrainingData(shards, 64, held_out=True).batch([2, 3, 4]).labels["mlm"]
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    for label in set(labels.tolist()) - {data.IGNORED}:
        assert f"({tokenizer.id_to_piece(label).replace('▁', ' ')})" in text


def test_a_terminal_without_utf_8_is_shown_escapes(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["show.py", "shards"])
    monkeypatch.setattr(show, "show", lambda folder: "ü")
    show.main()
    terminal.flush()
    assert terminal.buffer.getvalue() == b"\\xfc\n"


def test_a_folder_without_shards_or_with_damaged_ones_is_one_line(shards, tmp_path, monkeypatch):
    folder = shutil.copytree(shards, tmp_path / "damaged")
    (folder / "train-00000.tokens").write_bytes(b"")
    for path in "/nowhere/manifest.json", f"{folder}/train-00000.tokens":
        monkeypatch.setattr(sys, "argv", ["show.py", str(Path(path).parent)])
        with pytest.raises(SystemExit, match=f"^show.py: {path} is missing"):
            show.main()
