"""Ranks, and gradients averaged over them while backward still runs.

    torchrun --nproc_per_node=2 dist.py          # what averaging costs with each compressor

Read `Reducer` first: its docstring tells the method (Li et al., "PyTorch Distributed", arXiv
2006.15704, section 3.2), its steps are the headings of the code. Of the compressors, `dense` is
enough at first; each of the others can be read alone. Only here is torch.distributed imported. With
one rank every collective is a no-op.
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import itertools
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import torch
import torch.distributed


class DistError(Exception):
    """Why ranks cannot train, or not go on; the message says what to do."""


class RankLost(DistError):
    """A rank died, did not answer in time or never came. Leave by os._exit: else exit can hang."""


# ----- Ranks -----

@dataclasses.dataclass(frozen=True)
class World:
    """This process among all of them, and the collectives.

    Tensors on a GPU go over NCCL; numbers and objects go over Gloo also there, so that a rank that
    died is an exception in the training loop and not an aborted process.
    """
    rank: int = 0            # among all processes
    size: int = 1
    local_rank: int = 0      # among those of this node
    local_size: int = 1
    nodes: int = 1
    device: torch.device = torch.device("cpu")
    group: object = None     # torch's process group; None is all processes
    levels: tuple = ()       # on several nodes with several ranks each, see `two_levels`

    def sum(self, values):
        """Returns the sums over all ranks of a list of numbers, as floats: integers are exact below
        2^53, NaN and inf survive, and the answer is the same on every rank."""
        total = torch.tensor(values, dtype=torch.float64)
        self.all_reduce(total)
        return total.tolist()

    def broadcast_object(self, value):
        """Returns rank 0's value (any picklable object), on every rank. Entries of dicts go one by
        one: for a while, what is pickled takes four times its memory."""
        values = [dict.fromkeys(value) if isinstance(value, dict) else value]
        self._run(torch.distributed.broadcast_object_list, values, group_src=0)
        return ({k: self.broadcast_object(None if self.rank else value[k]) for k in values[0]}
                if isinstance(values[0], dict) else values[0])

    def all_gather_object(self, value):
        """Returns the list of every rank's value (any small picklable object), in order of rank."""
        values = [value] * self.size
        self._run(torch.distributed.all_gather_object, values, value)
        return values

    def on_all_ranks(self, expected, job):
        """Returns job(), called on every rank. If it raises one of the exceptions `expected` on a
        rank, all raise the first of these classes with its words: the others would wait for the
        failed rank in their next collective."""
        try:
            result, problem = job(), ""
        except expected as error:
            result, problem = None, str(error) or repr(error)
        if problems := [words for words in self.all_gather_object(problem) if words]:
            raise expected[0](problems[0])
        return result

    def check_same(self, values, otherwise):
        """Raises DistError, on every rank, if a dict is not the same on all; `otherwise` is what
        its words say of the rank that differs from rank 0."""
        for rank, other in enumerate(everyone := self.all_gather_object(values)):
            if differ := differences(other, everyone[0]):
                raise DistError(f"rank {rank} {otherwise}: {differ}")

    def all_reduce(self, tensor):
        """Sums a tensor over all ranks, in place on every rank."""
        self._run(torch.distributed.all_reduce, tensor)

    def reduce(self, tensor, target):
        """Sums a tensor over all ranks, in place on rank `target`; elsewhere it is undefined."""
        self._run(torch.distributed.reduce, tensor, group_dst=target)

    def broadcast(self, tensor, source=0):
        """Overwrites a tensor with that of rank `source`, in place."""
        self._run(torch.distributed.broadcast, tensor, group_src=source)

    def all_gather(self, tensor):
        """Returns every rank's tensor, stacked in order of rank: (...) -> (size, ...)."""
        gathered = torch.stack([tensor] * self.size)
        self._run(torch.distributed.all_gather, list(gathered.unbind()), tensor)
        return gathered

    def all_to_all(self, rows):
        """Returns (size, ...): row i is row `rank` of rank i's rows (size, ...)."""
        received = torch.empty_like(rows) if self.size > 1 else rows
        self._run(torch.distributed.all_to_all_single, received, rows)
        return received

    def _run(self, collective, *arguments, **options):
        try:
            if self.size > 1 and self.device.type != "meta":       # see `wire_bytes`
                collective(*arguments, group=self.group, **options)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise                                              # of our own GPU, not of a rank
        except RuntimeError as error:
            # The first to fail sets `failed`; who is alive sees it and sets alive/RANK (`answer`).
            # Each waits for the answers: when one leaves, torchrun ends all, the first among them
            _, lost = self.first_to_fail(), self._ask(lambda s: absent(s, "alive", "answered"))
            raise RankLost(f"rank {lost or '?'} died or did not answer in time; the same command "
                           f"resumes (was it busy? raise --timeout) ({error!r:.480})") from error

    def first_to_fail(self):
        """Returns True on the rank that calls it first, and False on the others: of all that fail,
        one has the reason. Where the store does not answer it is True on each of them, and a clean
        exit would wait for the store: leave by os._exit."""
        me = os.environ.get("RANK", "0")               # in a group, `rank` is another number
        return self._ask(lambda store: store.compare_set("failed", "", me).decode()) in (None, me)

    def _ask(self, question):
        """Returns question(store of all ranks), or None if there is no store or no answer in 3 s: a
        request to a host that is stopped or cut off never returns."""
        with contextlib.suppress(RuntimeError, TimeoutError, AttributeError):
            store = torch.distributed.group.WORLD.get_group_store()
            return concurrent.futures.ThreadPoolExecutor(1).submit(question, store).result(3)

    def close(self):
        """Closes the groups: one left open aborts at exit. After RankLost it could wait for that
        rank: leave by os._exit."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def init(timeout=600.0, init_method="env://"):
    """Returns this process's World from the environment that torchrun sets; without, of one rank.

    timeout: seconds that a collective waits for a rank. Raises DistError if the nodes have unequal
    numbers of ranks, or only some have GPUs, RankLost if the ranks do not meet.
    """
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    rank, size, local_rank, local_size = (int(os.environ.get(*item)) for item in defaults.items())
    nodes, device = size // local_size, torch.device("cpu")
    if torch.cuda.is_available():              # a scheduler may show each rank only its own GPU
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    world = World(rank, size, local_rank, local_size, nodes, device)
    if size == 1:
        return world
    limit = datetime.timedelta(seconds=timeout)
    try:
        store = meet(rank, size, init_method, limit)
        name, address = interface_towards(os.environ.get("MASTER_ADDR", ""))
        store.set(f"address/{rank}", address)
        # On node 0, where MASTER_ADDR is often 127.0.1.1: the way to the last node
        if rank == local_rank:
            name, _ = interface_towards(store.get(f"address/{size - 1}").decode())
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # Where NCCL gives up it aborts the process: Gloo, which gives up first, lets us say why
        torch.distributed.init_process_group(backend, None, 2 * limit, size, rank, store)
        gloo = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        getattr(gloo, "wrapped_pg", gloo)._set_default_timeout(limit)
        threading.Thread(target=answer, args=(rank,)).start()
        gpu = rank if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
        places = world.all_gather_object((local_rank, kind := f"{local_size} {device.type}", gpu))
        even = all(place[:2] == (r % local_size, kind) for r, place in enumerate(places))
        if not even or size % local_size or len({gpu for *_, gpu in places}) < size:
            raise DistError(f"nodes of {sorted({k for _, k, _ in places})} ranks, {size} in all; "
                            "set the same --nproc_per_node on every node, on GPUs one for each")
        return two_levels(world, limit) if nodes > 1 and local_size > 1 else world
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"rank {rank} of {size} could not meet others: {error!r:.200}") from error


def meet(rank, size, init_method, limit):
    """Returns a store of keys and values that all ranks share and no earlier ones have used.

    When torchrun starts ranks again its store still holds the addresses of the dead ones, and its
    count of restarts differs between nodes. So every process adds one to a count in the store, and
    the ranks meet under the number that it then has: a later process of the same rank changes it,
    so no two can be there. Raises RuntimeError if ranks do not come in time, naming them.
    """
    root, *_ = next(torch.distributed.rendezvous(init_method, rank, size, timeout=limit))
    root.add("processes", 1)
    for _ in range(1 + int(10 * limit.total_seconds())):
        store = torch.distributed.PrefixStore(f"{root.add('processes', 0)}", root)
        store.set(f"here/{rank}", "")
        if store.check([f"here/{r}" for r in range(size)]):
            return store
        time.sleep(0.1)
    raise RuntimeError(f"rank {absent(store, 'here', f'here/{rank}')} did not come in time")


def absent(store, word, key):
    """Returns the ranks that have not set `word` in a store when `key` is there, as "3, 5"."""
    while not store.check([key]):          # to wait for it would keep all threads from the store
        time.sleep(0.1)
    ranks = range(int(os.environ["WORLD_SIZE"]))
    return ", ".join(str(r) for r in ranks if not store.check([f"{word}/{r}"]))


def answer(rank):
    """Tells a rank that failed that this process is alive, and a second later that all who are have
    told so: ranks may notice one after another, and none then waits again. Ends the process if it
    has not ended a minute later. In a thread, since the program may be busy for minutes; a dead or
    stopped process has none."""
    with contextlib.suppress(RuntimeError):            # the store is gone
        store = torch.distributed.group.WORLD.get_group_store()
        # It ends before Python does, which would abort within a request of a daemon thread
        while torch.distributed.is_initialized() and threading.main_thread().is_alive():
            if store.check(["failed"]):
                store.set(f"alive/{rank}", "")
                time.sleep(1)                          # each looks five times a second
                store.set("answered", "")
                # It may be saving; in NCCL it would wait for a dead rank for twice the timeout
                return faulthandler.dump_traceback_later(60, exit=True)
            time.sleep(0.2)


def interface_towards(address):
    """Returns (name of the network interface by which packets to a host leave, our own address
    there), by Linux's `ip`; two empty strings where that does not tell.

    Gloo otherwise takes the one of the host's own name, often a wrong one where there are several,
    or one that other nodes cannot reach.
    """
    with contextlib.suppress(OSError):
        route = subprocess.getoutput(f"ip -o route get {socket.gethostbyname(address)}")
        if found := re.search(r"dev (\S+) .*src (\S+)", route):
            return found.groups()
    return "", ""


def two_levels(world, limit):
    """Returns the World with levels: the Worlds of this node, and of this local rank on all."""
    ranks, levels = torch.arange(world.size).view(world.nodes, world.local_size), []
    limit *= 2 if world.device.type == "cuda" else 1         # of NCCL, see `init`
    for teams in ranks.tolist(), ranks.T.tolist():
        # torch asks that every rank creates every group, its own or not, in the same order
        group, _ = torch.distributed.new_subgroups_by_enumeration(teams, limit)
        levels.append(World(group.rank(), group.size(), device=world.device, group=group))
    return dataclasses.replace(world, levels=tuple(levels))


def differences(one, other):
    """Returns the keys in which two dicts differ, as text: "seed 1 (not 0)"."""
    return ", ".join(f"{key} {one.get(key)} (not {other.get(key)})"
                     for key in sorted({*one, *other}) if one.get(key) != other.get(key))


# ----- Requests to stop -----

SIGNALLED = 1 << 30          # a reason to stop that stands out of the sum over all ranks
# torchrun's process, looked up before anything takes long: ranks must not train on without it
TORCHRUN = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def listen_to_signals(max_minutes):
    """Returns a list that SIGTERM, Ctrl-C, a closed terminal (SIGHUP) and the end of max_minutes
    add their names to, so that training can stop with a checkpoint. A second Ctrl-C ends the
    process at once, as does one after another signal. What nohup or a shell has set to be ignored
    stays so, but not under torchrun, which passes its own signals on and kills who ignores them."""
    requests = []

    def request(signum, _):
        requests.append(signal.Signals(signum).name)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if TORCHRUN or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, request)
    if max_minutes is not None:
        timer = threading.Timer(60 * max_minutes, requests.append, ["--max-minutes"])
        timer.daemon = True                                  # it must not outlive the training
        timer.start()
    return requests


def asked_to_stop(stop_requests):
    """Returns 0 if this rank is to go on; 1 if its time is up; SIGNALLED if it got a signal; inf if
    its torchrun is dead: no rank trains on then."""
    if TORCHRUN in (None, os.getppid()):
        return SIGNALLED if set(stop_requests) - {"--max-minutes"} else len(stop_requests)
    return math.inf


# ----- The reducer: gradients averaged while backward runs -----

class Reducer:
    """Averages a module's gradients over the N ranks while backward still runs.

        g = 1/N sum_r g_r           g_r: the sum of rank r's gradients over its micro-batches

    Afterwards g has the same bits on every rank. Four steps, the headings of the code below:

    1. Pack, once. Whole parameters, the last one first, go to a flat fp32 bucket until it has
       bucket_mb MB (by default a 12th of all gradients, within 1 and 25 MB), then to the next.
       Each gradient is a view of its bucket: of fp32 parameters it is `p.grad`; fp16 and bf16
       ones have theirs added to it and dropped, so that micro-batches add up in fp32. All ranks
       start from rank 0's weights.
    2. Ready. Autograd has added a parameter's gradient to its view.
    3. Launch. In the step's last micro-batch, a bucket whose parameters are all ready goes to the
       communication thread, which averages one bucket after another while backward goes on.
    4. Finish. Waits for the thread.

        reducer = Reducer(model, world)
        reducer.zero_grad()
        with reducer.accumulate():                 # all micro-batches of a step but the last
            loss(first).backward()
        loss(last).backward()
        reducer.finish()                           # now reducer.gradients are equal on all ranks
        reducer.commit(step_taken=True)            # for lossy compression, see Bucket
        optimizer.step()

    `gradients`: {name: view}; `buckets`: the flat tensors. compression: as in "none", "topk:0.01".
    After `finish`: `bytes_sent` by this rank (to other nodes, where there are several),
    `wait_seconds` for the thread, and `bucket_seconds` of each bucket.
    """

    # 1. Pack

    def __init__(self, module, world, bucket_mb=None, compression="none"):
        for tensor in [*module.parameters(), *module.buffers()]:
            world.broadcast(tensor.detach())
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if any(p._post_accumulate_grad_hooks for p in self.parameters.values()):
            raise DistError("this model has a Reducer already: close() that one first")
        total = 4e-6 * sum(p.numel() for p in self.parameters.values())
        bucket_mb = bucket_mb or min(25.0, max(1.0, total / 12))
        self._buckets = fill_buckets(order_of_readiness(module), bucket_mb, world, compression)
        self.buckets = [bucket.flat for bucket in self._buckets]
        self.gradients = {name: view for bucket in self._buckets
                          for name, view in bucket.views(bucket.flat).items()}
        self.hooks = [p.register_post_accumulate_grad_hook(functools.partial(self._ready, name))
                      for name, p in self.parameters.items()]
        # It uses one core. With a second team OpenMP has more threads than cores, and puts those of
        # backward to sleep after each operation: a step of tiny took 1.36 times as long
        self.thread = concurrent.futures.ThreadPoolExecutor(1, None, torch.set_num_threads, (1,))
        self.stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self.jobs, self.world = [], world
        self.zero_grad()

    def zero_grad(self, scale=1.0):
        """Begins a step, whose loss is multiplied by `scale`. The step before counts as taken where
        `commit` was not called, or error feedback would stand still."""
        concurrent.futures.wait(self.jobs)         # after an error some may still be running
        self.jobs, self.scale, self.sends = [], scale, True
        self.bytes_sent, self.wait_seconds, self.bucket_seconds = 0, 0.0, []
        self.missing = set(self.parameters)        # whose gradients are not yet ready
        torch._foreach_zero_(self.buckets)         # autograd adds to them in place
        for name, p in self.parameters.items():
            p.grad = self.gradients[name] if p.dtype == torch.float32 else None

    @contextlib.contextmanager
    def accumulate(self):
        """While inside, gradients add up on this rank and nothing is sent."""
        self.sends = False
        yield
        self.sends = True                          # after an exception, zero_grad sets it

    # 2. Ready

    def _ready(self, name, p):
        """Adds a gradient to its view, where autograd has not: in 16 bits, or where an optimizer's
        zero_grad() has dropped the view. Autograd calls this with the parameter, not the gradient,
        when p.grad is complete. Outside of `accumulate`, takes the name off `missing` and tries to
        launch; raises DistError where that is the second time in a step."""
        view = self.gradients[name]
        if p.grad is not view:
            view.add_(p.grad)
            p.grad = view if p.dtype == torch.float32 else None
        if self.sends:
            if name not in self.missing:
                raise DistError(f"gradient of {name} ready twice; see accumulate(), zero_grad()")
            self.missing.remove(name)
            self._launch()

    # 3. Launch

    def _launch(self):
        """Hands `_average` of each bucket that may start now to the thread, with a recorded event
        and the job before it (a list, empty for the first), and adds the job to `jobs`."""
        # Collectives of different ranks meet by their order alone, so buckets start in the order
        # of their numbers on every rank, whatever order they are complete in. The embedding that
        # is tied to the output matrix is ready last: no backward is left to overlap its bucket.
        waiting = self._buckets[len(self.jobs):]
        for bucket in itertools.takewhile(lambda b: self.missing.isdisjoint(b.shapes), waiting):
            event = torch.cuda.Event(blocking=True) if self.stream else torch.cpu.Event()
            event.record()                 # after what backward has queued on a GPU until now
            self.jobs.append(self.thread.submit(self._average, bucket, event, self.jobs[-1:]))

    def _average(self, bucket, event, before):
        """Averages a bucket, in the communication thread; returns (bytes sent, seconds)."""
        for job in before:
            job.result()                   # after an error in one bucket no further one is sent
        # First, and for good: it sets the device too, and any use of GPU 0, which threads begin
        # with, would take memory there on every rank. None on a CPU: changes nothing
        torch.cuda.set_stream(self.stream)
        event.synchronize()
        began = time.perf_counter()
        sent = bucket.average(self.scale)
        event.record()
        event.synchronize()                # only this thread waits, and its seconds are real
        return sent, time.perf_counter() - began

    # 4. Finish

    def finish(self):
        """Waits until all ranks hold the same gradients. Raises what went wrong in the thread, say
        RankLost; DistError if a parameter took no part in the loss, naming it."""
        if unused := sorted(self.missing):
            raise DistError(f"no gradient for {', '.join(unused)} in the step's last backward: "
                            "each must take part in that loss, or have requires_grad=False")
        if self.stream:
            torch.cuda.current_stream().synchronize()          # backward's own time is not waiting
            # A rank that died in backward is an exception here, over Gloo. NCCL would wait for it
            # until the timeout, and then abort the process without a line
            self.world.sum([0])
        began = time.perf_counter()
        sent, self.bucket_seconds = zip(*[job.result() for job in self.jobs])
        self.wait_seconds, self.bytes_sent = time.perf_counter() - began, sum(sent)

    def commit(self, step_taken):
        """Ends a step for the compressors: a skipped one leaves their residuals as they were."""
        for bucket in self._buckets:
            bucket.commit(step_taken)

    def state_dict(self):
        """Returns what lossy compression has not yet sent, {name: fp32 tensor}. All ranks call it.

        It averages residuals over them, so that any number of ranks can take them up, and restarts
        PowerSGD's factors, both also in the run that goes on. So with lossy compression the bits
        after a save depend on which steps were saved; and what resumes from a save, on as many
        ranks, equals the run that saved there, bit for bit.
        """
        return {name: rest for bucket in self._buckets if bucket.lossy
                for name, rest in bucket.fold().items()}

    def load_state_dict(self, state):
        """Takes up what `state_dict` returned, on any number of ranks and with any bucket size;
        None: forgets what is not yet sent."""
        for bucket in self._buckets:
            bucket.restart(state)

    def close(self):
        """Removes the hooks and ends the communication thread."""
        for hook in self.hooks:
            hook.remove()
        self.thread.shutdown(cancel_futures=True)


def order_of_readiness(module):
    """Returns two lists of (name, trainable parameter), each about as backward completes gradients:
    of modules that hold no embedding, and of those that do."""
    named = [(name, p) for name, p in reversed(list(module.named_parameters())) if p.requires_grad]
    named.sort(key=lambda pair: "." in pair[0])    # first the module's own: its output's (mlm_bias)
    # In buckets of their own: what shared those would wait for the end of backward too
    late = {p for owner in module.modules() for p in owner.parameters()
            if any(isinstance(child, torch.nn.Embedding) for child in owner.children())}
    return [[pair for pair in named if (pair[1] in late) == last] for last in (False, True)]


def fill_buckets(groups, bucket_mb, world, compression):
    """Returns Buckets of lists of (name, tensor), of bucket_mb MB or more but each list's last."""
    parts = []
    for group in groups:
        room = 0.0
        for name, tensor in group:
            if room <= 0:
                parts.append({})
                room = bucket_mb
            parts[-1][name] = tensor.shape
            room -= 4e-6 * tensor.numel()
    return [Bucket(shapes, world, compression, number) for number, shapes in enumerate(parts)]


class CompressedMean:
    """Averages the same tensors over the ranks at each call, by 1-bit compression with error
    feedback: what optimizers use that average momentum in place of gradients."""

    def __init__(self, named, world):
        # In buckets, because compressing takes several times the memory of what is compressed
        self._buckets = fill_buckets([named], 25.0, world, "onebit")

    def __call__(self, tensors):
        """Replaces tensors, in the order of `named`, by their means; returns the bytes sent."""
        views = [view for bucket in self._buckets for view in bucket.views(bucket.flat).values()]
        torch._foreach_copy_(views, tensors)
        sent = sum(bucket.average(1.0) for bucket in self._buckets)
        torch._foreach_copy_(tensors, views)
        return sent

    state_dict, load_state_dict = Reducer.state_dict, Reducer.load_state_dict


# ----- One bucket: error feedback, and two levels -----

class Bucket:
    """One flat fp32 tensor (n,) of gradients, and what its compressor leaves from step to step.

    Lossy compression adds what a rank could not send to what it sends next (error feedback):

        v_r = g_r / scale + e_r                e_r: the residual of rank r, unscaled, 0 at first
        q, rest_r = compress(v_r)              q: the same on every rank
        g = scale * q
        e_r = rest_r                           `commit`: only if the step is taken

    So an overflow leaves no trace, and what went in comes out: mean_r v_r = q + mean_r rest_r (and
    what the server error of int8 and onebit grew by). So does a spike that is finite, but over many
    steps: gradients are clipped after this, so most of it stays in e_r for a while.

    Several nodes with several ranks each have two levels (Goyal et al., arXiv 1706.02677, section
    4.1), but for dense sums on GPUs, where NCCL has its own: a node's ranks add up at one of them,
    the bucket's leader; the leaders of all nodes exchange, compressed; each passes the mean on. So
    a node sends no more than one rank. Bucket `number` decides who leads, which spreads memory and
    work over the node's GPUs.
    """

    def __init__(self, shapes, world, compression, number=0):
        self.compressor, self.argument, padding = parse_compression(compression)
        self.shapes, self.lossy = shapes, self.compressor is not dense
        two = world.levels and (self.lossy or world.device.type == "cpu")     # NCCL has its own
        self.inner, self.outer = world.levels if two else (World(), world)
        n, multiple = sum(map(math.prod, shapes.values())), padding(self.outer.size)
        self.padded = torch.zeros(-(-n // multiple) * multiple, device=world.device)
        self.flat, self.leader = self.padded[:n], number % self.inner.size
        self.keeps_residual = self.lossy and self.inner.rank == self.leader
        self.restart()

    def views(self, flat):
        """Returns {name: view} of a flat tensor (n,) with the bucket's layout."""
        return dict(zip(self.shapes, split(flat[:len(self.flat)], self.shapes.values())))

    def average(self, scale):
        """Averages the bucket over all ranks, in place; returns the bytes that this rank sent, to
        other nodes where there are several."""
        if self.inner.size > 1:
            self.inner.reduce(self.flat.div_(self.inner.size), self.leader)
        sent = 0
        if self.inner.rank == self.leader:
            sent = self._send(scale) if self.lossy else dense(self.outer, self.flat, self.argument)
        self.inner.broadcast(self.flat, self.leader)
        # In NCCL's ring through all ranks only one rank of each node sends to another node
        return sent // self.outer.local_size if self.outer.nodes > 1 else sent

    def _send(self, scale):
        """Averages the leaders' buckets, in place, by the equations of the class; returns the bytes
        sent. The compressor (its arguments: see Compressors below) gets v in `pending`, zeros after
        it; `padded`, which begins with `flat`, for the mean; and a copy of `state`. What it leaves
        there waits, as `pending` and `pending_state`, for `commit`. Where that was not called, the
        step before counts as taken."""
        self.commit(True)
        n, value, state = len(self.flat), self.pending, dict(self.state)
        torch.add(self.residual[:n], self.flat, alpha=1 / scale, out=value[:n])      # v
        value[n:] = 0                              # padding, in which onebit leaves rounding errors
        sent = self.compressor(self.outer, value, self.padded, state, self.argument)
        self.flat.mul_(scale)                                                        # g
        self.pending_state = state                 # and `value`, rest, is the pending residual
        return sent

    def commit(self, step_taken):
        """Makes the residual of the last `average`, if still undecided, the one of the next."""
        if self.pending_state and step_taken:
            self.residual, self.pending = self.pending, self.residual
            self.state = self.pending_state
        self.pending_state = None

    def fold(self):
        """Returns {name: what was not yet sent}, averaged over all ranks, and restarts from it."""
        self.commit(True)
        rest = torch.zeros_like(self.flat)
        if self.keeps_residual:
            dense(self.outer, rest.copy_(self.residual[:len(rest)]))
            if "server" in self.state:             # a part of it on each rank, see two_phase
                rest += self.outer.all_gather(self.state["server"]).view(-1)[:len(rest)]
        self.inner.broadcast(rest, self.leader)
        self.restart(self.views(rest))
        # Copies: to pickle a view is to pickle all that it is a view of
        return {name: view.clone() for name, view in self.views(rest).items()}

    def restart(self, residual=None):
        """Forgets all that earlier steps left, and takes up {name: residual} if there is one."""
        # Compressors replace what is in their state, they never change it in place: after a skipped
        # step the old dict is still right
        self.state, self.pending_state = {"shapes": list(self.shapes.values())}, None
        if self.keeps_residual:
            self.residual, self.pending = (torch.zeros_like(self.padded) for _ in range(2))
            for name, view in self.views(self.residual).items() if residual else ():
                view.copy_(residual[name])


def split(flat, shapes):
    """Returns the tensors of these shapes that lie in a flat one (n,), as views."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]


# ----- Compressors: what crosses the network, from simple to hard -----
#
# Each but `dense`, which sends everything and averages in place, is a function (world, value, mean,
# state, argument) -> bytes sent. value (n + padding,): flat fp32, another on each rank, in which it
# leaves what it could not send. mean (n + padding,): where it writes the mean of what was sent, the
# same on every rank. state: of the tensors in value, "shapes"; and what it keeps for the next step.

def dense(world, value, dtype=torch.float32):
    """none, fp16 and bf16: averages by one all-reduce in this format, in place.

    fp16 rounds to 11 bits, and needs the loss scaling that keeps gradients inside its range of
    6e-8 to 65,504; bf16 has the range of fp32 and rounds to 8 bits. Each addition on the way rounds
    as well. Returns the bytes of a ring: each rank sends all `size` parts of the tensor but one to
    sum them, and as many to spread the sums.
    """
    wire = value.div_(world.size).to(dtype)        # before the sum, which might overflow fp16
    world.all_reduce(wire)
    value.copy_(wire)                              # in fp32 they are the same tensor
    return 2 * (world.size - 1) * wire.numel() * wire.element_size() // world.size


def topk(world, value, mean, state, fraction):
    """Sends each rank's largest elements, with their indices, by all_gather (Deep Gradient
    Compression, arXiv 1712.01887, without its momentum correction).

        S_r = the k = fraction * n largest |v_r|         q = mean_r (v_r on S_r, 0 elsewhere)

    8 bytes an element go to each other rank: from N = 1 / fraction ranks on, fp32 sends less.
    """
    sizes, k = value.abs(), max(1, int(fraction * len(value)))
    # On a CPU NumPy finds them five times as fast
    indices = (torch.from_numpy(np.argpartition(sizes.numpy(), -k)[-k:]) if value.is_cpu
               else sizes.topk(k, sorted=False).indices)
    wire = torch.stack([value[indices], indices.int().view(torch.float32)])              # (2, k)
    wire[0, 0] += 0 * value.dot(value)             # an inf or NaN must be seen, wherever it is
    value.index_fill_(0, indices, 0)
    mean.zero_()
    for elements, indices in world.all_gather(wire):
        mean.index_add_(0, indices.view(torch.int32), elements, alpha=1 / world.size)
    return (world.size - 1) * wire.numel() * 4


def chunk(world, value, mean, state, fraction, size=1024):
    """Sends the chunks of 1,024 elements with the largest norms: GradientFlow's coarse-grained
    sparse communication, CSC (arXiv 1902.06855, section 3.2), without its momentum correction and
    dense warm-up. Norms are averaged first, so all ranks choose the same chunks, and a plain
    all-reduce of those is enough on any number of ranks.

        S = the chunks c with the largest mean_r ||v_r[c]||_1      q = mean_r v_r on S, 0 elsewhere
    """
    chunks = value.view(-1, size)
    norms = torch.linalg.vector_norm(chunks, ord=1, dim=1)
    sent = dense(world, norms)
    chosen = norms.topk(max(1, round(fraction * len(chunks)))).indices
    means = chunks[chosen]
    chunks.index_fill_(0, chosen, 0)
    sent += dense(world, means)
    mean.zero_().view(-1, size).index_copy_(0, chosen, means)
    return sent


def two_phase(world, value, mean, state, code):
    """int8 and onebit: an all-reduce that compresses twice (1-bit Adam, arXiv 2102.02888). Part j
    of every rank goes to rank j (all_to_all), which averages the parts, compresses the average
    again with a residual of its own, the server error, and sends it to all (all_gather).

        q_r = C(v_r)                  rest_r = v_r - q_r                   worker r, all parts
        q = C(mean_r q_r + s)         s = mean_r q_r + s - q               server j, part j
    """
    encode, decode, block = code
    n = sum(map(math.prod, state["shapes"]))               # the rest of `value` is padding
    parts = value.view(world.size, -1, block)              # (N, blocks of a part, block)
    scratch = mean.view_as(parts)                          # new memory costs more than arithmetic
    starts = torch.arange(0, len(value), block, device=value.device).view(world.size, -1, 1)
    sizes = (n - starts).clamp(1, block)                   # elements of each block, without padding
    wire = encode(parts, sizes, scratch)
    server = state["server"].clone() if "server" in state else torch.zeros_like(parts[0])
    for part in decode(world.all_to_all(wire), scratch):
        server.add_(part, alpha=1 / world.size)
    server.view(-1)[max(0, n - world.rank * server.numel()):] = 0     # onebit made signs of padding
    wire = encode(server, sizes[world.rank], scratch[0])
    state["server"] = server
    decode(world.all_gather(wire), scratch)
    return 2 * (world.size - 1) * wire.numel()


def encode_int8(blocks, sizes, scratch):
    """Returns bytes (..., 260) of blocks (..., 256), and leaves the rounding error in the blocks.

    8 bits an element and one fp32 scale a block, whose largest element becomes 127 (block-wise
    quantisation as of Dettmers et al., arXiv 2110.02861, section 2.1, here linear). sizes: unused.

        s = max |x| / 127            q = s round(x / s)
    """
    peaks = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
    scales = peaks.div_(127).clamp_(min=1e-30)
    levels = torch.mul(blocks, 1 / scales, out=scratch).round_()
    blocks.addcmul_(levels, scales, value=-1)
    return torch.cat([levels.to(torch.int8).view(torch.uint8), scales.view(torch.uint8)], -1)


def decode_int8(wire, out):
    """Writes the blocks (..., 256) of bytes (..., 260) to `out` and returns them."""
    # First to floats: int8 times float is 60 times slower on a CPU
    return out.copy_(wire[..., :-4].view(torch.int8)).mul_(wire[..., -4:].view(torch.float32))


# The eight signs that a byte stands for, (256, 8)
SIGNS = 1 - 2.0 * torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8))).view(256, 8)


def encode_onebit(blocks, sizes, scratch):
    """Returns bytes (..., 68) of blocks (..., 512), and leaves the rounding error in the blocks.

    One sign an element and one fp32 scale a block: 1-bit Adam's compressor (arXiv 2102.02888) in
    the blocks of Zheng et al. (arXiv 1905.10936). sizes: how many elements of a block are real.

        s = mean |x|          q = s sign(x), where sign(0) = +1

    1-bit Adam scales a whole part by ||x|| / sqrt(n). Where a few elements are large, as in an
    embedding, that q is further from x than 0 is, and errors grow; mean |x| is the closest scale
    (Karimireddy et al., arXiv 1901.09847).
    """
    scales = torch.abs(blocks, out=scratch).sum(-1, keepdim=True).div_(sizes)
    if not blocks.is_cpu:
        powers = (1 << torch.arange(7, -1, -1, device=blocks.device)).byte()     # 128, 64, ..., 1
        packed = ((blocks < 0).unflatten(-1, (-1, 8)) * powers).sum(-1, dtype=torch.uint8)
    else:                                          # NumPy packs several times faster than torch
        packed = torch.from_numpy(np.packbits(blocks.numpy() < 0, axis=-1))
    wire = torch.cat([packed, scales.view(torch.uint8)], -1)
    blocks.sub_(decode_onebit(wire, scratch))
    return wire


def decode_onebit(wire, out):
    """Writes the blocks (..., 512) of bytes (..., 68) to `out` and returns them."""
    packed, eights = wire[..., :-4], out.unflatten(-1, (-1, 8))
    if not wire.is_cpu:
        eights.copy_(SIGNS.to(wire.device)[packed.int()])
    else:
        np.take(SIGNS.numpy(), packed.numpy(), 0, out=eights.numpy(), mode="clip")
    return out.mul_(wire[..., -4:].view(torch.float32))


def powersgd(world, value, mean, state, rank):
    """Sends a rank-r factorisation of each matrix (PowerSGD, arXiv 1905.13727, algorithm 1).

        P = mean_r V_r Q       P = orthonormal(P)       Q = mean_r V_r^T P       q = P Q^T

    Q is the next step's start; the first is random, the same on every rank (seed 0). Vectors, and
    matrices a x b with 2 r (a + b) >= a b, go dense and leave nothing. Factors are rows, (r, a) and
    (r, b): products with them read the matrix once. Every rank computes the QR, whose bits are
    equal on equal machines only.
    """
    low, rest = [], []
    for v, m in zip(split(value, state["shapes"]), split(mean, state["shapes"])):
        gain = v.dim() == 2 and 2 * rank * sum(v.shape) < v.numel()
        (low if gain else rest).append((v, m))
    generator = torch.Generator().manual_seed(0)
    factors = state.get("factors") or [
        torch.randn(rank, v.shape[1], generator=generator).to(v.device) for v, _ in low]
    sent, left = dense_list(world, [q @ v.T for (v, _), q in zip(low, factors)])
    left = [torch.linalg.qr(p.T).Q.T.contiguous() for p in left]                         # (r, a)
    more, right = dense_list(world, [p @ v for (v, _), p in zip(low, left)] + [v for v, _ in rest])
    state["factors"] = [q.clone() for q in right[:len(low)]]                             # (r, b)
    for (_, m), p, q in zip(low, left, right):
        torch.mm(p.T, q, out=m)
    for (v, m), exact in zip(rest, right[len(low):]):
        m.copy_(v.copy_(exact))
    value.sub_(mean)
    return sent + more


def dense_list(world, tensors):
    """Returns (bytes sent, the means over the ranks of a list of tensors), by one all-reduce."""
    if not tensors:                                        # a bucket of vectors has no factors
        return 0, []
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return dense(world, flat), split(flat, [tensor.shape for tensor in tensors])


COMPRESSORS = {          # name: (function, its argument, what `value` is padded to a multiple of)
    "none": (dense, torch.float32, lambda ranks: 1),
    "fp16": (dense, torch.float16, lambda ranks: 1),
    "bf16": (dense, torch.bfloat16, lambda ranks: 1),
    "int8": (two_phase, (encode_int8, decode_int8, 256), lambda ranks: 256 * ranks),
    "onebit": (two_phase, (encode_onebit, decode_onebit, 512), lambda ranks: 512 * ranks),
    "topk": (topk, 0.01, lambda ranks: 1),                 # numbers are defaults: --compression
    "chunk": (chunk, 0.05, lambda ranks: 1024),            # chunk:0.1 sets another
    "powersgd": (powersgd, 4, lambda ranks: 1)}


def parse_compression(text):
    """Returns a row of COMPRESSORS, with the option that a text like "topk:0.05" sets; raises
    DistError for what is unknown or cannot work."""
    name, colon, option = text.partition(":")
    with contextlib.suppress(KeyError, ValueError, TypeError):     # TypeError: it has no option
        compressor, argument, padding = COMPRESSORS[name]
        argument = type(argument)(option) if colon else argument
        if not colon or 0 < argument <= (1 if isinstance(argument, float) else math.inf):
            return compressor, argument, padding
    raise DistError(f"--compression {text} cannot work; known are {', '.join(COMPRESSORS)}; with a "
                    "fraction in (0, 1], as topk:0.01 and chunk:0.05, or a rank, as powersgd:4")


def is_lossy(compression):
    """Returns True if a compression keeps residuals."""
    return parse_compression(compression)[0] is not dense


@functools.cache
def wire_bytes(compression, shapes, ranks):
    """Returns the bytes that each of `ranks` sends to average fp32 tensors of these shapes in a
    single bucket: `Reducer.bytes_sent` is a little more, for the padding of many."""
    world = World(size=ranks, device=torch.device("meta"))       # tensors without memory
    return Bucket(dict(enumerate(shapes)), world, compression).average(1.0)


# ----- The program: what averaging costs -----

def measure(world, name, megabytes, rounds=5):
    """Returns what it takes to average fp32 gradients of one matrix with a compressor: seconds (of
    the slowest rank, median) and the bytes that all ranks send, to other nodes if there are any."""
    shape = max(1, int(megabytes * 1e6 / 4096)), 1024
    gradient = torch.randn(math.prod(shape), device=world.device)
    bucket, seconds = Bucket({"matrix": shape}, world, name), []
    for _ in range(rounds + 1):                            # the first one warms up
        bucket.flat.copy_(gradient)
        world.sum([0])                                     # all ranks start together
        began = time.perf_counter()
        sent = bucket.average(1.0)
        bucket.flat[0].item()                              # waits for a GPU
        seconds.append(max(world.all_gather_object(time.perf_counter() - began)))
    return sorted(seconds[1:])[rounds // 2], world.sum([sent])[0]


def main():
    """Prints a table of what `measure` returns for each compressor and size."""
    parser = argparse.ArgumentParser(description="Measure how fast gradients are averaged here.")
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 25, 100, 400], help="sizes")
    args = parser.parse_args()
    try:
        world = init()
        say = functools.partial(print, flush=True) if world.rank == 0 else lambda line: None
        say(f"{world.size} ranks on {world.nodes} node(s), {world.device.type}; sent: by all")
        say("compression     MB        ms   MB sent    GB/s")
        for name, size in itertools.product(COMPRESSORS, args.mb):
            seconds, sent = measure(world, name, size)
            say(f"{name:<12}{size:>6}{1e3 * seconds:>10.2f}{sent / 1e6:>10.2f}"
                f"{size / 1e3 / seconds:>8.2f}")
        world.close()
    except (DistError, OSError) as error:
        print(f"dist.py: {error}", file=sys.stderr, flush=True)
        os._exit(1)                                # a clean exit can wait for a rank that is lost


if __name__ == "__main__":
    main()
