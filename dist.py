"""Ranks, and gradients averaged over them while backward still runs.

A rank is one process of the training, a node a machine with some of them. Each rank has the whole
model and computes the gradients of its own examples; all ranks then step with the mean of these.

To read first: `average_gradients`, the simple form; `Reducer`, the fast one (Li et al., "PyTorch
Distributed", arXiv 2006.15704, section 3.2); and `dense`, what crosses the network without
compression. Each of the other compressors can be read alone: it is lossy, and keeps what it did not
send (the residual) to add it to what it sends in the next step (error feedback).

A collective is a call that all ranks of a process group make together, such as a sum over them; if
there is only one rank it does nothing. Two libraries move the data: NCCL between GPUs, Gloo between
CPUs. Ranks find each other by a store, a small dictionary that all share, kept by a process of node
0. When a rank dies or hangs, the others get an error in their next collective, and one of them says
which ranks are lost (section Failures). All processes end, and torchrun may start them again. Only
this file imports torch.distributed.

In comments on shapes: W ranks, n elements of a bucket.
"""
import contextlib
import dataclasses
import datetime
import functools
import itertools
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import distributed


class DistError(Exception):
    """Why ranks cannot train, or cannot train on; the message says what to do."""


class RankLost(DistError):
    """A rank died, did not answer in time or never came. `leave` finds out which."""


class TorchrunLost(DistError):
    """The torchrun of a node has died, and its ranks must not go on. A restart helps."""


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
        """Returns rank 0's value (any small picklable object), on every rank."""
        values = [value]
        self._run(distributed.broadcast_object_list, values, group_src=0)
        return values[0]

    def all_gather_object(self, value):
        """Returns the list of every rank's value (any small picklable object), in order of rank."""
        values = [value] * self.size
        self._run(distributed.all_gather_object, values, value)
        return values

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
        if self.size == 1:
            return
        try:
            collective(*arguments, group=self.group, **options)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise                                    # an error of our own GPU, not of a rank
        except RuntimeError as error:
            raise RankLost(f"{error!r:.300}") from error

    def close(self):
        """Ends a training that went well, on all ranks. (After an error `leave` does.)"""
        if self.size == 1:
            return
        self.barrier()
        # The thread of `watch` waits in the store, and Python aborts if it exits meanwhile.
        STORE.set("failed", NOBODY)
        WATCHER.join(10)
        distributed.destroy_process_group()          # one left open aborts at exit


def differences(one, other):
    """Returns the keys in which two dicts differ, as text: "seed 1 (not 0)"."""
    found = []
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            found.append(f"{key} {one.get(key)} (not {other.get(key)})")
    return ", ".join(found)


# ----- How the ranks meet -----

def init(timeout=600.0, init_method="env://"):
    """Returns this process's World from the environment that torchrun sets; without, of one rank.

    timeout: seconds that a collective waits for a rank. From here on signals that ask for a stop do
    not end a rank: torchrun sends one to all of them when one has died, and they shall say which.
    Raises DistError if the nodes are unlike (numbers of ranks, GPUs) or the ranks were not started
    by torchrun, RankLost if they do not meet.
    """
    world = world_of_environment()
    if world.size == 1:
        return world
    listen_to_signals()
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
        return two_levels(world, limit)
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"rank {world.rank} could not meet the others: {error!r:.200}") from error


def world_of_environment():
    """Returns the World that torchrun's variables tell of, and makes its GPU the current one.
    Raises DistError if another program has started several processes."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if int(os.environ.get(name, 1)) > 1 and "RANK" not in os.environ:
            raise DistError(f"{name} is {os.environ[name]}, but each of these processes would train "
                            "alone; start one torchrun on each node, and it starts the ranks")
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # The remainder is for schedulers that show each rank only its own GPU.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return World(rank, size, local_rank, local_size, size // local_size, device)


def meet(world, init_method, limit):
    """Returns a store of keys and values that all ranks share and no earlier ones have used. Raises
    RuntimeError if ranks do not come within `limit`, a timedelta, naming them.

    When torchrun starts ranks again, its store still holds the keys of the dead ones, and its count
    of restarts differs between nodes. So who comes opens a new room, the next number of a count in
    the store, and all who wait move there. They meet when all ranks are in one room:

        rank 0 comes                           room 1      0 waits in 1
        rank 1 comes                           room 2      0 moves to 2: they meet, and train
        rank 1 is killed: both start again
        rank 0 comes                           room 3      0 waits in 3
        rank 1 comes                           room 4      0 moves to 4: they meet, and train

    So no process meets one that was there before a restart.
    """
    # torch's rendezvous yields (store, rank, size), here once.
    root, _, _ = next(
        distributed.rendezvous(init_method, world.rank, world.size, timeout=limit))
    root.add("processes", 1)
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        room = root.add("processes", 0)            # adding 0 reads the count
        store = distributed.PrefixStore(str(room), root)
        store.set(f"here/{world.rank}", "")
        absent = ranks_without(store, "here", world.size)
        if not absent:
            return store
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {absent} did not come in time")
        time.sleep(0.1)


def ranks_without(store, word, size):
    """Returns the ranks that have not set a word in the store, as "3, 5"."""
    return ", ".join(str(rank) for rank in range(size) if not store.check([f"{word}/{rank}"]))


def choose_interface(world, store):
    """Sets the network interface that Gloo uses, unless the user has: on node 0 the one towards the
    last node, on all others the one towards node 0. Gloo itself would take that of the host's own
    name, which others often cannot reach. Where nothing is known, it may."""
    address = own_address_towards(os.environ.get("MASTER_ADDR", ""))
    store.set(f"address/{world.rank}", address)
    if world.rank == world.local_rank:
        # This rank is on node 0.
        last_address = store.get(f"address/{world.size - 1}").decode()
        address = own_address_towards(last_address)
    interfaces = subprocess.getoutput("ip -o address")
    found = re.search(rf"^\d+: (\S+) .* {re.escape(address)}/", interfaces, re.MULTILINE)
    if address and found:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found[1])


def own_address_towards(host):
    """Returns this machine's own address on the way to a host; "" where that is not known."""
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(target)                    # sends nothing, but chooses the way
            return way.getsockname()[0]
    return ""


def start_groups(world, store, limit):
    """Starts torch's process group, Gloo and for GPUs NCCL, and the thread of `watch`."""
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

    global STORE, WATCHER
    STORE = store
    WATCHER = threading.Thread(target=watch, args=[store.clone(), world.rank], daemon=True)
    WATCHER.start()


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
    """Averages a module's gradients over the W ranks while backward still runs.

        g = 1/W sum_r g_r           g_r: the sum of rank r's gradients over its micro-batches

    Afterwards g has the same bits on every rank. Four steps, the headings of the code below:

    1. Pack, once. Whole parameters, the last one first, go to a flat fp32 bucket until it has
       bucket_mb MB (by default a 12th of all gradients, within 1 and 25 MB), then to the next.
       Each parameter has a view of its bucket. All ranks start from rank 0's weights.
    2. Ready. When backward has made a parameter's gradient, of any format, it is added to the view.
    3. Launch. In the step's last micro-batch, a bucket whose parameters are all ready goes to the
       communication thread, which averages one bucket after another while backward goes on.
    4. Finish. Waits for the thread.

        reducer = Reducer(model, world)
        reducer.zero_grad()
        for k, batch in enumerate(micro_batches):
            reducer.last_micro_batch = k == len(micro_batches) - 1      # only the last one sends
            loss(batch).backward()
        reducer.finish()                           # now reducer.gradients are equal on all ranks
        reducer.commit(step_taken=True)            # needed by lossy compression
        for name, parameter in model.named_parameters():
            parameter.grad = reducer.gradients[name]
        optimizer.step()

    `gradients`: {name: view}. `buckets`: the Buckets; `flats`: their flat tensors. compression: a
    name in COMPRESSORS. After `finish`: `bytes_sent` by this rank (to other nodes, where there
    are several), and `wait_seconds` for the thread.
    """

    # 1. Pack

    def __init__(self, module, world, compression="none", bucket_mb=None):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            world.broadcast(tensor.detach())
        self.world = world
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.buckets = fill_buckets(self.parameters, world, compression, bucket_mb)
        self.flats = [bucket.flat for bucket in self.buckets]
        self.gradients = {}
        for bucket in self.buckets:
            self.gradients.update(bucket.views())
        for name, p in self.parameters.items():
            p.register_post_accumulate_grad_hook(functools.partial(self._ready, name))

        # The thread computes on one core. On more it would take them away from backward: a step of
        # the model tiny took 1.36 times as long.
        self.thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self.stream = None
        if world.device.type == "cuda":
            self.stream = torch.cuda.Stream(world.device)
        self.zero_grad()

    def zero_grad(self, scale=1.0):
        """Begins a step, whose loss is multiplied by `scale`. Only lossy compression needs to know
        it: its residuals are unscaled."""
        self.scale = scale
        self.last_micro_batch = True
        self.jobs = []                             # of the thread, one for each launched bucket
        self.missing = set(self.parameters)        # names of those whose gradients are not ready
        torch._foreach_zero_(self.flats)

    # 2. Ready

    def _ready(self, name, p):
        """Autograd calls this when p.grad is complete, with the parameter, not its gradient. Moves
        the gradient to its view. Raises DistError if it comes twice in the last micro-batch."""
        self.gradients[name].add_(p.grad)
        p.grad = None
        if not self.last_micro_batch:
            return
        if name not in self.missing:
            raise DistError(f"gradient of {name} ready twice; see last_micro_batch and zero_grad()")
        self.missing.remove(name)
        self._launch()

    # 3. Launch

    def _launch(self):
        """Gives the thread each bucket that may start now."""
        # The first collective on one rank is matched with the first on the others, and so on. So
        # buckets start in the order of their numbers on every rank, in whatever order they become
        # complete.
        while len(self.jobs) < len(self.buckets):
            bucket = self.buckets[len(self.jobs)]
            if not self.missing.isdisjoint(bucket.shapes):
                return
            gradients_done = None
            if self.stream:
                # A mark in the GPU's queue: it is reached when what backward has queued until now
                # is done.
                gradients_done = torch.cuda.Event(blocking=True)
                gradients_done.record()
            self.jobs.append(self.thread.submit(self._average, bucket, gradients_done))

    def _average(self, bucket, gradients_done):
        """Averages a bucket, in the communication thread; returns the bytes sent."""
        if self.stream:
            # A stream is a queue of work for a GPU. What this thread calls now goes to a queue of
            # its own, beside that of backward. The call also makes the stream's GPU the thread's:
            # each thread begins with GPU 0, and even to wait there would take memory of it.
            torch.cuda.set_stream(self.stream)
            gradients_done.synchronize()
        sent = bucket.average(self.scale)
        if self.stream:
            # Only this thread waits, until the bucket is averaged.
            averaged = torch.cuda.Event(blocking=True)
            averaged.record()
            averaged.synchronize()
        return sent

    # 4. Finish

    def finish(self):
        """Waits until all ranks hold the same gradients. Raises what went wrong in the thread, say
        RankLost; DistError if a parameter took no part in the loss, naming it."""
        # A bucket with a missing gradient was never launched: nothing would come of waiting.
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
        self.bytes_sent = sum(job.result() for job in self.jobs)
        self.wait_seconds = time.perf_counter() - began

    def norm(self):
        """Returns the 2-norm of all that is in the buckets, as a float; NaN or inf if any of it
        is. After `finish` it is that of the averaged gradients, the same on every rank."""
        return float(torch.nn.utils.get_total_norm(self.flats))

    def commit(self, step_taken):
        """Ends a step for the compressors: a skipped one leaves their residuals as they were."""
        for bucket in self.buckets:
            bucket.commit(step_taken)

    def forget(self):
        """Drops all that lossy compression has not sent yet, as if the next step were the first."""
        for bucket in self.buckets:
            bucket.forget()


def fill_buckets(parameters, world, compression, bucket_mb=None):
    """Returns the Buckets of parameters {name: tensor}, numbered from 0, the last parameter first:
    backward begins at the output. A bucket takes tensors until it has at least bucket_mb MB."""
    if bucket_mb is None:
        megabytes = 4e-6 * sum(p.numel() for p in parameters.values())
        bucket_mb = min(25.0, max(1.0, megabytes / 12))
    contents = []                                  # {name: shape} of each bucket
    room = 0.0                                     # in MB, in the last bucket
    late = False
    for name, p in reversed(parameters.items()):
        # Backward ends with the embeddings, so a bucket with anything else in it would wait for
        # them. (No backward is left to hide their own bucket.)
        is_late = name.startswith("embeddings.")
        if room <= 0 or is_late != late:
            contents.append({})
            room = bucket_mb
        late = is_late
        contents[-1][name] = p.shape
        room -= 4e-6 * p.numel()
    return [Bucket(shapes, world, compression, k) for k, shapes in enumerate(contents)]


# ----- One bucket: error feedback, and two levels -----

BLOCK = 512                                        # elements that share a scale, see `int8`


class Bucket:
    """One flat fp32 tensor (n,) of gradients, and what its compressor leaves from step to step.

    Lossy compression adds what a rank could not send to what it sends next (error feedback):

        v_r = g_r / scale + e_r                e_r: the residual of rank r, unscaled, 0 at first
        q, rest_r = compress(v_r)              q: the same on every rank
        g = scale * q
        e_r = rest_r                           `commit`: only if the step is taken

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
        self.compressor = COMPRESSORS[compression]
        self.lossy = is_lossy(compression)
        self.shapes = shapes                       # {name: shape}, in the order of the flat tensor
        # The ranks of `inner` add up first, then those of `outer` exchange. With one level, `inner`
        # is this rank alone.
        self.inner = World()
        self.outer = world
        if world.levels and (self.lossy or world.device.type == "cpu"):
            self.inner, self.outer = world.levels
        self.leader = number % self.inner.size

        n = sum(math.prod(shape) for shape in shapes.values())
        multiple = BLOCK * self.outer.size if self.lossy else 1
        # Zeros fill it up, so that each rank of `outer` can average a part of whole blocks.
        self.padded = torch.zeros(math.ceil(n / multiple) * multiple, device=world.device)
        self.flat = self.padded[:n]
        self.forget()

    def views(self):
        """Returns {name: view of the flat tensor}."""
        views = {}
        start = 0
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            views[name] = self.flat[start:end].view(shape)
            start = end
        return views

    def average(self, scale):
        """Averages the bucket over all ranks, in place; returns the bytes that this rank sent, to
        other nodes where there are several."""
        if self.inner.size > 1:
            self.flat.div_(self.inner.size)
            self.inner.reduce(self.flat, self.leader)
        sent = 0
        if self.inner.rank == self.leader:
            sent = self._exchange(scale)
        self.inner.broadcast(self.flat, self.leader)
        if self.outer.nodes > 1:
            # This is the world of all ranks (a level has nodes = 1), so there are no levels, and a
            # ring passes through all ranks. Of each node one rank sends to another node.
            sent //= self.outer.local_size
        return sent

    def _exchange(self, scale):
        """Averages the leaders' buckets, in place; returns the bytes sent. What a lossy compressor
        did not send waits in `uncommitted`."""
        if not self.lossy:
            mean, _, sent = self.compressor(self.outer, self.flat, self.state)
            self.flat.copy_(mean)
            return sent
        if self.uncommitted:
            raise DistError("lossy compression needs a call of commit() after each step")
        value = torch.add(self.residual, self.padded, alpha=1 / scale)
        mean, state, sent = self.compressor(self.outer, value, self.state)
        self.uncommitted = (value, state)
        torch.mul(mean[:len(self.flat)], scale, out=self.flat)
        return sent

    def commit(self, step_taken):
        """Makes what was not sent the residual of the next step if this one is taken, and forgets
        it otherwise: a step that is skipped after an overflow leaves no trace."""
        if self.uncommitted and step_taken:
            self.residual, self.state = self.uncommitted
        self.uncommitted = None

    def forget(self):
        """Forgets all that earlier steps left."""
        self.uncommitted = None
        self.state = {"shapes": list(self.shapes.values())}
        if self.lossy and self.inner.rank == self.leader:
            self.residual = torch.zeros_like(self.padded)


# ----- Compressors: what crosses the network, from simple to hard -----
#
#     compressor(world, value, state) -> mean, new state, bytes sent
#
#     value (n + padding,)      flat fp32, another on each rank: what is to be averaged. Afterwards
#                               it holds what was not sent, which error feedback sends later.
#     mean (n + padding,)       the mean of what was sent, the same bits on every rank. Where an
#                               element of one rank is not finite, an element of the mean is not:
#                               all ranks must skip the same step.
#     state                     a dict: the "shapes" of the tensors in value, and what the
#                               compressor keeps for the next step. It is never changed in place,
#                               since after a skipped step the old one is used again; a save drops
#                               it.

def dense(dtype, world, value, state):
    """none, fp16 and bf16: averages by one all-reduce in the format `dtype`. It divides first, then
    casts, then sums.

    fp16 rounds to 11 bits, and needs the loss scaling that keeps gradients inside its range of
    6e-8 to 65,504; bf16 has the range of fp32 and rounds to 8 bits. Each addition on the way rounds
    as well, and nobody keeps what that loses. The bytes are those of a ring of W ranks: each sends
    (W - 1) / W of the tensor twice, to sum it up and to spread the sums.
    """
    value.div_(world.size)                         # before the sum, which might overflow fp16
    mean = value.to(dtype)                         # in fp32 it is `value` itself
    world.all_reduce(mean)
    sent = 2 * (world.size - 1) * mean.numel() * mean.element_size() // world.size
    return mean, state, sent


def compressed_mean(encode, decode, world, value, state):
    """int8 and onebit: an all-reduce that compresses twice (1-bit Adam, arXiv 2102.02888). Rank j
    averages part j of what all ranks send, and sends the average to all. C(x) is what is left of x
    when it is encoded and decoded. With two ranks, whose values are (a0 a1) and (b0 b1):

                       rank 0                 rank 1
        value          a0     a1              b0     b1
        encode         C(a0)  C(a1)           C(b0)  C(b1)        a - C(a) stays in value
        all_to_all     C(a0)  C(b0)           C(a1)  C(b1)        one part, of all ranks
        decode, mean   m0                     m1                  plus the s of the last step
        encode         C(m0)                  C(m1)               m - C(m) is the next s
        all_gather     C(m0)  C(m1)           C(m0)  C(m1)        the mean, on both

    Nothing is lost: what the ranks hold in the mean, mean_r v_r + s before and q + mean_r rest_r +
    s after, is the same, where s has the parts of all ranks.
    """
    parts = value.view(world.size, -1, BLOCK)              # (W, blocks of a part, BLOCK)
    codes = encode(parts)                                  # (W, blocks of a part, bytes of a block)
    parts.sub_(decode(codes))

    received = world.all_to_all(codes)                     # row i: rank i's codes of our part
    own_part = decode(received).mean(0)                    # (blocks of a part, BLOCK)
    if "unsent" in state:
        own_part.add_(state["unsent"])

    own_codes = encode(own_part)
    unsent = own_part.sub_(decode(own_codes))
    mean = decode(world.all_gather(own_codes)).view(-1)
    return mean, state | {"unsent": unsent}, 2 * (world.size - 1) * own_codes.numel()


def with_scales(packed, scales):
    """Returns the bytes of blocks: their packed elements (..., bytes), then an fp32 scale."""
    return torch.cat([packed, scales.view(torch.uint8)], -1)


def encode_int8(blocks):
    """Returns the bytes of blocks (..., BLOCK): a whole number of -127 to 127 for each element, and
    a scale (block-wise quantisation as of Dettmers et al., arXiv 2110.02861, section 2.1, here
    linear):

        scale = max |x| / 127            level = round(x / scale)
    """
    # Faster than abs(), which would write as much as it reads.
    lowest, highest = blocks.aminmax(dim=-1, keepdim=True)
    scales = torch.maximum(highest, -lowest).div_(127).clamp_(min=1e-30)
    levels = (blocks / scales).round_().to(torch.int8)
    return with_scales(levels.view(torch.uint8), scales)


def decode_int8(codes):
    """Returns the blocks (..., BLOCK) that `encode_int8` made bytes of."""
    levels = codes[..., :-4].view(torch.int8)
    return levels * codes[..., -4:].view(torch.float32)


def encode_onebit(blocks):
    """Returns the bytes of blocks (..., BLOCK): a bit for each element, 1 if it is negative, and a
    scale, mean |x|.

    1-bit Adam's compressor in the blocks of Zheng et al. (arXiv 1905.10936). 1-bit Adam scales a
    whole part by ||x|| / sqrt(n). Where a few elements are large, as in an embedding, then what is
    not sent is larger than x, and the residual grows from step to step. mean |x| is the scale with
    the smallest error (Karimireddy et al., arXiv 1901.09847).
    """
    scales = blocks.abs().mean(-1, keepdim=True)
    negative = blocks < 0
    if blocks.is_cpu:                              # NumPy packs several times faster than torch
        packed = torch.from_numpy(np.packbits(negative.numpy(), axis=-1))
    else:
        powers = (1 << torch.arange(7, -1, -1, device=blocks.device)).byte()     # 128, 64, ..., 1
        packed = (negative.unflatten(-1, (-1, 8)) * powers).sum(-1, dtype=torch.uint8)
    return with_scales(packed, scales)


# The eight signs that a byte stands for, (256, 8): a bit of 1 is -1.
SIGNS = 1 - 2.0 * torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8))).view(256, 8)


def decode_onebit(codes):
    """Returns the blocks (..., BLOCK) that `encode_onebit` made bytes of."""
    signs = SIGNS.to(codes.device)[codes[..., :-4].int()].flatten(-2)
    return signs.mul_(codes[..., -4:].view(torch.float32))


COMPRESSORS = {
    "none": functools.partial(dense, torch.float32),
    "fp16": functools.partial(dense, torch.float16),
    "bf16": functools.partial(dense, torch.bfloat16),
    "int8": functools.partial(compressed_mean, encode_int8, decode_int8),
    "onebit": functools.partial(compressed_mean, encode_onebit, decode_onebit),
}


def is_lossy(compression):
    """Returns True if a compression keeps residuals."""
    return compression not in ("none", "fp16", "bf16")


# ----- Requests to stop -----

# What asks for a stop: of batch systems, a terminal's Ctrl-C, a terminal that is closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
                signal.SIGXCPU)
REQUESTS = []                # the names of those that have come


def listen_to_signals():
    """Returns the list that each signal that asks for a stop adds its name to, so that training can
    stop with a checkpoint. After one, Ctrl-C ends the process at once. Without torchrun, signals
    that are ignored (by nohup) stay so; torchrun kills ranks that ignore what it passes on."""
    def request(signum, _):
        REQUESTS.append(signal.Signals(signum).name)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for signum in STOP_SIGNALS:
        if TORCHRUN or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, request)
    return REQUESTS


def torchrun_process():
    """Returns the number of the torchrun process, None without one. Torchrun starts each rank in a
    session of its own: it is the parent of the session's leader, which may be a wrapper, such as
    numactl, around this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    leader = os.getsid(0)
    with contextlib.suppress(OSError):
        # A line with the program's name in parentheses, its state, its parent ...
        line = Path(f"/proc/{leader}/stat").read_text()
        return int(line.rpartition(")")[2].split()[1])
    return os.getppid()


TORCHRUN = torchrun_process()


def torchrun_died():
    """Returns True if the torchrun that started this rank has ended: the rank must not go on."""
    return torchrun_process() != TORCHRUN


# ----- Failures: who failed, said once -----
#
# A rank can die (kill -9, no memory), hang (a stopped machine) or raise an exception. All others
# then get an error in their next collective: at once from a dead rank, at the end of --timeout from
# one that hangs. Gloo's error names no rank, or a wrong one, and every rank would print its own. So
# the first one that fails claims it, by the key "failed" of the store; a thread of each process
# waits for that key and says that the process is alive, whatever the program is busy with. Rank 2
# is killed:
#
#     s     rank 0                      rank 1                      rank 2     torchrun
#     0.0   in a collective             in a collective             killed
#     0.1   error: claims "failed"      error: is not the first     -          sees it, sends
#           thread: sets "alive/0"      thread: sets "alive/1"      -          SIGTERM, a request
#     2.1   no "alive/2": prints        prints nothing              -          to stop
#           "rank 2 died ...", ends     ends                                   starts all again
#
# A rank that raises an exception of its own is the first to fail, and prints that.

STORE = None                 # of all ranks, when they have met
WATCHER = None               # the thread of `watch`
NOBODY = "nobody"            # the value of "failed" at a good end


def watch(store, rank):
    """Waits, in a thread with a connection of its own, until a rank has failed. Then says in the
    store that this process is alive, and ends it if it lives a minute later."""
    with contextlib.suppress(RuntimeError):        # the store is gone: the next collective fails
        store.wait(["failed"], datetime.timedelta(days=1000))
        if store.get("failed").decode() == NOBODY:
            return
        store.set(f"alive/{rank}", "")
    # A program that is saving needs the time. One that waits for a dead rank in NCCL would wait
    # longer, or for ever.
    time.sleep(60)
    os._exit(1)


def agree(restart_helps, rank_lost):
    """Returns (whether this rank is the first that failed, which ranks are silent, whether a
    restart helps, as the first one says), by the store."""
    rank = distributed.get_rank()
    STORE.set(f"alive/{rank}", "")
    # compare_set writes our claim if the key is not set yet, and returns what it then holds.
    own_claim = f"{rank} {restart_helps}"
    claim = STORE.compare_set("failed", "", own_claim).decode()
    if rank_lost or claim != own_claim:
        time.sleep(2)                              # until all others have said that they are alive
    silent = ranks_without(STORE, "alive", distributed.get_world_size())
    return claim == own_claim, silent, claim.endswith("True")


def leave(message, restart_helps, rank_lost=False):
    """Ends this process after an error, with status 1. The first rank to fail prints the message.
    Where it would not help that torchrun starts all again, ends torchrun, too.

    rank_lost: it was a collective that failed, since another rank did not take part; then the first
    rank prints which ones are silent.
    """
    # Without a store, or if node 0 is gone and its store with it, one rank of each node prints.
    first = not rank_lost or os.environ.get("LOCAL_RANK", "0") == "0"
    if STORE:
        silent = ""
        # A request to a host that is stopped or cut off never returns, so a thread makes it.
        answer = ThreadPoolExecutor().submit(agree, restart_helps, rank_lost)
        with contextlib.suppress(RuntimeError, TimeoutError):
            first, silent, restart_helps = answer.result(timeout=10)
        if rank_lost:
            message = (f"rank {silent or '?'} died or did not answer in time; the same command "
                       f"resumes (was it busy? raise --timeout) ({message})")
    if first:
        print(message, file=sys.stderr, flush=True)

    if TORCHRUN and not restart_helps and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        time.sleep(0.1)                            # it ends all ranks, and one may still print
        os.kill(TORCHRUN, signal.SIGTERM)
    os._exit(1)                                    # a clean exit can wait for a rank that is lost
