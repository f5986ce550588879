"""BERT pre-training in two phases, on one process or on many.

    python train.py                                                      # a whole demo, on CPU too
    python train.py --corpus my.txt --out runs/mine                      # the same on your own text
    torchrun --nproc_per_node=8 train.py --data shards/wiki --model large --recipe nvlamb-64k
    torchrun --nnodes=32 --nproc_per_node=8 --node_rank=K --master_addr=HOST \\
        train.py --data shards/wiki --model large --recipe nvlamb-64k

The same command again resumes from the last checkpoint. All results are in the folder --out.

The file stands in the order in which it runs: flags, plan, log, training state, checkpoints, the
parts of a step, evaluation, and then `training_loop`, which uses them all. You can begin with it:
its eight numbered steps are those of the README. `--hours`, `train`, which is a whole run, `--plan`
and the program come last.
"""
import argparse
import bisect
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import json
import math
import os
import pickle
import resource
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import bert
import data
import dist
import optim


CLIP = 1.0                   # the largest global norm of the gradients
EVAL_EXAMPLES = 1024         # held-out examples, with the same masks at every evaluation
CPU_TOKENS = 8192            # tokens of a micro-batch on a CPU, if the user gives no size
CHECKPOINT_SECONDS = 1800    # a checkpoint is saved at least this often
LOG_EVERY = 50               # steps between two lines of the log
LOG_SECONDS = 60             # and the most seconds between two of them
TRIAL_SECONDS = 5            # --hours times the steps of each phase so long
LOCAL_FLAGS = "data", "corpus", "out", "workers", "timeout"      # each node may have its own
DEMO_SENTENCES = [           # for a model that has read this machine's documentation
    "This function can [MASK] used to create a new file.",
    "If [MASK] is None, the default value is used.",
    "The result is a list [MASK] strings."]


class ConfigError(ValueError):
    """Flags or files that training cannot start with; the message says what to change."""


class CheckpointError(ValueError):
    """A file that is not the checkpoint that its name says; the message says which file."""


# Errors that a user can mend. They are told in one line, all others with a traceback.
EXPECTED = (ConfigError, CheckpointError, data.DataError, bert.ModelError, dist.DistError,
            optim.TrainingStopped, OSError)


def ceil_div(a, b):
    """Returns a / b, rounded up to a whole number."""
    return -(-a // b)


# ----- Flags -----

# The kinds of numbers that flags take; data.py has `number` and `Parser` for both programs.
COUNT = data.number(int, 1, 10 ** 9)         # 1, 2, 3 ...
COUNT_OR_0 = data.number(int, 0, 10 ** 9)
FRACTION = data.number(float, 0, 1)
AMOUNT = data.number(float, 1e-6)            # any positive number


def known_compression(text):
    """Returns the text of --compression, for argparse's `type`; refuses what dist.py cannot do."""
    try:
        dist.parse_compression(text)
    except dist.DistError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parse_arguments(argv=None):
    """Returns the flags (Namespace). Wrong flags end the program with one line and status 2."""
    parser = data.Parser(description="Pre-train BERT.", allow_abbrev=False)

    add = parser.add_argument_group("text and results").add_argument
    add("--data", type=data.path, help="train on the shards in this folder")
    add("--corpus", type=data.path, nargs="+",
        help="prepare shards of these text files first; without --data and --corpus the text is "
             "this machine's documentation")
    add("--vocab-size", type=data.number(int, 16),
        help="give a new tokenizer this many pieces; without it 8192")
    add("--out", type=data.path,
        help="write all results to this folder; without it to one below runs/")
    add("--resume", type=data.path, default="auto",
        help="resume from this checkpoint; auto is the newest one in --out (default: %(default)s)")
    add("--init", type=data.path, help="begin with the weights in this model folder")

    add = parser.add_argument_group("model and recipe").add_argument
    add("--model", choices=bert.PRESETS, default="tiny",
        help="train a model of this size (default: %(default)s)")
    add("--recipe", choices=optim.RECIPES, default="demo",
        help="follow this recipe (default: %(default)s)")
    add("--optimizer", choices=optim.OPTIMIZERS, help="replace the recipe's optimizer")
    add("--steps", type=COUNT_OR_0, nargs="+",
        help="replace the recipe's steps, by one number for all phases or by one for each")
    add("--batch", type=COUNT, nargs="+",
        help="replace the recipe's examples in a step over all ranks, likewise")
    add("--lr-scale", type=data.number(float, 0), default=1.0,
        help="multiply all learning rates by this (default: %(default)s)")
    add("--dropout", type=FRACTION, help="replace the recipe's dropout")
    add("--mask-fraction", type=FRACTION, help="replace the recipe's fraction of masked tokens")
    add("--pairs", choices=["nsp", "sop", "none"],
        help="replace the recipe's pairs: learn whether B follows A (nsp), in which order they are "
             "(sop), or masked tokens only (none)")
    add("--whole-words", action="store_true", help="mask all tokens of a word, or none of them")
    add("--seed", type=data.number(int, 0, 1 << 63), default=0,
        help="draw weights, examples, masks and dropout from this seed (default: %(default)s)")

    add = parser.add_argument_group("how the machines do it").add_argument
    add("--precision", choices=["auto", *optim.PRECISIONS], default="auto",
        help="compute in this format; auto is the fastest one here (default: %(default)s)")
    add("--micro-batch", type=COUNT, nargs="+",
        help="compute this many examples at a time on a rank; without it as many as a GPU's "
             "memory holds, or 8,192 tokens on a CPU")
    add("--compression", type=known_compression, default="none",
        help=f"send gradients as one of {', '.join(dist.COMPRESSORS)}; topk:0.05 sets its "
             "fraction (default: %(default)s)")
    add("--bucket-mb", type=AMOUNT,
        help="average this many MB of gradients at a time; without it a twelfth of all, within 1 "
             "and 25 MB")
    add("--balance", action="store_true",
        help="deal examples to ranks by length; then each node reads all shards")
    add("--compile", action="store_true", help="let torch.compile fuse the kernels of each layer")
    add("--recompute", action="store_true",
        help="keep fewer activations, and compute the others twice")
    add("--workers", type=COUNT_OR_0, default=1,
        help="make examples ahead in this many processes a rank (default: %(default)s)")
    add("--timeout", type=data.number(float, 1e-3, 1e6), default=600.0,
        help="give a rank up after this many seconds of silence (default: %(default)s)")

    add = parser.add_argument_group("when to stop, evaluate and save").add_argument
    add("--hours", type=data.number(float, 1e-4, 1e5),
        help="time a few steps, then take as many as fit into this time; the recipe's steps say "
             "only how it is shared between the phases")
    add("--max-steps", type=COUNT, help="stop after this step of the same schedule")
    add("--max-minutes", type=data.number(float, 0, 1e6),
        help="stop after this many minutes, with a checkpoint")
    add("--eval-every", type=COUNT, default=300,
        help="evaluate every so many steps, and when a phase ends or half an hour is over "
             "(default: %(default)s)")
    add("--checkpoint-every", type=COUNT,
        help="save every so many steps, and when a phase ends or half an hour is over; without it "
             "every 300 steps in the demo")

    add = parser.add_argument_group("what a run would take").add_argument
    add("--plan", type=COUNT,
        help="start nothing; print the memory, seconds and hours that so many nodes would take")
    add("--gpus-per-node", type=COUNT, default=8,
        help="with --plan: the GPUs of a node, a rank each (default: %(default)s)")
    add("--gpu-memory", type=AMOUNT,
        help="the GB of a GPU; without it what --gpu or the GPU here has, or 16")
    add("--gpu", choices=bert.GPUS,
        help="with --plan: take this GPU's memory, and its speed in 16 bits that others published")
    add("--tflops", type=AMOUNT,
        help="with --plan: the TFLOP/s of a GPU in training, as metrics.jsonl of a short run says")
    add("--gbps", type=AMOUNT, default=10.0,
        help="with --plan: the Gb/s between two nodes (default: %(default)s)")
    return parser.parse_args(argv)


# ----- The plan: what was asked for, and what follows from it -----

@dataclasses.dataclass
class Plan:
    """All that is decided before training. It is the same on all ranks, but for LOCAL_FLAGS."""
    flags: argparse.Namespace    # as given: plan.flags.seed is --seed
    data: Path                   # the folder of shards
    out: Path                    # the folder of results
    reads_docs: bool             # whether the text is this machine's documentation
    vocab_size: int              # pieces of the tokenizer
    optimizer: str
    betas: tuple                 # of the optimizer's moments
    mask_fraction: float         # of the tokens that are to be predicted
    pairs: str                   # "nsp", "sop" or "none"
    precision: str               # "fp32", "bf16" or "fp16"
    gpu_memory: float            # GB of the smallest GPU; None on CPUs
    config: bert.BertConfig
    save_every: int              # steps
    # make_plan fills in the phases, which follow from the others, and `prepare` the last.
    phases: list = None          # of optim.Phase, with the flags' numbers
    run: dict = None             # what the results depend on; known when the shards are there

    @property
    def ends(self):
        """The number of each phase's last step (list), counted in the whole run."""
        return np.cumsum([phase.steps for phase in self.phases]).tolist()

    def phase_at(self, step):
        """Returns the index of the phase that the next step is in when `step` steps are done."""
        return bisect.bisect_right(self.ends, step)


def given_or(value, otherwise):
    """Returns a flag's value if it was given, else `otherwise`."""
    return otherwise if value is None else value


def planned_vocab_size(flags, shards):
    """Returns the number of the tokenizer's pieces: that of the shards, if they are there."""
    asked = flags.vocab_size
    if not (shards / "manifest.json").exists():
        return asked or 8192
    if flags.plan and asked:
        return asked                             # for a text that is not on this machine
    found = data.load_manifest(shards)["vocab_size"]
    if asked not in (None, found):
        raise ConfigError(f"{shards} has {found} pieces: remove it, or leave out --vocab-size")
    return found


def smallest_gpu_memory(flags, world):
    """Returns the GB of the smallest GPU of all ranks, which decides for all; None on CPUs, but 16
    for a plan."""
    if flags.gpu_memory:
        return flags.gpu_memory
    if flags.gpu:
        return bert.GPUS[flags.gpu][1]
    if world.device.type != "cuda":
        return 16.0 if flags.plan else None
    own = 1e-9 * torch.cuda.get_device_properties(world.device).total_memory
    if flags.plan:
        return own                               # the ranks of a plan do not exist
    return min(world.all_gather_object(own))


def one_for_each(flag, numbers, count):
    """Returns the numbers of a flag as one for each of `count` phases; None if it was not given."""
    if numbers is None:
        return [None] * count
    if len(numbers) == 1:
        return numbers * count
    if len(numbers) != count:
        raise ConfigError(f"{flag} takes one number, or one for each of the {count} phases")
    return numbers


def state_gigabytes(plan):
    """Returns {part: GB} of what a rank holds besides activations, by bert.state_gigabytes."""
    itemsize = optim.PRECISIONS[plan.precision].itemsize
    return bert.state_gigabytes(plan.config, itemsize, dist.is_lossy(plan.flags.compression))


def example_gigabytes(plan, phase):
    """Returns the GB of activations that an example leaves for backward."""
    itemsize = optim.PRECISIONS[plan.precision].itemsize
    masked = plan.mask_fraction * phase.seq_len
    return 1e-9 * bert.activation_bytes(plan.config, phase.seq_len, masked, itemsize,
                                        plan.flags.recompute)


def examples_that_fit(plan, phase):
    """Returns how many examples fit in 80 % of a GPU's memory: the formulas leave out a little."""
    free = 0.8 * plan.gpu_memory - sum(state_gigabytes(plan).values())
    return max(0, int(free / example_gigabytes(plan, phase)))


def plan_micro_batch(plan, phase, share, given):
    """Returns how many examples a rank computes at a time, of the `share` it has in a step."""
    if given:
        return min(given, share)
    if plan.gpu_memory:
        most = examples_that_fit(plan, phase)
    else:
        most = CPU_TOKENS // phase.seq_len
    # Equal parts: 100 examples, at most 64 at a time, are two micro-batches of 50.
    parts = ceil_div(share, max(1, most))
    return ceil_div(share, parts)


def plan_phases(plan, phases, world):
    """Returns a recipe's phases (list of optim.Phase) with the numbers that the flags give."""
    steps = one_for_each("--steps", plan.flags.steps, len(phases))
    batches = one_for_each("--batch", plan.flags.batch, len(phases))
    micro_batches = one_for_each("--micro-batch", plan.flags.micro_batch, len(phases))

    planned = []
    for index, phase in enumerate(phases):
        batch = batches[index] or phase.global_batch
        if batch < world.size:
            raise ConfigError(f"a batch of {batch} is too small for {world.size} ranks; raise "
                              "--batch")
        planned.append(dataclasses.replace(
            phase,
            steps=given_or(steps[index], phase.steps),
            global_batch=batch,
            lr=phase.lr * plan.flags.lr_scale,
            micro_batch=plan_micro_batch(plan, phase, ceil_div(batch, world.size),
                                         micro_batches[index])))
    return planned


def with_steps(plan, steps):
    """Returns the plan with other numbers of steps, one for each phase."""
    phases = []
    for phase, number in zip(plan.phases, steps, strict=True):
        phases.append(dataclasses.replace(phase, steps=number))
    return dataclasses.replace(plan, phases=phases)


def steps_that_fit(plan, step_seconds, seconds):
    """Returns how many steps of each phase (list) take `seconds` together, in the same proportions
    as those of the plan: at least one of a phase that has any. step_seconds: of each phase."""
    planned = sum(phase.steps * each for phase, each in zip(plan.phases, step_seconds))
    fraction = max(seconds, 0.0) / max(planned, 1e-9)
    return [min(phase.steps, 1) + int(phase.steps * fraction) for phase in plan.phases]


def make_plan(flags, world):
    """Returns the Plan of the flags. Decides only: it writes nothing, and no shards are needed yet.

    Raises ConfigError, data.DataError or dist.DistError if the plan cannot work.
    """
    recipe = optim.RECIPES[flags.recipe]
    if flags.data and flags.corpus:
        raise ConfigError("--data is a folder of shards, --corpus text to make them of: give one")
    reads_docs = not flags.data and not flags.corpus
    shards = Path(flags.data or data.default_folder(flags.corpus))
    name = flags.recipe if reads_docs else shards.name
    vocab_size = planned_vocab_size(flags, shards)

    plan = Plan(
        flags=flags,
        data=shards,
        out=Path(flags.out or f"runs/{name}"),
        reads_docs=reads_docs,
        vocab_size=vocab_size,
        optimizer=flags.optimizer or recipe.optimizer,
        betas=recipe.betas,
        mask_fraction=given_or(flags.mask_fraction, recipe.mask_fraction),
        pairs=flags.pairs or recipe.pairs,
        precision=optim.choose_precision(flags.precision, world.device),
        gpu_memory=smallest_gpu_memory(flags, world),
        config=bert.BertConfig.preset(
            flags.model,
            vocab_size,
            dropout=given_or(flags.dropout, recipe.dropout),
            attention_dropout=given_or(flags.dropout, recipe.attention_dropout)),
        # Only the demo saves by steps: its phases take minutes. Elsewhere the half hour decides.
        save_every=flags.checkpoint_every or (300 if reads_docs else sys.maxsize))
    # This needs the fields above: what fits a GPU depends on the model and its precision.
    plan.phases = plan_phases(plan, recipe.phases, world)
    return plan


def same_run(plan, manifest):
    """Returns what the results of a run depend on (flat dict of numbers and text).

    It is equal on all ranks, and a checkpoint with another one is refused. Ranks, micro-batches and
    buckets are left out, so a run may resume with others: they change only how sums are rounded,
    which activations dropout drops, and what lossy compression leaves over. With --hours the steps
    are left out, too: how many fit is measured once, and then stands in the checkpoint.
    """
    left_out = {"micro_batch"}
    if plan.flags.hours:
        left_out.add("steps")
    run = {"shards": manifest["sha256"][:16]}
    for field in ("optimizer", "betas", "mask_fraction", "pairs", "precision"):
        run[field] = getattr(plan, field)
    for flag in ("compression", "balance", "hours", "init", "seed", "whole_words"):
        run[flag] = getattr(plan.flags, flag)
    for field, value in dataclasses.asdict(plan.config).items():
        run[f"model.{field}"] = value
    for number, phase in enumerate(plan.phases, 1):
        for field, value in dataclasses.asdict(phase).items():
            if field not in left_out:
                run[f"phase{number}.{field}"] = value
    return run


def check_ranks(plan, world):
    """Raises dist.DistError on all ranks if one of them was started with other flags or code: then
    the ranks would call other collectives, or other results would be averaged."""
    told = dict(plan.run, torch=torch.__version__)
    for flag, value in vars(plan.flags).items():
        if flag not in LOCAL_FLAGS:
            told[flag] = value
    digest = hashlib.sha256()
    for module in (bert, data, dist, optim, sys.modules[__name__]):
        digest.update(Path(module.__file__).read_bytes())
    told["code"] = digest.hexdigest()[:16]
    world.check_same(told, "was started differently")


def prepare(plan, world):
    """Makes the shards if they are not there, and has every rank check those that it reads. Returns
    the plan with its field `run`. Collective; raises one of EXPECTED on all ranks."""

    def make_shards():
        # One process of each node prepares; the others wait for it in on_all_ranks. With --corpus
        # data.prepare looks whether the shards that are there are made of it.
        docs_needed = plan.reads_docs and not (plan.data / "manifest.json").exists()
        if world.local_rank == 0 and (plan.flags.corpus or docs_needed):
            corpus = data.open_corpus(plan.flags.corpus)
            manifest = data.prepare(corpus, plan.data, plan.vocab_size)
            print(data.describe(manifest), flush=True)

    def check_shards():
        every_shard = plan.flags.balance and world.local_rank == 0
        manifest = data.verify(plan.data, world.rank, world.size, every_shard)
        # A tokenizer that cannot be exported at the end is refused now.
        bert.tokenizer_json((plan.data / "tokenizer.model").read_bytes())
        return manifest

    world.on_all_ranks(EXPECTED, make_shards)
    manifest = world.on_all_ranks(EXPECTED, check_shards)
    plan = dataclasses.replace(plan, run=same_run(plan, manifest))
    check_ranks(plan, world)
    return plan


# ----- The log -----

STEP_LINE = ("step {step:>6}/{last}  phase {phase}  mlm {mlm_loss:6.3f}  {pairs} {nsp_loss:.3f}  "
             "lr {lr:.1e}  norm {grad_norm:5.2f}  scale {loss_scale:g}  {examples_per_second:.0f} "
             "examples/s  {memory_gb:.1f} GB  {minutes_left:.0f} min left")


class Log:
    """The terminal, log.txt and metrics.jsonl of a run; silent on all ranks but rank 0.

    On rank 0 it makes the folder of results and locks it until the process ends; raises ConfigError
    if another run has locked it, OSError if the folder cannot be written.
    """

    def __init__(self, plan, active):
        self.active = active
        self.text = plan.out / "log.txt"
        self.metrics = plan.out / "metrics.jsonl"
        self.unwritten = {}                  # {path: bytes that a full disk did not take}
        self.said_at = 0.0                   # when the last line of a step was printed, seconds
        if not active:
            return

        (plan.out / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.lock = open(self.text, "a")     # the lock lasts as long as this file is open
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another run writes to {plan.out}, or its disk has no locks "
                              f"({error.strerror}); take another --out") from None

    def say(self, text):
        """Prints a line and adds it to log.txt."""
        if self.active:
            self._print(text)
            self._append(self.text, text)

    def step(self, plan, figures):
        """Logs the figures of a step: always in metrics.jsonl, now and then as a line of text."""
        self.metric("train", **figures)
        step = figures["step"]
        silent = time.monotonic() - self.said_at
        if step <= 3 or step % LOG_EVERY == 0 or silent > LOG_SECONDS:
            self.said_at = time.monotonic()
            self.say(STEP_LINE.format(last=plan.ends[-1], pairs=plan.pairs, **figures))

    def metric(self, kind, **fields):
        """Adds a line to metrics.jsonl."""
        if not self.active:
            return
        for key, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                fields[key] = None           # JSON has neither NaN nor inf
        self._append(self.metrics, json.dumps({"kind": kind, **fields}))

    def _print(self, text):
        # A closed terminal or a full disk behind it must not end the training.
        with contextlib.suppress(OSError, AttributeError):
            print(text, flush=True)

    def _append(self, path, line):
        rest = self.unwritten.pop(path, b"") + f"{line}\n".encode()
        try:
            with open(path, "ab", buffering=0) as file:
                while rest:
                    written = file.write(rest)       # a disk that fills up takes a part first
                    rest = rest[written:]
        except OSError as error:
            self._print(f"warning: {path}: {error.strerror}")
            self.unwritten[path] = rest

    def metrics_length(self):
        """Returns the length of metrics.jsonl, which a checkpoint keeps."""
        if self.active and self.metrics.exists():
            return self.metrics.stat().st_size
        return 0

    def cut_metrics(self, length):
        """Cuts metrics.jsonl to the length it had at a checkpoint: later steps are done again."""
        if self.metrics_length() > length:
            os.truncate(self.metrics, length)


def log_start(plan, world, log, state):
    """Says what is about to run, and writes it as the first line of metrics.jsonl."""
    parameters = sum(p.numel() for p in state.model.parameters())
    if log.active and log.metrics_length() == 0:
        folder = shlex.quote(str(Path(__file__).parent))
        commit = subprocess.getoutput(f"git -C {folder} describe --always --dirty")
        log.metric("run", arguments=vars(plan.flags), run=plan.run, commit=commit,
                   python=sys.version, torch=torch.__version__, numpy=np.__version__,
                   world=world.size, nodes=world.nodes, device=str(world.device),
                   threads=torch.get_num_threads(), parameters=parameters)

    log.say(f"model {plan.flags.model}: {plan.config.layers} layers x {plan.config.width}, "
            f"{parameters:,} parameters, vocabulary {plan.config.vocab_size:,}\n"
            f"{world.size} rank(s) on {world.nodes} node(s), {world.device.type}, "
            f"{plan.precision}, optimizer {plan.optimizer}, compression {plan.flags.compression}")
    for number, phase in enumerate(plan.phases, 1):
        accumulation = ceil_div(phase.global_batch, world.size * phase.micro_batch)
        log.say(f"phase {number}: {phase.steps:,} steps x {phase.global_batch:,} examples of "
                f"{phase.seq_len} tokens; {world.size} rank(s) x micro-batch {phase.micro_batch} x "
                f"accumulation {accumulation}, lr {phase.lr:g}")
    if state.step > 0:
        log.say(f"resuming from the checkpoint of step {state.step}")


# ----- The training state -----

@dataclasses.dataclass
class State:
    """All that training changes; a checkpoint holds it."""
    model: bert.BertForPreTraining
    reducer: dist.Reducer            # holds the gradients, and averages them over the ranks
    masters: dict                    # {name: fp32 tensor}, the weights that the optimizer steps
    optimizer: torch.optim.Optimizer
    scaler: optim.LossScaler
    step: int = 0                    # finished steps, skipped ones too
    examples: int = 0                # in these steps
    seconds: float = 0.0             # of these steps, without evaluation and saving


def set_bias_to_frequencies(model, shards):
    """Sets the MLM head's bias so that the first loss is the unigram entropy, not log V: that saves
    the demo some 300 steps."""
    rarity = torch.from_numpy(data.unigram_losses(shards))         # (pieces,) nats
    # Subtracting the mean changes no probability, and makes the numbers smaller. LANS needs that:
    # its steps are proportional to their norm, which is eight times as large otherwise.
    bias = rarity.mean() - rarity
    # The rows that only pad the vocabulary become as rare as the rarest token.
    model.mlm_bias.data.fill_(bias.min())
    model.mlm_bias.data[:len(bias)] = bias


def build_model(plan, world, checkpoint):
    """Returns an fp32 model on this rank's device. On rank 0 it has the weights of the checkpoint
    (dict) if there is one. All others, and heads that do not train, are as --seed and --init say.
    """
    torch.manual_seed(plan.flags.seed)
    model = bert.BertForPreTraining(plan.config)
    # Without pairs these two have no gradient, and weight decay alone would wear them away.
    for head in (model.pooler, model.nsp):
        head.requires_grad_(plan.pairs != "none")
    set_bias_to_frequencies(model, plan.data)

    def load_weights():
        # Rank 0 is enough: it sends its weights to the others.
        if plan.flags.init and world.rank == 0:
            bert.copy_weights(plan.flags.init, model, plan.data / "tokenizer.model")
        if checkpoint:
            copy_checkpoint_weights(checkpoint, model)

    world.on_all_ranks(EXPECTED, load_weights)
    model.to(world.device)
    model.recompute = plan.flags.recompute
    if plan.flags.compile:
        # Attention depends on the lengths of a batch, so it would be compiled again and again. It
        # is replaced here, since a decorator in bert.py would import the compiler in every run.
        bert.attention = torch.compiler.disable(bert.attention)
        # Blocks one by one: so backward still completes their gradients one after another.
        for block in model.blocks:
            block.compile(dynamic=True)
    return model


def build(plan, world, checkpoint):
    """Returns the State before the first step, the same weights on all ranks: those of rank 0's
    checkpoint (dict, or None), see `build_model`. Collective."""
    dtype = optim.PRECISIONS[plan.precision]
    model = build_model(plan, world, checkpoint)
    masters = optim.master_weights(model, dtype)
    # It sends the model's weights from rank 0 to all. In 16 bits the masters are others.
    reducer = dist.Reducer(model, world, plan.flags.bucket_mb, plan.flags.compression)
    for name, master in masters.items():
        if dtype.itemsize == 2:
            world.broadcast(master)
        # The optimizer reads the gradient where the Reducer has averaged it: nothing is copied, and
        # the view stays the same in the whole run.
        master.grad = reducer.gradients[name]
    optimizer = optim.make_optimizer(plan.optimizer, masters, plan.betas)

    scaler = optim.LossScaler()
    if "fp16" not in (plan.precision, plan.flags.compression):
        # Nothing is in fp16, neither the model nor what is sent. bf16 has the range of fp32: no
        # gradient becomes 0, so no loss has to be scaled.
        scaler = optim.LossScaler(scale=1.0, largest=1.0)
    return State(model, reducer, masters, optimizer, scaler)


# ----- Checkpoints: one file each, what torch.save writes and then the digest of it -----

DIGEST_LENGTH = 64           # hexadecimal digits of a SHA-256


@torch.no_grad()
def check_weights(world, state):
    """Raises, on all ranks, optim.TrainingStopped if weights or moments of one are not finite, and
    dist.DistError if their weights are not the same bits."""
    tensors = list(state.masters.values())
    for moments in state.optimizer.state.values():
        tensors.append(moments["exp_avg"])
        tensors.append(moments["exp_avg_sq"])
    broken = not math.isfinite(optim.global_norm(tensors))
    # One rank alone must not stop: the others would wait for it.
    if world.sum([broken])[0]:
        raise optim.TrainingStopped(f"step {state.step}: weights or moments are not finite; not "
                                    "saved")

    # A checksum: the bits are added up as integers, whose sum no order of additions changes.
    masters = state.masters.values()
    bits = sum(int(master.view(torch.int32).sum(dtype=torch.int64)) for master in masters)
    world.check_same({"sum of bits": bits},
                     f"has other weights after step {state.step} (bad memory?)")


def checkpoints_in(folder):
    """Returns {step: path} of the checkpoints in a folder; a file of any other name is not ours."""
    paths = folder.glob(f"step-{'[0-9]' * 8}.pt")
    return {int(path.stem.removeprefix("step-")): path for path in paths}


def write_checkpoint(folder, checkpoint, keep):
    """Writes a checkpoint (tensors, numbers, text, plain containers), whole or not at all. Then
    removes the others, but for the one before and those of the steps in `keep`.

    The file step-00000007.pt is that of step 7: what torch.save writes, and its SHA-256 as text.

    The file is built in memory, which holds the checkpoint twice meanwhile. Raises OSError on a
    full disk.
    """
    content = io.BytesIO()
    torch.save(checkpoint, content)
    digest = hashlib.sha256(content.getbuffer()).hexdigest()

    # The same name each time: what a killed run has left is overwritten.
    temporary = folder / "unfinished"
    temporary.unlink(missing_ok=True)                # it might be a link to another file
    try:
        with open(temporary, "wb") as file:
            file.write(content.getbuffer())
            file.write(digest.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / f"step-{checkpoint['step']:08d}.pt")
    finally:
        temporary.unlink(missing_ok=True)

    # Later ones go, too: this run would have resumed from them, had they not been damaged.
    found = checkpoints_in(folder)
    older = [step for step in found if step < checkpoint["step"]]
    kept = {checkpoint["step"], max(older, default=0), *keep}
    for step in found.keys() - kept:
        found[step].unlink()


def save(plan, world, log, state):
    """Saves a checkpoint of all that the next step depends on: of the State the "step", "examples"
    and "seconds", the "weights" (masters, which 16 bits would round), and what "optimizer",
    "scaler" and reducer ("residuals") hold; of the plan its "run" and "phase_steps" (a list); and
    "log_bytes", the length of metrics.jsonl.

    Collective: what lossy compression has not sent yet is averaged over the ranks. A full disk is a
    warning: the older checkpoints are still whole. Raises what check_weights raises.
    """
    check_weights(world, state)
    checkpoint = {
        "run": plan.run,
        "phase_steps": [phase.steps for phase in plan.phases],
        "step": state.step,
        "examples": state.examples,
        "seconds": state.seconds,
        "weights": state.masters,
        "optimizer": state.optimizer.state_dict(),
        "scaler": vars(state.scaler),
        "residuals": state.reducer.state_dict(),
        "log_bytes": log.metrics_length()}
    if log.active:
        try:
            write_checkpoint(plan.out / "checkpoints", checkpoint, keep=plan.ends)
        except OSError as error:
            log.say(f"warning: no checkpoint of step {state.step}: {error.strerror}; training "
                    "goes on")


def read_checkpoint(path):
    """Returns what write_checkpoint wrote (dict), on the CPU. Raises CheckpointError if there is no
    such file, or if it is damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no file; checkpoints are in runs/NAME/checkpoints")
    content = memoryview(path.read_bytes())
    body = content[:-DIGEST_LENGTH]
    digest = bytes(content[-DIGEST_LENGTH:])
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointError(f"{path} is cut or damaged: its digest does not match")
    with contextlib.suppress(pickle.UnpicklingError, RuntimeError, EOFError):
        # weights_only, because a pickle could run any code.
        checkpoint = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get("run"), dict):
            return checkpoint
    raise CheckpointError(f"{path} is no checkpoint of ours; nothing in it was run")


def newest_whole_checkpoint(found, log):
    """Returns the latest of the checkpoints {step: path} that can be read, or None. Each that is
    damaged is a warning, and the one before is tried."""
    for step in sorted(found, reverse=True):
        try:
            return read_checkpoint(found[step])
        except (CheckpointError, OSError) as error:
            log.say(f"warning: {error}; trying the one before")
    return None


def find_checkpoint(plan, log):
    """Returns the checkpoint (dict) that --resume asks for, or None to start anew; for rank 0.

    Raises ConfigError if none of the folder is whole, if it is of another run, or if later steps in
    the folder would be overwritten; CheckpointError if the one that is asked for is damaged.
    """
    folder = plan.out / "checkpoints"
    found = checkpoints_in(folder)
    if plan.flags.resume == "auto":
        if not found:
            return None
        checkpoint = newest_whole_checkpoint(found, log)
        if checkpoint is None:
            raise ConfigError(f"no checkpoint in {folder} is whole; move the folder away to start "
                              "anew")
    else:
        checkpoint = read_checkpoint(Path(plan.flags.resume))
        newest = max(found, default=0)
        if newest > checkpoint["step"]:
            raise ConfigError(f"{folder} holds step {newest}: resume from it, or change --out")
        if not found:
            checkpoint["log_bytes"] = 0              # a new --out has no log yet

    differ = dist.differences(checkpoint["run"], plan.run)
    if differ:
        raise ConfigError(f"the checkpoint is of another run: {differ}; take another --out")
    return checkpoint


def check_for_later_checkpoints(plan, world):
    """Raises ConfigError on all ranks if another node has a later checkpoint than rank 0. Without a
    shared disk only the first node has checkpoints, and when a run is started again another node
    may be the first."""
    newest = max(checkpoints_in(plan.out / "checkpoints"), default=0)
    place = f"{os.uname().nodename}:{plan.out.absolute()}"
    places = world.all_gather_object((newest, place))
    own_step, own_place = places[0]
    latest_step, latest_place = max(places)
    if latest_step > own_step:
        raise ConfigError(f"{latest_place} holds step {latest_step}, and rank 0's {own_place} step "
                          f"{own_step}; give the nodes the --node_rank of before, or put --out on "
                          "a shared disk")


@contextlib.contextmanager
def contents_checked():
    """Raises CheckpointError for the errors of a checkpoint that is whole, but has wrong contents.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint is not of this program: {error!r}") from None


def copy_checkpoint_weights(checkpoint, model):
    """Gives a model's trainable parameters the weights of a checkpoint."""
    with contents_checked():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                weight = checkpoint["weights"][name]
                if weight.shape != parameter.shape:  # copy_ would repeat it until it fits
                    raise ValueError(f"{name} is {tuple(weight.shape)}")
                parameter.data.copy_(weight)


def replace_tensors(value, function):
    """Returns nested dicts with function(tensor) in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: replace_tensors(part, function) for key, part in value.items()}
    return value


def broadcast_checkpoint(world, checkpoint):
    """Returns rank 0's checkpoint, on every rank: first its outline, in which tensors have a shape
    but no content, then one tensor after another, on all ranks in the order of the outline."""
    def share(tensor):
        if world.rank > 0:
            tensor = torch.empty_like(tensor, device=world.device)
        tensor = tensor.to(world.device)             # so that NCCL sends it, where there are GPUs
        world.broadcast(tensor)
        return tensor

    outline = replace_tensors(checkpoint, lambda tensor: tensor.to("meta"))
    outline = world.broadcast_object(outline)
    return replace_tensors(checkpoint if world.rank == 0 else outline, share)


def resume_point(plan, world, log):
    """Returns on rank 0 what find_checkpoint does, on other ranks None. Collective; raises on every
    rank, also if the disk of another node has a later checkpoint."""
    check_for_later_checkpoints(plan, world)

    def find():
        return find_checkpoint(plan, log) if world.rank == 0 else None

    return world.on_all_ranks(EXPECTED, find)


def restore(world, log, state, checkpoint):
    """Gives the State what rank 0's checkpoint (dict) holds beside the weights, and cuts
    metrics.jsonl to where it was then; if it is None, to nothing.

    Collective. Raises CheckpointError on every rank if what is in it does not fit.
    """
    if checkpoint:
        del checkpoint["weights"]                    # the model has them already
    checkpoint = broadcast_checkpoint(world, checkpoint)
    if checkpoint is None:
        log.cut_metrics(0)                           # the lines of a run that saved nothing
        return
    with contents_checked():
        state.optimizer.load_state_dict(checkpoint["optimizer"])
        state.scaler = optim.LossScaler(**checkpoint["scaler"])
        state.reducer.load_state_dict(checkpoint["residuals"])
        state.step = checkpoint["step"]
        state.examples = checkpoint["examples"]
        state.seconds = float(checkpoint["seconds"])
        log.cut_metrics(checkpoint["log_bytes"])     # last: what cannot be loaded loses no line


# ----- The parts of a step -----

def open_phase(plan, world, state, phase_index):
    """Returns an iterator over the steps of a phase that are left, each a list of this rank's
    micro-batches (data.Batch)."""
    phase = plan.phases[phase_index]
    examples = data.PretrainingData(
        plan.data, phase.seq_len, phase_index, plan.flags.seed, pairs=plan.pairs,
        mask_fraction=plan.mask_fraction, whole_words=plan.flags.whole_words)
    # Which examples are this rank's in step 0, 1, 2 ... of the phase: called in the workers.
    deal = functools.partial(
        data.micro_batches, global_batch=phase.global_batch, micro_batch=phase.micro_batch,
        rank=world.rank, size=world.size, lengths=examples.lengths if plan.flags.balance else None)
    first = state.step - (plan.ends[phase_index] - phase.steps)
    return data.loader(examples, deal, range(first, phase.steps), plan.flags.workers)


class StepTotals(NamedTuple):
    """What all ranks know of a step before its forward passes."""
    masked: int              # tokens to be predicted, of all ranks: the divisor of the MLM loss
    rows: int                # rows of all batches, the ones that only pad included
    tokens: list             # real tokens of each rank


def step_totals(world, micro_batches):
    """Returns the StepTotals. Counts on the CPU, before batches go to a GPU, so nothing waits for
    the device. Collective."""
    own_masked = sum(int((batch.labels != data.IGNORED).sum()) for batch in micro_batches)
    own_rows = sum(len(batch.tokens) for batch in micro_batches)
    # The last length is that of the rows that only pad.
    own_tokens = sum(int(batch.lengths[:-1].sum()) for batch in micro_batches)
    table = world.all_gather(torch.tensor([own_masked, own_rows, own_tokens]))   # (ranks, 3)
    masked, rows, _ = table.sum(0).tolist()
    return StepTotals(masked, rows, table[:, 2].tolist())


def step_figures(plan, phase, totals, mlm_sum, nsp_sum, seconds):
    """Returns the log's fields (dict) that follow from a step's sums over all ranks and its
    seconds. tflops: the TFLOP/s of one rank, as the model's formula counts them."""
    ranks = len(totals.tokens)
    tokens = sum(totals.tokens)
    mlm_loss = mlm_sum / totals.masked
    nsp_loss = nsp_sum / phase.global_batch
    examples_per_second = phase.global_batch / seconds
    flops = bert.flops_per_example(plan.config, tokens / phase.global_batch,
                                   totals.masked / phase.global_batch)
    return {
        "loss": mlm_loss + nsp_loss,
        "mlm_loss": mlm_loss,
        "nsp_loss": nsp_loss,
        "padding": 1 - tokens / totals.rows,                 # fraction of the rows
        "imbalance": max(totals.tokens) * ranks / tokens,    # the busiest rank, over the mean
        "examples_per_second": examples_per_second,
        "tflops": 1e-12 * examples_per_second * flops / ranks}


def last_step(plan):
    """Returns the number of the step after which this program stops."""
    return min(plan.ends[-1], plan.flags.max_steps or plan.ends[-1])


def tokens_until(plan, step):
    """Returns the tokens of the run's first steps, as if no example were shorter."""
    tokens = 0
    for phase in plan.phases:
        taken = min(step, phase.steps)
        tokens += taken * phase.global_batch * phase.seq_len
        step -= taken
    return tokens


def minutes_left(plan, state):
    """Returns the minutes until the run's end, at the mean speed of the steps until now."""
    done = tokens_until(plan, state.step)
    last = tokens_until(plan, last_step(plan))
    return state.seconds / 60 * (last - done) / done


def memory_gigabytes():
    """Returns the most memory that was in use, GB: the GPU's, or this process's without one."""
    if torch.cuda.is_available():
        return 1e-9 * torch.cuda.max_memory_allocated()
    unit = 1e-6 if sys.platform == "linux" else 1e-9         # Linux counts KB, macOS bytes
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ----- Evaluation -----

@torch.no_grad()
def evaluate(plan, world, state, phase):
    """Returns what the model does on the held-out documents, at a phase's length (dict; losses in
    nats). Collective: the ranks share the work.

    Examples and masks are the same at every evaluation; 15 % of the tokens are masked, however many
    training masks. unigram_entropy is the loss on the same tokens of a predictor that knows only
    how often the training text has each token: the loss to beat. nsp_accuracy is None without
    pairs. Of 1,024 examples its standard error is about 1.6 %.
    """
    examples = data.PretrainingData(plan.data, phase.seq_len, held_out=True,
                                    pairs=plan.pairs, whole_words=plan.flags.whole_words)
    unigram_losses = torch.from_numpy(data.unigram_losses(plan.data)).to(world.device)
    # The four fields of Losses, then unigram_sum and masked.
    sums = np.zeros(6)
    state.model.eval()
    for indices in data.micro_batches(0, EVAL_EXAMPLES, phase.micro_batch, world.rank, world.size):
        batch = examples.batch(indices).to(world.device)
        labels = batch.labels[batch.labels != data.IGNORED]
        losses = state.model(batch)
        figures = [*losses, unigram_losses[labels].sum(), len(labels)]
        sums += [float(figure) for figure in figures]
    state.model.train()

    # Sums are added up over the ranks, not means: the ranks' shares differ in size.
    mlm_sum, nsp_sum, mlm_hits, nsp_hits, unigram_sum, masked = world.sum(sums.tolist())
    return {
        "mlm_loss": mlm_sum / masked,
        "mlm_accuracy": mlm_hits / masked,
        "unigram_entropy": unigram_sum / masked,
        "nsp_loss": nsp_sum / EVAL_EXAMPLES,
        "nsp_accuracy": None if plan.pairs == "none" else nsp_hits / EVAL_EXAMPLES}


def log_evaluation(plan, log, state, phase_index, result):
    """Logs the result of an evaluation."""
    log.metric("eval", step=state.step, phase=phase_index + 1, **result)
    line = (f"step {state.step:>6}/{plan.ends[-1]}  held out: MLM loss {result['mlm_loss']:.3f} "
            f"(unigram {result['unigram_entropy']:.3f}), MLM accuracy {result['mlm_accuracy']:.1%}")
    if result["nsp_accuracy"] is not None:
        line += f", {plan.pairs.upper()} accuracy {result['nsp_accuracy']:.1%}"
    log.say(line)


# ----- Training -----

def training_loop(plan, world, log, state, stop_requests):
    """Takes the steps of the plan that are left, saves the last one, and returns dist.TRAIN_ON, or
    why it stopped before (see dist.asked_to_stop). stop_requests: of dist.listen_to_signals."""
    phase_index = None
    stop = dist.TRAIN_ON
    saved_step = state.step
    saved_at = time.monotonic()

    while state.step < last_step(plan) and not stop:
        if plan.phase_at(state.step) != phase_index:
            phase_index = plan.phase_at(state.step)
            phase = plan.phases[phase_index]
            phase_begin = plan.ends[phase_index] - phase.steps
            steps = open_phase(plan, world, state, phase_index)
            # Every rank has at least so many micro-batches in a step; some have one more.
            common = ceil_div(phase.global_batch // world.size, phase.micro_batch)
        began = time.perf_counter()

        # 1. This rank's examples of the step, in micro-batches that workers have made ahead.
        micro_batches = next(steps)
        data_seconds = time.perf_counter() - began

        # 2. Count the masked tokens of the whole step, on all ranks: the divisor of the MLM loss.
        #    If each rank divided by its own, tokens of ranks that have few would weigh more.
        totals = step_totals(world, micro_batches)

        # 3. Forward and backward of each micro-batch. Gradients add up in flat fp32 buckets.
        # 4. In the last micro-batch, each full bucket is averaged while backward goes on.
        scale = state.scaler.scale
        loss_sums = torch.zeros(2, dtype=torch.float64, device=world.device)
        reducer = state.reducer
        reducer.zero_grad(scale)
        for number, batch in enumerate(micro_batches):
            # A step can take minutes, and torchrun kills 30 s after SIGTERM. So the ranks ask each
            # other whether to stop before each micro-batch that all have, as all must take part.
            if 0 < number < common:
                stop = world.max(dist.asked_to_stop(stop_requests))
            if stop:
                break
            # Dropout's seed is a function of the step, so that no generator has to be saved.
            # Python's hash of numbers is the same in every process; only that of text is not.
            torch.manual_seed(hash((plan.flags.seed, state.step, number, world.rank)))
            reducer.sends = number + 1 == len(micro_batches)
            losses = state.model(batch.to(world.device))
            loss = losses.mlm_sum / totals.masked + losses.nsp_sum / phase.global_batch
            # Averaging will divide by the number of ranks. Gradients in fp16 need the scale.
            (loss * world.size * scale).backward()
            loss_sums += torch.stack([losses.mlm_sum, losses.nsp_sum]).detach()
        if stop:
            break                                # out of a step that is not done

        # 5. Wait for the buckets. Then all ranks hold the same gradients, still times `scale`.
        reducer.finish()
        norm = reducer.norm()

        # 6. An inf or NaN skips the step, on all ranks, since all have the same norm.
        overflow = not math.isfinite(norm)
        step_taken = state.scaler.update(overflow, state.step + 1, reducer.gradients)
        reducer.commit(step_taken)               # for lossy compression

        # 7. Unscale, clip, and step the fp32 masters. The model's weights are copied from them.
        lr = optim.learning_rate(state.step - phase_begin, phase)
        if step_taken:
            optim.unscale_and_clip_(reducer.flats, norm, scale, CLIP)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
            state.optimizer.step()
            optim.copy_to_model(state.masters, state.model)

        # 8. Tell each other the losses, whether to stop, and whether half an hour is over. Then
        #    log, evaluate, save a checkpoint.
        own = [*loss_sums.tolist(), dist.asked_to_stop(stop_requests),
               time.monotonic() - saved_at > CHECKPOINT_SECONDS]
        table = world.all_gather(torch.tensor(own, dtype=torch.float64))         # (ranks, 4)
        mlm_sum, nsp_sum, _, half_hour = table.sum(0).tolist()
        stop = int(table[:, 2].max())
        duration = time.perf_counter() - began
        state.step += 1
        state.examples += phase.global_batch
        state.seconds += duration
        log.step(plan, {
            "step": state.step, "phase": phase_index + 1, "seq_len": phase.seq_len, "lr": lr,
            "grad_norm": norm / scale, "loss_scale": scale, "skipped": state.scaler.skipped,
            "examples": state.examples, "seconds": state.seconds,
            "data_share": data_seconds / duration, "bytes_sent": reducer.bytes_sent,
            "wait_seconds": reducer.wait_seconds,
            "bucket_seconds": reducer.bucket_seconds,
            "memory_gb": memory_gigabytes(), "minutes_left": minutes_left(plan, state),
            **step_figures(plan, phase, totals, mlm_sum, nsp_sum, duration)})
        phase_ends = state.step == plan.ends[phase_index]
        if phase_ends or state.step % plan.flags.eval_every == 0 or half_hour:
            result = evaluate(plan, world, state, phase)
            log_evaluation(plan, log, state, phase_index, result)
        if phase_ends or state.step % plan.save_every == 0 or half_hour:
            save(plan, world, log, state)
            saved_step = state.step
            saved_at = time.monotonic()

    if state.step == last_step(plan):
        stop = dist.TRAIN_ON                     # what was asked in the last step comes too late
    if state.step > saved_step:
        save(plan, world, log, state)
    return stop


# ----- A schedule that ends when the time is over: --hours -----

class StepTimer(Log):
    """A silent Log that notes when each step ended, and asks for a stop when it has timed enough.
    """

    def __init__(self, plan):
        super().__init__(plan, active=False)
        self.ended_at = []
        self.stop_requests = []

    def step(self, plan, figures):
        """Notes the time, in place of logging the figures of a step."""
        self.ended_at.append(time.monotonic())
        if len(self.ended_at) > 3 and self.ended_at[-1] - self.ended_at[1] > TRIAL_SECONDS:
            self.stop_requests.append("--hours")

    def step_seconds(self):
        """Returns the mean time of the later half of the steps. Before, workers start and fill
        their queues, and memory is taken."""
        timed = self.ended_at[len(self.ended_at) // 2:]
        return (timed[-1] - timed[0]) / (len(timed) - 1)


def time_phases(plan, world):
    """Returns the seconds that a step of each phase takes here (list), its part of an evaluation
    included. Real steps are timed, on a model that is thrown away. Collective."""
    state = build(plan, world, None)
    # The phases are so long that none ends here, nor does --max-steps end them.
    trial = with_steps(plan, [10 ** 6] * len(plan.phases))
    trial.flags = argparse.Namespace(**vars(plan.flags) | {"max_steps": None})
    seconds = []
    for phase, end in zip(trial.phases, trial.ends):
        state.step = end - phase.steps
        timer = StepTimer(trial)
        training_loop(trial, world, timer, state, timer.stop_requests)
        began = time.monotonic()
        evaluate(trial, world, state, phase)
        evaluation = time.monotonic() - began
        seconds.append(timer.step_seconds() + evaluation / plan.flags.eval_every)
    state.reducer.close()
    return seconds


def fit_to_hours(plan, world, checkpoint):
    """Returns the plan with as many steps as fit into --hours; on a resume, with the same steps as
    before. Collective.

    A schedule should end when the time is over, with the learning rate at 0 (Izsak et al., arXiv
    2104.07705). Their code and that of "Cramming" (2212.14034) make the rate a function of the
    clock. Here the steps are fixed before the first one, by the speed of a few: so a run stays a
    function of its steps, and a resume has the same bits. In return it ends late on a machine that
    becomes slower.
    """
    began = time.monotonic()
    steps = world.broadcast_object(checkpoint and checkpoint.get("phase_steps"))
    if steps is None:
        step_seconds = time_phases(plan, world)
        left = 3600 * plan.flags.hours - (time.monotonic() - began)
        # Ranks step together, so that rank 0 can decide for all.
        steps = world.broadcast_object(steps_that_fit(plan, step_seconds, left))
    with contents_checked():
        return with_steps(plan, steps)


# ----- A whole run -----

def report(plan, log, state, stop, stop_requests):
    """Says how the run ended, and for the demo how the model fills in its sentences."""
    if plan.reads_docs:
        tokenizer = data.load_tokenizer(plan.data / "tokenizer.model")
        for sentence in DEMO_SENTENCES:
            words = bert.fill_mask(state.model, tokenizer, sentence, 3)
            log.say(f"\n{sentence}\n    {words[0]}")

    ended = "Done"
    if state.step < plan.ends[-1]:
        ended = "Stopped"
    if stop and stop_requests:
        ended = f"Stopped by {stop_requests[0]}"
    to_go_on = "the same command goes on, " if stop else ""
    log.say(f"\n{ended} after step {state.step} of {plan.ends[-1]}; {to_go_on}another --out starts "
            "over. Fill in your own:\n"
            f'    python bert.py "{plan.out}/model" "A text with a [MASK] in it."')


def leave_after_signal(world, state, stop):
    """Raises dist.DistError where a signal under torchrun has stopped the training: a status of 0
    would leave the torchrun of other nodes waiting. stop: of dist.asked_to_stop, all ranks'."""
    if stop < dist.SIGNALLED or not dist.TORCHRUN:
        return
    # Rank 0 still writes the model. A rank that leaves has the others killed, so all wait for it.
    world.barrier()
    message = f"stopped after step {state.step}; the same command resumes"
    if stop == dist.TORCHRUN_DIED:
        raise dist.RankLost(message)     # a restart by the other nodes' torchruns helps
    raise dist.DistError(message)


def train(plan, world):
    """Trains as the plan says. Returns nothing: all results are in the folder plan.out.

    Raises one of EXPECTED; see `main`.
    """
    log = world.on_all_ranks(EXPECTED, functools.partial(Log, plan, world.rank == 0))
    plan = prepare(plan, world)
    # From here on a signal does not end the program. It asks for a checkpoint and a stop.
    stop_requests = dist.listen_to_signals(plan.flags.max_minutes)
    checkpoint = resume_point(plan, world, log)
    if plan.flags.hours:
        plan = fit_to_hours(plan, world, checkpoint)
    state = build(plan, world, checkpoint)
    restore(world, log, state, checkpoint)
    log_start(plan, world, log, state)
    stop = training_loop(plan, world, log, state, stop_requests)

    state.reducer.close()
    if log.active:
        # The folder gets the masters: in 16 bits the model's weights are rounded.
        state.model.float()
        optim.copy_to_model(state.masters, state.model)
        bert.save_huggingface(state.model, plan.data / "tokenizer.model", plan.out / "model")
        report(plan, log, state, stop, stop_requests)
    leave_after_signal(world, state, stop)


# ----- What a run would take: --plan -----

def step_seconds(plan, world, phase):
    """Returns the seconds of compute, of exchange, and of a step in which they overlap.

        step = compute + max(late, exchange - backward)

    backward: of the last micro-batch, behind which the exchange between the nodes hides. late: the
    part of the exchange that cannot hide, that of the embeddings, which are ready only when
    backward ends. Not counted: to compress, what happens inside a node, the optimizer, that some
    examples are shorter, loading and evaluation.
    """
    share = ceil_div(phase.global_batch, world.size)
    masked = plan.mask_fraction * phase.seq_len
    flops = share * bert.flops_per_example(plan.config, phase.seq_len, masked)
    compute = 1e-12 * flops / plan.flags.tflops
    all_backward = 2 / 3 * compute
    if plan.flags.recompute:
        # Backward computes the forward pass once more.
        all_backward = compute
        compute = 4 / 3 * compute
    # Gradients are exchanged during the last micro-batch only.
    backward = all_backward * min(1, phase.micro_batch / share)

    # What is lossy is exchanged by one rank of each node, dense sums in a ring through all ranks.
    ring = world.nodes
    if world.nodes > 1 and not dist.is_lossy(plan.flags.compression):
        ring = world.size
    shapes = bert.parameter_shapes(plan.config)
    sent = dist.wire_bytes(plan.flags.compression, shapes, ring)
    exchange = 8e-9 * sent / plan.flags.gbps
    embeddings = plan.config.vocab_size * plan.config.width
    late = exchange * embeddings / bert.parameter_count(plan.config)
    return compute, exchange, compute + max(late, exchange - backward)


def print_plan(flags):
    """Prints the memory, seconds and hours that --plan nodes take with these flags. Raises
    ConfigError without --tflops and --gpu."""
    if flags.gpu and not flags.tflops:
        flags.tflops = bert.GPUS[flags.gpu][0]
    if not flags.tflops:
        raise ConfigError("--plan needs --gpu, one of its list, or --tflops, what a GPU reaches in "
                          "training: see `tflops` in the metrics.jsonl of a short run")
    here = dist.world_of_environment()
    # As many ranks as there would be, though none of them exists.
    world = dataclasses.replace(here, size=flags.plan * flags.gpus_per_node, nodes=flags.plan)
    plan = make_plan(flags, world)
    parameters = bert.parameter_count(plan.config)
    seconds = [step_seconds(plan, world, phase) for phase in plan.phases]
    if flags.hours:
        steps = steps_that_fit(plan, [step for _, _, step in seconds], 3600 * flags.hours)
        plan = with_steps(plan, steps)

    print(f"{flags.model}: {parameters:,} parameters; {flags.plan} node(s) of "
          f"{flags.gpus_per_node} GPU(s) of {flags.tflops:g} TFLOP/s")
    if flags.recipe == "demo" and plan.config.layers > 4:
        print("the recipe demo is for small models and a few minutes: take another --recipe")
    for number, phase in enumerate(plan.phases, 1):
        activations = example_gigabytes(plan, phase) * phase.micro_batch
        compute, exchange, step = seconds[number - 1]
        print(f"phase {number}: micro-batch {phase.micro_batch}, {activations:.2f} GB of "
              f"activations ({examples_that_fit(plan, phase)} examples fit {plan.gpu_memory:g} "
              f"GB); a step computes {compute:.3g} s")
        if flags.plan > 1:
            print(f"    at {flags.gbps:g} Gb/s, compression {flags.compression}, it exchanges "
                  f"{exchange:.3g} s, {step - compute:.3g} s of it not hidden")
        print(f"    {phase.steps:,} steps take {phase.steps * step / 3600:.4g} h")
    parts = [f"{part} {gigabytes:.2f}" for part, gigabytes in state_gigabytes(plan).items()]
    print(f"GB of a rank in {plan.precision}:", *parts)


# ----- The program -----

def explain(error):
    """Returns what an exception says to a user: one line, or the traceback of an error of ours."""
    # Of Python; CUDA; torch on a CPU; cuBLAS. Several kinds of exceptions have these words.
    for words in ("MemoryError", "out of memory", "allocate", "ALLOC_F"):
        if words in repr(error):
            return f"out of memory; set --micro-batch lower ({str(error):.160})"
    if isinstance(error, KeyboardInterrupt):
        return "stopped before training began; the same command starts again"
    if isinstance(error, EXPECTED):
        return str(error) or repr(error)
    return traceback.format_exc()


def main():
    """Runs the program. Whatever ends it early is said once, by the rank that fails first."""
    flags = parse_arguments()
    world = dist.World()
    try:
        if flags.plan:
            print_plan(flags)
            return
        world = dist.init(flags.timeout, lossy=dist.is_lossy(flags.compression))
        train(make_plan(flags, world), world)
        world.close()
    except (Exception, KeyboardInterrupt) as error:
        message = f"rank {world.rank}: {explain(error)}" if world.size > 1 else explain(error)
        # A restart may help after a lost rank or a bug of ours, not after what a user has to mend
        # or has stopped.
        mendable = isinstance(error, (*EXPECTED, KeyboardInterrupt))
        restart_helps = isinstance(error, dist.RankLost) or not mendable
        dist.leave(f"train.py: {message}", restart_helps)


if __name__ == "__main__":
    main()
