"""BERT pre-training in two phases, on one process or on many.

    python train.py                                                      # a whole demo, on CPU too
    python train.py --corpus my.txt --out runs/mine                      # the same on your own text
    torchrun --nproc_per_node=8 train.py --data shards/wiki --model large --recipe nvlamb-64k
    torchrun --nnodes=32 --nproc_per_node=8 --node_rank=K --master_addr=HOST \\
        train.py --data shards/wiki --model large --recipe nvlamb-64k

The same command again resumes from the last checkpoint, bit for bit (but see README.md).
Results are in --out.

Read first: `optim.RECIPES`, and `train`, the loop. What follows it, in the order of use, can wait.
"""
import argparse
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import math
import io
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import bert
import data
import dist
import optim


LOCAL = "data", "corpus", "out", "workers", "timeout", "log_every"    # a node may have its own
CLIP = 1.0                   # the largest global norm of the gradients
EVAL_EXAMPLES = 1024         # held-out examples, the same masks at every evaluation
CPU_TOKENS = 8192            # of a micro-batch on a CPU, if none is given
DEMO_SENTENCES = [           # for the model that read this machine's documentation
    "This function can [MASK] used to create a new file.",
    "If [MASK] is None, the default value is used.",
    "The result is a list [MASK] strings."]
STEP_LINE = ("step {step:>6}/{last}  phase {phase}  mlm {mlm_loss:6.3f}  {pairs} {nsp_loss:.3f}  "
             "lr {lr:.1e}  norm {grad_norm:5.2f}  scale {loss_scale:g}  {examples_per_second:.0f} "
             "examples/s  {memory_gb:.1f} GB  {minutes_left:.0f} min left")


class ConfigError(ValueError):
    """Arguments or files that training cannot start with; the message says what to change."""


# ----- Checkpoint files: one a step, its digest at the end -----

class CheckpointError(ValueError):
    """A file that is not the checkpoint that its name says; the message says which."""


def write_checkpoint(folder, state, keep):
    """Writes `state` (tensors, numbers, strings, plain containers) to the folder, whole or not at
    all; then removes the others, but for the one before and those of the steps in `keep`.

    The file is what torch.save writes and the 64 hexadecimal digits of its SHA-256. It is built in
    memory, which holds the state twice meanwhile. Raises OSError on a full disk.
    """
    path, content = folder / f"step-{state['step']:08d}.pt", io.BytesIO()
    torch.save(state, content)
    # One name for all: what a killed run has left of its own is overwritten here
    temporary, digest = folder / "unfinished", hashlib.sha256(content.getbuffer()).hexdigest()
    try:
        with open(temporary, "wb") as file:
            file.writelines([content.getbuffer(), digest.encode()])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # Later ones are damaged or were not to be read: kept, one would be "the one before" some day
    found = checkpoints_in(folder)
    older = [step for step in found if step < state["step"]]
    for step in found.keys() - {state["step"], max(older, default=0)} - keep:
        found[step].unlink()


def checkpoints_in(folder):
    """Returns {step: path} of a folder's checkpoints; a file of any other name is not ours."""
    return {int(path.stem[5:]): path for path in folder.glob(f"step-{'[0-9]' * 8}.pt")}


def read_checkpoint(path, step=None):
    """Returns what write_checkpoint wrote, on the CPU; raises CheckpointError if the file is
    damaged, or not of the given step."""
    try:
        content = memoryview(path.read_bytes())
        if hashlib.sha256(content[:-64]).hexdigest().encode() != bytes(content[-64:]):
            raise CheckpointError(f"{path} is cut or damaged: its digest does not match")
        # weights_only: a pickle could run any code
        state = torch.load(io.BytesIO(content[:-64]), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise CheckpointError(f"{path} is no checkpoint of ours; nothing in it was run") from None
    if step not in (None, state["step"]):
        raise CheckpointError(f"{path} is of step {state['step']}: it was renamed")
    return state


# What a user can mend is told in one line, without a traceback
EXPECTED = (ConfigError, data.DataError, bert.ModelError, dist.DistError, CheckpointError,
            optim.TrainingStopped, ModuleNotFoundError, OSError)

# ----- Flags -----

N, X = functools.partial(data.number, int), functools.partial(data.number, float)


def parse_arguments(argv=None):
    """Returns the parsed command line; a wrong one ends the program with one line and status 2."""
    parser = data.Parser(description="BERT pre-training. In (): the default.", allow_abbrev=False)
    add = parser.add_argument_group("text and results").add_argument
    add("--data", metavar="DIR", help="train on these shards (shards/NAME of the corpus)")
    add("--corpus", nargs="+", metavar="FILE", help="prepare this text first (this machine's docs)")
    add("--vocab-size", **N(16), help="make a tokenizer of N pieces for it (8192)")
    add("--out", metavar="DIR", help="write results here (runs/RECIPE; runs/NAME of another text)")
    add("--resume", default="auto", metavar="PATH", help="this checkpoint, in a new --out (newest)")
    add("--init", metavar="DIR", help="begin with this model; --data made with its tokenizer.model")
    add = parser.add_argument_group("model and recipe").add_argument
    add("--model", default="tiny", choices=bert.PRESETS, help="train a model of this size (tiny)")
    add("--recipe", default="demo", choices=optim.RECIPES, help="follow this one (demo)")
    add("--optimizer", choices=optim.OPTIMIZERS, help="take this one (the recipe's)")
    add("--freeze", **X(0, 1), help="1-bit optimizers freeze at this part (0.2, or the warm-up)")
    add("--steps", **N(0), nargs="+", help="take N steps in each phase; one number, or one a phase")
    add("--batch", **N(1), nargs="+", help="take N examples a step over all ranks; likewise")
    add("--lr-scale", **X(0), default=1.0, help="multiply all learning rates by X (1)")
    add("--dropout", **X(0, 1), help="drop this fraction of activations (the recipe's)")
    add("--pairs", default="nsp", choices=["nsp", "sop", "none"], help="learn whether B "
        "follows A, whether A and B are in order, or masked tokens only (nsp)")
    add("--mask-fraction", **X(0, 1), help="predict this fraction of the tokens (the recipe's)")
    add("--whole-words", action="store_true", help="mask all tokens of a word or none")
    add("--seed", **N(0, 1 << 63), default=0, help="draw weights, order, masks, dropout from N (0)")
    add = parser.add_argument_group("how the machines do it").add_argument
    add("--precision", default="auto", choices=["auto", *optim.PRECISIONS], help="(the fastest)")
    add("--micro-batch", **N(1), nargs="+", help="N at a time (8,192 tokens; on a GPU what fits)")
    add("--compression", default="none", metavar="NAME[:X]", help="send gradients as "
        f"{', '.join(dist.COMPRESSORS)}; X: fraction of topk, chunk, or rank of powersgd (none)")
    add("--bucket-mb", **X(1e-6), help="average X MB of gradients at a time (1/12 of all, 1 to 25)")
    add("--balance", action="store_true", help="deal examples by length (a node needs all shards)")
    add("--compile", action="store_true", help="let torch.compile fuse the kernels of each layer")
    add("--recompute", action="store_true", help="keep fewer activations, and compute them twice")
    add("--profile", action="store_true", help="trace five steps of each phase into --out")
    add("--workers", **N(0), default=1, help="make examples ahead in N processes a rank (1)")
    add("--timeout", **X(1e-3), default=600, help="give up on a rank silent for X seconds (600)")
    add = parser.add_argument_group("what is written when").add_argument
    add("--max-steps", **N(1), help="stop after step N; the schedule stays the same")
    add("--eval-every", **N(1), default=300, help="evaluate every N steps and each phase (300)")
    add("--checkpoint-every", **N(1), default=300, help="save every N steps and each phase (300)")
    add("--checkpoint-minutes", **X(0), default=30, help="save too if X minutes passed (30)")
    add("--max-minutes", **X(0), help="stop after X minutes, with a checkpoint")
    add("--log-every", **N(1), default=50, help="print a line every N steps (50)")
    add("--tensorboard", action="store_true", help="write its files to --out as well")
    add = parser.add_argument_group("what it would take").add_argument
    add("--plan", **N(1), help="start nothing; tell memory, seconds and days of N nodes")
    add("--gpus-per-node", **N(1), default=8, help="of N GPUs, a rank each (8)")
    add("--gpu-memory", **X(0), help="of X GB each (16; in training, as it is)")
    add("--tflops", **X(1e-6), help="that reach X TFLOP/s in training (as measured here)")
    add("--gbps", **X(1e-6), default=10, help="over X Gb/s between the nodes (10)")
    add("--price-per-gpu-hour", **X(0), default=0, help="tell the bill, too (no price)")
    return parser.parse_args(argv)


# ----- Training -----

def train(plan, world):
    """Trains as the plan says; returns nothing, all results are in the folder `plan.out`.

    Raises ConfigError, data.DataError, optim.TrainingStopped, dist.DistError or OSError; see main.
    """
    # From here on a signal does not end the program: it asks for a checkpoint
    log, stop_requests = Log(plan, world.rank == 0), dist.listen_to_signals(plan.max_minutes)
    model, reducer, masters, optimizer, scaler = parts = build(plan, world)
    step, examples, seconds = restore(plan, world, log, *parts)
    log_plan(plan, world, log, model, step)
    stop, stop_at, saved = 0, min(plan.ends[-1], plan.max_steps or plan.ends[-1]), step
    # By the clock too: a step can take milliseconds or minutes
    save_at = time.monotonic() + 60 * plan.checkpoint_minutes

    # ----- the training loop begins -----
    for phase_index, (phase, end) in enumerate(zip(plan.phases, plan.ends)):
        if step >= min(end, stop_at):
            continue
        batches, all_have, bar = open_phase(plan, world, phase_index, step)
        while step < min(end, stop_at):
            began, phase_step = time.perf_counter(), step - end + phase.steps

            # 1. This rank's examples of the step, in micro-batches that workers have made ahead
            micro_batches = next(batches)
            data_seconds = time.perf_counter() - began

            # 2. The masked tokens of the whole step, on all ranks: the divisor of the MLM loss.
            #    Each rank's own would make a mean of means. And is it time to stop, or to save?
            wishes = dist.asked_to_stop(stop_requests), time.monotonic() > save_at
            masked, rows, stop, due, *tokens = step_totals(micro_batches, wishes, world)

            # 3. Forward and backward of each micro-batch; gradients add up in flat fp32 buckets
            # 4. In the last micro-batch, each full bucket is averaged while backward goes on
            scale, sums = scaler.scale, torch.zeros(2, dtype=torch.float64, device=world.device)
            reducer.zero_grad(scale)
            local = optimizer.local_gradients(phase_step >= phase.freeze)
            for k, batch in enumerate(micro_batches):
                # torchrun kills 30 s after SIGTERM and a step can take longer: ask before each
                # micro-batch that all ranks have, and leave the step undone
                if 0 < k < all_have:
                    stop, = world.sum([dist.asked_to_stop(stop_requests)])
                if stop:
                    break
                # Dropout's seed is a function of the step, so that no generator's state has to be
                # saved, and another one for each micro-batch and rank (Python's hash of numbers is
                # the same in every process, that of text is not)
                torch.manual_seed(hash((plan.seed, step, k, world.rank)))
                sends = k + 1 == len(micro_batches) and not local
                with contextlib.nullcontext() if sends else reducer.accumulate():
                    losses = model(batch.to(world.device))
                    loss = losses.mlm_sum / masked + losses.nsp_sum / phase.global_batch
                    # Averaging over the ranks will divide by their number; fp16 needs the scale
                    (loss * world.size * scale).backward()
                sums += torch.stack([part.detach().double() for part in losses[:2]])
            if stop:
                stop_at = step                               # which ends the loop over phases, too
                break

            # 5. Wait for the buckets; then all ranks hold the same gradients, still times `scale`.
            #    Where a 1-bit optimizer wants them local each keeps its own, whose norm is sqrt(N)
            #    times that of their mean where noise dominates: divided so, the norms compare.
            if not local:
                reducer.finish()
            norm = float(optim.global_norm(reducer.buckets)) / math.sqrt(world.size if local else 1)

            # 6. All ranks agree whether the step is taken: an inf on one of them skips it on all
            *sums, squares = world.sum([*sums.tolist(), norm ** 2])
            norm = math.sqrt(squares / world.size)
            step_taken = scaler.update(not math.isfinite(norm), step + 1, reducer.gradients)
            reducer.commit(step_taken)

            # 7. Unscale, clip, and step the fp32 masters; the model's weights are copied from them
            lr = optim.learning_rate(phase_step, phase)
            if step_taken:
                optim.unscale_and_clip_(reducer.buckets, norm, scale, CLIP)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
            step, examples = step + 1, examples + phase.global_batch
            evaluates = step % plan.eval_every == 0 or step == end
            saves = due or step % plan.checkpoint_every == 0 or step == end
            if evaluates:
                optimizer.synchronise()                      # in 0/1 Adam weights differ in between
            optim.copy_to_model(masters, model)

            # 8. Log, evaluate, save a checkpoint
            duration = time.perf_counter() - began
            seconds += duration
            figures = {
                "step": step, "phase": phase_index + 1, "seq_len": phase.seq_len, "lr": lr,
                "grad_norm": norm / scale, "loss_scale": scale, "skipped": scaler.skipped,
                "examples": examples, "seconds": seconds, "data_share": data_seconds / duration,
                "wait_seconds": reducer.wait_seconds, "bucket_seconds": reducer.bucket_seconds,
                "bytes_sent": reducer.bytes_sent + optimizer.bytes_sent,
                **step_figures(plan, phase, sums, masked, rows, tokens, duration),
                **outlook(plan, step, seconds)}
            log.metric("train", **figures)
            bar.set_postfix_str(f"mlm {figures['mlm_loss']:.3f}")
            bar.update()
            if step % plan.log_every == 0 or step == end:
                log.say(STEP_LINE.format(last=plan.ends[-1], pairs=plan.pairs, **figures))
            if evaluates:
                log_evaluation(evaluate(model, plan, phase, world), plan, log, model, figures)
            if saves:
                save(plan, world, log, step, examples, seconds, *parts)
                saved, save_at = step, time.monotonic() + 60 * plan.checkpoint_minutes
        bar.close()
    # ----- the training loop ends -----

    if step > saved:
        save(plan, world, log, step, examples, seconds, *parts)
    reducer.close()
    if log.active:
        bert.save_huggingface(model, plan.data / "tokenizer.model", plan.out / "model")
        report(plan, log, model, step, stop_requests)
    # Status 1, or other nodes' torchrun would wait for us. The sum waits until rank 0 has written
    # all: the first rank that fails has the others killed
    if stop >= dist.SIGNALLED and dist.TORCHRUN and world.sum([1]):
        kind = dist.RankLost if stop == math.inf else dist.DistError         # see `main`
        raise kind(f"stopped after step {step}; the same command resumes")


# ----- What the loop is built of, in the order of its steps -----

def build(plan, world):
    """Returns (model, reducer, masters, optimizer, scaler) as they are before the first step."""
    torch.manual_seed(plan.seed)
    model = bert.BertForPreTraining(plan.config)
    # Begin at the token frequencies: the first loss is the unigram entropy, not log V, which saves
    # the demo some 300 steps. Rows that only pad the vocabulary are as rare as the rarest token.
    # To subtract the mean changes no probability; else LANS steps eight times as far, and bf16
    # rounds more.
    rarity = torch.from_numpy(data.unigram_losses(plan.data))
    model.mlm_bias.data.fill_(rarity.mean() - rarity.max())
    model.mlm_bias.data[:len(rarity)] = rarity.mean() - rarity
    # The reducer sends rank 0's weights to the others. A run that resumes needs none of these, but
    # for the heads that --pairs none does not train: they are not in the checkpoint
    whole = plan.pairs != "none" and checkpoints_in(plan.out / "checkpoints")
    world.on_all_ranks(EXPECTED, lambda: plan.init and world.rank == 0 and not whole
                       and bert.copy_weights(plan.init, model, plan.data / "tokenizer.model"))
    # With --pairs none these are unused, and weight decay alone would wear them away
    for head in (model.pooler, model.nsp):
        head.requires_grad_(plan.pairs != "none")
    model.to(world.device, optim.PRECISIONS[plan.precision])
    model.recompute = plan.recompute
    if plan.compile:
        bert.attention = torch.compiler.disable(bert.attention)      # depends on a batch's lengths
        for block in model.blocks:       # one by one, so that backward still completes them in turn
            block.compile(dynamic=True)
    reducer = dist.Reducer(model, world, plan.bucket_mb, plan.compression)
    masters = optim.master_weights(model)
    for name, master in masters.items():
        master.grad = reducer.gradients[name]        # the bucket's view: nothing is copied
    optimizer = optim.make_optimizer(plan.optimizer, masters, plan.betas, plan.ends[-1],
                                     lambda named: dist.CompressedMean(named, world))
    # bf16 has the range of fp32
    scaling = {} if "fp16" in (plan.precision, plan.compression) else dict(scale=1.0, largest=1.0)
    return model, reducer, masters, optimizer, optim.LossScaler(**scaling)


def open_phase(plan, world, phase_index, step):
    """Returns (an iterator over the lists of this rank's micro-batches, one for each step of the
    phase that is left after `step` of the run; how many all ranks have of them; a progress bar)."""
    phase = plan.phases[phase_index]
    first = step - plan.ends[phase_index] + phase.steps
    examples = data.PretrainingData(plan.data, phase.seq_len, phase_index, plan.seed,
                                    mask_fraction=plan.mask_fraction, **plan.example_options)
    deal = functools.partial(data.micro_batches, global_batch=phase.global_batch,
                             micro_batch=phase.micro_batch, rank=world.rank, size=world.size,
                             lengths=examples.lengths if plan.balance else None)
    batches = data.loader(examples, range(first, phase.steps), plan.workers,
                          world.device.type == "cuda", deal)
    if plan.profile and world.rank == 0:
        batches = bert.profiled(batches, plan.out / f"profile-{phase_index + 1}")
    all_have = -(-(phase.global_batch // world.size) // phase.micro_batch)
    bar = tqdm(desc=f"phase {phase_index + 1}", total=phase.steps, initial=first, unit="step",
               disable=True if world.rank or not sys.stderr else None, dynamic_ncols=True)
    return batches, all_have, bar


def step_totals(micro_batches, wishes, world):
    """Returns what all ranks know of a step before backward, a list of sums over them: tokens to be
    predicted, rows for tokens (padding included), the two wishes (to stop, to save: all ranks
    must do it at the same step); then the tokens of each rank."""
    own = sum(int(batch.bounds[-2]) for batch in micro_batches)
    # Counted on the CPU, before the batch goes to a GPU: nothing waits for the device
    masked = sum(int((batch.labels != data.IGNORED).sum()) for batch in micro_batches)
    rows = sum(len(batch.tokens) for batch in micro_batches)
    tokens = [own * (rank == world.rank) for rank in range(world.size)]
    return world.sum([masked, rows, *wishes, *tokens])


def step_figures(plan, phase, sums, masked, rows, tokens, seconds):
    """Returns the log's fields that follow from a step's sums over all ranks: `sums` of the two
    losses, and what `step_totals` returns. imbalance: the most tokens of a rank over the mean;
    tflops: of the model, 10^12 operations a second and rank."""
    examples, total, ranks = phase.global_batch, sum(tokens), len(tokens)
    mlm_loss, nsp_loss, rate = sums[0] / masked, sums[1] / examples, examples / seconds
    flops = bert.flops_per_example(plan.config, total / examples, masked / examples)
    return {"loss": mlm_loss + nsp_loss, "mlm_loss": mlm_loss, "nsp_loss": nsp_loss,
            "padding": 1 - total / rows, "imbalance": max(tokens) * ranks / total,
            "examples_per_second": rate, "tflops": rate * flops / ranks / 1e12}


def outlook(plan, step, seconds):
    """Returns the log's fields on what a run takes: the most memory of this process, on a GPU the
    GPU's, and the minutes left at the mean speed of the `seconds` until now."""
    # A step of phase 2 takes longer: in proportion to its tokens, as if no text were shorter
    work = [phase.global_batch * phase.seq_len for phase in plan.phases for _ in range(phase.steps)]
    unit = 1e-6 if sys.platform == "linux" else 1e-9         # macOS counts bytes
    memory = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory_gb": torch.cuda.max_memory_allocated() / 1e9 or memory,
            "minutes_left": seconds / 60 * sum(work[step:plan.max_steps]) / sum(work[:step])}


# ----- Evaluation -----

@torch.no_grad()
def evaluate(model, plan, phase, world):
    """Returns a dict of what the model does on the held-out documents, at a phase's length.

    Examples and masks are the same at every evaluation, 15 % of the tokens however many training
    masks, and the ranks share the work. Losses are in nats. unigram_entropy is the loss on the same
    tokens of a predictor that knows only how often the training text has each token: the line to
    beat. nsp_accuracy is None without pairs; nsp_error is its standard error, as if examples were
    independent; those of one document are not: it is 1.3 times that in the demo. Leaves the model
    in training mode.
    """
    model.eval()
    examples = data.PretrainingData(plan.data, phase.seq_len, held_out=True, **plan.example_options)
    unigrams = torch.from_numpy(data.unigram_losses(plan.data)).to(world.device)
    total = torch.zeros(6, dtype=torch.float64, device=world.device)
    for indices in data.micro_batches(0, EVAL_EXAMPLES, phase.micro_batch, world.rank, world.size):
        batch = examples.batch(indices).to(world.device)
        predicted = batch.labels != data.IGNORED
        parts = *model(batch), unigrams[batch.labels[predicted]].sum(), predicted.sum()
        total += torch.stack([part.double() for part in parts])
    # Sums, not means, are what ranks can add up: their shares differ in size
    model.train()
    mlm_sum, nsp_sum, mlm_hits, nsp_hits, unigram_sum, masked = world.sum(total.tolist())
    accuracy = nsp_hits / EVAL_EXAMPLES
    return {"mlm_loss": mlm_sum / masked, "mlm_accuracy": mlm_hits / masked,
            "unigram_entropy": unigram_sum / masked, "nsp_loss": nsp_sum / EVAL_EXAMPLES,
            "nsp_accuracy": accuracy if plan.pairs != "none" else None,
            "nsp_error": math.sqrt(accuracy * (1 - accuracy) / EVAL_EXAMPLES)}


def log_evaluation(result, plan, log, model, figures):
    """Logs an evaluation, after a step with these figures; of the demo also how the model fills in
    its three sentences."""
    log.metric("eval", step=figures["step"], phase=figures["phase"], **result)
    log.say(f"step {figures['step']:>6}/{plan.ends[-1]}  held out: {describe(result, plan)}")
    if plan.reads_docs and log.active:
        log.say("    [MASK] of the three sentences: " + "; ".join(fill_in_demo(plan, model)))


def describe(result, plan):
    """Returns an evaluation as a line of text."""
    mlm = "MLM loss {mlm_loss:.3f} (unigram {unigram_entropy:.3f}), MLM accuracy {mlm_accuracy:.1%}"
    pairs = f", {plan.pairs.upper()} accuracy {{nsp_accuracy:.1%}} +- {{nsp_error:.1%}}"
    return (mlm if result["nsp_accuracy"] is None else mlm + pairs).format(**result)


def fill_in_demo(plan, model):
    """Returns the three likeliest words for the [MASK] of each DEMO_SENTENCES, a list of str."""
    tokenizer = data.load_tokenizer(plan.data / "tokenizer.model")
    return [words for text in DEMO_SENTENCES for words in bert.fill_mask(model, tokenizer, text, 3)]


# ----- The plan: the arguments, with all that they leave open filled in -----

def make_plan(args, world):
    """Returns `fill_in`'s plan, the same on every rank but for LOCAL, with its shards prepared and
    checked, and `same_run`, what the results depend on.

    Raises one of EXPECTED if it cannot work.
    """
    plan = fill_in(args, world)
    manifest = prepare_folders(plan, world)
    bert.tokenizer_json((plan.data / "tokenizer.model").read_bytes())    # refused now, if at all
    plan.same_run = same_run(plan, manifest)
    # Whatever decides which collectives are called when, or their result, is the same on all ranks
    code = [Path(m.__file__).read_bytes() for m in (bert, data, dist, optim, sys.modules[__name__])]
    told = {flag: value for flag, value in vars(args).items() if flag not in LOCAL} | plan.same_run
    told |= {"torch": torch.__version__, "code": hashlib.sha256(b"".join(code)).hexdigest()[:16]}
    world.check_same(told, "was started differently")
    return plan


def fill_in(args, world):
    """Returns the arguments as a plan: what they leave open is the recipe's or follows from the
    hardware, and `phases` (list of Phase), `config` and both folders (Path) follow from all of it.
    Raises ConfigError, data.DataError, or DistError for the compression, if it cannot work."""
    plan, recipe = argparse.Namespace(**vars(args)), optim.RECIPES[args.recipe]
    plan.arguments = vars(args)                              # as given, for the log
    for field in ("optimizer", "dropout", "mask_fraction"):
        if getattr(args, field) is None:
            setattr(plan, field, getattr(recipe, field))
    plan.one_bit = plan.optimizer in optim.ONE_BIT
    # A variance that will be frozen must be the mean of many steps
    plan.betas = recipe.betas[0], 0.999 if plan.one_bit else recipe.betas[1]
    plan.example_options = {"pairs": args.pairs, "whole_words": args.whole_words}
    plan.data = Path(args.data or data.default_folder(args.corpus))
    plan.reads_docs = not args.data and not args.corpus
    plan.out = Path(args.out or f"runs/{args.recipe if plan.reads_docs else plan.data.name}")
    known = (plan.data / "manifest.json").exists() and not (args.plan and args.vocab_size)
    # A tokenizer that is still to be made will have as many pieces as were asked for
    plan.pieces = data.load_manifest(plan.data)["vocab_size"] if known else args.vocab_size or 8192
    if args.vocab_size not in (None, plan.pieces):
        raise ConfigError(f"{plan.data} has {plan.pieces} pieces: remove it or set no --vocab-size")
    plan.config = bert.BertConfig.preset(args.model, plan.pieces, dropout=plan.dropout)
    plan.precision = optim.choose_precision(args.precision, world.device)
    if world.device.type == "cuda" and not args.gpu_memory:  # the smallest card decides for all
        own = 1e-9 * torch.cuda.get_device_properties(world.device).total_memory
        plan.gpu_memory = min(world.all_gather_object(own))
    plan.phases = plan_phases(plan, recipe.phases, world)
    plan.ends = np.cumsum([phase.steps for phase in plan.phases]).tolist()   # in steps of the run
    return plan


def plan_phases(plan, phases, world):
    """Returns a recipe's phases, changed as the flags say; raises ConfigError, or DistError for the
    compression, if that cannot work."""
    if dist.is_lossy(plan.compression) and plan.one_bit:
        raise ConfigError(f"{plan.optimizer} needs --compression none, fp16 or bf16")
    if plan.freeze is not None and not plan.one_bit:
        raise ConfigError(f"--freeze means nothing to {plan.optimizer}, only to 1-bit optimizers")
    # Each flag has one number for all phases, or one for each; None is the recipe's
    given = [getattr(plan, flag) or [None] for flag in ("steps", "batch", "micro_batch")]
    if not all(len(numbers) in (1, len(phases)) for numbers in given):
        raise ConfigError(f"--steps, --batch, --micro-batch: give one number, or {len(phases)}")
    given = zip(*(numbers * len(phases) for numbers in given))           # zip ends with phases
    return [plan_phase(plan, world, phase, *numbers) for phase, numbers in zip(phases, given)]


def plan_phase(plan, world, phase, steps, batch, micro_batch):
    """Returns a phase with its numbers as given; None: the recipe's, or the best micro-batch."""
    steps, batch = phase.steps if steps is None else steps, batch or phase.global_batch
    if batch < world.size:
        raise ConfigError(f"a batch of {batch} is too small for {world.size} ranks; raise --batch")
    share = -(-batch // world.size)                          # the most that a rank has in a step
    most = max(1, memory(plan, phase)[2] if plan.gpu_memory else CPU_TOKENS // phase.seq_len)
    # If none is given: equal parts of at most `most` examples
    micro_batch = min(micro_batch or -(-share // -(-share // most)), share)
    freeze = phase.freeze
    if plan.one_bit and steps:
        freeze = round(steps * (max(0.2, phase.warmup) if plan.freeze is None else plan.freeze))
        if not 0 < freeze < steps:
            raise ConfigError(f"no freeze after {freeze} of {steps} steps; change --freeze")
    return dataclasses.replace(phase, steps=steps, global_batch=batch, lr=phase.lr * plan.lr_scale,
                               micro_batch=micro_batch, freeze=freeze)


def prepare_folders(plan, world):
    """Rank 0 makes the folder of results, and each node's first rank the shards, if they are not
    yet there; all check them. Returns their manifest; raises ConfigError on all ranks."""
    def make():
        if world.rank == 0:
            (plan.out / "checkpoints").mkdir(parents=True, exist_ok=True)
            plan.lock = open(plan.out / "log.txt", "a")      # fails where nothing can be written
            try:                                             # locked until this process ends
                fcntl.flock(plan.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"another run writes to {plan.out}, or its disk has no locks "
                                  f"({error.strerror}); take another --out") from None
        # One process of a node prepares; the others wait for it at the end of on_all_ranks
        prepared = plan.arguments["data"] or (plan.data / "manifest.json").exists()
        if world.local_rank == 0 and (plan.corpus or not prepared):
            manifest = data.prepare(data.open_corpus(plan.corpus), plan.data, plan.pieces)
            print(data.describe(manifest), flush=True)

    world.on_all_ranks(EXPECTED, make)
    return world.on_all_ranks(EXPECTED, lambda: data.verify(
        plan.data, world.rank, world.size, plan.balance and world.local_rank == 0))


def same_run(plan, manifest):
    """Returns what the results of a run depend on, a flat dict: equal on all ranks, and equal to
    the checkpoint's where a run resumes. How many ranks, micro-batches and buckets share the work
    is not in it: it changes sums' order, dropout's masks, what lossy compression leaves over."""
    # Flat, so that a field that differs can be named
    fields = "optimizer betas compression balance init mask_fraction seed precision".split()
    run = {key: vars(plan)[key] for key in [*fields, *plan.example_options]}
    run["shards"] = manifest["sha256"][:16]                  # of the text, and how it was prepared
    run |= {f"model.{key}": value for key, value in plan.config._asdict().items()}
    for number, phase in enumerate(plan.phases, 1):
        run |= {f"phase{number}.{key}": value for key, value in vars(phase).items()
                if key != "micro_batch"}
    return run


# ----- Checkpoints: all that the next step depends on, one file each, its digest at the end -----

def restore(plan, world, log, model, reducer, masters, optimizer, scaler):
    """Gives model, optimizer and all else the state of the checkpoint that --resume names; returns
    (steps, examples, seconds) done so far, zeros without a checkpoint.

    Collective: rank 0 reads. Raises ConfigError on every rank if there is none that can be used, or
    if another node's disk has a later one: the node that was the first may have another rank now.
    """
    # All look: without a shared disk each node has checkpoints of its own, or none
    newest = max(checkpoints_in(plan.out / "checkpoints"), default=0)
    places = world.all_gather_object((newest, f"{os.uname().nodename}:{plan.out.absolute()}"))
    (later, theirs), (step, ours) = max(places), places[0]
    if later > step:
        raise ConfigError(f"{theirs} holds step {later}, and rank 0's {ours} step {step}; give the "
                          "nodes the --node_rank of before, or put --out on a shared disk")
    state = world.on_all_ranks(EXPECTED, lambda: world.rank == 0 and find_checkpoint(plan, log))
    state = world.broadcast_object(state)
    log.cut(state["log_bytes"] if state else 0)
    if state is None:
        return 0, 0, 0.0
    for name, master in masters.items():
        master.data.copy_(state["weights"][name])
    optim.copy_to_model(masters, model)
    optimizer.load_state_dict(state["optimizer"])
    vars(scaler).update(state["scaler"])
    reducer.load_state_dict(state["residuals"])
    return state["step"], state["examples"], state["seconds"]


def save(plan, world, log, step, examples, seconds, model, reducer, masters, optimizer, scaler):
    """Saves a checkpoint of the step. Collective: what lossy compression has not sent yet is
    averaged over the ranks. A full disk is a warning: the older checkpoints are whole."""
    optimizer.synchronise()
    optim.copy_to_model(masters, model)
    compare_weights(masters, optimizer, world, step)
    state = {"run": plan.same_run, "step": step, "examples": examples, "seconds": seconds,
             "weights": masters, "optimizer": optimizer.state_dict(), "scaler": vars(scaler),
             "residuals": reducer.state_dict(), "log_bytes": log.bytes()}
    if log.active:
        try:
            write_checkpoint(plan.out / "checkpoints", state, keep=set(plan.ends))
        except OSError as error:
            log.say(f"warning: no checkpoint of step {step}: {error.strerror}; training goes on")


@torch.no_grad()
def compare_weights(masters, optimizer, world, step):
    """Raises optim.TrainingStopped if weights or moments of a rank are not finite, dist.DistError
    if weights are not the same bits on all; either on all ranks."""
    moments = [x[key] for x in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    norm = float(optim.global_norm([*masters.values(), *moments]))
    # One rank alone must not stop: the others would wait for it
    if world.sum([not math.isfinite(norm)])[0]:
        raise optim.TrainingStopped(f"step {step}: weights or moments are not finite; not saved")
    # A sum of bits as integers, which no order of additions changes
    bits = sum(int(master.view(torch.int32).sum(dtype=torch.int64)) for master in masters.values())
    world.check_same({"sum of bits": bits}, f"has other weights after step {step} (bad memory?)")


def find_checkpoint(plan, log):
    """Returns the state that the plan's --resume asks for, or None to start anew.

    Where one is damaged the one before is taken, with a warning. Raises ConfigError if none is
    whole, if it is of another run, or if later steps in the folder would be overwritten.
    """
    folder, auto, state = plan.out / "checkpoints", plan.resume == "auto", None
    found = checkpoints_in(folder)
    if plan.resume not in ("auto", "never"):
        state = read_checkpoint(Path(plan.resume))
        # No checkpoint here: the file is another folder's, and what is in this log died unsaved
        state["log_bytes"] *= bool(found)
    for step in sorted(found, reverse=True) if auto else ():
        try:
            state = read_checkpoint(found[step], step)
            break
        except (CheckpointError, OSError) as error:
            log.say(f"warning: {error}; trying the one before")
    if auto and found and not state:
        raise ConfigError(f"no checkpoint in {folder} is whole; move the folder away to start anew")
    if not auto and max(found, default=0) > (state["step"] if state else 0):
        raise ConfigError(f"{folder} holds step {max(found)}: resume from it, or change --out")
    if state and (differ := dist.differences(state["run"], plan.same_run)):
        raise ConfigError(f"the checkpoint is of another run: {differ}; take another --out")
    return state


# ----- What it would take -----

def print_plan(args):
    """Prints memory, seconds and days that --plan nodes take with these flags; then the days of
    other nodes, networks and compressors.

        step = compute + max(late, exchange - backward)

    backward: 2/3 (with --recompute 3/4) of the compute of the last micro-batch, behind which the
    exchange between nodes hides; all but `late`, that of the embeddings, which are ready at its
    end. To compress counts where it can be measured: without --tflops. Not counted: what happens
    inside a node, the optimizer (and what a 1-bit one saves), that some examples are shorter,
    loading, evaluation.
    """
    args.gpu_memory = args.gpu_memory or 16
    # As many ranks as there would be, though none of them exists
    here = dist.init()
    plan = fill_in(args, dataclasses.replace(here, size=args.plan * args.gpus_per_node))
    config, shapes = plan.config, bert.parameter_shapes(plan.config)
    elements = sum(map(math.prod, shapes))
    precision = optim.PRECISIONS[plan.precision]
    tflops = args.tflops or bert.measure_tflops(config, here.device, precision)
    names = [name for name in dict.fromkeys([*dist.COMPRESSORS, args.compression])
             if not (dist.is_lossy(name) and plan.one_bit)]            # `plan_phases` refuses these
    packing = {name: 4e-6 * elements * dist.measure(here, name, 1)[0] for name in names}

    def seconds(phase, compression, nodes, gbps):
        """Returns those of compute, of exchange, and of a step in which they overlap."""
        share = -(-phase.global_batch // (nodes * args.gpus_per_node))       # of the busiest rank
        flops = bert.flops_per_example(config, phase.seq_len, plan.mask_fraction * phase.seq_len)
        compute = share * flops / tflops / 1e12 * (4 / 3 if plan.recompute else 1)
        exchange = packing[compression] * (nodes > 1 and not args.tflops)
        # Dense sums go in a ring through all GPUs, from node to node once; see dist.Bucket
        ring = nodes if nodes == 1 or dist.is_lossy(compression) else nodes * args.gpus_per_node
        exchange += 8e-9 * dist.wire_bytes(compression, shapes, ring) / gbps
        late = exchange * config.vocab_size * config.width / elements
        backward = (0.75 if plan.recompute else 2 / 3) * compute * min(1, phase.micro_batch / share)
        return compute, exchange, compute + max(late, exchange - backward)

    def days(*case):
        """Returns the days of all phases with a compression, so many nodes and Gb/s."""
        return sum(phase.steps * seconds(phase, *case)[2] / 86400 for phase in plan.phases)

    print(f"{args.model}: {elements:,} parameters; {args.plan} node(s) of {args.gpus_per_node} "
          f"GPU(s) of {tflops:.3g} TFLOP/s, {args.gbps:g} Gb/s, compression {args.compression}")
    for number, phase in enumerate(plan.phases, 1):
        state, each, most = memory(plan, phase)
        compute, exchange, step = seconds(phase, args.compression, args.plan, args.gbps)
        print(f"phase {number}: micro-batch {phase.micro_batch}, {each * phase.micro_batch:.2f} GB "
              f"({most} fit {args.gpu_memory:g}); a step computes {compute:.3g} s, exchanges "
              f"{exchange:.3g} s, {step - compute:.3g} s of it not hidden: "
              f"{phase.steps * step / 86400:.3g} days")
    print(f"GB of a rank in {plan.precision}:", *(f"{part} {gb:.2f}" for part, gb in state.items()))
    nodes = [1 << k for k in range(7)]
    print("days on nodes:       ", *(f"{n:>8}" for n in nodes))
    for gbps in 1, 10, 25, 100:
        for name in names:
            print(f"{gbps:>4} Gb/s  {name:<10}", *(f"{days(name, n, gbps):8.3g}" for n in nodes))
    # The first that is hardly slower than the fastest: what loses nothing stands first
    mine = {name: days(name, args.plan, args.gbps) for name in names}
    best = next(name for name in names if mine[name] <= 1.05 * min(mine.values()))
    hours, rate = 24 * mine[best] * args.plan * args.gpus_per_node, args.price_per_gpu_hour
    print(f"Take the largest micro-batch that fits and --compression {best}"
          + " (at some loss)" * dist.is_lossy(best) + f": {mine[best]:.3g} days (none: "
          f"{mine['none']:.3g}), {hours:,.0f} GPU hours" + f", at {rate * hours:,.0f}" * (rate > 0))


def memory(plan, phase):
    """Returns (what a rank holds besides activations, {part: GB}; the GB of activations that an
    example of the phase leaves; how many of these fit in 80 % of plan.gpu_memory: the formulas
    leave out a little)."""
    size = optim.PRECISIONS[plan.precision].itemsize
    state = bert.state_gigabytes(plan.config, size, dist.is_lossy(plan.compression), plan.one_bit)
    each = 1e-9 * bert.activation_bytes(plan.config, phase.seq_len,
                                        plan.mask_fraction * phase.seq_len, size, plan.recompute)
    return state, each, max(0, int((0.8 * (plan.gpu_memory or 0) - sum(state.values())) / each))


# ----- The log -----

class Log:
    """The terminal, log.txt and metrics.jsonl of a run; silent on all ranks but 0."""

    def __init__(self, plan, active):
        self.folder, self.active, self.metrics = plan.out, active, plan.out / "metrics.jsonl"
        self.unwritten, self.tensorboard = {}, None          # {path: bytes that found no room}
        if plan.tensorboard and active:
            from torch.utils.tensorboard import SummaryWriter
            self.tensorboard = SummaryWriter(plan.out)

    def say(self, text):
        """Prints a line, above the progress bar, and adds it to log.txt."""
        if self.active:
            self._print(text)
            self._append(self.folder / "log.txt", text)

    def metric(self, kind, **fields):
        """Adds a line to metrics.jsonl; numbers that are not finite become null."""
        if self.active:
            # JSON has no NaN
            fields = {key: None if isinstance(value, float) and not math.isfinite(value) else value
                      for key, value in fields.items()}
            self._append(self.metrics, json.dumps({"kind": kind, **fields}))
            for key, value in fields.items() if self.tensorboard else ():
                if isinstance(value, (int, float)):
                    self.tensorboard.add_scalar(f"{kind}/{key}", value, fields.get("step"))

    def _print(self, text):
        with contextlib.suppress(OSError, AttributeError):   # full disk, closed terminal, no stdout
            tqdm.write(text)
            sys.stdout.flush()

    def _append(self, path, line):
        lines = self.unwritten.pop(path, b"") + f"{line}\n".encode()
        try:
            with open(path, "ab", buffering=0) as file:
                while lines:                         # a disk that fills up takes a part first
                    lines = lines[file.write(lines):]
        except OSError as error:                     # a full disk must not end the training
            self._print(f"warning: {path}: {error.strerror}")
            self.unwritten[path] = lines

    def bytes(self):
        """Returns the length of metrics.jsonl."""
        return self.metrics.stat().st_size if self.active and self.metrics.exists() else 0

    def cut(self, length):
        """Cuts metrics.jsonl to the length that it had at a checkpoint: the steps after that are
        done again."""
        if self.bytes() > length:
            os.truncate(self.metrics, length)


def log_plan(plan, world, log, model, step):
    """Says what is about to run, and writes it as the first line of metrics.jsonl."""
    parameters = sum(p.numel() for p in model.parameters())
    if log.active and not log.bytes():
        commit = subprocess.getoutput(f"git -C '{Path(__file__).parent}' describe --always --dirty")
        log.metric("run", arguments=plan.arguments, run=plan.same_run, commit=commit,
                   python=sys.version, torch=torch.__version__, numpy=np.__version__,
                   world=world.size, nodes=world.nodes, device=str(world.device),
                   threads=torch.get_num_threads(), parameters=parameters)
    log.say(f"model {plan.model}: {plan.config.layers} layers x {plan.config.width}, "
            f"{parameters:,} parameters, vocabulary {plan.config.vocab_size:,}\n"
            f"{world.size} rank(s) on {world.nodes} node(s), {world.device.type}, "
            f"{plan.precision}, optimizer {plan.optimizer}, compression {plan.compression}")
    for index, phase in enumerate(plan.phases, 1):
        accumulation = -(-phase.global_batch // (world.size * phase.micro_batch))
        log.say(f"phase {index}: {phase.steps:,} steps x {phase.global_batch:,} examples of "
                f"{phase.seq_len} tokens; {world.size} rank(s) x micro-batch {phase.micro_batch} x "
                f"accumulation {accumulation}, lr {phase.lr:g}"
                + f", variance frozen after {phase.freeze}" * (phase.freeze < phase.steps))
    if step:
        log.say(f"resuming from the checkpoint of step {step}")


def report(plan, log, model, step, stop_requests):
    """Says what came out: the curve of held-out losses, the last evaluation of each phase; for the
    demo, sentences filled in."""
    # metrics.jsonl may have been damaged
    with contextlib.suppress(ArithmeticError, LookupError, TypeError, ValueError):
        lines = [json.loads(line) for line in open(log.metrics)]
        evaluations = [line for line in lines if line["kind"] == "eval"]
        log.say(f"\nHeld-out MLM loss in phase 1 and 2; -: by word frequency\n{curve(evaluations)}")
        for index, result in sorted({line["phase"]: line for line in evaluations}.items()):
            log.say(f"\nphase {index}, {plan.phases[index - 1].seq_len} tokens, after step "
                    f"{result['step']}: {describe(result, plan)}")
            padding, imbalance, waited = np.mean([
                [line["padding"], line["imbalance"], line["data_share"]] for line in lines
                if line["kind"] == "train" and line["phase"] == index], axis=0)
            log.say(f"    padding {padding:.1%} of the batches, busiest rank {imbalance:.3f} times "
                    f"the mean tokens, waiting for data {waited:.1%} of a step")
    if plan.reads_docs:
        for sentence, words in zip(DEMO_SENTENCES, fill_in_demo(plan, model)):
            log.say(f"\n{sentence}\n    {words}")
    ended = "Done" if step == plan.ends[-1] else " by ".join(["Stopped", *stop_requests[:1]])
    log.say(f"\n{ended} after step {step} of {plan.ends[-1]}; to start over, remove {plan.out}. "
            f'Fill in your own:\n    python bert.py "{plan.out}/model" "Returns the [MASK] of it."')


def curve(evaluations, width=64, height=10):
    """Returns a drawing of evaluations, lines of text: the loss of each over its step, as the
    number of its phase, and the unigram loss as dashes."""
    losses = [line[key] for line in evaluations for key in ("mlm_loss", "unigram_entropy")]
    low, step = min(losses), (max(losses) - min(losses)) / height or 1.0
    rows = [[" "] * (width + 1) for _ in range(height + 1)]
    for line in evaluations:
        column = round(line["step"] / evaluations[-1]["step"] * width)
        # Drawn first, so that a loss on the same row hides it
        rows[round((line["unigram_entropy"] - low) / step)][column] = "-"
        rows[round((line["mlm_loss"] - low) / step)][column] = str(line["phase"])
    return "\n".join(f"{low + k * step:7.3f} |{''.join(rows[k])}" for k in range(height, -1, -1))


def main():
    """Runs the program; whatever ends it early is said once, by the rank that fails first."""
    args, world = parse_arguments(), dist.World()
    try:
        if args.plan:
            return print_plan(args)
        world = dist.init(args.timeout)
        train(make_plan(args, world), world)
        world.close()
    except (Exception, KeyboardInterrupt) as error:
        if world.first_to_fail():                            # the others only notice that it failed
            rank = f"rank {world.rank}: " if world.size > 1 else ""
            print(f"train.py: {rank}{explain(error)}", file=sys.stderr, flush=True)
        traceback.clear_frames(error.__traceback__)          # ends the loader's workers
        # torchrun would start all ranks again: in vain after what a user must mend, or has stopped
        if (dist.TORCHRUN == os.getppid() and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
                and isinstance(error, EXPECTED)
                and not isinstance(error, (dist.RankLost, OSError))):
            time.sleep(0.1)                                  # it ends them all; one still prints
            os.kill(dist.TORCHRUN, signal.SIGTERM)
        os._exit(1)                      # a clean exit can wait for a rank that does not answer


def explain(error):
    """Returns what an exception says to a user: a line, or the traceback of an error of ours."""
    if any(x in repr(error) for x in ("MemoryError", "out of memory", "allocate", "ALLOC_F")):
        return f"out of memory; set --micro-batch lower ({str(error):.160})"
    if isinstance(error, KeyboardInterrupt):
        return "stopped before training began; the same command starts again"
    return str(error) if isinstance(error, EXPECTED) else traceback.format_exc()


if __name__ == "__main__":
    main()
