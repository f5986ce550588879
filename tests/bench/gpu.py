"""Measures most of what RESULTS.md reports for a GPU, with one command in eight minutes.

    python tests/bench/gpu.py --out gpu.txt                  # first: pip install transformers
    CUDA_VISIBLE_DEVICES= python tests/bench/gpu.py --tiny   # a rehearsal on a CPU, two minutes

Each result is printed, and appended to the file --out, as soon as it is measured. The most
important parts come first, so a run that is cut short has those. --parts chooses parts. After
--minutes no further part begins. Rates and milliseconds are medians.

A step of ours is one of train.py's loop, in this process, without evaluations and checkpoints, with
dropout 0.1. Hugging Face's is that of bench_step.py, without dropout. On both sides a thread makes
the batches ahead.
"""
import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import beside
import bench_optim
import bench_step
import torch

import data
import dist
import optim
import train

CUDA = beside.DEVICE.type == "cuda"
# Keep Hugging Face's attention off cuDNN, which prepares again for each of its many shapes.
torch.backends.cuda.enable_cudnn_sdp(False)


def say(args, text):
    """Prints a line and appends it to the file."""
    print(text, flush=True)
    with open(args.out, "a") as file:
        print(text, file=file)


def steps(args, model, seq_len, examples, micro_tokens):
    """Returns (examples per second, peak GiB on the GPU) of train.py's loop."""
    recipe = optim.RECIPES["nvidia-64k"]
    phase = optim.Phase(seq_len, examples, 25, lr=1e-4, warmup=0.1)
    optim.RECIPES = optim.RECIPES | {"nvidia-64k": recipe | {"phases": [phase]}}
    flags = train.parse_arguments([
        "--data", str(args.shards), "--model", model, "--recipe", "nvidia-64k", "--dropout", "0.1",
        "--precision", args.precision, "--micro-tokens", str(micro_tokens)])
    figures = []
    train.save = train.evaluate = lambda *_: None
    world = dist.init()
    train.prepare_run(flags, world)
    state = train.build(flags, world)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    log = SimpleNamespace(step=figures.append)
    train.training_loop(flags, world, log, state, train.Clock(0.0))
    memory = torch.cuda.max_memory_allocated() / 2 ** 30 if CUDA else 0.0
    return statistics.median(line["examples_per_second"] for line in figures[5:]), memory


# ----- Parts, the most important first -----

def beside_huggingface(args):
    """Steps of one micro-batch, 128 tokens, beside Hugging Face's model with fused AdamW."""
    dataset = data.PretrainingData(args.shards, 128)
    tokens = bench_step.tokens_of(dataset)
    vocab_size = data.load_manifest(args.shards)["vocab_size"]
    for model, sizes in args.models.items():
        for examples in sizes:
            ours, memory = steps(args, model, 128, examples, 128 * examples)
            loader = bench_step.padded_loader(dataset, examples)
            theirs = bench_step.of_huggingface(args, model, vocab_size, loader, 25) * examples
            say(args, f"{model}, {examples} examples a step: {ours * tokens:,.0f} tokens/s, "
                      f"Hugging Face {theirs * tokens:,.0f}, ratio {ours / theirs:.2f}; "
                      f"{memory:.1f} GiB")


def optimizers(args):
    """ms of an update, and its peak memory as a fraction of the weights' memory."""
    for model in args.models:
        for name, number in bench_optim.once(SimpleNamespace(model=model, steps=20)).items():
            say(args, f"{model}, {name}: {number:.2f}")


def loop(args):
    """Steps of three micro-batches, each of train.py's default --micro-tokens on a GPU."""
    micro_tokens = 1024
    if CUDA:
        memory = torch.cuda.get_device_properties(0).total_memory
        precision = optim.choose_precision(args.precision, beside.DEVICE)
        micro_tokens = train.micro_tokens_of(memory, precision)
    for model in args.models:
        for seq_len in 128, 512:
            examples = 3 * (micro_tokens // seq_len)
            rate, memory = steps(args, model, seq_len, examples, micro_tokens)
            say(args, f"{model}, {examples} examples of {seq_len} in 3 micro-batches: {rate:,.1f} "
                      f"examples/s, a step {1e3 * examples / rate:,.0f} ms, {memory:.1f} GiB")


def tests(args):
    """pytest -m gpu: attention, ranks over NCCL, bit-identical resumes in each precision."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], cwd=beside.ROOT,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    say(args, f"pytest -m gpu: {done.stdout.strip().splitlines()[-1]}")


def resume(args):
    """Does a run that is stopped and resumed end with the bits of an uninterrupted one?"""
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place, "whole")
        parts = Path(place, "parts")
        for out, stop in (whole, 12), (parts, 5), (parts, 12):
            beside.program("train.py", "--data", args.shards, "--out", out, "--model", args.small,
                           "--steps", 8, 4, "--dropout", 0.1, "--precision", args.precision,
                           "--max-steps", stop)
        differs = beside.other_bits(whole, parts)
    say(args, f"{args.small}, 12 steps, stopped after 5 and resumed: "
              f"{differs or 'the same bits'}")


def demo(args):
    """python train.py: its seconds, and the last evaluation of each phase."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as out:
        beside.program("train.py", "--out", out, "--steps", *args.demo_steps)
        seconds = time.monotonic() - began
        lines = {line["phase"]: line for line in beside.lines_of(out, "eval")}
    for phase, line in lines.items():
        say(args, f"demo, phase {phase}: MLM loss {line['mlm_loss']:.3f}, unigram "
                  f"{line['unigram_loss']:.3f}, NSP accuracy {line['nsp_accuracy']:.1%}")
    say(args, f"demo: {seconds:.0f} s")


PARTS = {part.__name__: part
         for part in (beside_huggingface, optimizers, loop, tests, resume, demo)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", default="gpu.txt", help="(default: %(default)s)")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--minutes", type=float, default=8)
    add("--precision", default="auto")
    add("--tiny", action="store_true", help="a rehearsal: a small model, few examples")
    args = parser.parse_args()
    args.models = {"base": [128, 256, 1024], "large": [128, 512]}
    args.small = "mini"
    args.demo_steps = 2300, 400
    args.shards = beside.shards_of(30522)
    if args.tiny:
        args.models = {"tiny": [4, 8]}
        args.small = "tiny"
        args.demo_steps = 20, 10
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    say(args, f"{device}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    began = time.monotonic()
    for name in args.parts:
        if time.monotonic() - began > 60 * args.minutes:
            say(args, f"{name}: no time")
            continue
        try:
            PARTS[name](args)
        except (RuntimeError, ImportError, SystemExit) as error:         # the other parts follow
            say(args, f"{name}: {error!r:.300}")
        if CUDA:
            torch.cuda.empty_cache()
        say(args, f"({name}: until {time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
