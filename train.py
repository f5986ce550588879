r"""BERT pre-training, in one process or in many.

    python train.py                                                      # the demo, also on a CPU
    python data.py my.txt --out shards/my                                # your own text
    python train.py --data shards/my --hours 1
    torchrun --nproc_per_node=8 train.py --data shards/wiki --model large --recipe nvidia-64k
    torchrun --nnodes=32 --nproc_per_node=8 --node_rank=K --master_addr=HOST \
        train.py --data shards/wiki --model large --recipe nvidia-64k

Run the same command again to resume from the last checkpoint. All results go to the folder --out.

The file goes from the parts to the whole: errors, flags, log, state, checkpoints, the parts of a
step, evaluation, `training_loop`, and finally `train` and `main`, where the program starts.

All ranks must call a function of this file together if its docstring says "Collective".
"""
import collections
import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import fcntl
import io
import itertools
import json
import math
import os
import re
import sys
import threading
import time
import traceback
import zipfile
from pathlib import Path

STARTED = time.monotonic()      # --hours counts from here: the imports below take seconds

# CPU threads spin while they wait for each other. If another program took one thread's core, the
# others would spin all that time, so they sleep after this many turns. Threads are not bound to
# cores, since all ranks of a node would be bound to the same cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["OMP_PROC_BIND"] = "false"

import torch
import torch.nn.functional as F

import bert
import data
import dist
import optim


CLIP = 1.0                   # gradients are clipped to this global norm
EVAL_EXAMPLES = 1024         # held-out examples, the same in every evaluation of a phase
SAVE_SECONDS = 1800          # after this time, a step ends with a checkpoint
LOG_SECONDS = 10             # the least time between two step lines on the terminal
LOCK_SECONDS = 120           # how long a run waits at most for another one in its folder
DEMO_SHARDS = Path("shards/demo")
DEMO_SENTENCES = [           # for a model trained on this machine's documentation
    "This function can [MASK] used to create a new file.",
    "If [MASK] is None, the default value is used.",
    "The result is a list [MASK] strings."]


class ConfigError(ValueError):
    """Training cannot start with these flags or files; the message says what to change."""


# Errors that a user can fix or must know about: the message is enough.
EXPECTED = (ConfigError, data.DataError, bert.ModelError, dist.DistError, optim.TrainingStopped,
            OSError)
# Errors of an unreachable network disk, perhaps back in a minute. A bad disk raises EIO, too.
DISK_AWAY = {errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN}


def explain(error):
    """Returns an exception as one line for the user. Returns None if it is a bug, or an unknown
    error of torch or a GPU."""
    # How Python, CUDA, torch on a CPU, cuBLAS and oneDNN report a lack of memory, in this order.
    if re.search("MemoryError|out of memory|allocate memory|ALLOC_F|create a primitive",
                 repr(error)):
        return f"out of memory; lower --micro-tokens ({str(error):.160})"
    if isinstance(error, KeyboardInterrupt):
        return "stopped before training began; the same command starts again"
    if isinstance(error, EXPECTED):
        return str(error) or repr(error)
    return None


# ----- Flags: args.x is what the user gave, or else what the recipe says -----

COUNT = data.number_in(int, 1, 10 ** 9)         # 1, 2, 3 ...
COUNT_OR_0 = data.number_in(int, 0, 10 ** 9)
FRACTION = data.number_in(float, 0, 1)


def parse_arguments(argv=None):
    """Returns the flags (Namespace), together with the recipe's `betas` and its `phases`, a list of
    optim.Phase with the flags applied. Prints one line and raises SystemExit if a flag is wrong."""
    parser = data.Parser(description="Pre-train BERT.", allow_abbrev=False)

    add = parser.add_argument
    add("--data", type=data.path_of, default=DEMO_SHARDS,
        help="train on the shards in this folder (default: this machine's documentation)")
    add("--out", type=data.path_of, help="write all results here (default: a folder below runs/)")
    add("--init", type=data.path_of,
        help="start from the weights in this model folder (give a new --seed, or the model reads "
             "the same examples again)")

    # The model and the recipe.
    add("--model", choices=bert.PRESETS, default="tiny", help="(default: %(default)s)")
    add("--recipe", choices=optim.RECIPES, default="demo", help="(default: %(default)s)")
    add("--optimizer", choices=optim.OPTIMIZERS, help="replace the recipe's optimizer")
    add("--steps", type=COUNT_OR_0, nargs="+", default=[],
        help="replace the recipe's steps: one number for all phases, or one for each")
    add("--batch", type=COUNT, nargs="+", default=[],
        help="replace the recipe's examples per step, over all ranks: one number, or one a phase")
    add("--lr-scale", type=data.number_in(float, 0, 1e9), default=1.0,
        help="multiply all learning rates by this (default: %(default)s)")
    add("--dropout", type=FRACTION, help="replace the recipe's dropout")
    add("--mask-fraction", type=FRACTION, help="replace the recipe's fraction of masked tokens")
    add("--pairs", choices=["nsp", "none"],
        help="replace the recipe's pairs: learn whether B follows A, or masked tokens only")
    add("--seed", type=data.number_in(int, 0, 1 << 63), default=0,
        help="draw weights, examples, masks and dropout from this seed (default: %(default)s)")
    add("--hours", type=data.number_in(float, 1e-4, 1e5),
        help="end after this time; the phases share it as they share the tokens")

    # How the machines run it.
    add("--precision", choices=["auto", *optim.PRECISIONS], default="auto",
        help="compute in this format; auto is the fastest one here (default: %(default)s)")
    add("--micro-tokens", type=COUNT,
        help="compute about this many tokens at a time on a rank (default: 8192; on a GPU one for "
             "each 2.4 MB of its memory, 4.8 MB in fp32, rounded down to a power of two)")
    add("--compression", choices=dist.COMPRESSORS, default="none",
        help="send gradients in this form (default: %(default)s)")
    # Between the GPUs of a node, NCCL takes longer to start a collective than to send a few MB.
    add("--bucket-mb", type=data.number_in(float, 1e-6),
        default=25.0 if torch.cuda.is_available() else 2.0,
        help="average gradients as soon as this many MB are ready (default: 2; on a GPU 25)")
    add("--timeout", type=data.number_in(float, 1e-3, 1e6), default=600.0,
        help="give up on a silent rank after this many seconds, over NCCL after twice as many "
             "(default: %(default)s)")
    add("--max-steps", type=COUNT, default=math.inf,
        help="stop after this step; the learning rates, and the minutes that are left, stay those "
             "of the whole training")
    add("--save-every", type=COUNT, default=300,
        help="save and evaluate every SAVE_EVERY steps and every half hour; after step 1 save only "
             "(default: %(default)s)")

    # Parse once to find the recipe, make its values the flags' defaults, and parse again. This also
    # puts `phases` and `betas`, which are not flags, into args.
    recipe = parser.parse_args(argv).recipe
    parser.set_defaults(**optim.RECIPES[recipe])
    args = parser.parse_args(argv)

    args.phases = planned_phases(parser, args)
    args.out = args.out or Path("runs", Path(os.path.abspath(args.data)).name)
    return args


def planned_phases(parser, args):
    """Returns the recipe's phases, a list of optim.Phase, with --steps, --batch and --lr-scale
    applied."""
    planned = [dataclasses.replace(phase, lr=phase.lr * args.lr_scale) for phase in args.phases]
    for field, numbers in ("steps", args.steps), ("global_batch", args.batch):
        if len(numbers) not in (0, 1, len(planned)):
            parser.error("--steps and --batch take one number, or one for each of "
                         f"{len(planned)} phases")
        # One number applies to all phases; without any, the recipe's stay.
        for phase, number in zip(planned, itertools.cycle(numbers)):
            setattr(phase, field, number)
    return planned


# Three kinds of flags. These may differ between nodes, and between a run and its resume:
LOCAL = {"data", "out", "timeout"}
# These may differ between a run and its resume, but not between nodes:
FREE = {"micro_tokens", "bucket_mb", "max_steps", "save_every"}
# The rest must never differ, see `run_settings`.


def run_settings(args, manifest):
    """Returns {name: text}: the flags that determine a run's results, and the digest of the shards.
    A run resumes only from a checkpoint with the same settings.

    What changes results only slightly is left out: the number of ranks and micro_tokens, which
    affect rounding and dropout; bucket_mb; and, with int8, the steps of checkpoints, because each
    save drops the residuals.
    """
    left_out = LOCAL | FREE | {"phases"}
    settings = {name: str(value) for name, value in vars(args).items() if name not in left_out}
    for number, phase in enumerate(args.phases, 1):
        settings[f"phase {number}"] = str(phase)
    return settings | {"shards": manifest["sha256"][:16]}


def code_digests():
    """Returns {file name: digest} of all *.py beside data.py and of the program that was started,
    which may be a variant. They must be equal on all ranks. A run may resume with changed code, but
    logs a warning."""
    paths = [*Path(data.__file__).parent.glob("*.py"), Path(sys.argv[0])]
    return {path.name: data.sha256_of(path)[:16] for path in paths if path.is_file()}


def micro_tokens_of(memory, precision):
    """Returns the default --micro-tokens for a GPU with `memory` bytes: a token for each 2.4 MB, or
    4.8 MB in fp32, rounded down to a power of two, so that `large` fits with its weights and
    moments if the GPU has 16 GB or more. More tokens at a time are faster."""
    return 2 ** int(math.log2(memory / (1.2e6 * optim.PRECISIONS[precision].itemsize)))


def fit_to_device(args, device):
    """Chooses --precision and --micro-tokens for the device where the user did not. Raises
    ConfigError if the device cannot compute in the requested precision."""
    args.precision = optim.choose_precision(args.precision, device)
    micro_tokens = 8192
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        micro_tokens = micro_tokens_of(gpu.total_memory, args.precision)
        if args.precision == "bf16" and gpu.major < 8:           # before Ampere
            raise ConfigError("this GPU has no bf16; give --precision auto")
    args.micro_tokens = args.micro_tokens or micro_tokens


def check_ranks(args, world):
    """Raises dist.DistError on all ranks if their settings, FREE flags, code, torch versions or
    processors differ, or if two ranks share a GPU, which NCCL refuses. Collective.

    With different flags or code, ranks would deadlock or average unrelated gradients. With a
    different torch or processor, sums would be rounded differently and weights would drift apart.
    """
    alike = {name: vars(args)[name] for name in FREE} | {"torch": torch.__version__}
    alike["processor"] = torch.backends.cpu.get_cpu_capability()
    if world.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(world.device)
        alike["processor"] = gpu.major, gpu.minor, gpu.multi_processor_count
        if len(set(world.all_gather_object(str(gpu.uuid)))) < world.size:
            raise dist.DistError("several ranks have the same GPU; lower --nproc_per_node")
    world.check_same(args.settings | args.code | alike, "was started differently")


def prepare_run(args, world):
    """Makes the demo's shards if they are missing, has each rank verify the shards that it reads,
    and completes args: the flags that `fit_to_device` chooses, `vocab_size`, `settings`
    (`run_settings`) and `code` (`code_digests`). Collective."""
    if args.data == DEMO_SHARDS and world.rank == 0 and not args.data.exists():
        data.prepare(data.machine_documentation(), args.data)
        data.say(data.describe(args.data))
    world.barrier()

    manifest = data.verify(args.data, world.rank, world.size)
    fit_to_device(args, world.device)
    args.vocab_size = manifest["vocab_size"]
    args.settings = run_settings(args, manifest)
    args.code = code_digests()           # now: later edits do not change the run
    check_ranks(args, world)
    smallest = min(phase.global_batch for phase in args.phases)
    if smallest < world.size:
        raise ConfigError(f"a batch of {smallest} is too small for {world.size} ranks; raise "
                          "--batch")


# ----- The log -----

STEP_LINE = ("step {step:>6}  phase {phase}  {losses}lr {lr:.1e}  norm {grad_norm:5.2f}  "
             "scale {loss_scale:g}  {examples_per_second:.0f} examples/s  "
             "{tokens_per_second:.0f} tokens/s  "
             "{minutes_left:.0f} min left")


class Log:
    """A run's terminal output and metrics.jsonl; silent on all ranks but rank 0.

    Rank 0 creates the results folder and locks it until the process ends. It waits for the lock of
    another run for LOCK_SECONDS at most, or for half of `timeout`, after which other ranks would
    give up. Raises ConfigError if another run holds the lock, OSError if the folder is not
    writable.
    """

    def __init__(self, folder, active, timeout=math.inf):
        self.active = active
        self.failing = False                 # whether the last line could not be written
        self.said_at = time.monotonic()      # when the last step line was printed, in seconds
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        # The lock lasts while the file is open; its 1 MB buffer is for a full disk, see `metric`.
        path = folder / "metrics.jsonl"
        self.file = open(path, "a", buffering=1 << 20)
        self.lock(folder, math.ceil(min(LOCK_SECONDS, timeout / 2)))
        # A crash or a full disk may have left half a line.
        if path.read_bytes()[-1:] not in (b"", b"\n"):
            self.file.write("\n")

    def lock(self, folder, seconds):
        """Locks the folder for this process. If another process holds the lock, waits up to
        `seconds` for it: a run that torchrun restarts may overlap its predecessor."""
        for second in range(seconds):
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if second == 0:
                    self.say(f"another run writes to {folder}; waiting {seconds} s for it")
                time.sleep(1)
            except OSError as error:
                self.say(f"warning: the disk of {folder} has no locks ({error.strerror}): start no "
                         "other run with this --out")
                return
        raise ConfigError(f"another run writes to {folder}; wait until it ends, or take another "
                          "--out")

    def claim(self, folder):
        """Writes a random `number` to the file `run` in the folder, by which `save` checks that the
        folder is still this run's. The lock is not enough: some disks enforce it on one node only,
        and a folder can be deleted and recreated."""
        self.number = os.urandom(8).hex()
        try:
            (folder / "run").write_text(self.number)
        except OSError:      # a disk is full or away: the number that is there, or none, will do
            with contextlib.suppress(OSError, ValueError):
                self.number = (folder / "run").read_text()

    def say(self, text):
        """Prints a line."""
        if self.active:
            data.say(text)

    def metric(self, kind, **fields):
        """Appends a line to metrics.jsonl. Lines of steps lost in a crash stay there: a "train"
        line of step n supersedes all earlier lines of step n and later."""
        if not self.active:
            return
        # JSON has no NaN or inf; they become null.
        line = json.loads(json.dumps({"kind": kind, **fields}), parse_constant=lambda _: None)
        try:
            self.file.write(json.dumps(line) + "\n")
            # On a full disk, the line stays in the buffer if it fits, for a later flush to write.
            self.file.flush()
            self.failing = False
        except OSError as error:
            if not self.failing:
                self.say(f"warning: metrics.jsonl: {error.strerror}; up to 1 MB of lines can wait")
            self.failing = True

    def step(self, figures):
        """Logs the figures of a step, a dict from `step_figures` and `training_loop`: always to
        metrics.jsonl, to the terminal at most every LOG_SECONDS."""
        self.metric("train", **figures)
        if time.monotonic() - self.said_at <= LOG_SECONDS:
            return
        self.said_at = time.monotonic()
        losses = ""
        for name, value in figures.items():
            if name.endswith("_loss"):
                losses += f"{name.removesuffix('_loss')} {value:6.3f}  "
        self.say(STEP_LINE.format(losses=losses, **figures))


def log_start(args, world, log, state):
    """Logs what is about to run, to the terminal and metrics.jsonl."""
    if not log.active:
        return
    log.claim(args.out)
    begun_before = (args.out / "metrics.jsonl").stat().st_size > 0       # by an earlier start
    config = state.model.config
    parameters = sum(p.numel() for p in state.model.parameters())
    log.metric("run", command=sys.argv, flags=args.settings, code=args.code,
               phases=[vars(phase) for phase in args.phases], python=sys.version,
               torch=torch.__version__, ranks=world.size, device=world.device.type,
               parameters=parameters)

    log.say(f"model {args.model}: {config.layers} layers x {config.width}, {parameters:,} "
            f"parameters, vocabulary {config.vocab_size:,}\n"
            f"{world.size} rank(s) on {world.size // world.local_size} node(s), "
            f"{world.device.type}, each with {torch.get_num_threads()} CPU threads\n"
            f"{args.precision}, optimizer {args.optimizer}\n"
            f"{args.micro_tokens:,} tokens at once, compression {args.compression}, buckets of "
            f"{args.bucket_mb:g} MB")
    made_for = optim.RECIPES[args.recipe]["optimizer"]
    if args.optimizer != made_for:
        log.say(f"warning: the recipe's rates and betas are for {made_for}")
    if args.recipe == "demo" and config.layers > 4:
        log.say("warning: the recipe demo is for tiny and mini; give another --recipe")
    text = data.load_manifest(args.data)["tokens"]
    for number, phase in enumerate(args.phases, 1):
        steps = f"{phase.steps:,} steps (up to {phase.tokens / text:.3g} times the text)"
        if args.hours and phase.steps:
            steps = "by the clock"
        part = data.part_long_enough(args.data, phase.seq_len)
        log.say(f"phase {number}: {steps}, {phase.global_batch:,} examples of {phase.seq_len} "
                f"tokens ({part:.0%} of the text is long enough) a step, lr {phase.lr:g}")
    unlike = bert.unlike_huggingface(state.model)
    if unlike:
        log.say(f"Hugging Face's BERT differs in {', '.join(unlike)}: only bert.py will load the "
                "model's folder as it is")
    if state.counters.step:
        log.say(f"resuming from the checkpoint of step {state.counters.step}")
    elif begun_before:
        log.say(f"an earlier run in {args.out} left no whole checkpoint: this one starts over")


# ----- The training state -----

@dataclasses.dataclass
class Counters:
    """How far a run has got."""
    step: int = 0                    # finished steps, including skipped steps
    phase: int = 0                   # the index of the phase, see `begin_phase`
    phase_step: int = 0              # finished steps of this phase
    seconds: float = 0.0             # running time over all starts, without steps that a crash
                                     # lost; a mean over the ranks, so that all end --hours together
    longest: int = 0                 # tokens of this rank's longest example, for the model's folder
                                     # (a checkpoint has rank 0's)


@dataclasses.dataclass
class State:
    """Everything that training changes. A checkpoint holds what the next step depends on, see
    `save`. Anything else, such as an average of weights or a running figure in the log, starts over
    at a resume unless it is in `tensors_of` or in Counters."""
    model: bert.BertForPreTraining
    masters: dict                    # {name: fp32 tensor}, the weights that the optimizer steps
    reducer: dist.Reducer            # owns the gradients and averages them over the ranks
    optimizer: torch.optim.Optimizer
    scaler: optim.LossScaler
    counters: Counters


def set_bias_to_frequencies(model, shards):
    """Sets the MLM head's bias so that the first guesses follow token frequency instead of being
    uniform, which saves the demo about 300 steps."""
    rarity = data.unigram_losses(shards)                           # (pieces,), -log frequency
    # Adding a constant to all logits changes no probability. With a mean of 0, 16 bits round less.
    bias = rarity.mean() - rarity
    # Rows that only pad the vocabulary become as rare as the rarest token.
    model.mlm_bias.data.fill_(bias.min())
    model.mlm_bias.data[:len(bias)] = bias


def build_model(args, world):
    """Returns the fp32 model before the first step, on this rank's device. Only rank 0 reads
    --init, and changes its entry in args.settings; dist.Reducer sends rank 0's weights to all.
    Raises ConfigError if a phase has more tokens than the model has positions."""
    torch.manual_seed(args.seed)
    config = bert.BertConfig.preset(args.model, args.vocab_size, dropout=args.dropout)
    longest = max(phase.seq_len for phase in args.phases)
    if longest > config.max_positions:
        raise ConfigError(f"a phase has {longest} tokens, and the model {config.max_positions} "
                          "positions, see bert.BertConfig")
    model = bert.BertForPreTraining(config)
    # Without pairs, the pooler and the NSP head take no part in the loss. They are frozen: the
    # Reducer needs a gradient for each trained parameter, and weight decay alone would shrink them.
    # So are the embeddings of segments, since no text has a segment B. B's is a copy of A's; those
    # of --init stay as they are.
    for name, p in model.named_parameters():
        if args.pairs == "none" and name.startswith(("pooler.", "nsp.", "embeddings.segments.")):
            p.requires_grad_(False)
            if name == "embeddings.segments.weight":
                p[1] = p[0]
    set_bias_to_frequencies(model, args.data)
    if args.init and world.rank == 0:
        bert.init_from(args.init, model, args.data / "tokenizer.model")
        # In place of the path, which may change. A checkpoint has no frozen weights, so a resume
        # needs the same ones.
        args.settings["init"] = "given"
        if not all(p.requires_grad for p in model.parameters()):
            args.settings["init"] = data.sha256_of(args.init / "model.safetensors")[:16]
    model.to(world.device)
    return model


def build(args, world):
    """Returns the State before the first step, with the same weights on all ranks. Collective.

    Three parts share gradient memory that the Reducer owns: the model's backward adds to p.grad,
    the Reducer averages over the ranks, and the optimizer steps the masters by master.grad.
    """
    model = build_model(args, world)
    masters = optim.cast_with_masters(model, optim.PRECISIONS[args.precision])
    reducer = dist.Reducer(model, world, args.compression, args.bucket_mb, masters)
    optimizer = optim.make_optimizer(args.optimizer, masters, args.betas)

    scaler = optim.LossScaler()
    if "fp16" not in (args.precision, args.compression):
        # Nothing is computed or sent in fp16, so the loss needs no scaling.
        scaler = optim.LossScaler(scale=1.0, largest=1.0, growth_interval=100)
    return State(model, masters, reducer, optimizer, scaler, Counters())


# ----- Checkpoints: files of torch.save, zips whose checksums tell whether they are whole -----

def tensors_of(state):
    """Returns the tensors that steps change, {name: tensor}: masters and the optimizer's moments.
    Names and shapes are the same on every rank, even before the first step. Raises ValueError if
    the optimizer does not step every master."""
    tensors = dict(state.masters)
    for name, master in state.masters.items():
        if master not in state.optimizer.state:
            raise ValueError(f"{name} is not among the optimizer's parameters")
        for moment, tensor in state.optimizer.state[master].items():
            tensors[f"{moment} of {name}"] = tensor
    return tensors


def shapes_of(tensors):
    """Returns the shapes of tensors, {name: list}."""
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def numbers_of(state):
    """Returns the rest of what training changes, as a dict of numbers and plain containers. Raises
    TypeError for any other value, since a checkpoint with it could not be read."""
    groups = [dict(group) for group in state.optimizer.param_groups]
    for group in groups:
        del group["params"]                          # its counts and options remain
    numbers = {"counters": vars(state.counters), "scaler": vars(state.scaler), "groups": groups}
    return json.loads(json.dumps(numbers))           # turns NumPy's floats into Python's


def check_weights(world, state):
    """Raises optim.TrainingStopped if weights or moments are not finite, and dist.DistError on all
    ranks if their weights are not bit-identical. Collective."""
    floats = [tensor for tensor in tensors_of(state).values() if tensor.is_floating_point()]
    if not torch.nn.utils.get_total_norm(floats).isfinite():
        raise optim.TrainingStopped(f"step {state.counters.step}: weights or moments are not "
                                    "finite; not saved: start over with a lower --lr-scale and a "
                                    "new --out")
    # A checksum: integers, unlike floats, add up to the same sum in any order. Unchecked, ranks
    # with different weights would train on, and the model would be worthless.
    masters = state.masters.values()
    bits = sum(int(master.view(torch.int32).sum(dtype=torch.int64)) for master in masters)
    world.check_same({"sum of bits": bits},
                     f"has other weights after step {state.counters.step} (bad memory? the same "
                     "command resumes from the last checkpoint)")


def checkpoints_in(folder):
    """Returns {step: path} of the checkpoints in a folder, ignoring files with other names; {} if
    there are none. Raises OSError if the disk is unreachable, where Path.glob would find nothing
    from Python 3.12 on."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if re.fullmatch(r"step-\d{8}\.pt", name):
                found[int(name[5:13])] = folder / name
    return found


def save(args, world, log, state):
    """Saves everything the next step depends on, in a file that is whole or absent, and keeps only
    this checkpoint and the one before. Collective.

    Raises what check_weights raises, and ConfigError if another run has begun in the folder or if
    not even a first checkpoint can be saved. Otherwise a full disk is only a warning, since older
    checkpoints are whole. Drops the residuals of int8, so that continuing and resuming give the
    same run.
    """
    check_weights(world, state)
    state.reducer.forget()
    if world.rank > 0:
        return
    step = state.counters.step
    checkpoint = {"settings": args.settings, "code": args.code, "tensors": tensors_of(state),
                  **numbers_of(state)}
    # Always the same name, to overwrite what a killed run has left.
    temporary = args.out / "unfinished"
    number = ""
    # No check if the file is missing, empty or unreadable.
    with contextlib.suppress(OSError, ValueError):
        number = (args.out / "run").read_text()
    if number not in ("", log.number):
        raise ConfigError(f"another run has begun in {args.out}; start with another --out")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())              # returns when it is on the disk
        os.replace(temporary, args.out / f"step-{step:08d}.pt")
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError):          # torch's; the disk's own error is more useful
            error = error.__context__ or error
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not checkpoints_in(args.out):             # not even the first: stop now, not at the end
            raise ConfigError(f"no checkpoint can be saved in {args.out}: {error!r:.100}")
        log.say(f"warning: no checkpoint of step {step}: {error!r:.100} (is the disk full?); "
                "older ones stay")
        return

    found = checkpoints_in(args.out)
    for older in sorted(found)[:-2]:
        with contextlib.suppress(OSError):           # the next save tries again
            found[older].unlink()


def read_checkpoint(path):
    """Returns a checkpoint (dict, on the CPU); takes twice the file's size in memory. Raises
    OSError if the disk fails; a damaged file can raise any other exception."""
    # Read it all first: a later error is then the file's, not the disk's.
    file = io.BytesIO(path.read_bytes())
    archive = zipfile.ZipFile(file)
    # testzip returns the name of the first damaged part. The zip's list of parts has no checksum.
    # In it torch.save sets no attributes, and torch.load would not read a part marked as a folder.
    if archive.testzip() or any(part.external_attr for part in archive.infolist()):
        raise ValueError("wrong checksum")
    file.seek(0)
    # torch.save writes a pickle, which could run any code; with weights_only, none runs.
    return torch.load(file, map_location="cpu", weights_only=True)


def newest_checkpoint(args, log, tensors):
    """Returns the latest whole checkpoint of args.out (dict, on the CPU), or None if there are no
    checkpoints.

    Renames damaged checkpoints that are later than it, so that `save` does not keep them in place
    of whole ones. Raises ConfigError if all are damaged, if there are none but a model, which a new
    run would replace, or if the latest whole one is from a different run: its settings differ, or
    its tensors differ from `tensors` in names or shapes. If the disk or memory fails, raises that
    error, since the file may be whole.
    """
    found = checkpoints_in(args.out)
    for step in sorted(found, reverse=True):
        path = found[step]
        try:
            checkpoint = read_checkpoint(path)
            differ = (dist.differences(checkpoint["settings"], args.settings)
                      or dist.differences(shapes_of(checkpoint["tensors"]), shapes_of(tensors)))
        except Exception as error:
            if explain(error):
                if isinstance(error, OSError):
                    log.say(f"{path} cannot be read now (if the disk has lost it, remove it)")
                raise
            log.say(f"warning: {path} is damaged ({error!r:.80}); trying the one before")
            with contextlib.suppress(OSError):
                path.rename(f"{path}.damaged")
            continue
        if differ:
            raise ConfigError(f"{path} is from a different run: {differ:.500}; give the same flags "
                              "as before, or a new --out")
        return checkpoint
    if found:
        raise ConfigError(f"no checkpoint in {args.out} is whole; they are now named *.damaged: "
                          "start over with a new --out")
    if (args.out / "model").exists():
        raise ConfigError(f"{args.out} has a model, but no checkpoint to go on from; give a new "
                          "--out, or remove the model to replace it")
    return None


def restore(args, world, log, state):
    """Restores the State on all ranks from rank 0's newest checkpoint, if there is one. Logs a
    warning if the code has changed since. Collective.

    Raises ConfigError if the checkpoint does not fit, or if another node has a later one: without a
    shared disk only the first node has checkpoints, and a restart may number the nodes differently.
    """
    newest = max(checkpoints_in(args.out), default=0)
    newest_of_rank_0 = world.all_gather_object(newest)[0]
    if newest > newest_of_rank_0:
        raise ConfigError(f"step {newest} is in {args.out} here, and only {newest_of_rank_0} where "
                          "rank 0 is; give the nodes their earlier --node_rank, or put --out on a "
                          "shared disk")

    # All ranks have tensors of the same names and shapes. Rank 0 fills its own and broadcasts them.
    checkpoint = None
    tensors = tensors_of(state)
    if world.rank == 0:
        checkpoint = newest_checkpoint(args, log, tensors)
    if checkpoint:
        for name, saved in checkpoint.pop("tensors").items():
            tensors[name].copy_(saved)
        changed = dist.differences(args.code, checkpoint["code"])
        if changed:
            log.say(f"warning: the code has changed since the checkpoint: {changed}")
    numbers = world.all_gather_object(checkpoint)[0]     # all but the tensors
    if numbers is None:
        return
    for tensor in tensors.values():
        world.broadcast(tensor)
    optim.copy_to_model(state.masters, state.model)
    try:
        for kept, saved in (state.counters, "counters"), (state.scaler, "scaler"):
            if vars(kept).keys() != numbers[saved].keys():
                raise ValueError(f"it has other {saved}")
            vars(kept).update(numbers[saved])
        for group, options in zip(state.optimizer.param_groups, numbers["groups"], strict=True):
            group.update(options)
    except ValueError as error:                      # from zip: another number of groups
        raise ConfigError(f"the checkpoint is from different code ({error}); give a new --out")


# ----- The parts of a step -----

def planned_tokens(phases):
    """Returns the number of tokens in all steps of these phases."""
    return sum(phase.tokens for phase in phases)


def finished_tokens(args, counters):
    """Returns how many of the planned tokens are finished: those of all steps so far.

    With --hours, time replaces steps: at half time, half of the planned tokens count as finished,
    however many were read. The phases thus share the time as they share the tokens. A hundredth of
    the time is reserved for the final evaluation, checkpoint and model folder. For a learning rate
    by the clock, see Izsak et al., arXiv 2104.07705.
    """
    if args.hours:
        return planned_tokens(args.phases) * counters.seconds / (0.99 * 3600 * args.hours)
    in_this_phase = counters.phase_step * args.phases[counters.phase].step_tokens
    return planned_tokens(args.phases[:counters.phase]) + in_this_phase


def progress(args, counters):
    """Returns (index, done): the phase of the next step, and `done` of learning_rate; (None, 0.0)
    if there is no next step.

    With phases of 100 and 50 tokens and 120 finished, the next step is in the second phase, 20
    tokens in.
    """
    finished = finished_tokens(args, counters)
    for index, phase in enumerate(args.phases):
        if finished < phase.tokens and counters.step < args.max_steps:
            if args.hours:
                return index, finished / phase.tokens
            # Step k = 0, 1, ... of n is at (k + 1) / (n + 1), so neither the first nor the last
            # step has a rate of 0. By the clock, the rate of the run's first step is 0.
            k = finished / phase.step_tokens
            return index, (k + 1) / (phase.steps + 1)
        finished -= phase.tokens               # the rest belongs to the phases after
    return None, 0.0


def copy_positions(args, state):
    """Copies trained position embeddings to the positions that no earlier phase has trained: after
    a phase of 64 tokens, position 64 gets the embedding of position 0, 65 that of 1.

    A phase of longer texts then starts from meaningful positions instead of random ones
    (Longformer, arXiv 2004.05150, section 5); without the copies, the demo's loss ends 0.25 nats
    higher. Google's and NVIDIA's BERT do not copy. Nor does a run with --init, whose model may know
    all positions.

    The copies' moments start at 0 while `t` of optim.adam_update goes on, so they get no bias
    correction. Where gradients change sign at random and b2 is 0.999, the copies' first steps are
    up to fourteen times as long as those of other positions; after 100 steps, three times.
    """
    phase_index = state.counters.phase
    # (max_positions, width); None if they are not trained
    positions = state.masters.get("embeddings.positions.weight")
    if state.counters.step and not args.init and positions is not None:
        trained = max(phase.seq_len for phase in args.phases[:phase_index] if phase.steps)
        new = torch.arange(args.phases[phase_index].seq_len)[trained:]
        positions[new] = positions[new % trained]
        optim.copy_to_model(state.masters, state.model)


def begin_phase(args, world, state, phase_index):
    """Returns an endless iterator over the steps from `phase_step` on, each a list of this rank's
    micro-batches (data.Batch). A new phase starts with its first example."""
    counters = state.counters
    if phase_index != counters.phase:          # not when a run resumes within a phase
        counters.phase = phase_index
        counters.phase_step = 0
        copy_positions(args, state)
    phase = args.phases[phase_index]
    examples = data.PretrainingData(
        args.data, phase.seq_len, phase_index, args.seed, pairs=args.pairs,
        mask_fraction=args.mask_fraction)
    micro_size = max(1, args.micro_tokens // phase.seq_len)
    return data.loader(examples, counters.phase_step, phase.global_batch, micro_size, world.rank,
                       world.size)


def count_labels(world, micro_batches):
    """Returns how many labels each task has in the micro-batches of all ranks together, {task:
    count}, not counting labels that are data.IGNORED. Counts on the CPU, so that nothing waits for
    a GPU. Collective."""
    own = {}
    for task in micro_batches[0].labels:
        own[task] = sum(int((batch.labels[task] != data.IGNORED).sum()) for batch in micro_batches)
    return world.sum(**own)


def loss_sum(logits, labels):
    """Returns the sum of -log softmax(logits)[label], in nats, over logits (n, classes) and labels
    (n,), skipping labels that are data.IGNORED. A sum, not a mean, because the divisor is the count
    of the whole step over all ranks. Training and `evaluate` call it for each task."""
    # The softmax sums an exponential for each class: 16 bits would round too much.
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def step_figures(args, state, counts, total, seconds):
    """Returns the log's fields (dict) that follow from the State, the step's label counts, its sums
    over all ranks (`total`) and its duration in seconds."""
    counters = state.counters
    batch = args.phases[counters.phase].global_batch
    finished = finished_tokens(args, counters)
    left = max(0, planned_tokens(args.phases) - finished)
    losses = {}
    for task, count in counts.items():
        losses[f"{task}_loss"] = total[task] / (count or math.nan)       # NaN: no labels
    return {
        "step": counters.step,
        "phase": counters.phase + 1,
        **losses,
        "skipped": state.scaler.skipped,
        "seconds": counters.seconds,
        "examples_per_second": batch / seconds,
        "tokens_per_second": total["tokens"] / seconds,
        "masked_fraction": counts["mlm"] / total["tokens"],
        "wait_seconds": state.reducer.wait_seconds,
        "bytes_sent": state.reducer.bytes_sent,
        "minutes_left": left / finished * counters.seconds / 60}        # at the speed so far


def reason_to_stop(step, total):
    """Returns the dist.DistError that ends training early, after this step, or None. total: over
    all ranks, the number of signals received ("signals") and of ranks whose torchrun is gone
    ("orphans")."""
    message = f"stopped after step {step}; the same command resumes"
    if total["signals"]:
        return dist.DistError(message)
    if total["orphans"]:
        return dist.RankLost(f"{message} (a torchrun has died)")
    return None


def save_is_due(args, counters, saved_at):
    """Returns whether a save is due after this step, within a phase. saved_at: `seconds` at the
    last save."""
    half_hour = counters.seconds - saved_at > SAVE_SECONDS
    # Saving after the first step reveals a full disk at once.
    return half_hour or counters.step == 1 or counters.step % args.save_every == 0


# ----- Evaluation -----

@torch.no_grad()
def evaluate(args, world, log, state):
    """Logs and returns a dict of the model's losses (nats) and accuracies on the held-out
    documents, at the phase's length. Collective: the ranks share the work.

    Every evaluation of a phase uses the same examples and masks, whatever the run's seed: seed,
    phase and mask_fraction (15 %, whatever --mask-fraction is) are the defaults of
    data.PretrainingData. Changing masks or pairs there changes evaluation too, so do not compare
    losses across such a change. unigram_loss, the loss to beat, is that of predicting the same
    tokens from their frequency in the training text alone. With 1,024 examples, the NSP accuracy
    has a standard error of about sqrt(0.5 * 0.5 / 1024), 1.6 %.

    Raises optim.TrainingStopped if a loss is not finite, and ConfigError if the shards are no
    longer those of the start.
    """
    counters = state.counters
    seq_len = args.phases[counters.phase].seq_len
    if data.load_manifest(args.data)["sha256"][:16] != args.settings["shards"]:
        raise ConfigError(f"the shards in {args.data} have changed since the start")
    examples = data.PretrainingData(args.data, seq_len, held_out=True, pairs=args.pairs)
    unigram_losses = data.unigram_losses(args.data).to(world.device)
    micro_size = max(1, args.micro_tokens // seq_len)
    sums = collections.Counter()             # of numbers and tensors; each starts at 0
    state.model.eval()
    # Each rank gets at least one example, so that `sums` has the same keys on all.
    for indices in data.micro_batches(0, max(EVAL_EXAMPLES, world.size), micro_size, world.rank,
                                      world.size):
        batch = examples.batch(indices).to(world.device)
        logits = state.model(batch)
        sums["tokens"] += int(batch.lengths[:-1].sum())
        for task, labels in batch.labels.items():
            sums[f"{task}_loss"] += loss_sum(logits[task], labels).double()
            sums[f"{task}_accuracy"] += (logits[task].argmax(1) == labels).sum()
            sums[f"{task}_labels"] += (labels != data.IGNORED).sum()
        masked = batch.labels["mlm"]
        sums["unigram_loss"] += unigram_losses[masked[masked != data.IGNORED]].sum()
    state.model.train()

    # Add sums over the ranks, not means: their shares differ in size.
    total = world.sum(**sums)
    if not all(map(math.isfinite, total.values())):
        raise optim.TrainingStopped(f"step {counters.step}: the held-out loss is not finite; start "
                                    "over with a lower --lr-scale and a new --out")
    result = {"step": counters.step, "phase": counters.phase + 1,
              "unigram_loss": total["unigram_loss"] / total["mlm_labels"]}
    line = (f"step {counters.step:>6}  held out, {total['mlm_labels'] / total['tokens']:.0%} "
            f"masked: unigram {result['unigram_loss']:.3f}")
    for task in batch.labels:                # the same in every batch
        loss, accuracy = f"{task}_loss", f"{task}_accuracy"
        for name in loss, accuracy:
            result[name] = total[name] / (total[f"{task}_labels"] or math.nan)
        line += f"  {task} {result[loss]:.3f} ({result[accuracy]:.1%} right)"
    log.metric("eval", **result)
    log.say(line)
    return result


# ----- Training -----

class Clock:
    """Counts the seconds of a run over all its starts, for `--hours`. Once the clock exists,
    suspensions of the whole process for more than a minute do not count."""

    def __init__(self, seconds):
        self.start = STARTED - seconds       # of earlier starts
        threading.Thread(target=self.leave_out_pauses, daemon=True).start()

    def leave_out_pauses(self):
        """Runs in a thread and leaves out pauses: one-second sleeps that took over a minute."""
        while True:
            before = time.monotonic()
            time.sleep(1)
            passed = time.monotonic() - before
            if passed > 60:
                self.start += passed

    def read(self):
        """Returns the seconds so far."""
        return time.monotonic() - self.start


def training_loop(args, world, log, state, clock):
    """Takes the remaining steps, saves and evaluates. Returns None, or the dist.DistError that says
    why it stopped early. Collective."""
    counters = state.counters
    saved_at = counters.seconds
    batches = stop = None
    phase_index, done = progress(args, counters)
    while phase_index is not None and not stop:
        if batches is None or phase_index != counters.phase:
            batches = begin_phase(args, world, state, phase_index)
            phase = args.phases[phase_index]
        began = time.perf_counter()

        # 1. Take this rank's examples, in micro-batches that the loader thread has made ahead.
        micro_batches = next(batches)
        data_seconds = time.perf_counter() - began

        # 2. Count the labels of the whole step, over all ranks: the divisors of the losses.
        counts = count_labels(world, micro_batches)                  # {"mlm": ..., "nsp": ...}

        # 3. Run each micro-batch forward and backward. Gradients add up in flat fp32 buckets.
        # 4. In the last micro-batch, each complete bucket is averaged while backward goes on.
        scale = state.scaler.scale
        sums = collections.Counter()             # {"tokens": number, task: its loss (a tensor)}
        state.reducer.zero_grad(scale)
        for number, batch in enumerate(micro_batches):
            # Dropout's seed: numbers, unlike text, have the same hash in every process.
            torch.manual_seed(hash((args.seed, counters.step, number, world.rank)))
            state.reducer.last_micro_batch = number + 1 == len(micro_batches)
            batch = batch.to(world.device)
            sums["tokens"] += int(batch.lengths[:-1].sum())          # all but the padding
            counters.longest = max(counters.longest, int(batch.lengths[-2]))    # the last example's
            logits = state.model(batch)                              # {task: (labels, classes)}
            loss = 0.0
            for task, labels in batch.labels.items():
                task_sum = loss_sum(logits[task], labels)
                sums[task] += task_sum.detach().double()
                # Divided by the count of all ranks, each masked token weighs the same; so do pairs.
                loss = loss + task_sum / max(counts[task], 1)
            # The Reducer takes the mean: 1/W sum_r (W scale loss_r) = scale sum_r loss_r.
            (world.size * scale * loss).backward()

        # 5. Wait for the buckets. All ranks now hold the same gradients, still times `scale`.
        state.reducer.finish()
        norm = state.reducer.norm()

        # 6. If the norm, the same on all ranks, is inf or NaN, all skip the step. Sum the losses.
        step_taken = state.scaler.update(not math.isfinite(norm), counters.step + 1)
        state.reducer.commit(step_taken)             # for int8
        total = world.sum(**sums, seconds=clock.read(), signals=len(dist.stop_requests),
                          orphans=dist.torchrun_died())  # later, it would wait for a GPU's update

        # 7. Unscale, clip, step the fp32 masters, and copy them to the model.
        lr = optim.learning_rate(done, phase)
        if step_taken:
            optim.unscale_and_clip_(state.reducer.flats, norm, scale, CLIP)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
            state.optimizer.step()
            optim.copy_to_model(state.masters, state.model)

        # 8. Log, sometimes save a checkpoint and evaluate.
        counters.step += 1
        counters.phase_step += 1
        counters.seconds = total["seconds"] / world.size
        seconds = time.perf_counter() - began
        figures = step_figures(args, state, counts, total, seconds)
        log.step(figures | {"lr": lr, "grad_norm": norm / scale, "loss_scale": scale,
                            "data_share": data_seconds / seconds})
        phase_index, done = progress(args, counters)
        if phase_index is not None:
            stop = reason_to_stop(counters.step, total)
        phase_ends = phase_index != counters.phase               # also at the run's end: None
        if phase_ends or stop or save_is_due(args, counters, saved_at):
            save(args, world, log, state)
            saved_at = counters.seconds
            # Within a phase, no evaluation after step 1 or before a stop, which must be quick.
            if phase_ends or (not stop and counters.step > 1):
                evaluate(args, world, log, state)
    return stop


# ----- A whole run -----

def keep_freed_memory():
    """Makes the C library keep the CPU memory that torch frees, for the next tensors. Getting new
    memory from Linux, page by page, takes a tenth of a small model's step on a CPU."""
    with contextlib.suppress(AttributeError):        # macOS has no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)                          # M_MMAP_MAX: map no block separately
        libc.mallopt(-1, 2 ** 31 - 1)                # M_TRIM_THRESHOLD: the heap does not shrink
        libc.mallopt(-8, 1)                          # M_ARENA_MAX: all threads share the heap


def report(args, log, state):
    """Logs the end of the run; in the demo, first how the model fills in its sentences."""
    if args.data == DEMO_SHARDS:
        tokenizer = data.load_tokenizer(args.data / "tokenizer.model")
        for sentence in DEMO_SENTENCES:
            words = bert.fill_mask(state.model, tokenizer, sentence, 3)
            log.say(f"\n{sentence}\n    {words[0]}")
    ends = "another --out starts over"
    if finished_tokens(args, state.counters) < planned_tokens(args.phases):
        ends = "without --max-steps the same command goes on"
    log.say(f"\nDone after step {state.counters.step}; {ends}.\n"
            f'Fill in your own:\n    python bert.py "{args.out}/model" "Text with a [MASK] in it."')


def use_masters(state):
    """Gives rank 0's model the fp32 weights for its folder: the masters, since 16-bit weights are
    rounded. Untrained tensors have no masters and stay rounded: buffers and, without pairs, the
    pooler, the NSP head and the embeddings of segments."""
    state.model.float()
    optim.copy_to_model(state.masters, state.model)


def train(args, world):
    """Trains as the flags ask; all results go to the folder args.out. Collective.

    Raises what `explain` knows, and any other error; see `main`.
    """
    prepare_run(args, world)
    log = Log(args.out, world.rank == 0, args.timeout)
    if world.size == 1:      # several ranks have listened since they met
        # From here on, a signal requests a checkpoint and a stop instead of ending the program.
        dist.listen_to_signals()
    state = build(args, world)
    restore(args, world, log, state)
    clock = Clock(state.counters.seconds)    # a resumed run keeps its seconds
    log_start(args, world, log, state)
    # A resumed run may have died in an evaluation, so it evaluates first, unless it must stop at
    # once. So does a run that begins phase 1 from --init, to show what it begins with. A run with
    # no steps left evaluates too, and rewrites its model.
    signals = world.sum(signals=len(dist.stop_requests))["signals"]
    phase_index, _ = progress(args, state.counters)
    begins_from_init = args.init and phase_index == 0
    if phase_index is None or ((state.counters.step or begins_from_init) and not signals):
        evaluate(args, world, log, state)
    stop = training_loop(args, world, log, state, clock)

    if world.rank == 0:
        use_masters(state)
        bert.save_huggingface(state.model, args.data / "tokenizer.model", args.out / "model",
                              state.counters.longest or args.phases[0].seq_len)
        if not stop:
            report(args, log, state)
    # `stop` is an error, and torchrun kills the others when a rank ends with an error. All wait
    # here until rank 0 has written.
    world.barrier()
    if stop:
        raise stop


def main():
    """Runs the program. If it ends early, the rank that fails first says why, once if possible; see
    dist.leave."""
    try:
        args = parse_arguments()
    except SystemExit as end:
        if end.code and dist.TORCHRUN:
            # A restart would fail on the same flags. The node's first rank has printed the error;
            # the others wait until it ends torchrun, which ends them.
            if os.environ["LOCAL_RANK"] != "0":
                time.sleep(10)
            dist.end_torchrun()
        raise
    if not torch.cuda.is_available():
        keep_freed_memory()
    torch.set_num_threads(data.usable_cores())
    faulthandler.enable(2)       # a traceback on SIGBUS, if a shard is truncated while it is read
    world = dist.World()
    try:
        world = dist.init(args.timeout)
        train(args, world)
        data.end_terminal()
        dist.end(0)
    except (Exception, KeyboardInterrupt) as error:
        line = explain(error)
        rank = f"rank {world.rank}: " if world.size > 1 else ""
        rank_lost = isinstance(error, dist.RankLost)
        disk_lost = getattr(error, "errno", None) in DISK_AWAY
        # A restart may help after a lost rank or disk, and after a RuntimeError, as torch and GPUs
        # raise. It does not help where the user must act or has stopped the run, nor after other
        # errors: a bug would come again.
        torch_error = line is None and isinstance(error, RuntimeError)
        restart_helps = rank_lost or disk_lost or torch_error
        dist.leave(f"train.py: {rank}{line or traceback.format_exc()}", restart_helps, rank_lost)


if __name__ == "__main__":
    main()
