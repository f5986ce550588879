"""Short runs of train.py on a few ranks, for tests of train.py and of the variants."""
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

import bert
import data
import dist
import optim
import train
from tests.ranks import run_ranks, script

# Accumulation; two phases, whose batches do not divide evenly among 2 or 4 ranks, nor 7 among 3.
SHORT = "--steps 8 6 --batch 9 7 --micro-tokens 128 --save-every 3".split()
# More steps than any test waits for; each has many micro-batches, so a signal comes within a step.
LONG = "--batch 128 --micro-tokens 256 --steps 5000 --save-every 5000 --precision fp32".split()
# The shortest whole program.
LITTLE = "--steps 4 2 --batch 8 --precision fp32".split()
TORCHRUN = [find_spec("torch.distributed.run").origin,
            *"--standalone --max-restarts=1 --nproc_per_node=2 --no-python".split()]
# train.py in a shell that stays alive, so that torchrun is not its parent.
SHELL = ["bash", "-c", '"$@"; exit $?', "bash", sys.executable, "train.py"]
FAILS = """
import os, train
save = train.save

def fail(args, world, log, state):
    lives_before = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if (state.counters.step, world.rank, lives_before) == (2, 1, "0"):
        raise RuntimeError("CUDA error: in a checkpoint")
    save(args, world, log, state)

train.save = fail
train.EVAL_EXAMPLES = 64
train.main()
"""


def metrics(out, kind="train"):
    """Returns the lines of one kind in a run's metrics.jsonl; if a step has two, the last one."""
    found = {}
    for text in (out / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == kind:
            found[line.get("step", len(found))] = line
    return list(found.values())


def column(out, *names):
    """Returns the values of these fields, step by step, in one list."""
    return [line[name] for line in metrics(out) for name in names]


def shrink(patch=setattr):
    """Makes training in this process small enough for a CPU without bf16 instructions: 2 layers of
    width 64, half the lengths, few held-out examples. The initial weights are as small as those of
    a wider model, so that gradients of few examples fit in fp16."""
    recipe = optim.RECIPES["demo"]
    short = [dataclasses.replace(phase, seq_len=phase.seq_len // 2) for phase in recipe["phases"]]
    patch(optim, "RECIPES", optim.RECIPES | {"demo": recipe | {"phases": short}})
    patch(train, "EVAL_EXAMPLES", 16)
    preset = bert.BertConfig.preset
    patch(bert, "PRESETS", bert.PRESETS | {"tiny": (2, 64)})
    patch(bert.BertConfig, "preset", lambda *arguments, **changes: dataclasses.replace(
        preset(*arguments, **changes), init_std=0.04))


def args_of(*argv):
    """Returns train.py's arguments for a command line."""
    return train.parse_arguments([str(word) for word in argv])


def built(shards, *flags):
    """Returns train.py's arguments for some flags and the State before the first step, on one rank;
    in fp32, unless the flags set a precision."""
    args = args_of("--data", shards, "--precision", "fp32", *flags)
    train.prepare_run(args, dist.World())
    return args, train.build(args, dist.World())


def training(world, argv, sabotage):
    """Trains on one rank of several, after `sabotage` (function, *arguments), if any, has patched
    this process. Returns a checksum of the rank's masters: the sum of their bits as integers."""
    shrink()
    train.STARTED = time.monotonic()             # was set when the ranks' server imported train
    masters = {}
    restore = train.restore

    def noted_restore(args, world, log, state):
        masters.update(state.masters)
        restore(args, world, log, state)

    train.restore = noted_restore
    if sabotage:
        function, *arguments = sabotage
        function(world, *arguments)
    train.train(args_of(*argv), world)
    return sum(int(master.view(torch.int32).sum()) for master in masters.values())


def run(shards, out, *argv, size=1, sabotage=None, check=True, gpu=False):
    """Returns what `training` returns on each of `size` ranks, in order of rank.

    With check=False, the outcome of a failed rank is its exception, that of a killed rank is None.
    """
    out.parent.mkdir(exist_ok=True)
    arguments = ["--data", shards, "--out", out, *argv]
    return run_ranks(training, size, out.parent, arguments, sabotage, check=check, gpu=gpu)


def torchrun(folder, *words):
    """Returns a process that runs a program on two ranks under torchrun; the caller starts it. The
    run's --out is folder/out."""
    return script(folder, *TORCHRUN, *words, "--out", folder / "out")


def wait_for(condition, what):
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, f"after 200 s {what}"
        time.sleep(0.05)


def wait_for_a_step(out):
    wait_for(lambda: steps_kept(out), f"no step is saved in {out}")


def alive(words):
    """Returns the ids of the processes whose command lines contain these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):                     # it has just ended
            if words in path.read_text():
                found.append(int(path.parent.name))
    return found


def start_and_kill(process, out):
    """Starts a torchrun, kills it after a step is saved, and waits until its ranks have ended."""
    process.start()
    try:
        wait_for_a_step(out)
        process.kill()
        wait_for(lambda: not alive(str(out)), "ranks still train, though their torchrun was killed")
    finally:
        process.kill()
        for pid in alive(str(out)):
            with contextlib.suppress(ProcessLookupError):      # it has just ended
                os.kill(pid, signal.SIGKILL)


def steps_kept(out):
    """Returns the steps of a run's checkpoints, from the first to the last."""
    return sorted(train.checkpoints_in(out))


def last_state(out):
    """Returns the content of a run's newest checkpoint."""
    return torch.load(train.checkpoints_in(out)[steps_kept(out)[-1]], weights_only=True)


def random_batch(vocabulary, examples=8, length=128, device="cpu"):
    """Returns a batch of random tokens, 15 % masked, as tensors and in the form of
    data.PretrainingData, but without padding: `examples` times `length` is a multiple of 64."""
    generator = np.random.default_rng(0)
    rows = examples * length
    tokens = generator.integers(5, vocabulary, rows)
    positions = np.tile(np.arange(length), examples)
    masked_rows = np.sort(generator.permutation(rows)[:rows * 3 // 20])
    bounds = np.array([*range(0, rows + 1, length), rows], dtype=np.int32)
    return data.Batch(
        tokens=tokens,
        segments=(positions >= length // 2).astype(np.int64),
        positions=positions,
        masked_rows=masked_rows,
        labels={"mlm": tokens[masked_rows], "nsp": generator.integers(0, 2, examples)},
        bounds=bounds,
        lengths=np.diff(bounds).astype(np.int64)).to(device)


def padded(batch):
    """Returns a Batch as keyword arguments of transformers' model, with each example padded to the
    longest."""
    labels = torch.full_like(batch.tokens, data.IGNORED)
    kept = batch.labels["mlm"] != data.IGNORED
    labels[batch.masked_rows[kept]] = batch.labels["mlm"][kept]

    def rows(values, fill=0):
        return pad_sequence(values.split(batch.lengths.tolist())[:-1], True, fill)

    return {"input_ids": rows(batch.tokens), "token_type_ids": rows(batch.segments),
            "attention_mask": rows(torch.ones_like(batch.tokens)),
            "labels": rows(labels, data.IGNORED), "next_sentence_label": batch.labels["nsp"]}


def losses_of(logits, batch):
    """Returns the sum of each task's losses, {task: tensor}."""
    return {task: train.loss_sum(logits[task], labels) for task, labels in batch.labels.items()}


def assert_same(a, b, where="the checkpoint"):
    """Asserts that two checkpoints are equal, tensors bit for bit, except for their seconds. where:
    names b in the message."""
    assert type(a) is type(b), f"{where} is of {type(b)}, not {type(a)}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where} has the entries {list(b)}, not {list(a)}"
        tensors = [key for key in a if torch.is_tensor(a[key])]
        off = [key for key in tensors if not torch.equal(a[key], b[key])]
        assert not off, (
            f"{where}: {len(off)} of {len(tensors)} tensors have wrong bits, the first is {off[0]} "
            "(if all have, the steps differed; if only some have, what happened to these?)")
        for key in a.keys() - {"seconds", *tensors}:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert_same(dict(enumerate(a)), dict(enumerate(b)), where)
    else:
        assert a == b, f"{where} is {b}, not {a}: not saved, not restored, or counted differently"


# ----- Sabotage: patches of a rank's process, see `training` -----

def on_own_disk(world):
    """Gives each rank its own disk, as on a node of its own: its own folder --out."""
    parse = train.parse_arguments
    train.parse_arguments = lambda argv: parse([*argv, "--out", f"{argv[3]}{world.rank}"])


def spoil(world, rank, part, value):
    """Sets one weight or moment of one rank to `value` after each update."""
    step = optim.LAMB.step

    def patched(self):
        step(self)
        if world.rank == rank:
            p, state = next(iter(self.state.items()))
            ({"weight": p} | state)[part].view(-1)[0] = value

    optim.LAMB.step = patched


def fake_clock(world, seconds_of_step, patch=setattr):
    """Sets a clock on which only steps take time, seconds_of_step(step, rank); now it is 0."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, perf_counter=lambda: clock.now,
                            sleep=lambda seconds: threading.Event().wait())
    update = optim.LossScaler.update

    def update_slowly(scaler, overflow, step):
        clock.now += seconds_of_step(step - 1, world.rank)
        return update(scaler, overflow, step)

    patch(optim.LossScaler, "update", update_slowly)     # once a step, before the clock is read
    patch(train, "STARTED", 0.0)
    patch(train, "time", clock)


def by_the_clock(world, killed_in=None):
    """Makes each step take 1 s. At the end of step `killed_in`, before anything of it is saved, the
    last rank is killed with SIGKILL."""
    fake_clock(world, lambda step, rank: 1.0)
    write = train.Log.step

    def patched(log, figures):
        if figures["step"] == killed_in and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        write(log, figures)

    train.Log.step = patched


def power_fails(world):
    """After each save the power fails: checkpoints that os.fsync has not put on disk are lost."""
    synced = set()           # (inode, which no rename changes; length) of each file
    fsync = os.fsync
    save = train.save

    def noted(file):
        fsync(file)
        status = os.stat(getattr(file, "fileno", lambda: file)())
        synced.add((status.st_ino, status.st_size))

    def patched(args, world, log, state):
        save(args, world, log, state)
        for path in train.checkpoints_in(args.out).values():
            if (path.stat().st_ino, path.stat().st_size) not in synced:
                path.unlink()

    os.fsync = os.fdatasync = noted
    train.save = patched
