"""Whole training steps over a slow link: the Reducer with each compressor beside torch's DDP.

    sudo python tests/bench/bench_network.py   # Linux, iproute2; 15 minutes
    sudo python tests/bench/bench_network.py --rates 100mbit --vocab 8192 --methods ddp onebit

Two hosts are made of one machine: two network namespaces, a veth pair between them and a token
bucket (`tc ... tbf`) at each end. In each of them one rank (or --ranks) takes a step of `mini` with
every method in turn, at every rate in turn, round after round, so that all meet the same noise.
Milliseconds are medians of the slowest rank; bytes are what left the first host's interface, all
overhead included, and what the Reducers of that host counted; `hidden` is the fraction of the
communication that backward covered, without the bucket of the tied embedding, which is complete
only when backward ends.
"""
import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

import bert  # noqa: E402
import dist  # noqa: E402
import optim  # noqa: E402
from tests.training import random_batch  # noqa: E402
from tests.variants import powersgd  # noqa: E402

powersgd.register()


def ddp_powersgd(model):
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


DDP = {"ddp": lambda model: None,
       "ddp-fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
       "ddp-powersgd": ddp_powersgd}
METHODS = [*DDP, *dist.COMPRESSORS]
COLUMNS = "method", "ms", "of ddp", "of unlimited", "MB wire", "MB count", "waiting", "hidden"
ADDRESS = "10.86.75."            # .1 and .2 are the two hosts; nothing else sees them


# ----- One rank: steps of every method in turn -----

class Method:
    """A model of its own, its way of averaging gradients, its optimizer."""

    def __init__(self, name, world, vocabulary):
        torch.manual_seed(0)
        self.model = bert.BertForPreTraining(
            bert.BertConfig.preset("mini", vocabulary, dropout=0.0))
        self.reducer = None
        if name in DDP:
            # With several buckets, its PowerSGD over Gloo starts the second all-reduce of each in
            # whatever order the first ones end, and the ranks wait for each other: it gets one
            size = 1000 if name == "ddp-powersgd" else None
            self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=size)
            DDP[name](self.ddp)
        else:
            self.reducer = dist.Reducer(self.model, world, compression=name)
        self.optimizer = optim.LAMB(self.model.parameters())

    def step(self, batch):
        (self.reducer or self.optimizer).zero_grad()
        losses = (self.model if self.reducer else self.ddp)(batch)
        (losses.mlm_sum / len(batch.labels) + losses.nsp_sum / len(batch.pair_labels)).backward()
        if self.reducer:
            self.reducer.finish()
            self.reducer.commit(True)
        self.optimizer.step()


def sent_by_interface():
    """Returns the bytes that have left this namespace over the link."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("link"):
            return int(line.split(":")[1].split()[8])
    return 0


def limit(rate):
    """Limits what leaves this namespace to a rate as "100mbit"; "none" lifts the limit."""
    link = "dev", "link0", "root"
    subprocess.run(["tc", "qdisc", "del", *link], stderr=subprocess.DEVNULL)
    if rate != "none":
        burst = "128kb" if "gbit" in rate else "32kb"          # 1 ms of 1 Gb/s
        run("tc", "qdisc", "add", *link, "tbf", "rate", rate, "burst", burst, "latency", "100ms")


def measure_step(method, world, batch):
    """Returns a dict of what one step took on the slowest rank, and sent from the first host."""
    world.sum([0])
    before, began = sent_by_interface(), time.perf_counter()
    method.step(batch)
    seconds = max(world.all_gather_object(time.perf_counter() - began))  # nothing is on its way now
    row = {"ms": 1e3 * seconds, "wire": sent_by_interface() - before}
    if reducer := method.reducer:
        *others, last = reducer.bucket_seconds
        exposed = max(0.0, reducer.wait_seconds - last)
        row["count"] = sum(world.all_gather_object(reducer.bytes_sent)[:world.size // 2])
        row["waiting"] = reducer.wait_seconds / seconds
        row["hidden"] = 1 - min(1.0, exposed / max(sum(others), 1e-9))
    return row


def worker(args):
    """Runs as one rank; rank 0 prints the medians of every rate and method as JSON."""
    torch.set_num_threads(1)
    with contextlib.closing(dist.init(300)) as world:
        methods = {name: Method(name, world, args.vocab[0]) for name in args.methods}
        batch = random_batch(args.vocab[0])
        for method in list(methods.values()) * args.warmup:
            measure_step(method, world, batch)
        rows = {rate: {name: [] for name in methods} for rate in args.rates}
        for _, rate in itertools.product(range(args.steps), args.rates):
            if world.rank % args.ranks == 0:
                limit(rate)
            for _ in range(3):                                 # connections find the new rate
                world.all_reduce(torch.zeros(1 << 17))
            for name, method in methods.items():
                method.step(batch)                             # the caches are this method's again
                rows[rate][name].append(measure_step(method, world, batch))
        for method in methods.values():
            if method.reducer:
                method.reducer.close()
    medians = {rate: {name: {key: statistics.median(row[key] for row in steps) for key in steps[0]}
                      for name, steps in table.items()} for rate, table in rows.items()}
    if world.rank == 0:
        print(json.dumps(medians), flush=True)


# ----- The two hosts -----

def run(*command):
    subprocess.run(command, check=True)


def make_hosts(names):
    """Makes two namespaces of these names, joined by a link."""
    for name in names:
        run("ip", "netns", "add", name)
    run("ip", "link", "add", "link0", "netns", names[0],
        "type", "veth", "peer", "link0", "netns", names[1])
    for number, name in enumerate(names, 1):
        inside = "ip", "-n", name
        run(*inside, "address", "add", f"{ADDRESS}{number}/24", "dev", "link0")
        run(*inside, "link", "set", "link0", "mtu", "9000", "up")
        run(*inside, "link", "set", "lo", "up")


def measure(names, args, vocabulary, local_size):
    """Returns {rate: {method: medians}} of ranks in the two hosts; `local_size` of them are told
    that they are one node, so that with all of them there is one level."""
    processes = []
    for rank in range(2 * args.ranks):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(2 * args.ranks),
            "LOCAL_RANK": str(rank % local_size), "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_RANK": str(rank // local_size), "MASTER_ADDR": f"{ADDRESS}1",
            "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = ["ip", "netns", "exec", names[rank // args.ranks], sys.executable, __file__,
                   "--vocab", str(vocabulary), "--methods", *args.methods, "--rates", *args.rates,
                   "--steps", str(args.steps), "--warmup", str(args.warmup),
                   "--ranks", str(args.ranks), "--worker"]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,
                                          text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("bench_network.py: a rank failed; what it said stands above")
    return json.loads(outputs[0].splitlines()[-1])


def show(medians, plain):
    """Prints one table; the ratios are to plain DDP at this rate, and without a limit."""
    print("".join(f"{column:>14}" for column in COLUMNS))
    for name, row in medians.items():
        cells = [name, f"{row['ms']:.0f}"]
        for ddp in medians.get("ddp"), plain:
            cells.append(f"{row['ms'] / ddp['ms']:.2f}" if ddp else "-")
        cells.append(f"{row['wire'] / 1e6:.3f}")
        if "count" in row:
            cells += [f"{row['count'] / 1e6:.3f}", f"{row['waiting']:.0%}", f"{row['hidden']:.0%}"]
        print("".join(f"{cell:>14}" for cell in cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rates", nargs="+", default=["none", "1gbit", "100mbit"], help="as tc spells them")
    add("--vocab", nargs="+", type=int, default=[8192, 30522])
    add("--methods", nargs="+", default=METHODS, choices=METHODS)
    add("--ranks", type=int, default=1, help="in each of the two hosts")
    add("--steps", type=int, default=9, help="rounds, of which the median counts")
    add("--warmup", type=int, default=4, help="rounds before; DDP packs its buckets anew in them")
    add("--json", metavar="FILE", help="write all medians there as well")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    if os.geteuid():
        sys.exit("bench_network.py: network namespaces need root")
    names, results = [f"bench{os.getpid()}{side}" for side in "ab"], []
    # Two ranks in each host are measured twice: as the nodes they are, and as if all were one
    local_sizes = {args.ranks, 2 * args.ranks if args.ranks > 1 else 1}
    try:
        make_hosts(names)
        for vocabulary, local_size in itertools.product(args.vocab, sorted(local_sizes)):
            levels = "two levels" if 1 < local_size == args.ranks else "one level"
            tables = measure(names, args, vocabulary, local_size)
            for rate, medians in tables.items():
                print(f"\nlink {rate}, vocabulary {vocabulary:,}, 2 hosts x {args.ranks} rank(s), "
                      f"{levels}, torch {torch.__version__}, {os.cpu_count()} cores")
                show(medians, tables.get("none", {}).get("ddp"))
            results.append({"vocabulary": vocabulary, "levels": levels, "rates": tables})
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name])
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
