"""How long does a training step take over a slow link, with each compressor and with torch's DDP?

    sudo python tests/bench/bench_network.py               # Linux, iproute2; 10 minutes
    sudo python tests/bench/bench_network.py --rates 100mbit --methods none onebit --beside ../old
    sudo python tests/bench/bench_network.py --ranks 2     # two levels: the link is between nodes
    sudo python tests/bench/bench_network.py --methods one-by-one buckets-after none ring
    sudo python tests/bench/bench_network.py --rates 100mbit gbps=0.1 --methods none int8 onebit

hosts.py makes two hosts of one machine. On each host one rank, or --ranks of them, takes --steps
steps of `mini`, 8 x 128. Rates and methods take turns, so that all meet the same noise.

    ms        time of a step on the slowest rank, median over the steps
    wait      time of averaging after backward, the Reducer's wait_seconds, likewise in ms
    of ddp    ms divided by DDP's at the same rate
    MB        sent by the first host's interface in a step, all overhead included

one-by-one and buckets-after are the first rungs of tests/variants/one_by_one.py's ladder; ring is
none over ring.py. A rate such as gbps=0.1 uses slow_network.py over a link without a limit, and
does not slow DDP.
"""
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import beside
import hosts
import torch
import torch.nn.functional as F
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import bert
import dist
import optim
from tests.training import random_batch
from tests.variants import buckets_after, one_by_one, ring, slow_network

with contextlib.suppress(ImportError):             # older checkouts have it in dist.py
    from tests.variants import onebit
    onebit.install()
METHODS = ["ddp", *dist.COMPRESSORS]
REDUCERS = {                 # only if --methods names them
    "one-by-one": one_by_one.OneByOne,
    "buckets-after": buckets_after.BucketsAfter,
    "ring": lambda model, world: dist.Reducer(model, over_ring(world))}
VOCABULARY = 8192


# ----- One rank: steps of every method in turn -----

class Loss(torch.nn.Module):
    """A model and its loss, as a module that DistributedDataParallel can wrap."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        logits = self.model(batch)
        return sum(F.cross_entropy(logits[task], labels) for task, labels in batch.labels.items())


class RingWorld(dist.World):
    """A World that sums around a ring, for a single method."""

    def _run(self, collective, *arguments, **options):
        if collective is distributed.all_reduce:
            collective = ring.sum_around_ring
        super()._run(collective, *arguments, **options)


def over_ring(world):
    """Returns a RingWorld of the same ranks."""
    levels = world.levels and [over_ring(level) for level in world.levels]
    return RingWorld(**vars(world) | {"levels": levels})


class Method:
    """A way of averaging gradients, with its own model and optimizer."""

    def __init__(self, name, world):
        torch.manual_seed(0)
        model = bert.BertForPreTraining(bert.BertConfig.preset("mini", VOCABULARY, dropout=0.0))
        self.loss = Loss(model)
        self.reducer = None
        self.optimizer = optim.LAMB(model.parameters())
        if name in REDUCERS:
            self.reducer = REDUCERS[name](model, world)
            return
        if name != "ddp":
            self.reducer = dist.Reducer(model, world, compression=name)
            return
        self.loss = DistributedDataParallel(self.loss)

    def step(self, batch):
        (self.reducer or self.optimizer).zero_grad()
        self.loss(batch).backward()
        if self.reducer:
            self.reducer.finish()
            self.reducer.commit(True)
        self.optimizer.step()


def sent_by_interface():
    """Returns the bytes that this host has sent over the link."""
    return int(Path("/sys/class/net/link0/statistics/tx_bytes").read_text())


def rank_main(args):
    """Runs as one rank. Returns the rows on rank 0, for beside.py to print as JSON."""
    torch.set_num_threads(1)
    beside.keep_freed_memory()
    world = dist.init(300)
    batch = random_batch(VOCABULARY)
    methods = {name: Method(name, world) for name in args.methods}
    slow_network.slow_down()
    seconds = {key: [] for key in itertools.product(args.rates, methods)}
    waits = {key: [] for key in seconds}
    sent = {}
    for number, rate in itertools.product(range(args.steps + 1), args.rates):
        limit, _, gbps = rate.partition("gbps=")
        slow_network.GBPS = float(gbps or "inf")
        if world.rank % args.ranks == 0:
            hosts.limit(limit or "none")
        for name, method in methods.items():
            for _ in range(3 if number == 0 else 1):
                method.step(batch)       # connections adapt to the rate, caches get warm
            world.barrier()
            before = sent_by_interface()
            began = time.perf_counter()
            method.step(batch)
            taken = time.perf_counter() - began, getattr(method.reducer, "wait_seconds", 0)
            slowest = [max(each) for each in zip(*world.all_gather_object(taken))]
            if number > 0:
                seconds[rate, name].append(slowest[0])
                waits[rate, name].append(slowest[1])
            sent[rate, name] = sent_by_interface() - before
    figures = {}
    for (rate, name), found in seconds.items():
        figures[f"{rate}, {name}, ms"] = 1e3 * statistics.median(found)
        if name != "ddp":
            figures[f"{rate}, {name}, wait"] = 1e3 * statistics.median(waits[rate, name])
        if "ddp" in args.methods:
            peer = statistics.median(seconds[rate, "ddp"])
            figures[f"{rate}, {name}, of ddp"] = statistics.median(found) / peer
        figures[f"{rate}, {name}, MB"] = 1e-6 * sent[rate, name]
    return figures if world.rank == 0 else None


# ----- The two hosts -----

def once(args):
    if "RANK" in os.environ:
        return rank_main(args)
    processes = []
    with hosts.two_hosts(), contextlib.ExitStack() as stack:
        for rank in range(2 * args.ranks):
            node, local_rank = divmod(rank, args.ranks)
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(2 * args.ranks),
                "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(args.ranks),
                "MASTER_ADDR": f"{hosts.ADDRESS}1", "MASTER_PORT": "29511",
                "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            processes.append(subprocess.Popen(
                [*hosts.INSIDE[node], sys.executable, *sys.argv], env=environment,
                stdout=subprocess.PIPE, text=True))
            stack.callback(processes[-1].kill)           # ranks only note a Ctrl-C
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank failed; what it said stands above")
    return json.loads(outputs[0].splitlines()[-1])


def flags(add):
    add("--rates", nargs="+", default=["none", "1gbit", "100mbit"],
        help="as tc spells them, or gbps=N")
    add("--methods", nargs="+", default=METHODS, choices=[*METHODS, *REDUCERS])
    add("--ranks", type=int, default=1, help="in each of the two hosts")
    add("--steps", type=int, default=9)


if __name__ == "__main__":
    beside.main(once, flags, rounds=1)
