"""Draws one training step: backward, buckets and waiting, on each rank.

    torchrun --nproc_per_node=2 tests/tools/timeline.py --model mini --batch 16 --at-step 20
    torchrun --nproc_per_node=2 tests/tools/timeline.py --variant topk --save topk.json
    python tests/tools/timeline.py --draw none.json topk.json --picture steps.svg

The first two commands train like train.py with these flags, and end when the step is drawn. If a
phase of more than one step ends before that step, its last step is drawn. No checkpoint is written;
without --out nothing of the run is, except the demo's shards if they are missing. The third command
draws files from --save, with a panel for each file and one time axis for all.

Time runs to the right, on each rank from the start of backward of the step's last micro-batch: the
clocks of two ranks are not compared. A rank has a row for its main thread, with its total in ms:

    =   backward
    w   waiting in dist.Reducer.finish for the communication thread

and a row for each bucket, with the MB that the rank sent for it; 1.3 is bucket 3 of rank 1:

    .   complete, like the buckets before it, but not yet begun by the communication thread
    #   averaging: this rank computes, for example encodes
    ~   averaging: in collectives, which send, or wait for the other ranks

A single rank averages in `finish`, without a thread. A variant without buckets has one row in place
of the bucket rows.

What an optimizer exchanges after `finish` (1-bit Adam, ZeRO) is not drawn.

On a GPU the CPU only puts work into a stream. There, `=` is the CPU's calls of backward, `w`
includes waiting for the rest of backward, `.` begins with the call that completed the bucket, and
`#` includes the collectives.
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
import train  # first: it sets how torch's threads wait

import torch

import data
import dist
from tests.variants import common, slow_network

# The palette of Okabe and Ito, which colour-blind readers can tell apart, and a light grey.
COLOURS = {"=": "#0072B2", "w": "#E69F00", ".": "#D8D8D8", "#": "#CC79A7", "~": "#009E73"}
NAMES = {"=": "backward", "w": "waiting", ".": "complete, not begun", "#": "averaging: computing",
         "~": "in collectives"}
MOMENTS = []                 # perf_counter() at the start and end of each noted call
COLLECTIVES = []             # the same in pairs, for each collective; on CPUs only


# ----- Record a step -----

def note(owner, name):
    """Makes every call of the method owner.name note its start and end in MOMENTS."""
    method = getattr(owner, name)

    def call(*arguments):
        MOMENTS.append(perf_counter())
        method(*arguments)
        MOMENTS.append(perf_counter())

    setattr(owner, name, call)


def note_collective(name):
    """Makes the collective dist.World.name add its start and end to COLLECTIVES."""
    collective = getattr(dist.World, name)

    def call(world, tensor):
        began = perf_counter()
        result = collective(world, tensor)
        if world.size > 1 and world.device.type == "cpu":
            COLLECTIVES.append((began, perf_counter()))
        return result

    setattr(dist.World, name, call)


def rows_of(rank, buckets):
    """Returns this rank's rows of the step that has just ended, a list of (label, kinds, moments).
    kinds: keys of COLOURS. moments: in ms, the start of each kind, and the end of the last."""
    start, _, waits, ended = MOMENTS[-4:]            # of the last backward and `finish`

    def ms(*moments):
        return [1e3 * (moment - start) for moment in moments]

    rows = [(f"rank {rank}  {1e3 * (ended - start):.0f} ms", "=w", ms(start, waits, ended))]
    for number, bucket in enumerate(buckets):
        if getattr(bucket, "began", 0) > start:      # it has times, from this step
            launched = getattr(bucket, "launched", bucket.began)         # not set on one rank
            kinds, moments = averaging(launched, bucket.began, bucket.ended)
            rows.append((f"  bucket {rank}.{number}  {1e-6 * bucket.bytes_sent:.2f} MB", kinds,
                         ms(*moments)))
    if len(rows) == 1:
        kinds, moments = averaging(waits, waits, ended)
        rows.append((f"  rank {rank}: all in finish", kinds, ms(*moments)))
    return rows


def averaging(launched, began, ended):
    """Returns (kinds, moments) of a bucket that was averaged from `began` to `ended`."""
    kinds = ".#"
    moments = [launched, began]
    for start, end in sorted(COLLECTIVES):
        # A broadcast over two levels calls others, which are part of it.
        if moments[-1] <= start and end <= ended:
            kinds += "~#"
            moments += start, end
    return kinds, [*moments, ended]


# ----- Draw steps, {title: rows of all ranks} -----

def draw(steps, picture):
    """Prints steps on one scale, and draws them into the file `picture` unless it is None."""
    # Columns per millisecond: the longest step gets 46, after 24 for the label.
    scale = 46 / max(row[-1][-1] for rows in steps.values() for row in rows)
    for title, rows in steps.items():
        print(f"{title}:", *(f" {kind} {name}" for kind, name in NAMES.items()))
        for label, kinds, moments in rows:
            columns = [round(moment * scale) for moment in moments]
            bar = " " * columns[0]
            for kind, begin, end in zip(kinds, columns, columns[1:]):
                bar += kind * (end - begin)
            if columns[1] == columns[-1]:
                bar += kinds[1]                      # too short to be seen
            print(f"{label:<24}{bar}")
    if picture:
        try:
            draw_picture(steps, picture)
        except ImportError:
            print("no picture without matplotlib: pip install matplotlib")
    sys.stdout.flush()


def draw_picture(steps, path):
    """Draws steps into a file, with a panel for each."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
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
    patches = [Patch(color=COLOURS[kind], label=name) for kind, name in NAMES.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=5, handlelength=1,
                  columnspacing=1)
    figure.savefig(path, dpi=200)


# ----- The program -----

def draw_and_end(options, args, world, log, state):
    """Replaces train.save: draws the step that has just ended, and ends the program. Collective."""
    goes_on = train.progress(args, state.counters)[0] is not None
    if state.counters.step == 1 and options.at_step > 1 and goes_on:
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
    """Trains until a step is drawn, or draws the files of --draw. Wrong flags are one line and
    status 2."""
    parser = data.Parser(description="Draw a training step, with all flags of train.py.",
                         allow_abbrev=False)
    add = parser.add_argument
    add("--at-step", type=train.COUNT, default=20, help="draw this step (default: %(default)s)")
    add("--variant", nargs="+", default=[], help="first install these files of tests/variants")
    add("--save", type=data.path_of, help="write what is drawn to this file, as JSON")
    add("--draw", type=data.path_of, nargs="+", help="train nothing: draw what --save has written")
    add("--picture", type=data.path_of,
        help="draw this file as well, .png, .svg or .pdf, by matplotlib")
    options, train_flags = parser.parse_known_args()
    if options.picture and options.picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        parser.error("argument --picture: must end in .png, .svg or .pdf")
    if options.draw:
        try:
            steps = {str(path.with_suffix("")): json.loads(path.read_text())
                     for path in options.draw}
            draw(steps, options.picture)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            parser.error("no picture of what --save has written: "
                         f"{type(error).__name__}: {error}")
        return

    for name in options.variant:
        try:
            variant = importlib.import_module(f"tests.variants.{name}")
        except ModuleNotFoundError:
            variant = None
        if hasattr(variant, "install"):
            variant.install()
        else:
            train_flags += [f"--variant={name}"]             # train.py will refuse it
    common.use_network()
    for name in slow_network.SENT:
        note_collective(name)
    note(torch.Tensor, "backward")
    note(dist.Reducer, "finish")
    train.save = functools.partial(draw_and_end, options)
    options.folder = tempfile.TemporaryDirectory()
    sys.argv[1:] = ["--out", options.folder.name, *train_flags,
                    "--save-every", str(options.at_step)]
    train.main()


if __name__ == "__main__":
    main()
