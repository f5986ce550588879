"""The open task: a compressor that sends few bytes; the lowest loss wins.

    python tests/course/exercises.py compete mine.py theirs.py

Each file has a function compress(world, value, mean, state, argument), as the comment "Compressors"
in dist.py says; argument is None. It averages the gradients of a small model on two ranks, with
error feedback around it. Whatever it returns, the bytes are counted that it gives to collectives.
Over BUDGET bytes a step it is out of the race. This is no sandbox: it runs your files.
"""
import runpy
import statistics
import tempfile
from pathlib import Path

import data
import dist
from tests.conftest import make_documents
from tests.ranks import start_server
from tests.training import metrics, run

STEPS = 600                  # of a model of 2 x 64
BUDGET = 10_000              # bytes that a rank may send in a step; "none" sends 70 times as many
REFERENCES = "none", "onebit", "topk:0.007"


def enter(world, file):
    """Makes --compression mine that of a file, in this rank."""
    compress = runpy.run_path(file)["compress"]
    collective = dist.World._run

    def compressor(*arguments):
        sent = []

        def counted(self, function, *tensors, **options):
            sent.append(tensors[-1].numel() * tensors[-1].element_size())
            collective(self, function, *tensors, **options)

        dist.World._run = counted
        try:
            compress(*arguments)
        finally:
            dist.World._run = collective
        return sum(sent)

    dist.COMPRESSORS["mine"] = compressor, None, 0


def score(shards, compression, sabotage=None):
    """Returns (the most bytes that a rank sends in a step, loss over the last quarter)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        run(shards, out, "--steps", STEPS, 0, "--compression", compression, "--workers", 0, size=2,
            sabotage=sabotage)
        lines = metrics(out)
    losses = [line["mlm_loss"] for line in lines[-STEPS // 4:]]
    return max(line["bytes_sent"] for line in lines), statistics.mean(losses)


def compete(files):
    """Prints the loss, bytes and name of each, the winner first, then those over the budget."""
    start_server()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder, "shards")
        # The same text everywhere, which a small model soon learns something of
        data.prepare(make_documents(1000), shards, vocab_size=512, shards=2, workers=0)
        for name in REFERENCES:
            rows.append((*score(shards, name), f"--compression {name}"))
        for file in files:
            try:
                rows.append((*score(shards, "mine", (enter, file)), file))
            except Exception as error:               # whatever a competitor's file raises
                print(f"{file}: {str(error).strip().splitlines()[-1]}")
    print(f"{'loss':>6}{'bytes':>12}    of at most {BUDGET:,}")
    for sent, loss, name in sorted(rows, key=lambda row: (row[0] > BUDGET, row[1])):
        print(f"{loss:>6.3f}{sent:>12,}    {name}{' (too many bytes)' * (sent > BUDGET)}")
