"""One training step drawn: backward, buckets and waiting, on each rank.

    torchrun --nproc_per_node=2 tests/tools/timeline.py --model mini --batch 16 --at-step 20
    torchrun --nproc_per_node=2 tests/tools/timeline.py --variant topk --save topk.json
    python tests/tools/timeline.py --draw none.json topk.json --picture steps.svg

The first two train as train.py does with these flags, and end when the step is drawn; if the first
phase ends before, its last step is. No checkpoint is written; without --out nothing is, but for the
demo's shards if they are not there. The third draws what --save has written, a panel for each file,
all with one time axis.

Time runs to the right. It begins on each rank with backward of the step's last micro-batch: clocks
of two ranks are not compared. A rank has a row for its main thread, with the ms of all of it:

    =   backward
    w   in dist.Reducer.finish, which waits for the communication thread

and a row for each bucket, with the MB that the rank has sent of it; 1.3 is bucket 3 of rank 1:

    .   complete, as are those before it; but the communication thread has not begun with it
    #   averaged; this waits for the other ranks, too

One rank averages in `finish`, without a thread. For a variant that has no buckets there is one row
in place of theirs.

What an optimizer exchanges after `finish` (1-bit Adam, ZeRO) is not drawn.

On a GPU the CPU only puts work into a stream. There `=` are the CPU's calls of backward; `w` waits
for the rest of backward as well; and `.` begins with the call that made the bucket complete.
"""
import functools
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import torch

import data
import dist
from tests.variants import common

# Of Okabe and Ito, and a light grey: they differ for colour-blind readers as well.
COLOURS = {"=": "#0072B2", "w": "#E69F00", ".": "#D8D8D8", "#": "#009E73"}
MOMENTS = []                 # when calls that are noted began and ended, of perf_counter()


# ----- Record a step -----

def note(owner, name):
    """Has calls of the method owner.name noted."""
    method = getattr(owner, name)

    def call(*arguments):
        MOMENTS.append(perf_counter())
        method(*arguments)
        MOMENTS.append(perf_counter())

    setattr(owner, name, call)


def rows_of(rank, buckets):
    """Returns the rows of this rank in the step that has just ended, a list of (label, kinds,
    moments): two keys of COLOURS, and in ms where the first begins, the second begins and ends."""
    start, _, waits, ended = MOMENTS[-4:]            # of the last backward, and of `finish`

    def ms(*moments):
        return [1e3 * (moment - start) for moment in moments]

    rows = [(f"rank {rank}  {1e3 * (ended - start):.0f} ms", "=w", ms(start, waits, ended))]
    for number, bucket in enumerate(buckets):
        if getattr(bucket, "began", 0) > start:      # it has noted times, and in this step
            launched = getattr(bucket, "launched", bucket.began)         # one rank launches none
            rows.append((f"  bucket {rank}.{number}  {1e-6 * bucket.bytes_sent:.2f} MB", ".#",
                         ms(launched, bucket.began, bucket.ended)))
    if len(rows) == 1:
        rows.append((f"  rank {rank}: all in finish", ".#", ms(waits, waits, ended)))
    return rows


# ----- Draw steps, {title: rows of all ranks} -----

def draw(steps, picture):
    """Prints steps, on one scale, and draws them into the file `picture` if it is not None."""
    # Columns for a millisecond: the longest step has 46, beside the 24 of a label.
    scale = 46 / max(row[-1][-1] for rows in steps.values() for row in rows)
    for title, rows in steps.items():
        print(f"{title}:  = backward  w waiting  . complete, not begun  # averaging")
        for label, kinds, moments in rows:
            a, b, c = [round(moment * scale) for moment in moments]
            print(f"{label:<24}{' ' * a}{kinds[0] * (b - a)}{kinds[1] * max(c - b, 1)}")
    if picture:
        try:
            draw_picture(steps, picture)
        except ImportError:
            print("no picture without matplotlib: pip install matplotlib")
    sys.stdout.flush()


def draw_picture(steps, path):
    """Draws steps into a file, in a panel each."""
    from matplotlib.figure import Figure
    heights = [len(rows) for rows in steps.values()]
    figure = Figure(figsize=(8, 1.5 + 0.18 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(steps), sharex=True, squeeze=False, height_ratios=heights)
    for axes, (title, rows) in zip(panels.flat, steps.items()):
        axes.set_title(title)
        for label, kinds, moments in rows:
            for kind, begin, end in zip(kinds, moments, moments[1:]):
                axes.barh(label, end - begin, left=begin, color=COLOURS[kind])
        axes.invert_yaxis()
    axes.set_xlabel("ms since backward began")
    # The names of the first four bars: of the first rank, and of its first bucket.
    figure.legend(["backward", "waiting in finish", "bucket complete, not begun", "averaging"],
                  loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=200)


# ----- The program -----

def draw_and_end(options, args, world, log, state):
    """Stands in the place of train.save, and draws the step before it. Collective."""
    if state.counters.step == 1 and options.at_step != "1":
        return               # train.py saves after the first step, too
    rows = sum(world.all_gather_object(
        rows_of(world.rank, getattr(state.reducer, "buckets", []))), [])
    if world.rank == 0:
        if options.save:
            options.save.write_text(json.dumps(rows))
        draw({f"step {state.counters.step}": rows}, options.picture)
    options.folder.cleanup()
    os._exit(0)              # as train.main does


def main():
    """Trains until a step is drawn; or draws those of --draw. Wrong flags are one line, status 2.
    """
    parser = data.Parser(description="Draw a training step, with all flags of train.py.",
                         allow_abbrev=False)
    add = parser.add_argument
    add("--at-step", default="20", help="draw this step (default: %(default)s)")
    add("--variant", nargs="+", default=[], help="first install these files of tests/variants")
    add("--save", type=Path, help="write what is drawn to this file, as JSON")
    add("--draw", type=Path, nargs="+", help="train nothing: draw what --save has written")
    add("--picture", type=Path, help="draw this file as well, .png or .svg, by matplotlib")
    options, train_flags = parser.parse_known_args()
    if options.draw:
        try:
            steps = {path.stem: json.loads(path.read_text()) for path in options.draw}
        except (OSError, ValueError) as error:
            parser.error(f"what --save has written cannot be read: {error}")
        draw(steps, options.picture)
        return

    for name in options.variant:
        try:
            importlib.import_module(f"tests.variants.{name}").install()
        except ModuleNotFoundError:
            train_flags += [f"--variant={name}"]             # train.py refuses it
    note(torch.Tensor, "backward")
    note(dist.Reducer, "finish")
    train.save = functools.partial(draw_and_end, options)
    options.folder = tempfile.TemporaryDirectory()
    sys.argv[1:] = ["--out", options.folder.name, *train_flags, "--save-every", options.at_step]
    common.main()            # which heeds GBPS


if __name__ == "__main__":
    main()
