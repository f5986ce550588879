"""Ranks, and gradients averaged over them while backward still runs.

A rank is one training process; a node is a machine with one or more of them. Several ranks are
started by torch's program torchrun, one on each node, which waits for them and may start them
again. Each rank holds the whole model and computes the gradients of its own examples; then all
ranks step with the mean gradient.

The first part is the core, from simple to hard. `World` is a group of ranks. `average_gradients`
averages after backward; `Reducer` averages during backward (Li et al., "PyTorch Distributed", arXiv
2006.15704, section 3.2), one `Bucket` after another. `Dense` and `ErrorFeedback` decide what goes
over the wire: full gradients, or fewer bits. The second part, from "To run for a week" on, is how
ranks meet, stop and fail; `init` there makes the World. The first part can be read without it: in
it the ranks have met, and a lost rank is an exception.

A collective is a call that all ranks of a group make together, such as a sum over them; with a
single rank it sends nothing. Two libraries move the data: NCCL between GPUs, Gloo between CPUs.

Shapes in comments: W ranks of a group, n elements of a bucket.
"""
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import distributed, nn


class DistError(Exception):
    """Ranks cannot train together, or no longer can; the message says why and what to do."""


class RankLost(DistError):
    """A rank died, did not answer in time or never came, or its torchrun is gone: a restart helps.
    End the process with `leave`, which says once which rank it is.
    """


# ----- Ranks and collectives -----

# All-gather into one tensor; into a list of tensors, NCCL would copy all once more. Torch 2.13 has
# the first name, 2.11 the second.
ALL_GATHER = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclasses.dataclass
class World:
    """A group of ranks, seen from one of them, with its collectives.

        library moves                                   if a rank is gone
        NCCL    tensors on GPUs, such as buckets        waits for the lost rank, then aborts the
                                                        process
        Gloo    tensors on CPUs, numbers, objects       raises an exception; `leave` then finds out
                                                        which rank it is

    One torch group uses both libraries: the device of the tensor decides. `sum` and `barrier` have
    a tensor on the CPU, so they go over Gloo even between GPUs. NCCL cannot report a lost rank,
    Gloo can: so the Reducer first calls `barrier`, then waits for NCCL.

    With several nodes a rank is also in two smaller Worlds, its `levels`: the ranks within its
    node, and the ranks with its local rank (its number on its node) across the nodes. With two
    nodes of two ranks:

        node 0: ranks 0 1        within nodes:  (0 1) and (2 3)
        node 1: ranks 2 3        across nodes:  (0 2) and (1 3)
    """
    rank: int = 0            # among the processes of `group`
    size: int = 1
    local_size: int = 1      # ranks of this node; 1 in the Worlds of `levels`
    device: torch.device = torch.device("cpu")
    group: object = None     # torch's process group; None: all processes, or this one alone
    levels: list = None      # the Worlds within and across nodes; None if this is one of
                             # them, or if there is one node

    def sum(self, **numbers):
        """Returns the sums over all ranks of numbers or one-element tensors, {name: float}, equal
        on every rank. Integers are exact below 2^53; NaN and inf survive. All ranks pass the same
        names in the same order."""
        total = torch.tensor([*numbers.values()], dtype=torch.float64)
        # Within the nodes first, then across them: every rank has the whole sum. 32 nodes of 8
        # ranks have rings of 8 and of 32 ranks, see `all_reduce`; a ring of 256 would take seven
        # times as many messages, one after another.
        for level in self.levels or [self]:
            level.all_reduce(total)
        return dict(zip(numbers, total.tolist()))

    def barrier(self):
        """Returns when all ranks have called it."""
        self.sum(here=1)

    def all_reduce(self, tensor):
        """Sums a tensor over all ranks, in place on every rank.

        For example in a ring: each rank cuts its tensor into W parts. W - 1 times it sends a part
        to the next rank, which adds its own; then each rank has the sum of one part, and W - 1
        times it passes a sum on (tests/variants/ring.py)."""
        self._run(distributed.all_reduce, tensor)

    def broadcast(self, tensor):
        """Overwrites a tensor, in place, with rank 0's tensor of the same shape. Each node receives
        it once: its first rank passes it on to the others."""
        if self.levels and tensor.is_cpu:            # NCCL does this by itself
            within_node, across_nodes = self.levels
            if within_node.rank == 0:
                across_nodes.broadcast(tensor)
            within_node.broadcast(tensor)
        else:
            self._run(distributed.broadcast, tensor, group_src=0)

    def all_to_all(self, rows):
        """Returns (W, ...) from rows (W, ...): rank r gets row r of every rank, in their order."""
        received = rows.clone()                      # for one rank already the result
        self._run(distributed.all_to_all_single, received, rows)
        return received

    def all_gather(self, tensor):
        """Returns every rank's tensor, stacked in order of rank: (...) -> (W, ...)."""
        gathered = torch.stack([tensor] * self.size)     # for one rank already the result
        # `flatten` copies nothing of `gathered`: torch writes into it.
        self._run(ALL_GATHER, gathered.flatten(), tensor.flatten())
        return gathered

    def all_gather_object(self, value):
        """Returns the list of every rank's value, in order of rank. A value is any small Python
        object that pickle can store."""
        values = [value] * self.size
        self._run(distributed.all_gather_object, values, value)
        return values

    def check_same(self, values, complaint):
        """Raises DistError on every rank unless the dict `values` is equal on all of them. The
        message names the first rank that differs from rank 0, then has the text `complaint`."""
        everyone = self.all_gather_object(values)
        for rank, other in enumerate(everyone):
            differ = differences(other, everyone[0])
            if differ:
                raise DistError(f"rank {rank} {complaint}: {differ}")

    def _run(self, collective, *arguments, **options):
        """Calls one of torch's collectives. Raises RankLost if it fails, nearly always because a
        rank is gone (torch also refuses tensors that do not fit; the message quotes it). An error
        of memory, which is also a RuntimeError, is raised unchanged."""
        if self.size == 1:
            return
        try:
            collective(*arguments, group=self.group, **options)
        except RuntimeError as error:
            # Out of memory: no rank is lost, and a restart does not help.
            if "memory" in str(error):
                raise
            # Gloo's message names no rank, or the wrong one. `leave` finds out which it is.
            raise RankLost("rank ? died or did not answer in time; the same command resumes (busy? "
                           "raise --timeout; unreachable? set GLOO_SOCKET_IFNAME; killed for its "
                           f"memory? lower --micro-tokens) ({error!r:.400})")


def differences(one, other):
    """Returns the entries in which two dicts differ, as text: "seed 1 (not 0)"."""
    keys = [key for key in sorted(one | other) if one.get(key) != other.get(key)]
    return ", ".join(
        f"{key} {one.get(key, 'absent')} (not {other.get(key, 'absent')})" for key in keys)


# ----- The simple form: average after backward -----

def average_gradients(module, world):
    """Replaces the gradients of a module by their means over all ranks. Call it after backward, on
    ranks that began with equal weights.

    It is slow for three reasons, which `Reducer` avoids. Nothing overlaps: the network idles
    during backward, and the processor afterwards. Each tensor is a call of its own, and even a
    small one costs a round trip; BERT base has 158 tensors. And everything is sent in full, without
    compression.

    tests/variants/one_by_one.py trains with this function; buckets_after.py sends buckets, still
    after backward.
    """
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(world.size)          # before the sum, which could overflow fp16
            world.all_reduce(parameter.grad)


# ----- The reducer: gradients averaged while backward runs -----

class Reducer:
    """Averages a module's gradients over the W ranks while backward still runs:

        g = 1/W sum_r g_r           g_r: the sum of rank r's gradients over its micro-batches

    Ranks differ in the number of their labels. For each label to weigh the same, train.py divides a
    rank's summed loss by the number of labels on all ranks, and multiplies it by W.

    A bucket has a flat fp32 tensor, the memory of the gradients of one or more parameters. p.grad
    is a view of it, and so is the gradient of p's master, the fp32 weight that the optimizer steps.
    Nothing is copied:

        one memory       p.grad              bucket              master.grad
        in this order    backward adds  -->  averaging     -->   the optimizer reads

    A step:

        reducer.zero_grad()
        for k, batch in enumerate(micro_batches):
            reducer.last_micro_batch = k == len(micro_batches) - 1
            loss(batch).backward()
        reducer.finish()                # now every master.grad is g (nearly, if compressed), the
                                        # same bits on all ranks
        reducer.commit(step_taken)      # for int8, see `ErrorFeedback`

    The threads that work on gradients; for others see "To run for a week":

        main thread             the training loop; on a CPU also backward, with the hooks (`_ready`)
        autograd's thread       on a GPU: backward, with the hooks
        communication thread    averages buckets (`_average`); only if W > 1

    compression: a name in COMPRESSORS. masters: {name: fp32 tensor}, from optim.cast_with_masters;
    without them the optimizer steps the parameters themselves, in fp32. `finish` sets `bytes_sent`,
    the bytes that this rank sent (on two levels, see `Bucket`, to other nodes), and `wait_seconds`,
    how long it waited for the communication thread. For the log and for pictures each bucket
    records its own `bytes_sent` and three times of time.perf_counter: when it was `launched` (only
    if there is a thread), and when its averaging `began` and `ended`.
    """

    # 1. Pack, once. Each parameter gets a place in a bucket. All ranks start from rank 0's weights.

    def __init__(self, module, world, compression="none", bucket_mb=2.0, masters=None):
        world.barrier()                            # raises if a rank is gone, see `World`
        self.world = world
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        masters = masters or {}
        # state_dict: parameters and buffers; its tensors share their memory.
        for tensor in [*module.state_dict().values(), *masters.values()]:
            world.broadcast(tensor)
        self.buckets = fill_buckets(parameters, world, compression, bucket_mb)
        self.flats = [bucket.flat for bucket in self.buckets]
        self.views = {}
        for bucket in self.buckets:
            self.views.update(bucket.views)
        for name, p in parameters.items():
            if masters:
                masters[name].grad = self.views[name]
            p.grad_dtype = None                    # any format: p.grad is fp32, p may have 16 bits
            # `detach` makes a second tensor of the same memory. A later cast of the module moves
            # p.grad to other memory, but not the view, so `_ready` sees the difference.
            p.grad = self.views[name].detach()
            # Autograd calls `_ready` as soon as it has added a gradient to p.grad.
            p.register_post_accumulate_grad_hook(functools.partial(self._ready, name))

        self.thread = self.stream = None
        if world.size > 1:
            # The thread first limits itself to one core: with more it would slow backward, and a
            # step of `tiny` took 1.36 times as long. The main thread keeps its number of cores;
            # threads that begin later have one, too.
            self.thread = ThreadPoolExecutor(
                1, "communication", initializer=torch.set_num_threads, initargs=[1])
            if world.device.type == "cuda":
                # A stream is a queue of work for a GPU. In a stream of its own, averaging runs
                # beside backward, not after it.
                self.stream = torch.cuda.Stream(world.device)
        self.zero_grad()

    def zero_grad(self, loss_scale=1.0):
        """Begins a step: sets all gradients to 0. loss_scale: the factor that the step's loss, and
        so its gradients, will have."""
        self.jobs = []             # the thread's jobs in this step, one for each launched bucket
        self.loss_scale = loss_scale
        self.last_micro_batch = True
        self.missing = set(self.views)             # names of the gradients that are not ready yet
        torch._foreach_zero_(self.flats)

    # 2. Ready. Autograd has added a gradient to p.grad.

    def _ready(self, name, p):
        """In the step's last micro-batch, launches the buckets that are complete now.

        Autograd calls this hook after it has added the gradients of all uses of p to p.grad (on a
        GPU: has put this into a stream); the token embedding has two uses. On a CPU it runs in the
        thread that called backward, on a GPU in autograd's own thread, while the main thread waits
        in backward: no lock is needed. Raises KeyError for a backward after that of the last
        micro-batch, and DistError if p.grad is no longer a view of its bucket."""
        if p.grad.data_ptr() != self.views[name].data_ptr():
            raise DistError(f"the gradient of {name} is no longer in its bucket: cast the module "
                            "before you make the Reducer, call no zero_grad but the Reducer's, and "
                            "no backward with create_graph")
        if self.last_micro_batch:
            self.missing.remove(name)
            if self.thread:
                self._launch()

    # 3. Launch. The communication thread averages complete buckets while backward goes on. Here
    #    bucket 0 is complete at "0"; the main thread has to wait only for the last one:
    #
    #        main thread             backward -- 0 ------- 1 --- 2 waits | clips, steps
    #        communication thread                [0    ]   [1 ]  [2      ]
    #
    #    Only one thread at a time runs Python, but both are nearly always in C++ code, backward and
    #    collectives, which lets the other one run.
    #
    #    On a GPU a call in Python only puts work into a stream and returns. The hooks are called
    #    long before the gradients exist, so each bucket has an event, a mark in the queue:
    #
    #        autograd's thread       0 1 2 (it puts work and events into the stream)
    #        stream of backward      ------------ 0 ------- 1 --- 2
    #        stream of averaging                  [0    ]   [1 ]  [2      ]
    #
    #    The communication thread sleeps until the GPU has reached the event, puts the averaging
    #    into a stream of its own, and waits until it is done.

    def _launch(self):
        """Gives the thread each bucket that may start now, and appends its job to `self.jobs`.

        Buckets start in the order of `self.buckets` on every rank, because torch matches
        collectives by their order: the first of one rank is added up with the first of the others,
        and so on. A complete bucket therefore waits for the buckets before it.
        """
        for bucket in self.buckets[len(self.jobs):]:         # not launched yet
            if not self.missing.isdisjoint(bucket.shapes):
                return
            gradients_done = None
            if self.stream:
                # The event comes after all of backward's work so far. A thread that waits for a
                # "blocking" event takes no core.
                gradients_done = torch.cuda.Event(blocking=True)
                gradients_done.record()
            bucket.launched = time.perf_counter()
            self.jobs.append(self.thread.submit(self._average, bucket, gradients_done))

    def _average(self, bucket, gradients_done):
        """Averages a bucket, in the communication thread if there is one. gradients_done: None, or
        the torch.cuda.Event to wait for first."""
        if self.stream:
            # From here on this thread's calls go to this stream, and to its GPU. A new thread
            # begins with GPU 0, and would take memory there even to wait.
            torch.cuda.set_stream(self.stream)
            gradients_done.synchronize()   # sleeps until the GPU has reached the mark
        bucket.began = time.perf_counter()
        bucket.bytes_sent = bucket.average(self.loss_scale)
        if self.stream:
            self.stream.synchronize()      # so that the job ends when the bucket is averaged
        bucket.ended = time.perf_counter()

    # 4. Finish. Wait for the communication thread.

    def finish(self):
        """Waits until this rank has the mean of all gradients; sets `bytes_sent`, `wait_seconds`.
        Raises the thread's errors, such as RankLost. Before it waits, raises DistError if some
        parameters took no part in the loss, since their buckets were never launched."""
        if self.missing:
            raise DistError(f"no gradient for {', '.join(sorted(self.missing))} in the step's last "
                            "backward: each must take part in that loss, or have "
                            "requires_grad=False")
        if self.stream:
            # Let backward end first, so that wait_seconds counts the averaging alone.
            torch.cuda.current_stream().synchronize()
            # A rank may have died in backward, see `World`. This call is over Gloo, so it does not
            # mix with the thread's calls, which are over NCCL.
            self.world.barrier()
        if not self.thread:
            # One rank sends nothing, but compression rounds here, too: a single rank already shows
            # the effect on the loss.
            for bucket in self.buckets:
                self._average(bucket, None)
        began = time.perf_counter()
        for job in self.jobs:
            job.result()
        self.wait_seconds = time.perf_counter() - began
        self.bytes_sent = sum(bucket.bytes_sent for bucket in self.buckets)

    def norm(self):
        """Returns the 2-norm of all gradients, as a float; NaN or inf if any element is. Call it
        after `finish`: then the gradients are the means, and their norm is equal on every rank. The
        sum is in fp32: on a CPU the norm of 67 million random elements was off by 5e-3, of equal
        ones by up to 6e-2, and by 5e-2 if one element is as large as the norm of all others."""
        return float(nn.utils.get_total_norm(self.flats))

    def commit(self, step_taken):
        """Ends a step. With int8 the new residuals, what rounding has left unsent, replace the old
        ones if the step is taken; if it is skipped, the old ones stay."""
        for bucket in self.buckets:
            bucket.wire.commit(step_taken)

    def forget(self):
        """Drops the residuals and states, which differ from rank to rank and fit this number of
        ranks alone. train.py does so at each save: a checkpoint then needs none, and a run that
        continues after it equals a run that resumes from it."""
        for bucket in self.buckets:
            bucket.wire.forget()


def fill_buckets(tensors, world, compression, bucket_mb):
    """Returns Buckets for {name: tensor}, the last tensor first, since backward begins at the
    output.

    A bucket is full when it has bucket_mb MB or more, at 4 bytes an element. The embeddings begin a
    new bucket: their gradients come last, and whatever shared a bucket with them would wait. Torch
    lists a model's own parameters before those of its parts, so the small mlm_bias comes last of
    all, in a bucket of its own; it waits for the embeddings, because buckets start in order."""
    contents = []                                  # {name: shape} of each bucket
    space = 0.0                                    # MB that still fit into the last bucket
    in_embeddings = False
    for name, tensor in reversed(tensors.items()):
        if space <= 0 or name.startswith("embeddings.") != in_embeddings:
            contents.append({})
            space = bucket_mb
        in_embeddings = name.startswith("embeddings.")
        contents[-1][name] = tensor.shape
        space -= 4e-6 * tensor.numel()
    return [Bucket(shapes, world, compression) for shapes in contents]


# ----- One bucket, and two levels of network -----

class Bucket:
    """One flat fp32 tensor (n,) of gradients, `flat`, and its way over the network, `wire`.

    With several nodes there are two levels (Goyal et al., arXiv 1706.02677, section 4.1). The first
    rank of each node is its leader, here 0 and 2:

        node 0: ranks 0 1, node 1: ranks 2 3
        1. all_reduce        0 <-> 1    2 <-> 3    the mean of each node
        2. wire.average      0 <-> 2               the leaders exchange
        3. broadcast         0 -> 1    2 -> 3      and pass the mean on

    A node then sends no more than a single rank would. All nodes have equally many ranks, so the
    mean of their means is the mean. With one level `within_node` is this rank alone: steps 1 and 3
    do nothing, and each rank is a leader. On GPUs `none`, `fp16` and `bf16` use one level, since
    NCCL itself adds up inside a node first.
    """

    def __init__(self, shapes, world, compression):
        self.shapes = shapes                       # {name: shape}, in the order of the flat tensor
        self.wire = COMPRESSORS[compression]()
        self.within_node = World()                 # one level: this rank alone
        self.across_nodes = world
        if world.levels and (world.device.type == "cpu" or not isinstance(self.wire, Dense)):
            self.within_node, self.across_nodes = world.levels
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.flat = torch.zeros(sum(sizes), device=world.device)
        self.views = {}                            # {name: view of the flat tensor}
        for name, part in zip(shapes, self.flat.split(sizes)):
            self.views[name] = part.view(shapes[name])

    def average(self, loss_scale):
        """Averages the bucket over all ranks, in place. Returns the bytes that this rank sent; on
        two levels, only those to other nodes. loss_scale: the factor in the gradients."""
        if self.within_node.size > 1:
            self.flat.div_(self.within_node.size)
            self.within_node.all_reduce(self.flat)
        sent = 0
        if self.within_node.rank == 0:
            sent = self.wire.average(self.across_nodes, self.flat, loss_scale)
        self.within_node.broadcast(self.flat)
        return sent


# ----- What goes over the wire, from simple to hard -----
#
# Each Bucket has a wire of its own, an object with these methods:
#
#     average(world, flat, loss_scale)    averages flat (n,) over the ranks, in place, to the same
#                                         bits on all; returns the bytes sent by this rank. Called
#                                         by leaders, in `Bucket.average`
#     commit(step_taken)                  ends a step; called by all ranks, in the main thread
#     forget()                            drops what earlier steps have left; called like commit
#
# A wire must keep inf and NaN: if any rank has one, the mean on all ranks must have one, because
# all ranks must skip the same step.

@dataclasses.dataclass
class Dense:
    """The wire of none, fp16 and bf16: one all-reduce in the format `dtype`. What rounding changes
    is lost.

    fp16 ranges from 6e-8 to 65,504; a loss scale keeps gradients in this range. It has 11
    significant bits, fewer below 6e-5. bf16 has 8, and the range of fp32. Each addition on the way
    rounds as well: in bf16 the sum of 64 ranks is 1 to 3 % off, that of 512 ranks 2 to 31 %.
    """
    dtype: torch.dtype

    def average(self, world, flat, loss_scale):
        """Divides, casts and sums, in this order. Returns the bytes that a rank sends in a ring:
        twice W - 1 of the tensor's W parts, see `World.all_reduce`."""
        flat.div_(world.size)                      # before the sum, which could overflow fp16
        rounded = flat.to(self.dtype)              # for fp32 this is `flat` itself
        world.all_reduce(rounded)
        flat.copy_(rounded)
        return 2 * (world.size - 1) * rounded.nbytes // world.size

    def commit(self, step_taken):
        """Does nothing."""

    def forget(self):
        """Does nothing."""


BLOCK = 512                  # elements that share a block's scale, see `encode_int8`


def encode_int8(blocks):
    """Returns the codes of blocks (..., 512), bytes (..., 516): an int8 for each element and an
    fp32 scale for the block. `decode_int8` returns C(blocks), the values that they stand for.

    The element farthest from 0 becomes 127 or -127 (block-wise quantisation, Dettmers et al., arXiv
    2110.02861, section 2.1, here to evenly spaced numbers):

        block_scale = max |x| / 127     level = round(x / block_scale)     C(x) = block_scale level
    """
    # The clamp is for blocks of zeros. A block with an inf or NaN has such a scale, and all of it
    # is decoded to NaN (0 * inf). So is then the mean, once more encoded: all ranks skip the step.
    scales = blocks.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
    levels = (blocks / scales).round_().to(torch.int8)
    return torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], -1)


def decode_int8(codes):
    """Returns the blocks (..., 512) that codes, bytes (..., 516), stand for."""
    levels = codes[..., :-4].view(torch.int8).float()
    return levels.mul_(codes[..., -4:].view(torch.float32))


class ErrorFeedback:
    """The wire of int8, and of the compressors in tests/variants. The residual, what was not
    sent, is added to what the next step sends. For example, one rank that rounds to whole numbers:

        step    bucket    + residual    = value    sent    next residual
                b_r         e_r           v_r      c_r       e'_r
        1       0.4         0.0           0.4      0         0.4
        2       0.4         0.4           0.8      1        -0.2
        3       0.3        -0.2           0.1      0         0.1

    For each rank r of `world`, which on two levels is a leader. Residuals are unscaled, because the
    next step may have a different loss scale:

        v_r = b_r / loss_scale + e_r           b_r: the rank's bucket; e_r: its residual, 0 at first
        q = mean(v_r), nearly                  the result, the same on every rank
        g = loss_scale * q                     goes back into the bucket
        e'_r = v_r - c_r                       the next residual, which `commit` keeps if the step
                                               is taken; c_r: what rank r sends of v_r, for int8 v_r
                                               rounded

    After a skipped step (an overflow) the next one begins with the same e_r.

    exchange: a function (world, value, state) -> (mean, residual, next state, bytes sent):

        value (n + padding,)       v_r, then padding, so that each rank has whole blocks; the
                                   function may overwrite it
        mean (n + padding,)        q
        residual (n + padding,)    e'_r; the padding may have a residual, too
        state                      a dict, empty at first, for what the function keeps from step to
                                   step; a save drops it, too, see `Reducer.forget`. The next
                                   state is a new dict: after a skipped step the old one comes again
    """

    def __init__(self, exchange):
        self.exchange = exchange
        self.forget()

    def average(self, world, flat, loss_scale):
        """Averages flat by the equations of the class, and sets `next` for `commit`."""
        n = len(flat)
        residual, state = self.kept
        if residual is None:
            # n, rounded up to whole blocks for each rank.
            residual = flat.new_zeros(n + -n % (BLOCK * world.size))
        # A copy, since the residual must stay as it is if the step is skipped.
        value = residual.clone()
        value[:n].add_(flat, alpha=1 / loss_scale)
        mean, next_residual, next_state, sent = self.exchange(world, value, state)
        self.next = next_residual, next_state
        torch.mul(mean[:n], loss_scale, out=flat)
        return sent

    def commit(self, step_taken):
        """Keeps the residual and state of `average` if the step is taken, else the old ones. A
        commit without an `average` before it, as on ranks that do not lead, changes nothing."""
        if step_taken:
            self.kept = self.next
        self.next = self.kept

    def forget(self):
        """Drops the residual and the state."""
        self.kept = None, {}                       # residual (n + padding,), state
        self.next = self.kept                      # from `average` to `commit`


def compressed_mean(encode, decode, world, value, state):
    """The mean of int8: an all-reduce that compresses twice, as 1-bit Adam's (arXiv 2102.02888).

    The value is cut into W parts. Rank j averages part j of all ranks, and sends the average to
    all. C(x) is x encoded and then decoded. For example, the first step of two ranks, with a C that
    rounds down to whole numbers:

                       rank 0                 rank 1
        value          3.4    1.0             2.0    5.2          part 0 and part 1 of each rank
        encode         3      1               2      5
        residual       0.4    0.0             0.0    0.2          for the next step
        all_to_all     3      2               1      5            now part 0 of both; part 1 of both
        mean           2.5                    3.0                 plus s, which is 0 at first
        encode         2                      3                   0.5 and 0.0 are the next s
        all_gather     2      3               2      3            the mean, on both

    In letters, for each part: rank r has the value v_r, see `ErrorFeedback`, and the rank that
    averages the part keeps a residual of its own, s, the `part_residual`:

        c_r = C(v_r)              e'_r = v_r - c_r          what rank r sends, and its next residual
        m = mean_r c_r + s
        q = C(m)                  s' = m - q                the mean that all get, and the next s

    In a step nothing is lost. All goes out or stays: mean_r v_r + s = q + mean_r e'_r + s'. Above,
    for part 0: (3.4 + 2.0) / 2 + 0 = 2 + (0.4 + 0.0) / 2 + 0.5.

    encode: a function blocks (..., BLOCK) -> codes (..., bytes of a block) uint8. decode: codes ->
    C(blocks). For world, value, state and the result see `ErrorFeedback`.
    """
    parts = value.view(world.size, -1, BLOCK)              # (W, blocks of a part, BLOCK)

    # 1. Send each part to the rank that averages it.
    codes = encode(parts)                                  # (W, blocks, bytes of a block)
    residual = parts.sub_(decode(codes)).view(-1)          # in place, to save memory
    received = world.all_to_all(codes)                     # row r: rank r's codes of our part

    # 2. Average our part over the ranks.
    part_mean = decode(received).mean(0)                   # (blocks of a part, BLOCK)
    part_mean += state.get("part_residual", 0)

    # 3. Send the average to all.
    part_codes = encode(part_mean)
    part_residual = part_mean.sub_(decode(part_codes))
    mean = decode(world.all_gather(part_codes)).view(-1)
    sent = 2 * (world.size - 1) * part_codes.numel()
    return mean, residual, {"part_residual": part_residual}, sent


COMPRESSORS = {              # name: makes the wire of a bucket
    "none": lambda: Dense(torch.float32),
    "fp16": lambda: Dense(torch.float16),
    "bf16": lambda: Dense(torch.bfloat16),
    "int8": lambda: ErrorFeedback(functools.partial(compressed_mean, encode_int8, decode_int8)),
}


# ===== To run for a week: how ranks meet, stop and fail. Nothing above calls it. =====
#
# The algorithm ends above, and a first reading can, too. A store is a small dictionary that all
# ranks share; the torchrun of node 0 keeps one.
#
# The threads of a rank, beside those of the `Reducer`:
#
#     loader thread           makes batches (data.py)
#     train.Clock             notices when the process was suspended, which --hours does not count
#     `watch`                 waits until some rank has failed; only if W > 1
#     `leave`'s thread        asks the store after an error; if W > 1 it begins before training

# ----- How the ranks meet -----

def init(timeout=600.0, init_method="env://"):
    """Returns this process's World, from the environment that torchrun sets; without torchrun, a
    World of one rank.

    timeout: the seconds that a collective over Gloo waits for a rank; over NCCL twice as many.
    init_method: the address of the store, as for torch; "env://" is torchrun's.

    If there are several ranks, they listen to signals from here on, see `listen_to_signals`, and
    must end by `end`. Raises DistError if the nodes differ (number of ranks, GPUs or none), or
    if srun or mpirun started the processes without torchrun; RankLost if the ranks do not meet.
    """
    world = world_of_environment()
    if world.size == 1:
        return world
    limit = datetime.timedelta(seconds=timeout)
    # With this Gloo opens a socket to a rank when it first sends to it, not to all ranks at once.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        store = meet(world, init_method, limit)
        start_groups(world, store, limit)
        node = {"ranks of its node": world.local_size, "device": world.device.type}
        world.check_same(node, "is on a different kind of node than rank 0; set the same "
                               "--nproc_per_node on every node")
        world.levels = two_levels(world, limit)
        return world
    except (RuntimeError, ValueError) as error:
        if "memory" in str(error):                   # see `World._run`
            raise
        raise RankLost(f"rank {world.rank} of {world.size} could not meet others: {error!r:.200}")


def world_of_environment():
    """Returns the World that torchrun's variables describe, and makes its GPU the current one.
    Raises DistError if srun or mpirun has started several processes without torchrun."""
    # Set by srun, by Open MPI and by MPICH. SLURM_NTASKS is no sign: a batch script, which runs
    # once, has it too.
    for name in "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE":
        if not os.environ.get("RANK") and os.environ.get(name, "1") != "1":
            raise DistError(f"{name} is {os.environ[name]}, but each of these processes would "
                            "train alone; start one torchrun on each node, and it starts the ranks")
    rank = int(os.environ.get("RANK") or 0)
    size = int(os.environ.get("WORLD_SIZE") or 1)
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # The remainder is for schedulers that show each rank only its own GPU. If two ranks get the
        # same GPU by it, train.py refuses them.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return World(rank, size, local_size, device)


def meet(world, init_method, limit):
    """Returns a store that all ranks share, free of keys of earlier processes. Raises RuntimeError
    if node 0 cannot be reached within `limit`, a timedelta; if ranks are missing after another
    `limit` (it names them); or if this rank's torchrun dies.

    The store of node 0's torchrun lives longer than the ranks, and still has the keys of dead ones:
    a new rank 1 would take a dead rank 0 for present, and hang in the first collective. So each new
    process begins a new attempt to meet. All that wait to meet see this within 0.1 s and join it;
    the dead do not. The ranks have met when all have joined the same attempt:

                                          newest attempt    joined by
        rank 0 comes                      1                 0
        rank 1 comes                      2                 1, then 0: they have met
        both die and are started again
        rank 1 comes                      3                 1
        rank 1 dies, comes once more      4                 1
        rank 0 comes                      5                 0, then 1: they have met

    An attempt has a number, which is the prefix of its keys. A new process adds 1 to a count; all
    read the count ten times a second, and join the newest attempt by setting a key. Torchrun's own
    count of restarts would not do: a torchrun that was itself started anew begins with 0. If a rank
    joins and dies before the others look again, all meet, and the next collective fails.
    """
    # torch's rendezvous connects to the store of node 0; it yields (store, rank, size), once.
    root, _, _ = next(
        distributed.rendezvous(init_method, world.rank, world.size, timeout=limit))
    root.add("newest attempt", 1)
    deadline = time.monotonic() + limit.total_seconds()
    everyone = [f"here/{rank}" for rank in range(world.size)]
    while True:
        if torchrun_died():
            raise RuntimeError("its torchrun has died")    # a new one may restart this rank
        newest = root.add("newest attempt", 0)     # adding 0 reads the number
        attempt = distributed.PrefixStore(str(newest), root)
        attempt.set(f"here/{world.rank}", "")
        if attempt.check(everyone):
            return attempt
        if time.monotonic() > deadline:
            absent = ranks_without(attempt, "here", world.size)
            raise RuntimeError(f"rank {absent} did not come in time")
        time.sleep(0.1)


def ranks_without(store, word, size):
    """Returns the ranks whose key `word`/RANK is not in the store, as "3, 5"."""
    return ", ".join(str(rank) for rank in range(size) if not store.check([f"{word}/{rank}"]))


def start_groups(world, store, limit):
    """Starts torch's process group (Gloo, and NCCL for GPUs) and the thread `watch`. From here on
    signals are requests to stop, see `listen_to_signals`."""
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    distributed.init_process_group(
        backend,
        timeout=2 * limit,
        world_size=world.size,
        rank=world.rank,
        store=store)
    limit_gloo(distributed.group.WORLD, limit)
    # When a rank has died torchrun sends SIGTERM to the others. The signal must not end them at
    # once: they still have to say which rank died.
    listen_to_signals()
    asking.submit(bool)      # does nothing, but begins the thread
    threading.Thread(target=watch, args=[world.rank], daemon=True).start()


def limit_gloo(group, limit):
    """Sets the timeout of a group's collectives over Gloo. A group is made with twice the limit,
    which NCCL keeps. Gloo must time out first, because it raises where NCCL aborts the process.
    Only a private function of torch sets the limit of one library."""
    gloo = group._get_backend(torch.device("cpu"))
    gloo = getattr(gloo, "wrapped_pg", gloo)         # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    gloo._set_default_timeout(limit)


def two_levels(world, limit):
    """Returns `World.levels`: two Worlds, the ranks within this node, and the ranks with this local
    rank across the nodes; None on a single node."""
    if world.local_size == world.size:
        return None
    ranks = torch.arange(world.size).view(-1, world.local_size)    # a row for each node
    levels = []
    for teams in ranks, ranks.T:
        # Every rank must create all groups, in the same order, and gets its own back.
        group, _ = distributed.new_subgroups_by_enumeration(teams.tolist(), 2 * limit)
        limit_gloo(group, limit)
        levels.append(World(group.rank(), group.size(), device=world.device, group=group))
    return levels


# ----- Requests to stop -----

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
                signal.SIGXCPU, signal.SIGQUIT)
# The names of the signals that have come.
stop_requests = []


def listen_to_signals():
    """From here on a signal that asks for a stop (SIGTERM, Ctrl-C, a closed terminal, a scheduler's
    warning) does not end the process. It adds its name to the list `stop_requests`, so that
    training can stop with a checkpoint.

                         without torchrun                   under torchrun
        Ctrl-C           a request                          passed on by torchrun: a request
        Ctrl-C after     ends the process at once           a request
        any signal
        ignored signals  stay ignored (SIGHUP, by nohup)    are requests: torchrun kills ranks that
                                                            ignore what it passes on
    """
    def request(signum, _):
        stop_requests.append(signal.Signals(signum).name)
        if not TORCHRUN and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    for signum in STOP_SIGNALS:
        if TORCHRUN or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, request)


def find_torchrun():
    """Returns the process number of the torchrun that started this rank; None without torchrun.

    The parent of a rank may be a wrapper (numactl, bash -c). But torchrun starts each rank in its
    own session, which is a set of processes. The session's number is that of its first process, the
    wrapper or the rank, and torchrun is the parent of that process.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        # "PID (NAME) STATE PARENT ...", where NAME can be anything.
        status = Path(f"/proc/{os.getsid(0)}/stat").read_text(errors="replace")
        return int(status.rpartition(")")[2].split()[1])
    except OSError:                                # no /proc, or the wrapper is gone
        return os.getppid()


# Time enough for every living rank's `watch` to notice that a rank has failed, and to answer.
REACTION_SECONDS = 2

# Looked up once, when this file is imported. A torchrun that died before that goes unnoticed.
TORCHRUN = find_torchrun()


def torchrun_died():
    """Returns whether torchrun started this process and is gone: ranks must not train on alone. If
    torchrun dies, `find_torchrun` finds another parent."""
    return find_torchrun() != TORCHRUN


def end_torchrun():
    """Ends the torchrun that started this process, if any, which would restart the ranks."""
    if TORCHRUN:
        # Node 0's torchrun keeps the store: first let all read "failed".
        time.sleep(REACTION_SECONDS)
        if not torchrun_died():
            with contextlib.suppress(ProcessLookupError):        # it has just ended
                os.kill(TORCHRUN, signal.SIGTERM)


# ----- Failures: who failed, said once -----
#
# A rank can die (kill -9, no memory), hang (a stopped machine) or raise an exception. Then errors
# spread. A rank that waits for another one over Gloo gets an error: at once if that one is dead, at
# the end of --timeout if it hangs, else when it ends. NCCL waits for a dead rank, too, for twice
# the --timeout at most. So a rank that fails only has to end, and all others come to `leave`, which
# train.py calls for each error in training. One of them prints its error: the first to put its
# number into the store. If its error comes from a collective, which only says that some rank is
# gone, it first asks which. Keys in the store:
#
#     "failed"          set once, by the first rank that fails: "0 True" means rank 0, and that a
#                       restart helps
#     "alive/RANK"      set by a thread of each process (`watch`) when "failed" is set, whatever the
#                       program is busy with. The ranks without it are gone
#
# Rank 2 is killed:
#
#     s     rank 0                        rank 1                     rank 2    torchrun
#     0.0   in a collective               in a collective            killed
#     0.1   error; `leave` sets "failed"  error; `leave`: it is set            SIGTERM to 0 and 1,
#     0.2   `watch` sets "alive/0"        `watch` sets "alive/1"               to them a request
#     2.1   no "alive/2": prints          prints nothing
#           "rank 2 died ..."
#           ends                          ends                                 ends, or restarts all
#
# `agree` decides who waits, and prints:
#
#     this rank                    waits                                         prints
#     first, with its own error    not at all                                    its error
#     first, with a RankLost       2 s, so that the living can set "alive"       who is lost
#     later                        2 s at most, so that its `watch` can set      nothing
#                                  "alive"; less if `may_leave` is set
#
# A later rank waits because its "alive" must be set, and because node 0's torchrun, with the store,
# ends soon after the ranks of node 0: the first rank must have asked by then.
#
# When something is wrong, every wait has an end, with one exception: a request to the store never
# returns if node 0's machine is stopped or cut off. `leave` asks in a thread, `meet` does not.
#
#     2 s (REACTION_SECONDS)  `agree` and `watch` wait, so that the living can set "alive";
#                             `end_torchrun`, so that others can read "failed"
#     10 s                    `leave` gives up asking the store
#     --timeout               a collective over Gloo raises an exception
#     2 x --timeout           meeting; a collective over NCCL aborts the process
#     30 s after SIGTERM      torchrun kills the ranks of its node that are left. It sends SIGTERM
#                             when a rank of this node has failed
#     60 s after "failed"     `watch` ends its process: on nodes where no rank has ended, torchrun
#                             has sent no SIGTERM

@functools.cache
def own_store():
    """Returns the ranks' store, by a connection that only `watch` and `agree` use: they ask nothing
    that takes long, and if node 0's torchrun has ended, with the store, it fails at once."""
    return distributed.group.WORLD.get_group_store().clone()


# Set by `watch` 2 s after it saw "failed", or 2 s after it has ended torchrun.
may_leave = threading.Event()
# The thread in which `leave` asks the store. It begins before training, since after an error there
# may be no memory for a new one.
asking = ThreadPoolExecutor()


def watch(rank):
    """Waits, in a thread of each process, until a rank has failed. Then reports this process as
    alive, and ends it if it still runs a minute later. If a restart cannot help it ends torchrun as
    well."""
    with contextlib.suppress(RuntimeError):        # the store is gone with node 0's torchrun
        store = own_store()
        while not store.check(["failed"]):
            time.sleep(0.1)
        # A timer that prints all stacks and ends the process in 60 s, even if all of Python hangs.
        # That is time enough for rank 0 to end a save; in NCCL the process could wait longer for a
        # dead rank.
        faulthandler.dump_traceback_later(60, exit=True)
        store.set(f"alive/{rank}", "")
        if store.get("failed").endswith(b"False"):
            end_torchrun()                         # here, too: the main thread may hang
        time.sleep(REACTION_SECONDS)
        may_leave.set()


def leave(message, restart_helps, rank_lost=False):
    """Ends this process after an error, with status 1. The first of all ranks to fail prints its
    message; if its restart_helps is False, torchrun is ended, too.

    rank_lost: whether the error was a RankLost. Then the first rank to fail finds out which ranks
    are silent, and puts their numbers in place of the "?" in its message.
    """
    try:
        # A thread asks, since the request may never return.
        agreement = asking.submit(agree, message, restart_helps, rank_lost)
        message, restart_helps = agreement.result(timeout=10)
    except (RuntimeError, TimeoutError):
        # The store is gone with its torchrun or did not answer; or the ranks have not met, and no
        # memory is left for a thread. Then each rank prints an error of its own. But a RankLost is
        # printed by the first rank of a node alone, if it is alive, and not if `may_leave` is set:
        # then it was printed before.
        if rank_lost and TORCHRUN and (os.environ["LOCAL_RANK"] != "0" or may_leave.is_set()):
            message = ""
    if message:
        with contextlib.suppress(OSError, ValueError):           # a closed terminal, a full disk
            print(message, file=sys.stderr, flush=True)
    if not restart_helps:
        end_torchrun()
    end(1)


def end(status):
    """Ends this process, at once if there may be other ranks: Python's own exit aborts while
    torch's groups are open, and can wait for a lost rank. A process without torchrun and without
    other ranks returns from here if status is 0, and else raises SystemExit: a profiler can write
    its file, and a notebook lives on."""
    if TORCHRUN or distributed.is_initialized():
        os._exit(status)
    if status:
        sys.exit(status)


def agree(message, restart_helps, rank_lost):
    """Returns (the text that this rank prints, whether a restart helps), as the first rank to fail
    decides. Raises RuntimeError if the store is gone."""
    if not distributed.is_initialized():
        return message, restart_helps              # before they meet, each speaks for itself
    store = own_store()
    # compare_set writes ours if the key is not set yet, and returns what it then holds.
    ours = f"{distributed.get_rank()} {restart_helps}"
    first = store.compare_set("failed", "", ours).decode()
    if first != ours:
        may_leave.wait(REACTION_SECONDS)
        return "", first.endswith("True")
    if rank_lost:
        time.sleep(REACTION_SECONDS)
        with contextlib.suppress(RuntimeError):    # the store has gone meanwhile
            silent = ranks_without(store, "alive", distributed.get_world_size())
            message = message.replace("rank ?", f"rank {silent or '?'}")
    return message, restart_helps
