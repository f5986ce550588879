"""What a step's bookkeeping costs on up to 1,024 ranks, after a million steps.

    python tests/bench/bench_scale.py                 # by a fake process group: a minute
    python tests/bench/bench_scale.py --real 16       # so many ranks of train.py, one is killed

The table is of rank 0 of N, on nodes of 8, with torch's own fake process group: its collectives
return at once, and nothing is sent. So it shows the time of Python and of tensors that grow with
the number of ranks, and how often a step calls the network; not what the network takes. Columns:

    deal      ms: which examples are this rank's (in a thread, ahead of the step)
    count     ms: the masked tokens of all ranks (step 2 of the loop)
    end       ms: losses, seconds and stops of all ranks (step 8)
    log       ms: the line of metrics.jsonl
    calls     collectives of a step beside those of the buckets

--real starts ranks on this machine, many more than it has cores: so seconds say little, and sockets
and memory are what to look at.
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
from types import SimpleNamespace

import beside
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import bert
import data
import dist
import optim
import train

NODE = 8


def median_ms(function):
    """Returns the median time of 50 calls, in ms."""
    function()
    seconds = []
    for _ in range(50):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


class CountingWorld(dist.World):
    """A World that counts its collectives."""
    calls = 0

    def _run(self, collective, *arguments, **options):
        CountingWorld.calls += self.size > 1
        super()._run(collective, *arguments, **options)


def bookkeeping(shards, out, size):
    """Returns (deal, count, end, log) in ms, and the collectives of a step."""
    local = min(size, NODE)
    if size > 1:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    world = CountingWorld(0, size, local, size // local)
    args = train.parse_arguments(["--data", str(shards), "--out", str(out), "--batch",
                                  str(64 * size), "--steps", "2000000", "0"])
    log = train.Log(args.out, active=True)
    log.said_at = time.monotonic() + 1e6             # no lines on the terminal
    model = SimpleNamespace(config=bert.BertConfig.preset("tiny", 8192))
    reducer = SimpleNamespace(wait_seconds=0.1, bytes_sent=0)
    state = train.State(model, reducer, None, None, optim.LossScaler(), step=1_000_007,
                        phase_step=1_000_007, seconds=1e5)
    examples = data.PretrainingData(shards, 64)

    def deal():
        return data.micro_batches(state.step, 64 * size, 64, 0, size)

    batches = [examples.batch(indices).to("cpu") for indices in deal()]

    def count():
        return train.count_masked(world, batches)

    def end():
        return world.sum([1.0, 1.0, time.monotonic(), 0, dist.torchrun_died()])

    def write():
        figures = train.step_figures(args, state, 100.0, 1000.0, 1.0, 0.0)
        log.step(figures | {"lr": 1e-3, "grad_norm": 1.0, "loss_scale": 1.0, "data_share": 0.0})

    found = [median_ms(part) for part in (deal, count, end, write)]
    CountingWorld.calls = 0
    count()
    end()
    if size > 1:
        distributed.destroy_process_group()
    return found, CountingWorld.calls


def sockets_and_memory(pid):
    """Returns (open sockets, resident MB) of a process."""
    sockets = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        sockets += "socket:" in os.readlink(entry)
    status = Path(f"/proc/{pid}/status").read_text()
    return sockets, int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1e3


def real(shards, out, ranks):
    """Runs train.py on many ranks, looks at them when they train, and kills one."""
    began = time.monotonic()
    run = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
         "train.py", "--data", shards, "--out", out], cwd=beside.ROOT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = ""
    while "mlm" not in line:
        line = run.stdout.readline()
        if not line:
            sys.exit(run.stderr.read())
    print(f"{ranks} ranks: first line of a step after {time.monotonic() - began:.0f} s")
    listed = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout
    pids = [int(pid) for pid in listed.split()]
    for pid in pids[0], pids[-1]:
        print("sockets, MB of a rank:", sockets_and_memory(pid))
    os.kill(pids[-1], signal.SIGKILL)
    killed = time.monotonic()
    said = re.findall("^train.py: .*", run.communicate()[1], re.MULTILINE)
    print(f"kill -9 of the last rank: all ended after {time.monotonic() - killed:.1f} s; {said}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--real", type=int, metavar="N", help="start N real ranks instead")
    args = parser.parse_args()
    shards = beside.shards_of()
    with tempfile.TemporaryDirectory() as out:
        if args.real:
            return real(shards, out, args.real)
        print("  ranks    deal   count     end     log   calls")
        for size in args.ranks:
            found, calls = bookkeeping(shards, Path(out, str(size)), size)
            print(f"{size:>7,}" + "".join(f"{ms:>8.2f}" for ms in found) + f"{calls:>8}",
                  flush=True)


if __name__ == "__main__":
    main()
