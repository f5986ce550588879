"""Ranks, and gradients averaged over them while backward still runs.

    torchrun --nproc_per_node=2 dist.py          # what averaging costs with each compressor

A rank is one process of the training, a node a machine with some of them. Each rank has the whole
model and computes the gradients of its own examples; all ranks then step with the mean of these.
`average_gradients` is the simple form, `Reducer` the fast one (Li et al., "PyTorch Distributed",
arXiv 2006.15704, section 3.2). Of the compressors, `dense` is enough at first; each of the others
can be read alone: it is lossy, and keeps what it did not send (the residual) to add it to what it
sends in the next step (error feedback).

A collective is a call that all ranks of a process group make together, such as a sum over them; if
there is only one rank it does nothing. Two libraries move the data: NCCL between GPUs, Gloo between
CPUs. Ranks find each other by a store, a small dictionary that all share, kept by a process of node
0. When a rank dies or hangs, the others get an error in their next collective. They then ask
through the store who is alive, and one of them says which ranks are lost (section Failures). All
processes end, and torchrun may start them again. Only this file imports torch.distributed.

In comments on shapes: N ranks (bert.py and data.py say N for rows), n elements of a bucket.
"""
import argparse
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import itertools
import math
import os
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import distributed


class DistError(Exception):
    """Why ranks cannot train, or cannot train on; the message says what to do."""


class RankLost(DistError):
    """A rank died, did not answer in time or never came. After it call `leave`, at the end of this
    file, not sys.exit: a clean exit can wait for the lost rank."""


# ----- Ranks and collectives -----

# torch 2.13 has given it another name.
ALL_GATHER = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclasses.dataclass(frozen=True)
class World:
    """This process among all of them, and the collectives: calls that every rank makes together.

    Numbers and objects go as CPU tensors, and so over Gloo, even where there are GPUs: a rank that
    died is then an exception in the training loop, while NCCL would abort the process.
    """
    rank: int = 0            # among all processes
    size: int = 1
    local_rank: int = 0      # among those of this node
    local_size: int = 1
    nodes: int = 1
    device: torch.device = torch.device("cpu")
    group: object = None     # torch's process group; None is all processes
    levels: tuple = ()       # the Worlds inside and between nodes, see `two_levels`

    def sum(self, values):
        """Returns the sums over all ranks of a list of numbers, as floats: integers are exact below
        2^53, NaN and inf survive, and the answer is the same on every rank."""
        total = torch.tensor(values, dtype=torch.float64)
        self.all_reduce(total)
        return total.tolist()

    def max(self, value):
        """Returns the largest of all ranks' numbers, as a float."""
        return float(self.all_gather(torch.tensor(value, dtype=torch.float64)).max())

    def all_reduce(self, tensor):
        """Sums a tensor over all ranks, in place on every rank."""
        self._run(distributed.all_reduce, tensor)

    def barrier(self):
        """Returns when all ranks have called it."""
        self.sum([0])

    def reduce(self, tensor, target):
        """Sums a tensor over all ranks, in place on rank `target`; elsewhere it is undefined."""
        self._run(distributed.reduce, tensor, group_dst=target)

    def broadcast(self, tensor, source=0):
        """Overwrites a tensor with that of rank `source`, in place. Its shape is the same there."""
        if self.levels and source == 0 and tensor.is_cpu:
            # First between the nodes, then inside them: else a node would get several copies.
            inner, outer = self.levels
            if inner.rank == 0:
                outer.broadcast(tensor)
            inner.broadcast(tensor)
        else:
            self._run(distributed.broadcast, tensor, group_src=source)

    def all_gather(self, tensor):
        """Returns every rank's tensor, stacked in order of rank: (...) -> (size, ...)."""
        gathered = torch.stack([tensor] * self.size)     # with one rank already the answer
        self._run(ALL_GATHER, gathered.view(-1), tensor.view(-1))
        return gathered

    def all_to_all(self, rows):
        """Returns (size, ...) from rows (size, ...): rank r gets row r of every rank."""
        received = rows.clone()                          # with one rank already the answer
        self._run(distributed.all_to_all_single, received, rows)
        return received

    def broadcast_object(self, value):
        """Returns rank 0's value (any picklable object), on every rank. For small things: what is
        pickled takes four times its memory. Large tensors go by `broadcast`."""
        values = [value]
        self._run(distributed.broadcast_object_list, values, group_src=0)
        return values[0]

    def all_gather_object(self, value):
        """Returns the list of every rank's value (any small picklable object), in order of rank."""
        values = [value] * self.size
        self._run(distributed.all_gather_object, values, value)
        return values

    def on_all_ranks(self, expected, job):
        """Returns job(), called on every rank. If it raises one of the exceptions `expected` (a
        tuple) on a rank, all ranks raise that exception: else they would wait for the failed rank
        in their next collective."""
        result = None
        own_error = None
        try:
            result = job()
        except expected as error:
            own_error = error
        for error in self.all_gather_object(own_error):
            if error is not None:
                raise error
        return result

    def check_same(self, values, complaint):
        """Raises DistError, on every rank, if a dict is not the same on all; `complaint` is what
        its message says of the rank that differs from rank 0."""
        everyone = self.all_gather_object(values)
        for rank, other in enumerate(everyone):
            differ = differences(other, everyone[0])
            if differ:
                raise DistError(f"rank {rank} {complaint}: {differ}")

    def _run(self, collective, *arguments, **options):
        """Calls a collective of torch; raises RankLost if a rank does not take part."""
        # Tensors on the device "meta" have a shape but no elements. With them `wire_bytes` runs the
        # compressors, to count bytes.
        if self.size == 1 or self.device.type == "meta":
            return
        try:
            collective(*arguments, group=self.group, **options)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise                                    # an error of our own GPU, not of a rank
        except RuntimeError as error:
            raise rank_lost(error) from error        # see Failures, at the end of this file

    def close(self):
        """Closes the groups: one left open aborts at exit. After RankLost, `leave` instead."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


def differences(one, other):
    """Returns the keys in which two dicts differ, as text: "seed 1 (not 0)"."""
    found = []
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            found.append(f"{key} {one.get(key)} (not {other.get(key)})")
    return ", ".join(found)


# ----- How the ranks meet -----

def init(timeout=600.0, init_method="env://", lossy=True):
    """Returns this process's World from the environment that torchrun sets; without, of one rank.

    timeout: seconds that a collective waits for a rank. lossy: whether gradients are to be
    compressed with losses; only then GPUs need two levels, see Bucket. Raises DistError if the
    nodes are unlike (numbers of ranks, GPUs), RankLost if the ranks do not meet.
    """
    world = world_of_environment()
    if world.size == 1:
        return world
    limit = datetime.timedelta(seconds=timeout)
    # So Gloo opens a socket to a rank when it first sends to it, not to all ranks at once. And the
    # system's usual limit, 1,024 open files, is too low for a thousand ranks.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError):              # macOS says that it has no limit, and has
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    try:
        store = meet(world, init_method, limit)
        choose_interface(world, store)
        start_groups(world, store, limit)
        check_nodes(world)
        if world.device.type == "cpu" or lossy:
            world = two_levels(world, limit)
        return world
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"rank {world.rank} of {world.size} could not meet others: {error!r:.200}"
                       ) from error


def world_of_environment():
    """Returns the World that torchrun's variables tell of, and makes its GPU the current one."""
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # The remainder is for schedulers that show each rank only its own GPU.
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
    return World(rank, size, local_rank, local_size, size // local_size, device)


def meet(world, init_method, limit):
    """Returns a store of keys and values that all ranks share and no earlier ones have used. Raises
    RuntimeError if ranks do not come within `limit`, a timedelta, naming them.

    When torchrun starts ranks again, its store still holds the addresses of the dead ones, and its
    count of restarts differs between nodes. So who comes opens a new room, the next number of a
    count in the store, and all who wait move there. They meet when all ranks are in one room:

        rank 0 comes                           room 1      0 waits in 1
        rank 1 comes                           room 2      0 moves to 2: they meet, and train
        rank 1 is killed: both start again
        rank 0 comes                           room 3      0 waits in 3
        rank 0 is killed: both start again
        rank 1 comes                           room 4      1 waits in 4, not in 3
        rank 0 comes                           room 5      1 moves to 5: they meet

    So no process meets one that was there before a restart.
    """
    # torch's rendezvous yields (store, rank, size), here once.
    root, _, _ = next(
        distributed.rendezvous(init_method, world.rank, world.size, timeout=limit))
    root.add("processes", 1)
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        count = root.add("processes", 0)           # adding 0 reads the count
        store = distributed.PrefixStore(str(count), root)
        store.set(f"here/{world.rank}", "")
        if store.check([f"here/{rank}" for rank in range(world.size)]):
            return store
        if time.monotonic() > deadline:
            absent = ranks_without(store, "here", world.size)
            raise RuntimeError(f"rank {absent} did not come in time")
        time.sleep(0.1)


def ranks_without(store, word, size):
    """Returns the ranks that have not set a word in the store, as "3, 5"."""
    return ", ".join(str(rank) for rank in range(size) if not store.check([f"{word}/{rank}"]))


def choose_interface(world, store):
    """Sets the network interface that Gloo uses, unless the user has: on node 0 the one towards the
    last node, on all others the one towards node 0. Gloo itself would take that of the host's own
    name, which others often cannot reach."""
    name, address = interface_towards(os.environ.get("MASTER_ADDR", ""))
    store.set(f"address/{world.rank}", address)
    if world.rank == world.local_rank:
        # This rank is on node 0.
        last_address = store.get(f"address/{world.size - 1}").decode()
        name, _ = interface_towards(last_address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_towards(address):
    """Returns (name of the network interface by which packets to a host leave, our own address
    there), by Linux's `ip`; two empty strings where that does not tell."""
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(address)
        route = subprocess.getoutput(f"ip -o route get {host}")
        found = re.search(r"dev (\S+) .*src (\S+)", route)
        if found:
            return found.groups()
    return "", ""


def start_groups(world, store, limit):
    """Starts torch's process group, Gloo and for GPUs NCCL, and the thread `answer`."""
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    # When its time is up NCCL aborts the process, while Gloo raises an exception, which can say
    # why. So Gloo shall have `limit`, and NCCL twice that. This call sets the same for both; below,
    # Gloo's is set to `limit`.
    distributed.init_process_group(
        backend,
        timeout=2 * limit,
        world_size=world.size,
        rank=world.rank,
        store=store)
    gloo = distributed.group.WORLD._get_backend(torch.device("cpu"))
    gloo = getattr(gloo, "wrapped_pg", gloo)         # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    gloo._set_default_timeout(limit)
    threading.Thread(target=answer).start()            # see Failures


def check_nodes(world):
    """Raises DistError, on every rank, if nodes are unlike or two ranks have the same GPU."""
    node = {"ranks of its node": world.local_size, "device": world.device.type}
    world.check_same(node, "is on another kind of node than rank 0; set the same --nproc_per_node "
                           "on every node")
    if world.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(world.device).uuid
        gpus = set(world.all_gather_object(str(gpu)))
        if len(gpus) < world.size:
            raise DistError(f"{world.size} ranks share {len(gpus)} GPUs; set --nproc_per_node to "
                            "the number of GPUs of a node")


def two_levels(world, limit):
    """Returns the World. With several nodes of several ranks each, it gets its levels: the World of
    the ranks on this node, and that of the ranks with this local rank on all nodes.

        node 0: ranks 0 1        level 0: (0 1) and (2 3)
        node 1: ranks 2 3        level 1: (0 2) and (1 3)
    """
    if world.nodes == 1 or world.local_size == 1:
        return world
    if world.device.type == "cuda":
        limit = 2 * limit                            # of NCCL, see `start_groups`
    ranks = torch.arange(world.size).view(world.nodes, world.local_size)
    levels = []
    for teams in (ranks, ranks.T):
        # Every rank must create all groups, in the same order; it gets back the one it is in.
        group, _ = distributed.new_subgroups_by_enumeration(teams.tolist(), limit)
        levels.append(World(group.rank(), group.size(), device=world.device, group=group))
    return dataclasses.replace(world, levels=tuple(levels))


# ----- The simple form: average after backward -----

def average_gradients(module, world):
    """Replaces the gradients of a module by their means over all ranks. To be called after
    backward, on ranks that began with equal weights.

    What it costs: the network idles during backward and the processor afterwards, since nothing
    overlaps; each tensor is a call of its own, and a small one costs a whole round trip (BERT base
    has 158); and all are sent in full, without compression. `Reducer` mends all three.
    """
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(world.size)          # before the sum, which might overflow fp16
            world.all_reduce(parameter.grad)


# ----- The reducer: gradients averaged while backward runs -----

class Reducer:
    """Averages a module's gradients over the N ranks while backward still runs.

        g = 1/N sum_r g_r           g_r: the sum of rank r's gradients over its micro-batches

    Afterwards g has the same bits on every rank. Four steps, the headings of the code below:

    1. Pack, once. Whole parameters, the last one first, go to a flat fp32 bucket until it has
       bucket_mb MB (by default a 12th of all gradients, within 1 and 25 MB), then to the next.
       Each parameter has a view of its bucket, in which the gradients of its micro-batches add up
       in fp32. All ranks start from rank 0's weights.
    2. Ready. A parameter's gradient is in its view:
           fp32      p.grad is the view, and autograd adds to it
           16 bits   autograd makes p.grad; `_ready` adds it to the view and drops it
    3. Launch. In the step's last micro-batch, a bucket whose parameters are all ready goes to the
       communication thread, which averages one bucket after another while backward goes on.
    4. Finish. Waits for the thread.

        reducer = Reducer(model, world)
        reducer.zero_grad()
        for k, batch in enumerate(micro_batches):
            reducer.sends = k == len(micro_batches) - 1          # only the last one sends
            loss(batch).backward()
        reducer.finish()                           # now reducer.gradients are equal on all ranks
        reducer.commit(step_taken=True)            # needed by lossy compression
        optimizer.step()

    `gradients`: {name: view}. `buckets`: the Buckets; `flats`: their flat tensors. compression: a
    name in COMPRESSORS. After `finish`: `bytes_sent` by this rank (to other nodes, where there
    are several), `wait_seconds` for the thread, and `bucket_seconds` of each bucket.
    """

    # 1. Pack

    def __init__(self, module, world, bucket_mb=None, compression="none"):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            world.broadcast(tensor.detach())
        self.world = world
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if bucket_mb is None:
            megabytes = 4e-6 * sum(p.numel() for p in self.parameters.values())
            bucket_mb = min(25.0, max(1.0, megabytes / 12))
        groups = order_of_readiness(module, self.parameters)
        self.buckets = fill_buckets(groups, bucket_mb, world, compression)
        self.flats = [bucket.flat for bucket in self.buckets]
        self.gradients = {}
        for bucket in self.buckets:
            self.gradients.update(bucket.views(bucket.flat))
        self.hooks = []
        for name, p in self.parameters.items():
            hook = functools.partial(self._ready, name)
            self.hooks.append(p.register_post_accumulate_grad_hook(hook))

        # The thread computes on one core. On more it would take them away from backward: a step of
        # the model tiny took 1.36 times as long.
        self.thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self.stream = None
        if world.device.type == "cuda":
            self.stream = torch.cuda.Stream(world.device)
        self.jobs = []             # of the thread in this step, one for each launched bucket
        self.zero_grad()

    def zero_grad(self, scale=1.0):
        """Begins a step, whose loss is multiplied by `scale`. Only lossy compression needs to know
        it: its residuals are unscaled."""
        wait(self.jobs)         # after an error some may still be running
        self.jobs = []
        self.scale = scale
        self.sends = True
        self.bytes_sent = 0
        self.bucket_seconds = []
        self.missing = set(self.parameters)        # names of those whose gradients are not ready
        torch._foreach_zero_(self.flats)           # autograd adds to them in place
        for name, p in self.parameters.items():
            p.grad = self.gradients[name] if p.dtype == torch.float32 else None

    # 2. Ready

    def _ready(self, name, p):
        """Autograd calls this when p.grad is complete, with the parameter, not its gradient.

        Adds p.grad to its view, unless it is the view, as in fp32. (If an optimizer's own zero_grad
        has dropped the view, it is put back.) Afterwards p.grad is the view in fp32, and None in 16
        bits. In the micro-batch that sends, launches the buckets that are complete now, and raises
        DistError if the gradient is complete twice."""
        view = self.gradients[name]
        if p.grad is not view:
            view.add_(p.grad)
            p.grad = view if p.dtype == torch.float32 else None
        if not self.sends:
            return
        if name not in self.missing:
            raise DistError(f"gradient of {name} ready twice; see Reducer.sends and zero_grad()")
        self.missing.remove(name)
        self._launch()

    # 3. Launch

    def _launch(self):
        """Gives the thread each bucket that may start now, and appends its job to `self.jobs`:

            job = self.thread.submit(self._average, bucket, previous_job, gradients_done)

        previous_job is that of the bucket before it, None for the first. gradients_done marks what
        the GPU has to finish first: a torch.cuda.Event(blocking=True) that is recorded now; without
        `self.stream`, on a CPU, None. Buckets start in the order of their numbers on every rank.
        """
        # The first collective on one rank is matched with the first on the others, and so on. So
        # buckets start in the order of their numbers on every rank, in whatever order they become
        # complete.
        while len(self.jobs) < len(self.buckets):
            bucket = self.buckets[len(self.jobs)]
            if any(name in self.missing for name in bucket.shapes):
                return
            previous_job = self.jobs[-1] if self.jobs else None
            gradients_done = None
            if self.stream:
                # A mark in the GPU's queue: it is reached when what backward has queued until now
                # is done.
                gradients_done = torch.cuda.Event(blocking=True)
                gradients_done.record()
            job = self.thread.submit(self._average, bucket, previous_job, gradients_done)
            self.jobs.append(job)

    def _average(self, bucket, previous_job, gradients_done):
        """Averages a bucket, in the communication thread; returns (bytes sent, seconds)."""
        if previous_job:
            previous_job.result()          # raises its error: after one, no further bucket is sent
        if self.stream:
            # A stream is a queue of work for a GPU. What this thread calls now goes to a queue of
            # its own, beside that of backward. The call also makes the stream's GPU the thread's:
            # each thread begins with GPU 0, and even to wait there would take memory of it.
            torch.cuda.set_stream(self.stream)
            gradients_done.synchronize()
        began = time.perf_counter()
        sent = bucket.average(self.scale)
        if self.stream:
            # Only this thread waits, until the bucket is averaged: so its seconds are real.
            averaged = torch.cuda.Event(blocking=True)
            averaged.record()
            averaged.synchronize()
        return sent, time.perf_counter() - began

    # 4. Finish

    def finish(self):
        """Waits until all ranks hold the same gradients. Raises what went wrong in the thread, say
        RankLost; DistError if a parameter took no part in the loss, naming it.

        Looks for missing gradients before it waits: their buckets were never launched. A job's
        result is (bytes, seconds). Adds the bytes to `bytes_sent`, appends the seconds to
        `bucket_seconds`, and sets `wait_seconds`, the time that it waited for all jobs."""
        if self.missing:
            unused = ", ".join(sorted(self.missing))
            raise DistError(f"no gradient for {unused} in the step's last backward: each must take "
                            "part in that loss, or have requires_grad=False")
        if self.stream:
            # First let backward end: wait_seconds shall count the network alone.
            torch.cuda.current_stream().synchronize()
            # A rank that died in backward is an exception here, over Gloo. NCCL would wait for it
            # until the timeout, and then abort the process without a line.
            self.world.barrier()
        began = time.perf_counter()
        for job in self.jobs:
            sent, seconds = job.result()
            self.bytes_sent += sent
            self.bucket_seconds.append(seconds)
        self.wait_seconds = time.perf_counter() - began

    def norm(self):
        """Returns the 2-norm of all that is in the buckets, as a float; NaN or inf if any of it
        is. After `finish` it is that of the averaged gradients, the same on every rank."""
        return float(torch.nn.utils.get_total_norm(self.flats))

    def commit(self, step_taken):
        """Ends a step for the compressors: a skipped one leaves their residuals as they were."""
        for bucket in self.buckets:
            bucket.commit(step_taken)

    def state_dict(self):
        """Returns what lossy compression has not yet sent, see `fold_buckets`. Collective."""
        return fold_buckets(self.buckets)

    def load_state_dict(self, state):
        """Takes up what `state_dict` returned, on any number of ranks and with any bucket size."""
        for bucket in self.buckets:
            bucket.restart(state)

    def close(self):
        """Removes the hooks and ends the communication thread."""
        for hook in self.hooks:
            hook.remove()
        self.thread.shutdown(cancel_futures=True)


def order_of_readiness(module, parameters):
    """Returns two lists of (name, parameter), each in about the order in which backward completes
    gradients: parameters of modules without an embedding, and of modules with one. parameters: the
    trainable ones of the module, {name: parameter}."""
    # Backward ends with embeddings, and with what stands beside them, their LayerNorm. A bucket
    # with anything else in it would wait for them. (No backward is left to hide their own bucket.)
    late = set()
    for owner in module.modules():
        if any(isinstance(child, torch.nn.Embedding) for child in owner.children()):
            late.update(owner.parameters())

    before_embeddings = []
    embeddings = []
    for name, p in reversed(parameters.items()):   # backward begins at the output
        if p in late:
            embeddings.append((name, p))
        else:
            before_embeddings.append((name, p))
    return before_embeddings, embeddings


def fill_buckets(groups, bucket_mb, world, compression):
    """Returns Buckets of lists of (name, tensor), numbered from 0. A bucket takes tensors of one
    list until it has at least bucket_mb MB (4 bytes an element); the last of a list may have less.
    """
    contents = []                                  # {name: shape} of each bucket
    for group in groups:
        room = 0.0                                 # in MB; a new list begins a new bucket
        for name, tensor in group:
            if room <= 0:
                contents.append({})
                room = bucket_mb
            contents[-1][name] = tensor.shape
            room -= 4e-6 * tensor.numel()
    return [Bucket(shapes, world, compression, k) for k, shapes in enumerate(contents)]


def fold_buckets(buckets):
    """Returns what lossy compression of Buckets has not yet sent, {name: fp32 tensor}. Collective.

    Saving changes the run: each rank's residual becomes the mean of all ranks', and what else a
    compressor keeps is dropped. So any number of ranks can resume, and on the same number a resumed
    run equals the run that saved, bit for bit. A run that saves in other steps gets other bits.
    """
    state = {}
    for bucket in buckets:
        if bucket.lossy:
            state.update(bucket.fold())
    return state


# ----- One bucket: error feedback, and two levels -----

class Bucket:
    """One flat fp32 tensor (n,) of gradients, and what its compressor leaves from step to step.

    Lossy compression adds what a rank could not send to what it sends next (error feedback):

        v_r = g_r / scale + e_r                e_r: the residual of rank r, unscaled, 0 at first
        q, rest_r = compress(v_r)              q: the same on every rank
        g = scale * q
        e_r = rest_r                           `commit`: only if the step is taken

    Nothing is lost: mean_r v_r = q + mean_r rest_r. (`two_phase` loses twice, and keeps the second
    rest, "server", in its state.) Until `commit`, rest_r waits in next_residual, so a step that is
    skipped after an overflow leaves no trace:

                                residual    next_residual
        before the step         e_r         free
        after `average`         e_r         rest_r
        step taken: swap        rest_r      free
        step skipped            e_r         free

    Several nodes with several ranks each have two levels (Goyal et al., arXiv 1706.02677, section
    4.1). One rank of each node is the bucket's leader, here 0 and 2:

        node 0: ranks 0 1, node 1: ranks 2 3
        1. reduce            1 -> 0    3 -> 2      a node's ranks add up at the leader
        2. compressor        0 <-> 2               the leaders exchange
        3. broadcast         0 -> 1    2 -> 3      and pass the mean on

    So a node sends no more than a single rank would. Bucket `number` decides who leads, which
    spreads memory and work over the node's GPUs. Dense sums on GPUs do without these levels, since
    NCCL has its own.
    """

    def __init__(self, shapes, world, compression, number=0):
        self.compressor, self.argument, padding = parse_compression(compression)
        self.lossy = is_lossy(compression)
        self.shapes = shapes                       # {name: shape}, in the order of the flat tensor
        # The ranks of `inner` add up first, then those of `outer` exchange. With one level, `inner`
        # is this rank alone.
        if world.levels and (self.lossy or world.device.type == "cpu"):
            self.inner, self.outer = world.levels
        else:
            self.inner = World()
            self.outer = world
        self.leader = number % self.inner.size
        self.keeps_residual = self.lossy and self.inner.rank == self.leader

        n = sum(math.prod(shape) for shape in shapes.values())
        multiple = max(1, padding * self.outer.size)
        length = math.ceil(n / multiple) * multiple
        self.padded = torch.zeros(length, device=world.device)
        self.flat = self.padded[:n]
        self.restart()

    def views(self, flat):
        """Returns {name: view} of a flat tensor (n + padding,) with the bucket's layout."""
        views = {}
        start = 0
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            views[name] = flat[start:end].view(shape)
            start = end
        return views

    def average(self, scale):
        """Averages the bucket over all ranks, in place; returns the bytes that this rank sent, to
        other nodes where there are several.

        Where compression is not lossy, `argument` is the format in which `dense` sums up. What a
        node's ranks add up is divided before, too."""
        if self.inner.size > 1:
            self.flat.div_(self.inner.size)
            self.inner.reduce(self.flat, self.leader)
        sent = 0
        if self.inner.rank == self.leader:
            if self.lossy:
                sent = self._send(scale)
            else:
                sent = dense(self.outer, self.flat, self.argument)
        self.inner.broadcast(self.flat, self.leader)
        if self.outer.nodes > 1:
            # This is the world of all ranks (a level has nodes = 1), so there are no levels, and a
            # ring passes through all ranks. Of each node one rank sends to another node.
            sent //= self.outer.local_size
        return sent

    def _send(self, scale):
        """Averages the leaders' buckets, in place, by the equations of the class, and leaves rest_r
        and the compressor's new state to `commit`; returns the bytes sent."""
        if self.next_state:
            raise DistError("lossy compression needs a call of commit() after each step")
        # No memory is taken here; two flat tensors get new contents:
        #     next_residual   v, and after the compressor the rest
        #     padded          this node's g_r, and after the compressor q; `flat` is a part of it
        n = len(self.flat)
        value = self.next_residual
        torch.add(self.residual[:n], self.flat, alpha=1 / scale, out=value[:n])
        value[n:] = 0                              # padding, in which onebit leaves rounding errors
        mean = self.padded
        state = dict(self.state)
        sent = self.compressor(self.outer, value, mean, state, self.argument)
        self.flat.mul_(scale)
        self.next_state = state
        return sent

    def commit(self, step_taken):
        """Makes the rest of the last `average` the residual of the next if the step is taken, and
        forgets it otherwise."""
        if self.next_state and step_taken:
            self.residual, self.next_residual = self.next_residual, self.residual
            self.state = self.next_state
        self.next_state = None

    def fold(self):
        """Returns {name: what was not yet sent}, averaged over all ranks, and restarts from it. To
        be called after `commit`."""
        rest = torch.zeros_like(self.flat)
        n = len(rest)
        if self.keeps_residual:
            rest.copy_(self.residual[:n])
            dense(self.outer, rest)
            if "server" in self.state:             # a part of it on each rank, see `two_phase`
                # That was lost after the average, so it is not divided.
                parts = self.outer.all_gather(self.state["server"])
                rest += parts.view(-1)[:n]
        self.inner.broadcast(rest, self.leader)
        # These are copies, since a view is pickled with all of the tensor that it is a view of.
        residual = {name: view.clone() for name, view in self.views(rest).items()}
        self.restart(residual)
        return residual

    def restart(self, residual=None):
        """Forgets all that earlier steps left, and takes up {name: residual} if there is one."""
        self.state = {"shapes": list(self.shapes.values())}
        self.next_state = None                     # from `_send` to `commit` the new state
        if not self.keeps_residual:
            return
        self.residual = torch.zeros_like(self.padded)
        self.next_residual = torch.zeros_like(self.padded)
        if residual:
            for name, view in self.views(self.residual).items():
                view.copy_(residual[name])


# ----- Compressors: what crosses the network, from simple to hard -----
#
# `dense` sends everything and averages in place. Each other compressor is a function
#
#     compressor(world, value, mean, state, argument) -> bytes sent
#
#     value (n + padding,)      flat fp32, another on each rank: what is to be averaged
#     mean (n + padding,)       where q is written, the mean of what was sent, equal on every rank
#     state                     a dict: the "shapes" of the tensors in value, and what the
#                               compressor keeps for the next step
#     argument                  as in COMPRESSORS below
#
# Five rules:
#
# 1. What it could not send stays in `value`, so that error feedback sends it later.
# 2. Where an element of one rank is not finite, an element of `mean` is not, on all ranks: all
#    must skip the same step.
# 3. It puts new tensors into `state` and never changes one in place, since after a skipped step the
#    old ones are used again. At each save the state is emptied, but for what `fold` takes out of
#    it ("server"): what counts must be in `value`.
# 4. The shapes alone decide how many bytes it sends: `wire_bytes` calls it with tensors on the
#    device "meta", which have no elements.
# 5. The padding at the end of `value` is zeros before; what is left in it is ignored.

def dense(world, value, dtype=torch.float32):
    """none, fp16 and bf16: averages by one all-reduce in the format `dtype`, in place. It divides
    first, then casts, then sums.

    fp16 rounds to 11 bits, and needs the loss scaling that keeps gradients inside its range of
    6e-8 to 65,504; bf16 has the range of fp32 and rounds to 8 bits. Each addition on the way rounds
    as well. Returns the bytes of a ring of N ranks: each sends (N - 1) / N of the tensor twice, to
    sum it up and to spread the sums.
    """
    value.div_(world.size)                         # before the sum, which might overflow fp16
    wire = value.to(dtype)                         # in fp32 it is `value` itself
    world.all_reduce(wire)
    value.copy_(wire)
    return 2 * (world.size - 1) * wire.numel() * wire.element_size() // world.size


def topk(world, value, mean, state, fraction):
    """Sends each rank's largest elements, with their indices, by all_gather (Deep Gradient
    Compression, arXiv 1712.01887, without its momentum correction).

        S_r = the k = fraction * n largest |v_r|         q = mean_r (v_r on S_r, 0 elsewhere)

    8 bytes an element go to each other rank: from N = 1 / fraction ranks on, fp32 sends less. An
    inf or NaN is always among the largest, as rule 2 asks.
    """
    sizes = value.abs()
    k = max(1, int(fraction * len(value)))
    if value.is_cpu:                               # NumPy finds them five times as fast as torch
        largest = np.argpartition(sizes.numpy(), -k)[-k:]
        indices = torch.from_numpy(largest)
    else:
        indices = sizes.topk(k, sorted=False).indices
    elements = value[indices]                                                            # (k,)
    value.index_fill_(0, indices, 0)
    mean.zero_()
    all_indices = world.all_gather(indices.int())                                        # (N, k)
    all_elements = world.all_gather(elements)
    for indices, elements in zip(all_indices, all_elements):
        mean.index_add_(0, indices, elements, alpha=1 / world.size)
    return (world.size - 1) * 8 * k


def two_phase(world, value, mean, state, quantiser):
    """int8 and onebit: an all-reduce that compresses twice (1-bit Adam, arXiv 2102.02888). Rank j
    is the server of part j of the bucket: it averages what all ranks send of that part, and sends
    the average to all. C(x) is what is left of x when it is encoded and decoded. With two ranks,
    whose values are (a0 a1) and (b0 b1):

                       rank 0                 rank 1
        value          a0     a1              b0     b1
        encode         C(a0)  C(a1)           C(b0)  C(b1)        a - C(a) stays in value
        all_to_all     C(a0)  C(b0)           C(a1)  C(b1)        the part it serves, of all ranks
        decode, mean   m0                     m1                  plus the server error s
        encode         C(m0)                  C(m1)               m - C(m) is the next s
        all_gather     C(m0)  C(m1)           C(m0)  C(m1)        the mean, on both

        c_r = C(v_r)                  rest_r = v_r - c_r                   sender r, all parts
        q = C(mean_r c_r + s)         s = mean_r c_r + s - q               server j, part j
    """
    quantise, unpack, block = quantiser
    n = sum(math.prod(shape) for shape in state["shapes"])
    parts = value.view(world.size, -1, block)              # (N, blocks of a part, block)
    # Until the end `mean` is memory to compute in: to take new memory costs more than to compute.
    out = mean.view_as(parts)
    starts = torch.arange(0, len(value), block, device=value.device)
    # How many elements of each block are no padding, (N, blocks of a part, 1); at least 1, since
    # onebit divides by it.
    sizes = (n - starts).clamp(1, block).view(world.size, -1, 1)

    # 1. Send each part to its server.
    codes = encode(quantise, parts, sizes, out)            # (N, blocks of a part, bytes of a block)
    received = world.all_to_all(codes)                     # row i: rank i's part for this server

    # 2. As a server, average the part of all ranks.
    if "server" in state:
        server = state["server"].clone()                   # as rule 3 asks
    else:
        server = torch.zeros_like(parts[0])
    for part in decode(unpack, received, out):
        server.add_(part, alpha=1 / world.size)
    # Where the bucket ends in this part, if it does: onebit has made signs of the padding there.
    first_padding = max(0, n - world.rank * server.numel())
    server.view(-1)[first_padding:] = 0

    # 3. As a server, send the average to all; what is lost in that stays in `server`.
    codes = encode(quantise, server, sizes[world.rank], out[0])
    state["server"] = server
    decode(unpack, world.all_gather(codes), out)
    return 2 * (world.size - 1) * codes.numel()


def encode(quantise, blocks, sizes, levels):
    """Returns the bytes of blocks (..., block), each an fp32 scale and a small level an element,
    and leaves the rounding error, x - scale * level, in the blocks. sizes (..., 1): how many
    elements of a block are no padding. levels: memory of the blocks' shape, for the levels."""
    packed, scales = quantise(blocks, sizes, levels)
    blocks.addcmul_(levels, scales, value=-1)
    return torch.cat([packed, scales.view(torch.uint8)], -1)


def decode(unpack, codes, out):
    """Writes the blocks that `encode` made bytes of to `out`, and returns them."""
    scales = codes[..., -4:].view(torch.float32)
    unpack(codes[..., :-4], out)
    return out.mul_(scales)


def quantise_int8(blocks, sizes, out):
    """Writes the levels of blocks (..., 256) to `out`; returns them as bytes, and the scales.

    The largest element becomes 127 (block-wise quantisation as of Dettmers et al., arXiv
    2110.02861, section 2.1, here linear):

        scale = max |x| / 127            level = round(x / scale)
    """
    # Faster than abs(), which would write as much as it reads.
    highest = blocks.amax(-1, keepdim=True)
    lowest = blocks.amin(-1, keepdim=True)
    scales = torch.maximum(highest, -lowest).div_(127).clamp_(min=1e-30)
    levels = torch.mul(blocks, 1 / scales, out=out).round_()
    return levels.to(torch.int8).view(torch.uint8), scales


def unpack_int8(packed, out):
    """Writes the levels that are packed in bytes (..., 256) to `out`."""
    out.copy_(packed.view(torch.int8))


def quantise_onebit(blocks, sizes, out):
    """Writes the levels of blocks (..., 512) to `out`; returns them as bits, and the scales.

    1-bit Adam's compressor in the blocks of Zheng et al. (arXiv 1905.10936):

        scale = mean |x|            level = sign(x), where sign(0) = +1

    1-bit Adam scales a whole part by ||x|| / sqrt(n). Where a few elements are large, as in an
    embedding, then ||x - q|| > ||x||, and the residual grows from step to step. mean |x| is the
    scale with the smallest error (Karimireddy et al., arXiv 1901.09847).
    """
    sums = torch.abs(blocks, out=out).sum(-1, keepdim=True)        # |x| is in `out` only here
    scales = sums.div_(sizes)
    if blocks.is_cpu:                              # NumPy packs several times faster than torch
        packed = torch.from_numpy(np.packbits(blocks.numpy() < 0, axis=-1))
    else:
        eights = (blocks < 0).unflatten(-1, (-1, 8))
        powers = (1 << torch.arange(7, -1, -1, device=blocks.device)).byte()     # 128, 64, ..., 1
        packed = (eights * powers).sum(-1, dtype=torch.uint8)
    unpack_onebit(packed, out)
    return packed, scales


# The eight signs that a byte stands for, (256, 8): a bit of 1 is -1.
SIGNS = 1 - 2.0 * torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8))).view(256, 8)


def unpack_onebit(packed, out):
    """Writes the signs that are packed in bits (..., 64) to `out`."""
    signs = SIGNS.to(packed.device)
    torch.index_select(signs, 0, packed.int().flatten(), out=out.view(-1, 8))


# name: (function, argument, padding). An argument that is a fraction can be set, as topk:0.1.
# `value` is made as long as a multiple of the padding times N, the number of ranks; 0: no padding.
COMPRESSORS = {
    "none": (dense, torch.float32, 0),
    "fp16": (dense, torch.float16, 0),
    "bf16": (dense, torch.bfloat16, 0),
    "int8": (two_phase, (quantise_int8, unpack_int8, 256), 256),
    "onebit": (two_phase, (quantise_onebit, unpack_onebit, 512), 512),
    "topk": (topk, 0.01, 0),
}


def parse_compression(text):
    """Returns a row of COMPRESSORS, with the argument that a text like "topk:0.05" sets; raises
    DistError for what is unknown or cannot work."""
    if text in COMPRESSORS:
        return COMPRESSORS[text]
    name, _, option = text.partition(":")
    with contextlib.suppress(KeyError, ValueError):        # an unknown name; not a number
        compressor, argument, padding = COMPRESSORS[name]
        if isinstance(argument, float) and 0 < float(option) <= 1:
            return compressor, float(option), padding
    raise DistError(f"--compression {text} cannot work; known are {', '.join(COMPRESSORS)}; with a "
                    "fraction in (0, 1], as topk:0.01")


def is_lossy(compression):
    """Returns True if a compression keeps residuals."""
    compressor, _, _ = parse_compression(compression)
    return compressor is not dense


@functools.cache
def wire_bytes(compression, shapes, ranks):
    """Returns the bytes that each of `ranks` sends to average fp32 tensors of these shapes in a
    single bucket: `Reducer.bytes_sent` is a little more, for the padding of many."""
    world = World(size=ranks, device=torch.device("meta"))       # tensors without memory
    bucket = Bucket(dict(enumerate(shapes)), world, compression)
    return bucket.average(1.0)


# ----- Requests to stop -----

# What a rank is asked to do. Of all ranks' answers the largest counts.
TRAIN_ON, TIME_IS_UP, SIGNALLED, TORCHRUN_DIED = range(4)
# torchrun's process, looked up before anything takes long: ranks must not train on without it.
TORCHRUN = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def listen_to_signals(max_minutes):
    """Returns a list that SIGTERM, Ctrl-C, a closed terminal (SIGHUP) and the end of max_minutes
    add their names to, so that training can stop with a checkpoint. After a signal, Ctrl-C ends the
    process at once. Without torchrun, signals that are ignored (by nohup) stay so. Torchrun passes
    its own signals on to the ranks and kills those that ignore them, so there none stays so."""
    requests = []

    def request(signum, _):
        requests.append(signal.Signals(signum).name)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if TORCHRUN or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, request)
    if max_minutes is not None:
        timer = threading.Timer(60 * max_minutes, requests.append, ["--max-minutes"])
        timer.daemon = True                        # it must not outlive the training
        timer.start()
    return requests


def asked_to_stop(requests):
    """Returns one of the four numbers above for this rank. requests: of `listen_to_signals`."""
    if TORCHRUN and os.getppid() != TORCHRUN:
        return TORCHRUN_DIED
    if any(request.startswith("SIG") for request in requests):
        return SIGNALLED
    return TIME_IS_UP if requests else TRAIN_ON


# ----- Failures: who failed, said once -----
#
# A rank can die (kill -9, no memory), hang (a stopped machine) or raise an exception. All others
# then get an error in their next collective: at once from a dead rank, at the end of --timeout from
# one that hangs. Gloo's error names no rank, or a wrong one, and every rank would print its own. So
# a rank that gets an error asks, through the store, who is alive; a thread of each process answers,
# whatever the program is busy with. And only the first rank that failed prints. Rank 2 is killed:
#
#     s     rank 0                    rank 1                    rank 2     torchrun
#     0.0   in a collective           in a collective           killed
#     0.1   error: sets "failed"      error: is not the first   -          sees it, sends SIGTERM,
#     0.2   thread: sets "alive/0"    thread: sets "alive/1"    -          a request to stop
#     1.2   thread: sets "answered"   thread: the same          -
#           no "alive/2": sets        waits for "silent"
#           "silent" to 2; prints     reads it
#           "rank 2 died ..."         prints nothing
#           ends, see `leave`         ends                                 ends, or starts all again
#
# A rank that raises an exception of its own is the first to fail, and prints that.

def answer():
    """Waits, in a thread, until a rank has failed. Then says in the store that this process is
    alive, and a second later that all have answered. Ends the process if it lives a minute later.
    """
    store = distributed.group.WORLD.get_group_store()
    rank = distributed.get_rank()
    with contextlib.suppress(RuntimeError):        # the store is gone: the next collective fails
        # It is no daemon thread: Python aborts if it exits while such a thread asks the store.
        while distributed.is_initialized() and threading.main_thread().is_alive():
            if store.check(["failed"]):
                store.set(f"alive/{rank}", "")
                time.sleep(1)                      # each thread looks five times a second
                store.set("answered", "")
                # This ends the process in 60 s, even if all its threads hang. A program that is
                # saving needs that time. One that waits for a dead rank in NCCL would wait longer.
                faulthandler.dump_traceback_later(60, exit=True)
                return
            time.sleep(0.2)


def rank_lost(error):
    """Returns the RankLost that an error in a collective means, naming the ranks that are lost."""
    # The first to fail asks, and the others wait for what it finds: nobody may end before, since
    # torchrun then ends all.
    lost = ask(find_silent_ranks if claim_failure() else told_silent_ranks)
    lost = lost or "? (node 0, which would know, does not answer)"
    return RankLost(f"rank {lost} died or did not answer in time; the same command resumes (was it "
                    f"busy? raise --timeout) ({error!r:.480})")


def claim_failure():
    """Tells all ranks, by the key "failed", that this one has failed. Returns True if it is the
    first, which knows the reason; a second call returns the same. If the store does not answer,
    local rank 0 of each node counts as the first; before there is a store, each rank does."""
    if not distributed.is_initialized():
        return True
    # compare_set writes our rank if the key is not set yet, and returns what it then holds.
    me = os.environ.get("RANK", "0").encode()
    first = ask(lambda store: store.compare_set("failed", "", me))
    if first is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    return first == me


def find_silent_ranks(store):
    """Returns the ranks that have not answered when there was time to, as "3, 5", and puts that
    into the store."""
    wait_for(store, "answered")
    silent = ranks_without(store, "alive", distributed.get_world_size())
    store.set("silent", silent)
    return silent


def told_silent_ranks(store):
    """Returns what `find_silent_ranks` has put into the store, on another rank."""
    wait_for(store, "silent")
    return store.get("silent").decode()


def wait_for(store, key):
    """Returns when a key is in the store."""
    # A get() would wait, too, but it would hold the connection that `answer` needs meanwhile.
    while not store.check([key]):
        time.sleep(0.1)


def ask(question):
    """Returns question(store of all ranks), or None if there is no store or no answer in 3 s: a
    request to a host that is stopped or cut off never returns, so a thread makes it."""
    if not distributed.is_initialized():
        return None
    store = distributed.group.WORLD.get_group_store()
    try:
        return ThreadPoolExecutor().submit(question, store).result(timeout=3)
    except (RuntimeError, TimeoutError):
        return None


def leave(message, restart_helps):
    """Ends this process after an error, with status 1. The first rank to fail prints the message
    (None: nothing). Where it would not help that torchrun starts all again, ends torchrun, too."""
    if claim_failure() and message:
        print(message, file=sys.stderr, flush=True)
    torchrun_restarts = (
        TORCHRUN == os.getppid()
        and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
    )
    if torchrun_restarts and not restart_helps:
        time.sleep(0.1)                            # it ends all ranks, and one may still print
        os.kill(TORCHRUN, signal.SIGTERM)
    os._exit(1)                                    # a clean exit can wait for a rank that is lost


# ----- The program: what averaging costs -----

def measure(world, name, megabytes):
    """Returns what it takes to average fp32 gradients of one matrix with a compressor: seconds (of
    the slowest rank, median) and the bytes that all ranks send, to other nodes if there are any."""
    shape = (int(megabytes * 1e6 / 4096), 1024)
    bucket = Bucket({"matrix": shape}, world, name)
    gradient = torch.randn_like(bucket.flat)
    seconds = []
    for _ in range(6):
        bucket.flat.copy_(gradient)
        world.barrier()                            # all ranks start together
        began = time.perf_counter()
        sent = bucket.average(1.0)
        bucket.flat[0].item()                      # waits for a GPU
        seconds.append(world.max(time.perf_counter() - began))
        bucket.commit(True)
    return statistics.median(seconds[1:]), world.sum([sent])[0]          # the first warmed up


def main():
    """Prints a table of what `measure` returns for each compressor and size."""
    parser = argparse.ArgumentParser(description="Measure how fast gradients are averaged here.")
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 25, 100, 400], help="sizes")
    sizes = parser.parse_args().mb
    if min(sizes) < 1:
        parser.error("argument --mb: must be at least 1")
    try:
        world = init()
        if world.rank == 0:
            print(f"{world.size} ranks on {world.nodes} node(s), {world.device.type}; sent: by all")
            print("compression     MB        ms   MB sent    GB/s")
        for name, size in itertools.product(COMPRESSORS, sizes):
            seconds, sent = measure(world, name, size)
            if world.rank == 0:
                print(f"{name:<12}{size:>6}{1e3 * seconds:>10.2f}{sent / 1e6:>10.2f}"
                      f"{size / 1e3 / seconds:>8.2f}", flush=True)
        world.close()
    except DistError as error:
        leave(f"dist.py: {error}", restart_helps=isinstance(error, RankLost))


if __name__ == "__main__":
    main()
