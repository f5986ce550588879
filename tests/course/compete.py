"""The open task: write a compressor that sends few bytes; the lowest loss wins.

    python tests/course/exercises.py compete mine.py theirs.py

Each file has a function compress(world, value, state) -> (mean, residual, next state, bytes), like
the `exchange` of dist.ErrorFeedback. It averages the gradients of a small model on two ranks, with
error feedback around it; the loss is a mean over SEEDS. The bytes that count are those given to
torch.distributed, whatever the function returns. A file that sends more than BUDGET bytes in a step
is out of the race. This is no sandbox: it runs your files, and only reading a file shows whether it
sends in another way.
"""
import functools
import re
import runpy
import statistics
import tempfile
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

import data
import dist
from tests.conftest import make_documents
from tests.ranks import run_ranks, start_server
from tests.training import column, training
from tests.variants import common

STEPS = 600                  # of a model with 2 layers of width 64
SEEDS = 0, 1                 # of weights, examples and masks
SECONDS = 600                # for the steps of a seed; the baseline needs about a minute
BUDGET = 1_000               # bytes that a rank may send in a step; "none" sends 700 times as many


def count_into(sent):
    """Makes torch's process groups append to `sent` the bytes that this rank gives them to send."""
    group = torch.distributed.ProcessGroup
    for name, collective in [*vars(group).items()]:
        if re.search("reduce|gather|all_?to|scatter|broadcast|send", name):
            setattr(group, name, functools.partialmethod(counted, collective, sent))


def counted(self, collective, sent, *arguments):
    """Calls a collective of a process group and notes its bytes in `sent`."""
    tensors = []
    for argument in arguments:           # the last one with tensors is what this rank gives
        tensors = list(filter(torch.is_tensor, tree_leaves(argument))) or tensors
    # In an all-to-all a rank keeps its own part, half of the rows. An all-reduce over two ranks
    # sends as many bytes as the tensor has.
    share = 2 if re.search("all_?to", collective.__name__) else 1
    sent.append(sum(tensor.nbytes for tensor in tensors) // share)
    return collective(self, *arguments)


def enter(world, file):
    """Makes --compression mine use the function of a file, on this rank."""
    sent = []
    count_into(sent)
    compress = runpy.run_path(file)["compress"]

    def compressor(world, value, state):
        sent.clear()
        mean, residual, next_state, _ = compress(world, value, state)
        most = max(world.all_gather_object(sum(sent)))         # of the rank that sends most
        return mean, residual, next_state, most

    dist.COMPRESSORS["mine"] = lambda: dist.ErrorFeedback(compressor)
    common.tell_shapes()


def score(shards, compression, sabotage=None):
    """Returns (the most bytes that a rank sends in a step, mean loss of the last quarter)."""
    bytes_sent = []
    losses = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out")
            flags = ["--data", shards, "--out", out, "--steps", STEPS, 0, "--seed", seed,
                     "--compression", compression]
            run_ranks(training, 2, out.parent, flags, sabotage, timeout=SECONDS / 2)
            bytes_sent += column(out, "bytes_sent")
            losses += column(out, "mlm_loss")[-STEPS // 4:]
    return max(bytes_sent), statistics.mean(losses)


def compete(files):
    """Prints the loss, bytes and name of each file, the winner first, those over budget last."""
    start_server()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder, "shards")
        # The same text on every machine. A small model soon learns something from it.
        data.prepare(make_documents(1000), shards, vocab_size=512, shards=2)
        for name in "none", "int8":
            rows.append((*score(shards, name), f"--compression {name}"))
        for file in files:
            try:
                rows.append((*score(shards, "mine", (enter, str(file))), file))
            except Exception as error:               # whatever a competitor's file raises
                print(f"{file}: {(str(error).strip() or repr(error)).splitlines()[0]}")
    print(f"{'loss':>6}{'bytes':>12}    of at most {BUDGET:,}")
    for sent, loss, name in sorted(rows, key=lambda row: (row[0] > BUDGET, row[1])):
        print(f"{loss:>6.3f}{sent:>12,}    {name}{' (too many bytes)' * (sent > BUDGET)}")
