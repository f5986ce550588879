"""BERT pre-training in two phases, on one process or on many.

    python train.py                                                      # a whole demo, on CPU too
    python train.py --corpus my.txt --out runs/mine                      # the same on your own text
    torchrun --nproc_per_node=8 train.py --data shards/wiki --model large --recipe nvlamb-64k
    torchrun --nnodes=32 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \\
        train.py --data shards/wiki --model large --recipe nvlamb-64k

The same command again goes on from the last checkpoint, bit for bit. Results are in --out.
"""
import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import bert
import data
import dist
import optim


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of pre-training with one sequence length and one learning-rate schedule."""
    seq_len: int             # tokens, the special ones included
    global_batch: int        # examples a step, over all ranks and micro-batches
    steps: int
    lr: float                # at its peak
    warmup: float            # share of the steps
    hold: float = 0.0        # share of the steps at the peak, for warmup_hold_decay
    power: float = 1.0       # of the polynomial decay
    schedule: Callable = optim.warmup_hold_decay


class Recipe(NamedTuple):
    """How a model is pre-trained: what the phases have in common, and the phases."""
    optimizer: str
    betas: tuple             # of the moments; with few steps the second one must forget sooner
    dropout: float           # off where every text is seen a few times only
    phases: list


RECIPES = {
    # A 2x128 model on 5 MB of text, in minutes.
    "demo": Recipe("lamb", (0.9, 0.98), 0.0, [
        Phase(seq_len=64, global_batch=32, steps=2300, lr=1e-2, warmup=0.05),
        Phase(seq_len=128, global_batch=32, steps=250, lr=3e-3, warmup=0.1),
    ]),
    # BERT-large as NVIDIA trains it: DeepLearningExamples, PyTorch, pretrain_config.sh.
    "nvlamb-64k": Recipe("nvlamb", (0.9, 0.999), 0.1, [
        Phase(128, 65536, 7038, 6e-3, warmup=0.2843, power=0.5, schedule=optim.warmup_polynomial),
        Phase(512, 32768, 1563, 4e-3, warmup=0.128, power=0.5, schedule=optim.warmup_polynomial),
    ]),
    # "54 minutes" (arXiv 2006.13484). Batches and the schedule's form are READ in the paper and its
    # code; steps, rates and shares are RECALL, unconfirmed.
    "lans-96k": Recipe("lans", (0.9, 0.999), 0.1, [
        Phase(128, 98304, 3519, 6.75e-3, warmup=0.4265, hold=0.2735),       # RECALL
        Phase(512, 33792, 782, 5e-3, warmup=0.192, hold=0.108),             # RECALL
    ]),
}

OPTIMIZERS = {               # each from parameter groups and betas
    "lamb": optim.LAMB,
    "nvlamb": functools.partial(optim.LAMB, adapt_all=True, max_grad_norm=1.0),
    "lans": optim.LANS,
    "adamw": functools.partial(torch.optim.AdamW, eps=1e-6),
    "onebit-adam": optim.OneBitAdam,
    "onebit-lamb": optim.OneBitLAMB,
    "zeroone-adam": optim.ZeroOneAdam,
}
EXCHANGING = "onebit-adam", "onebit-lamb", "zeroone-adam"    # these take an exchange as well
LONG_MEMORY = 0.999          # their second beta: what is frozen must not be the last few steps'
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_DECAY = 0.01
CLIP = 1.0                   # the largest global norm of the gradients
EVAL_EXAMPLES = 1024         # held-out examples, the same masks at every evaluation
DEMO_SENTENCES = [           # for the model that read this machine's documentation
    "This function can [MASK] used to create a new file.",
    "If [MASK] is None, the default value is used.",
    "The result is a list [MASK] strings.",
]


class Refused(ValueError):
    """Arguments or files that training cannot start with; the message says what to change."""


def parse_arguments(argv=None):
    """Returns the parsed command line; a wrong one ends the program with one line and status 2."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            self.exit(2, f"{self.prog}: {message}\n" if os.environ.get("RANK", "0") == "0" else "")

    class Help(argparse.ArgumentDefaultsHelpFormatter):
        def _get_help_string(self, action):          # no "(default: None)" behind a told default
            return super()._get_help_string(action) if action.default else action.help

    parser = Parser(description="BERT pre-training in two phases.", allow_abbrev=False,
                    formatter_class=Help)
    add = parser.add_argument
    # What to train on, and where results go
    add("--data", metavar="DIR", help="prepared shards; default: shards/ and the corpus's name")
    add("--corpus", nargs="+", metavar="FILE", help="text to prepare: files, folders or patterns; "
        "default: documentation")
    add("--vocab-size", type=int, default=8192, metavar="N", help="pieces, if text is prepared")
    add("--out", metavar="DIR", help="results; default: runs/ and the recipe's name")
    # What to train
    add("--model", default="tiny", choices=bert.PRESETS, help="size of the model")
    add("--recipe", default="demo", choices=RECIPES, help="lengths, batches, steps and rates")
    add("--optimizer", choices=OPTIMIZERS, help="default: the recipe's")
    add("--freeze", type=float, metavar="X", help="share of each phase's steps in which onebit-* "
        "and zeroone-adam learn the variance; default: 0.2, or the warm-up where that is longer")
    add("--dropout", type=float, metavar="P", help="default: the recipe's")
    add("--seed", type=int, default=0, metavar="N", help="of weights, data order, masks, dropout")
    add("--pairs", default="nsp", choices=["nsp", "sop", "none"], help="the second task: does B "
        "follow A, are A and B in order, no second task")
    add("--mask-fraction", type=float, default=data.MASK_FRACTION, metavar="X", help="of tokens")
    add("--whole-words", action="store_true", help="mask all tokens of a word or none")
    # How the recipe is bent
    add("--lr-scale", type=float, default=1.0, metavar="X", help="multiplies all learning rates")
    add("--phase1-steps", type=int, metavar="N", help="default: the recipe's; 0 leaves it out")
    add("--phase2-steps", type=int, metavar="N", help="likewise for phase 2")
    add("--phase1-batch", type=int, metavar="N", help="global batch; default: the recipe's")
    add("--phase2-batch", type=int, metavar="N", help="likewise for phase 2")
    add("--max-steps", type=int, metavar="N", help="stop here; the schedule stays the same")
    # How the machine does it
    add("--precision", default="auto", choices=["auto", *PRECISIONS], help="masters are fp32")
    add("--micro-batch", type=int, nargs="+", metavar="N", help="examples a rank at a time, one "
        "number or one a phase; default: about 8,192 tokens, 32,768 on a GPU")
    add("--compression", default="none", choices=dist.COMPRESSORS, help="what crosses the wire")
    add("--topk-fraction", type=float, default=0.01, metavar="X", help="sent by topk")
    add("--chunk-fraction", type=float, default=0.05, metavar="X", help="sent by chunk")
    add("--powersgd-rank", type=int, default=4, metavar="N", help="of powersgd's factors")
    add("--bucket-mb", type=float, metavar="N", help="gradients sent at a time, in MB; default: a "
        "12th of all, from 1 to 25")
    add("--compile", action="store_true", help="let torch.compile fuse the model's kernels")
    add("--workers", type=int, default=1, metavar="N", help="processes a rank that make examples")
    add("--balance", action="store_true", help="deal a step's examples to ranks and micro-batches "
        "by length: even work, little padding; each node needs all shards")
    add("--timeout", type=float, default=600, metavar="S", help="seconds to wait for a rank")
    # What is written when; each phase ends with an evaluation and a checkpoint in any case
    add("--eval-every", type=int, default=300, metavar="N", help="steps between evaluations")
    add("--checkpoint-every", type=int, default=300, metavar="N", help="steps between checkpoints")
    add("--log-every", type=int, default=50, metavar="N", help="steps between lines of the log")
    add("--resume", default="auto", metavar="auto|never|PATH", help="the newest checkpoint "
        "in --out, none (those in --out are removed), or this one")
    args = parser.parse_args(argv)
    least = dict(log_every=1, eval_every=1, checkpoint_every=1, max_steps=1, workers=0, seed=0,
                 phase1_steps=0, phase2_steps=0, phase1_batch=1, phase2_batch=1, dropout=0)
    for name, value in least.items():
        if getattr(args, name) is not None and getattr(args, name) < value:
            parser.error(f"--{name.replace('_', '-')} must be at least {value}")
    if min(args.micro_batch or [1]) < 1 or (args.dropout or 0) >= 1:
        parser.error("--micro-batch must be at least 1 and --dropout below 1")
    if not 0 < args.mask_fraction < 1:
        parser.error("--mask-fraction must lie between 0 and 1")
    return args


# ----- The plan: phases, batches, precision -----

def plan_phases(args):
    """Returns the recipe's phases, bent as the flags say; a phase without steps is left out."""
    phases = []
    for number, phase in enumerate(RECIPES[args.recipe].phases, 1):
        steps, batch = getattr(args, f"phase{number}_steps"), getattr(args, f"phase{number}_batch")
        phases.append(dataclasses.replace(
            phase, lr=phase.lr * args.lr_scale,
            steps=phase.steps if steps is None else steps,
            global_batch=phase.global_batch if batch is None else batch))
    if not any(phase.steps for phase in phases):
        raise Refused("no steps are left to do; raise --phase1-steps or --phase2-steps")
    return phases


def phase_at(phases, step):
    """Returns (number from 0, phase, step within it) of a step of the run."""
    for number, phase in enumerate(phases):
        if step < phase.steps:
            return number, phase, step
        step -= phase.steps
    raise IndexError("the step lies behind the last phase")


def micro_batch_of(phase, number, given, size, device):
    """Returns the examples that a rank takes at a time; `given` is --micro-batch or None.

    Without it, the largest divisor of the rank's share with at most 8,192 tokens (four times that
    on a GPU). Raises Refused, naming the nearest global batch, where the batch does not divide.
    """
    unit = size * (given[min(number, len(given) - 1)] if given else 1)
    if phase.global_batch % unit:
        nearest = max(1, round(phase.global_batch / unit)) * unit
        raise Refused(f"phase {number + 1}: a global batch of {phase.global_batch} does not divide "
                      f"into {size} ranks x micro-batches of {unit // size}; the nearest that does "
                      f"is --phase{number + 1}-batch {nearest}")
    if given:
        return unit // size
    share = phase.global_batch // size
    most = max(1, (8192 if device.type == "cpu" else 32768) // phase.seq_len)
    return max(n for n in range(1, min(share, most) + 1) if share % n == 0)


def freeze_steps(args, optimizer, phases):
    """Returns the steps of each phase before the optimizer freezes its variance, [] for one that
    never does; raises Refused if a phase has no steps before or after."""
    if optimizer not in EXCHANGING:
        if args.freeze is not None:
            raise Refused(f"--freeze means nothing to {optimizer}; it is for "
                          f"{', '.join(EXCHANGING)}")
        return []
    if args.compression not in ("none", "fp16", "bf16"):
        raise Refused(f"{optimizer} sends gradients only while it learns the variance, which "
                      f"--compression {args.compression} would spoil; take none, bf16 or fp16")
    if args.freeze is not None and not 0 < args.freeze < 1:
        raise Refused(f"--freeze {args.freeze} cannot work; it is a share of the steps, in (0, 1)")
    frozen_from = [round((args.freeze or max(0.2, phase.warmup)) * phase.steps) for phase in phases]
    for number, (steps, phase) in enumerate(zip(frozen_from, phases), 1):
        if phase.steps and not 0 < steps < phase.steps:
            raise Refused(f"phase {number}: {optimizer} would freeze its variance after {steps} of "
                          f"{phase.steps} steps, and needs steps before and after; change --freeze "
                          f"or --phase{number}-steps")
    return frozen_from


def choose_precision(name, device):
    """Returns the precision's name; for "auto" bf16 where the hardware multiplies it, else fp16 on
    a GPU and fp32 on a CPU."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any(capabilities.get(key) for key in ("avx512_bf16", "amx_bf16", "bf16")) \
        else "fp32"


def measure_peak(dtype, device):
    """Returns the floating-point operations a second of a large matrix product on this device, the
    best of five: what the log's MFU is a share of."""
    n = 8192 if device.type == "cuda" else (1024 if dtype != torch.float16 else 128)
    a = torch.randn(n, n, device=device, dtype=dtype)
    best = math.inf
    for _ in range(6):
        began = time.perf_counter()
        float((a @ a)[0, 0])                               # a number on the host: it is done
        best = min(best, time.perf_counter() - began)
    return 2 * n ** 3 / best


# ----- The log -----

class Log:
    """The terminal, log.txt and metrics.jsonl of a run; silent on all ranks but 0."""

    def __init__(self, folder, active):
        self.folder, self.active = folder, active

    def say(self, text=""):
        """Prints a line, above the progress bar, and adds it to log.txt."""
        if self.active:
            tqdm.write(text)
            sys.stdout.flush()
            self._append("log.txt", text)

    def metric(self, kind, **fields):
        """Adds a line to metrics.jsonl; numbers that are not finite become null."""
        if self.active:
            fields = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                      for key, value in fields.items()}
            self._append("metrics.jsonl", json.dumps({"kind": kind, **fields}))

    def _append(self, name, line):
        try:
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:                     # a full disk must not end the training
            tqdm.write(f"warning: {self.folder / name}: {error.strerror}")

    def read(self):
        """Returns the lines of metrics.jsonl, a list of dicts, without a half-written last one."""
        path, lines = self.folder / "metrics.jsonl", []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def rewind(self, step):
        """Drops what metrics.jsonl says of steps behind `step`: they are done again."""
        kept = [line for line in self.read() if step and line.get("step", 0) <= step]
        temporary = self.folder / "metrics.jsonl.tmp"
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.folder / "metrics.jsonl")


def git_commit():
    """Returns the commit that this file is of, "-dirty" behind it if it was changed; or None."""
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], check=True, text=True,
                              capture_output=True, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# ----- Checkpoints: one file each, its digest behind it -----

class HashingFile:
    """A file to write to that computes the SHA-256 of all that went by, and remembers what failed:
    torch.save puts an error of its own in place of a full disk's."""

    def __init__(self, file):
        self.file, self.digest, self.error = file, hashlib.sha256(), None

    def write(self, part):
        self.digest.update(part)
        try:
            return self.file.write(part)
        except OSError as error:
            self.error = error
            raise

    def flush(self):
        self.file.flush()


def save_checkpoint(path, state, keep):
    """Writes `state` (tensors, numbers, strings, plain containers) to `path`, whole or not at all.

    The file is what torch.save writes and 64 hexadecimal digits behind it, of its SHA-256. Then
    removes all other checkpoints of the folder but the newest two and the paths in `keep`.
    Raises OSError on a full disk, with the older checkpoints untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            hashing = HashingFile(file)
            torch.save(state, hashing)
            file.write(hashing.digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)                       # the name is on the disk too
        os.close(folder)
    except RuntimeError as error:
        raise hashing.error or error from None
    finally:
        temporary.unlink(missing_ok=True)
    for old in checkpoints_in(path.parent)[:-2]:
        if old not in keep:
            old.unlink()


def checkpoints_in(folder):
    """Returns the paths of a folder's checkpoints, in the order of their steps."""
    return sorted(folder.glob("step-*.pt"), key=step_of)


def step_of(path):
    """Returns the step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


def read_checkpoint(path):
    """Returns what save_checkpoint wrote, on the CPU; raises Refused if the file is damaged."""
    try:
        with open(path, "rb") as file:
            size, digest = max(0, os.path.getsize(path) - 64), hashlib.sha256()
            while part := file.read(min(1 << 24, size - file.tell())):
                digest.update(part)
            if file.read() != digest.hexdigest().encode():
                raise Refused(f"{path} is cut or damaged: its digest does not match")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise Refused(f"{path} is not one of our checkpoints; nothing in it was run") from None


def find_checkpoint(folder, resume, say):
    """Returns the state to go on from, or None to start anew.

    resume: "auto" takes the newest that is whole and warns of those that are not, "never" none,
    else it is a path. Raises Refused if there are checkpoints and none of them is whole.
    """
    if resume not in ("auto", "never"):
        return read_checkpoint(Path(resume))
    for rest in folder.glob("*.tmp"):
        rest.unlink(missing_ok=True)           # of a run that was killed while it wrote
    paths = checkpoints_in(folder)[::-1] if resume == "auto" else []
    for path in paths:
        try:
            return read_checkpoint(path)
        except Refused as error:
            say(f"warning: {error}; trying the one before")
    if paths:
        raise Refused(f"no checkpoint in {folder} is whole; move the folder away to start again")
    return None


def forget_behind(step, folder, log):
    """Removes checkpoints and metrics of steps behind `step`, from where the run goes on: they are
    done again, and a checkpoint left from before would look like the newest."""
    for path in checkpoints_in(folder):
        if step_of(path) > step:
            path.unlink()
    log.rewind(step)


# ----- Evaluation -----

@torch.no_grad()
def evaluate(model, plan, phase, micro_batch, world):
    """Returns a dict of what the model does on the held-out documents, at a phase's length.

    Examples and masks are the same at every evaluation, and all ranks share them. unigram_entropy,
    nats, is the loss on the same tokens of a predictor that knows only how often the training text
    has each token: the line to beat. nsp_error is the standard error of nsp_accuracy; without pairs
    both are None. Leaves the model in training mode.
    """
    model.eval()
    examples = data.PretrainingData(plan.shards, phase.seq_len, held_out=True, **plan.examples)
    total = torch.zeros(6, dtype=torch.float64, device=world.device)
    unigrams = torch.from_numpy(data.unigram_losses(plan.shards)).to(world.device)
    for numbers in data.micro_batches(range(1), EVAL_EXAMPLES, micro_batch, world.rank, world.size):
        batch = data.collate(examples.__getitems__(numbers)).to(world.device)
        labels = batch.labels[batch.labels != data.IGNORED]
        parts = *model(batch), unigrams[labels].sum(), torch.tensor(len(labels)).to(world.device)
        total += torch.stack([part.double() for part in parts])
    model.train()
    world.all_reduce(total)
    mlm_sum, nsp_sum, mlm_hits, nsp_hits, unigram_sum, masked = total.tolist()
    accuracy, paired = nsp_hits / EVAL_EXAMPLES, plan.examples["pairs"] != "none"
    return {"mlm_loss": mlm_sum / masked, "mlm_accuracy": mlm_hits / masked,
            "unigram_entropy": unigram_sum / masked, "nsp_loss": nsp_sum / EVAL_EXAMPLES,
            "nsp_accuracy": accuracy if paired else None,
            "nsp_error": math.sqrt(accuracy * (1 - accuracy) / EVAL_EXAMPLES) if paired else None}


def describe(result):
    """Returns an evaluation as a line of text."""
    return (f"MLM loss {result['mlm_loss']:.3f} (unigram entropy {result['unigram_entropy']:.3f}), "
            f"MLM accuracy {result['mlm_accuracy']:.1%}, NSP accuracy {nsp_accuracy(result)}")


def nsp_accuracy(result):
    """Returns an evaluation's accuracy on pairs with its standard error as text."""
    if result["nsp_accuracy"] is None:
        return "none"
    return f"{result['nsp_accuracy']:.1%} +- {result['nsp_error']:.1%}"


# ----- Training -----

def prepare_data(args, world):
    """Returns (folder, manifest) of the shards, made by each node's first rank if they are not yet
    there, then checked; raises Refused on all ranks, with the words of the one that has a problem.
    """
    name = Path(os.path.abspath(args.corpus[0])).name.split(".")[0] if args.corpus else "docs"
    name = re.sub(r"\W+", "-", name).strip("-") or "corpus"
    folder = Path(args.data or f"shards/{name}")
    missing = not (folder / "manifest.json").exists()

    def make():
        if world.local_rank == 0 and (args.corpus or (missing and not args.data)):
            corpus = data.corpus_of(args.corpus)
            print(data.describe(data.prepare(corpus, folder, args.vocab_size)))

    together(world, make)
    together(world, lambda: data.verify(folder, world.rank, world.size,
                                        everything=args.balance and world.local_rank == 0))
    return folder, data.load_manifest(folder)


def together(world, job):
    """Returns job(), called on every rank; if it fails on one, all raise Refused with its words."""
    result = problem = None
    try:
        result = job()
    except (Refused, data.DataError, OSError) as error:
        problem = str(error)
    if problems := [words for words in world.gather(problem) if words]:
        raise Refused(problems[0])
    return result


def open_folder(out):
    """Makes the folder of results; raises OSError where nothing can be written."""
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    (out / "log.txt").touch()
    (out / "checkpoints" / "writable.tmp").touch()
    (out / "checkpoints" / "writable.tmp").unlink(missing_ok=True)


def seed_dropout(*numbers):
    """Seeds torch's generators, of CPU and GPU, by a tuple of numbers."""
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def differences(run, found):
    """Returns the fields in which two descriptions of a run differ, as text: "seed 1 (was 0)"."""
    return ", ".join(f"{key} {run.get(key)} (was {found.get(key)})"
                     for key in sorted({*run, *found}) if run.get(key) != found.get(key))


class Plan(NamedTuple):
    """All that is settled before the first step."""
    phases: list             # of Phase
    micro_batches: list      # examples a rank takes at a time, for each phase
    out: Path                # the folder of results
    shards: Path             # the folder of shards
    config: bert.BertConfig
    precision: str
    optimizer: str
    freeze: list             # steps of each phase before the variance is frozen, or none
    options: dict            # of the compressor
    examples: dict           # options of data.PretrainingData
    balance: bool
    run: dict                # what the result depends on: equal on all ranks and after a resume


def settle(args, world):
    """Returns the Plan for the arguments; raises Refused or data.DataError if it cannot work."""
    phases = plan_phases(args)
    micro = [micro_batch_of(phase, number, args.micro_batch, world.size, world.device)
             if phase.steps else 1 for number, phase in enumerate(phases)]
    out = Path(args.out or f"runs/{args.recipe}")
    together(world, lambda: open_folder(out))
    shards, manifest = prepare_data(args, world)
    recipe = RECIPES[args.recipe]
    dropout = recipe.dropout if args.dropout is None else args.dropout
    config = bert.BertConfig.preset(args.model, manifest["vocab_size"], dropout=dropout)
    precision = choose_precision(args.precision, world.device)
    optimizer = args.optimizer or recipe.optimizer
    freeze = freeze_steps(args, optimizer, phases)
    betas = [recipe.betas[0], LONG_MEMORY if optimizer in EXCHANGING else recipe.betas[1]]
    examples = {"pairs": args.pairs, "mask_fraction": args.mask_fraction,
                "whole_words": args.whole_words}
    run = {**examples, "balance": args.balance, "optimizer": optimizer, "freeze": freeze,
           "betas": betas, "seed": args.seed,
           "precision": precision, "compression": args.compression, "shards": manifest["shards"],
           "corpus": manifest["corpus"]["sha256"][:16],
           "tokenizer": manifest["files"]["tokenizer.model"]["sha256"][:16],
           **{f"model.{key}": value for key, value in dataclasses.asdict(config).items()}}
    options = {"topk": {"fraction": args.topk_fraction}, "chunk": {"fraction": args.chunk_fraction},
               "powersgd": {"rank": args.powersgd_rank}}.get(args.compression, {})
    run |= {f"{args.compression}.{key}": value for key, value in options.items()}
    for number, phase in enumerate(phases, 1):
        run |= {f"phase{number}.{key}": getattr(value, "__name__", value)
                for key, value in dataclasses.asdict(phase).items()}
    for rank, other in enumerate(world.gather(run)):
        if other != run:
            raise Refused(f"rank {rank} was started differently: {differences(other, run)}")
    return Plan(phases, micro, out, shards, config, precision, optimizer, freeze, options, examples,
                args.balance, run)


def build(plan, args, world):
    """Returns (model, reducer, masters, optimizer, exchange, scaler), as they are before the first
    step; exchange is None for an optimizer that needs none."""
    torch.manual_seed(args.seed)
    model = bert.BertForPreTraining(plan.config)
    # Begin at the token frequencies: the first loss is the unigram entropy, not log V, which saves
    # the demo some 300 steps. Rows that only pad the vocabulary are as rare as the rarest token.
    rarity = torch.from_numpy(data.unigram_losses(plan.shards)).float()
    model.mlm_bias.data.fill_(-rarity.max())[:len(rarity)] = -rarity
    if plan.examples["pairs"] == "none":             # weight decay alone would wear them away
        for head in (model.pooler, model.nsp):
            head.requires_grad_(False)
    model.to(world.device, PRECISIONS[plan.precision])
    reducer = dist.Reducer(model, world, args.bucket_mb, args.compression, **plan.options)
    masters = optim.master_weights(model)
    for name, master in masters.items():
        master.grad = reducer.gradients[name]
    named = optim.parameter_groups(model, WEIGHT_DECAY)
    groups = [{"params": [masters[name] for name in names], "weight_decay": decay}
              for names, decay in named]
    options, exchange = {"betas": tuple(plan.run["betas"])}, None
    if plan.freeze:
        order = [(name, masters[name]) for names, _ in named for name in names]
        exchange = options["exchange"] = dist.Exchange(order, world)
    if plan.optimizer == "zeroone-adam":   # the published 32,678 steps of 125,000
        steps = sum(phase.steps for phase in plan.phases)
        options["interval_steps"] = max(1, steps * 32678 // 125000)
    if plan.optimizer == "adamw" and world.device.type == "cuda":
        options["fused"] = True
    optimizer = OPTIMIZERS[plan.optimizer](groups, **options)
    scaled = "fp16" in (plan.precision, args.compression)
    scaler = optim.LossScaler() if scaled else optim.LossScaler(initial=1.0, largest=1.0)
    return model, reducer, masters, optimizer, exchange, scaler


def train(args, world):
    """Trains as the arguments say; returns nothing, all results are in the folder --out.

    Raises Refused, data.DataError, optim.TrainingStopped, dist.DistError or OSError; see main.
    """
    plan = settle(args, world)
    log = Log(plan.out, world.rank == 0)
    model, reducer, masters, optimizer, exchange, scaler = build(plan, args, world)
    checkpoints, step, examples, seconds = plan.out / "checkpoints", 0, 0, 0.0
    state = together(world, lambda: find_checkpoint(checkpoints, args.resume, log.say)
                     if world.rank == 0 else None)
    if state := world.share(state):
        if state["run"] != plan.run:
            raise Refused(f"the checkpoint in {plan.out} is of another run: "
                          f"{differences(plan.run, state['run'])}; take another --out")
        step, examples, seconds = state["step"], state["examples"], state["seconds"]
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(state["weights"][name])
        optim.copy_to_model(masters, model)
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        reducer.load_state_dict(state["compression"])
        if exchange:
            exchange.load_state_dict(state["exchange"])
    del state
    if log.active:
        forget_behind(step, checkpoints, log)
    introduce(plan, args, world, log, model, step)
    peak = measure_peak(PRECISIONS[plan.precision], world.device)
    forward = torch.compile(model, dynamic=True) if args.compile else model
    last = sum(phase.steps for phase in plan.phases)
    stop_at = min(last, args.max_steps or last)
    # Stop after the step under way on SIGTERM, or when torchrun is gone: orphans must not train on.
    stopping, parent = [], os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    batches = bar = None

    # ----- the training loop begins -----
    while step < stop_at:
        number, phase, local = phase_at(plan.phases, step)
        if batches is None or local == 0:
            micro, batch_size = plan.micro_batches[number], phase.global_batch
            accumulation = batch_size // (micro * world.size)
            batches, bar = open_phase(plan, args, world, number, local, accumulation)
        began = time.perf_counter()

        # 1. The step's micro-batches, and what all ranks must know before backward
        step_batches = list(itertools.islice(batches, accumulation))
        data_seconds = time.perf_counter() - began
        orphaned = parent is not None and os.getppid() != parent
        masked, stop, slots, *tokens = agree(step_batches, len(stopping) + orphaned, world)

        # 2. Forward and backward; the last micro-batch sends gradients while backward goes on
        scale = scaler.scale
        reducer.zero_grad(scale)
        alone = exchange and optimizer.local_gradients(local >= plan.freeze[number])
        total = torch.zeros(4, dtype=torch.float64, device=world.device)
        for k, batch in enumerate(step_batches):
            seed_dropout(args.seed, step, k, world.rank)
            sends = k + 1 == accumulation and not alone
            with contextlib.nullcontext() if sends else reducer.accumulate():
                losses = forward(batch.to(world.device))
                loss = losses.mlm_sum / masked + losses.nsp_sum / batch_size
                (loss * world.size * scale).backward()       # averaging over ranks divides by size
            total += torch.stack([part.detach().double() for part in losses])
        if not alone:
            reducer.finish()

        # 3. Every rank agrees whether the step counts; then unscale, clip, update
        norm = float(optim.global_norm(reducer.buckets))
        *sums, squares = world.sum([*total.tolist(), norm ** 2])
        norm = math.sqrt(squares / world.size)               # where alone, over all ranks
        counts = scaler.update(not math.isfinite(norm), step + 1, reducer.gradients)
        reducer.commit(counts)
        lr = phase.schedule(local, phase)
        if counts:
            # Noise makes the norm of one rank's gradients larger than that of the mean
            optim.unscale_and_clip_(reducer.buckets, norm, scale,
                                    CLIP * math.sqrt(world.size if alone else 1))
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        step, examples = step + 1, examples + batch_size
        phase_ends, ends = local + 1 == phase.steps, step == stop_at or stop > 0
        evaluates = step % args.eval_every == 0 or phase_ends
        saves = step % args.checkpoint_every == 0 or phase_ends or ends
        if exchange and (evaluates or saves):
            optimizer.synchronise()
        optim.copy_to_model(masters, model)

        # 4. Log, evaluate, checkpoint
        duration = time.perf_counter() - began
        seconds += duration
        figures = step_figures(plan, sums, masked, slots, tokens, batch_size, duration, peak)
        log.metric("train", step=step, phase=number + 1, seq_len=phase.seq_len, **figures, lr=lr,
                   grad_norm=norm / scale, loss_scale=scale, skipped=scaler.skipped,
                   examples=examples, seconds=seconds, data_share=data_seconds / duration,
                   bytes_sent=reducer.bytes_sent + (exchange.take_bytes() if exchange else 0),
                   wait_seconds=reducer.wait_seconds, bucket_seconds=reducer.bucket_seconds)
        bar.set_postfix_str("mlm {mlm_loss:.3f} nsp {nsp_loss:.3f} acc {mlm_accuracy:.1%} "
                            "{examples_per_second:.0f} examples/s".format(**figures))
        bar.update()
        if step % args.log_every == 0 or phase_ends:
            log.say("step {:>6}/{}  phase {}  mlm {mlm_loss:6.3f}  nsp {nsp_loss:.3f}  lr {:.2e}  "
                    "norm {:6.2f}  scale {:g}  {examples_per_second:6.0f} examples/s".format(
                        step, last, number + 1, lr, norm / scale, scale, **figures))
        if evaluates:
            result = evaluate(model, plan, phase, micro, world)
            log.metric("eval", step=step, phase=number + 1, **result)
            log.say(f"step {step:>6}/{last}  held out: {describe(result)}")
        if saves:
            compare_weights(masters, world, step)
            # On every rank: what was not yet sent is averaged over them
            residuals, unsent = reducer.state_dict(), exchange.state_dict() if exchange else {}
            if log.active:
                checkpoint({"run": plan.run, "step": step, "examples": examples, "seconds": seconds,
                            "weights": masters, "optimizer": optimizer.state_dict(),
                            "scaler": scaler.state_dict(), "compression": residuals,
                            "exchange": unsent},
                           checkpoints, plan.phases, log)
        if phase_ends or ends:
            bar.close()
            batches = None
        if stop:
            log.say(f"stopped {'by SIGTERM' if stopping else 'without torchrun'} after step {step}"
                    "; the same command goes on from there")
            break
    # ----- the training loop ends -----

    reducer.close()
    if log.active:
        bert.save_huggingface(model, plan.shards / "tokenizer.model", plan.out / "model")
        report(plan, args, log, model, step, last)


def agree(batches, stop, world):
    """Returns a list of sums over all ranks of a step: masked tokens, reasons to stop, places for
    tokens; then the tokens of each rank."""
    of_ranks = [0] * world.size
    of_ranks[world.rank] = sum(int(batch.mask.sum()) for batch in batches)
    return world.sum([sum(int((batch.labels != data.IGNORED).sum()) for batch in batches), stop,
                      sum(batch.mask.numel() for batch in batches), *of_ranks])


def step_figures(plan, sums, masked, slots, tokens, examples, seconds, peak):
    """Returns the log's fields that follow from a step's sums over all ranks: of the losses and
    hits (4 numbers), masked tokens, places for tokens and examples; and from the tokens of each
    rank. imbalance: the most tokens of a rank over the mean. peak: FLOP/s of one rank."""
    mlm_loss, nsp_loss, rate = sums[0] / masked, sums[1] / examples, examples / seconds
    all_tokens, peak = sum(tokens), peak * len(tokens)
    flops = rate * bert.flops_per_example(plan.config, all_tokens / examples, masked / examples)
    return {"loss": mlm_loss + nsp_loss, "mlm_loss": mlm_loss, "nsp_loss": nsp_loss,
            "mlm_accuracy": sums[2] / masked, "nsp_accuracy": sums[3] / examples,
            "padding": 1 - all_tokens / slots, "imbalance": max(tokens) * len(tokens) / all_tokens,
            "examples_per_second": rate, "mfu": flops / peak}


def open_phase(plan, args, world, number, local, accumulation):
    """Returns (an iterator over this rank's micro-batches from step `local` of a phase, a bar)."""
    phase, micro = plan.phases[number], plan.micro_batches[number]
    examples = data.PretrainingData(plan.shards, phase.seq_len, number, args.seed, **plan.examples)
    numbers = data.micro_batches(range(local, phase.steps), phase.global_batch, micro, world.rank,
                                 world.size, examples.lengths if plan.balance else None)
    batches = data.loader(examples, numbers, args.workers,
                          prefetch=2 + accumulation // max(1, args.workers),
                          pin_memory=world.device.type == "cuda")
    return iter(batches), tqdm(desc=f"phase {number + 1}", total=phase.steps, initial=local,
                               unit="step", disable=True if world.rank else None,
                               dynamic_ncols=True)


@torch.no_grad()
def compare_weights(masters, world, step):
    """Raises optim.TrainingStopped if weights are not finite, or not the same bits on all ranks."""
    if not math.isfinite(float(optim.global_norm(list(masters.values())))):
        raise optim.TrainingStopped(f"step {step}: the weights are not finite; no checkpoint is "
                                    "saved of them")
    bits = [int(master.view(torch.int32).sum(dtype=torch.int64)) for master in masters.values()]
    for rank, other in enumerate(world.gather(sum(bits))):
        if other != sum(bits):
            raise optim.TrainingStopped(f"step {step}: the weights of rank {rank} are not those of "
                                        f"rank {world.rank}; no checkpoint is saved. Go on from "
                                        "the last one, and have that machine's memory checked")


def checkpoint(state, folder, phases, log):
    """Saves a step's state in the folder and keeps the newest two and the last of each phase; a
    full disk is a warning, since the older checkpoints are whole and training can go on."""
    ends = itertools.accumulate(phase.steps for phase in phases)
    try:
        save_checkpoint(folder / f"step-{state['step']:06d}.pt", state,
                        keep=[folder / f"step-{end:06d}.pt" for end in ends])
    except OSError as error:
        log.say(f"warning: no checkpoint of step {state['step']}: {error.strerror}; training "
                "goes on")


def introduce(plan, args, world, log, model, step):
    """Says what is about to run, and writes it as the first line of metrics.jsonl."""
    parameters = sum(p.numel() for p in model.parameters())
    if step == 0:
        log.metric("run", arguments=vars(args), run=plan.run, commit=git_commit(),
                   versions={"python": sys.version.split()[0], "torch": torch.__version__,
                             "numpy": np.__version__}, world=world.size, nodes=world.nodes,
                   device=str(world.device), threads=torch.get_num_threads(), parameters=parameters)
    log.say(f"model {args.model}: {plan.config.layers} layers x {plan.config.width}, "
            f"{parameters:,} parameters, vocabulary {plan.config.vocab_size:,}")
    log.say(f"{world.size} rank(s) on {world.nodes} node(s), {world.device.type}, "
            f"{plan.precision}, optimizer {plan.optimizer}, compression {args.compression}")
    for number, (phase, micro) in enumerate(zip(plan.phases, plan.micro_batches), 1):
        log.say(f"phase {number}: {phase.steps:,} steps x {phase.global_batch:,} examples of "
                f"{phase.seq_len} tokens = {world.size} rank(s) x micro-batch {micro} x "
                f"accumulation {phase.global_batch // (micro * world.size)}, lr {phase.lr:g}")
    if plan.freeze:
        log.say(f"{plan.optimizer} freezes its variance after "
                f"{' and '.join(map(str, plan.freeze))} steps of the phases")
    if step:
        log.say(f"going on from the checkpoint of step {step}")


def report(plan, args, log, model, step, last):
    """Says what came out: the last evaluation of each phase; for the demo, sentences filled in."""
    lines = log.read()
    results = {line["phase"]: line for line in lines if line["kind"] == "eval"}
    log.say()
    log.say(f"{'phase':<7}{'length':>7}{'steps':>8}{'MLM loss':>10}{'unigram':>9}{'MLM acc':>9}"
            f"{'NSP acc':>18}")
    for number, result in sorted(results.items()):
        log.say(f"{number:<7}{plan.phases[number - 1].seq_len:>7}{result['step']:>8}"
                f"{result['mlm_loss']:>10.3f}{result['unigram_entropy']:>9.3f}"
                f"{result['mlm_accuracy']:>9.1%}{nsp_accuracy(result):>18}")
    log.say("Held-out documents. `unigram` is the MLM loss of guessing by frequency alone, the "
            "line to beat.")
    for number in sorted(results):
        steps = [line for line in lines if line["kind"] == "train" and line["phase"] == number]
        if not steps:                                # a full disk kept them out of the log
            continue
        padding, imbalance, waited = (
            statistics.fmean(line[key] for line in steps)
            for key in ("padding", "imbalance", "data_share"))
        log.say(f"phase {number}: {padding:.1%} of a batch is padding, the busiest rank has "
                f"{imbalance:.3f} times the mean tokens; {waited:.1%} of the time waits for data")
    if not args.corpus and not args.data:
        tokenizer = data.load_tokenizer(plan.shards / "tokenizer.model")
        cpu = bert.load_huggingface(plan.out / "model")
        for sentence in DEMO_SENTENCES:
            guesses = bert.fill_mask(cpu, tokenizer, sentence, 3)[0]
            log.say(f"\n{sentence}\n    " + ", ".join(
                f"{piece.replace('▁', '')} {probability:.0%}" for piece, probability in guesses))
    log.say(f"\n{'Done' if step == last else 'Stopped'} after step {step} of {last}. "
            "Fill in your own:\n    "
            f'python bert.py {plan.out}/model "Returns the [MASK] of the list."')


def main():
    args = parse_arguments()
    rank = int(os.environ.get("RANK", 0))
    try:
        with dist.init(args.timeout) as world:
            train(args, world)
    except dist.RankLost as error:
        print(f"train.py: {error}", file=sys.stderr, flush=True)
        os._exit(1)              # a clean exit would wait for the rank that does not answer
    except (Refused, data.DataError, bert.ModelError, dist.DistError, optim.TrainingStopped,
            OSError) as error:
        if rank == 0:
            print(f"train.py: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
