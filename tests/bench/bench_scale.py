"""What a step's bookkeeping costs on up to 1,024 ranks and over up to a million steps.

    python tests/bench/bench_scale.py                 # by a fake process group: a minute
    python tests/bench/bench_scale.py --real          # 24 ranks of dist.py, 16 of train.py

The first table is of rank 0 of N, with torch's own fake process group: its collectives return at
once, and nothing is sent. So it shows the time of Python and of tensors that grow with the number
of ranks, and how often a step calls the network; not what the network takes. Columns:

    ranks, steps    N ranks on nodes of 8, and the length of the schedule
    deal            ms: which examples are this rank's (in a worker, ahead of the step)
    totals          ms: the counts of all ranks (step 2 of the loop)
    end             ms: losses, stop and save of all ranks (step 8)
    log             ms: figures, metrics.jsonl, minutes left
    sum             ms: totals, end and log, which no worker hides
    calls           collectives of a step beside those of the buckets
    hops            messages one after another in them, in a ring: N - 1 for an all_gather
    requests        to the store on node 0, a second, of all ranks: each looks 5 times for a failure

The second one starts real ranks on this machine, many more than it has cores: so seconds say
little, and sockets and memory are what to look at.
"""
import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
from torch import distributed  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import data  # noqa: E402
import dist  # noqa: E402
import train  # noqa: E402

NODE = 8


def median_ms(function, rounds=50):
    """Returns the median time of a call, in ms."""
    function()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


class CountingWorld(dist.World):
    """A World that counts its collectives."""
    calls = 0

    def _run(self, collective, *arguments, **options):
        CountingWorld.calls += 1
        super()._run(collective, *arguments, **options)


def bookkeeping(shards, folder, size, steps):
    """Returns (deal, totals, end, log) in ms, and the collectives of a step."""
    local = min(size, NODE)
    if size > 1:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    world = CountingWorld(0, size, 0, local, size // local)
    flags = train.parse_arguments(
        ["--data", str(shards), "--out", str(folder / f"{size}-{steps}"), "--batch", str(64 * size),
         "--steps", str(steps), str(steps // 4)])
    plan = train.make_plan(flags, world)
    plan.run = {}
    log = train.Log(plan, active=True)
    log.said_at = time.monotonic() + 1e6             # lines of metrics alone, as in most steps
    phase = plan.phases[0]

    def deal():
        return data.micro_batches(10, phase.global_batch, phase.micro_batch, 0, size)

    examples = data.PretrainingData(shards, phase.seq_len)
    batches = [examples.batch(indices).to("cpu") for indices in deal()]
    state = train.State(None, None, None, None, None, step=steps // 2 + 7, seconds=100.0)

    def totals():
        return train.step_totals(world, batches)

    def end():
        own = [1.0, 1.0, dist.asked_to_stop([]), False]
        table = world.all_gather(torch.tensor(own, dtype=torch.float64))
        return table.sum(0).tolist(), int(table[:, 2].max())

    known = totals()

    def write():
        plan.phase_at(state.step)
        log.step(plan, {
            "step": state.step, "phase": 1, "seq_len": 64, "lr": 1e-3, "grad_norm": 1.0,
            "loss_scale": 1.0, "skipped": 0, "examples": 0, "seconds": 1.0, "memory_gb": 1.0,
            "bucket_seconds": [0.1] * 12, "minutes_left": train.minutes_left(plan, state),
            **train.step_figures(plan, phase, known, 100.0, 10.0, 0.5)})

    found = [median_ms(part) for part in (deal, totals, end, write)]
    CountingWorld.calls = 0
    totals()
    end()
    if size > 1:
        distributed.destroy_process_group()
    return *found, CountingWorld.calls


def fake(shards, sizes, schedules):
    """Prints the first table."""
    print("  ranks      steps    deal  totals     end     log     sum   calls    hops  requests")
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            for steps in schedules:
                deal, totals, end, log, calls = bookkeeping(shards, Path(folder), size, steps)
                print(f"{size:>7,}{steps:>11,}{deal:>8.2f}{totals:>8.2f}{end:>8.2f}{log:>8.2f}"
                      f"{totals + end + log:>8.2f}{calls:>8}{calls * (size - 1):>8,}"
                      f"{5 * size if size > 1 else 0:>10,}", flush=True)


def processes(root):
    """Returns the pids of the ranks under torchrun, its children."""
    listed = subprocess.run(["pgrep", "-P", str(root)], capture_output=True, text=True).stdout
    return [int(pid) for pid in listed.split()]


def sockets_and_memory(pid):
    """Returns (open sockets, resident MB) of a process."""
    sockets = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets += os.readlink(entry).startswith("socket:")
        except OSError:
            pass
    status = Path(f"/proc/{pid}/status").read_text()
    return sockets, int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1e3


def real(name, ranks, arguments, kill):
    """Runs a program on many ranks, looks at them when they train, and kills one if asked to."""
    root = Path(__file__).parents[2]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={ranks}", str(root / name), *arguments]
    began = time.monotonic()
    run = subprocess.Popen(command, cwd=root, env=environment, text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    first = ""
    while "compression " not in first and "phase 1  mlm" not in first:
        first = run.stdout.readline()
        if not first:
            sys.exit(run.stderr.read())
    started = time.monotonic() - began
    time.sleep(5)
    found = [sockets_and_memory(pid) for pid in processes(run.pid)]
    print(f"{name}, {ranks} ranks: first line after {started:.0f} s; sockets a rank "
          f"{min(s for s, _ in found)} to {max(s for s, _ in found)}, MB a rank "
          f"{min(m for _, m in found):.0f} to {max(m for _, m in found):.0f}", flush=True)
    if kill:
        os.kill(processes(run.pid)[-1], signal.SIGKILL)
        killed = time.monotonic()
    _, errors = run.communicate()
    if kill:
        said = [line for line in errors.splitlines() if line.startswith(f"{name}: ")]
        print(f"    kill -9 of the last rank: all ended after {time.monotonic() - killed:.1f} s; "
              f"said: {[line[:90] for line in said]}", flush=True)
    else:
        print(f"    ended after {time.monotonic() - began:.0f} s with status {run.returncode}")


def main():
    parser = argparse.ArgumentParser(description="Measure what grows with ranks and steps.")
    parser.add_argument("--data", default="shards/docs", help="shards (default: %(default)s)")
    parser.add_argument("--real", action="store_true", help="start real ranks instead")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--steps", type=int, nargs="+", default=[1_000, 1_000_000])
    args = parser.parse_args()
    if not args.real:
        fake(args.data, args.ranks, args.steps)
        return
    real("dist.py", 24, ["--mb", "1"], kill=False)
    with tempfile.TemporaryDirectory() as out:
        flags = ["--data", args.data, "--out", f"{out}/run", "--workers", "0"]
        real("train.py", 16, flags, kill=True)


if __name__ == "__main__":
    main()
