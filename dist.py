"""Ranks, and gradients averaged over them while backward still runs.

A rank is one training process; a node is a machine that runs one or more. Each rank has the whole
model and computes the gradients of its own examples; all ranks then step with the mean of these.

The first half is the core, from simple to hard. `World` is a group of ranks. `average_gradients`
averages after backward; `Reducer` does it during backward (Li et al., "PyTorch Distributed", arXiv
2006.15704, section 3.2), one `Bucket` after another. `Dense` and `ErrorFeedback` are what may go
over the wire: full gradients, or fewer bits. The second half, from "To run for a week" on, is how
ranks meet, stop and fail. The first half can be understood without it. You only have to know that
a collective over Gloo raises RankLost if a rank is gone.

A collective is a call that all ranks of a group make together, such as a sum over them; if there is
only one rank it does nothing. Two libraries move the data: NCCL between GPUs, Gloo between CPUs.

In comments on shapes: W ranks of a group, n elements of a bucket.
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

import numpy as np
import torch
from torch import distributed, nn


class DistError(Exception):
    """Ranks cannot train together, or not any longer; the message says why and what to do."""


class RankLost(DistError):
    """A rank died, did not answer in time or never came, or its torchrun is gone: a restart helps.
    After it, end the process by `leave`.
    """


# ----- Ranks and collectives -----

# One function, two names: torch 2.13 has the first, 2.11 the second.
ALL_GATHER = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclasses.dataclass
class World:
    """A group of ranks, seen from one of them, and the collectives: calls that all make together.

        library what it moves                           if a rank is gone
        NCCL    tensors on GPUs, such as buckets        waits for it, then aborts the process
        Gloo    tensors on CPUs, numbers, objects       raises an exception; `leave` then finds out
                                                        which rank it is

    So before the main thread waits for what NCCL does, it asks over Gloo whether all ranks are
    there. (One group of torch has both: the tensor's device decides.)
    """
    rank: int = 0            # among the processes of `group`
    size: int = 1
    local_size: int = 1      # ranks of this node (only in the World of all ranks; elsewhere 1)
    device: torch.device = torch.device("cpu")
    group: object = None     # torch's process group; None: all processes, or this one alone
    levels: list = None      # the Worlds within and across nodes, see `two_levels`

    def sum(self, **numbers):
        """Returns the sums over all ranks of numbers (or tensors of one element), {name: float}:
        integers are exact below 2^53, NaN and inf survive, and the answer is the same on every
        rank. All ranks give the same names in the same order."""
        total = torch.tensor([*numbers.values()], dtype=torch.float64)
        self.all_reduce(total)
        return dict(zip(numbers, total.tolist()))

    def barrier(self):
        """Returns when all ranks have called it."""
        self.sum(here=1)

    def all_reduce(self, tensor):
        """Sums a tensor over all ranks, in place on every rank."""
        self._run(distributed.all_reduce, tensor)

    def reduce(self, tensor):
        """Sums a tensor over all ranks, in place on rank 0; elsewhere it is undefined."""
        self._run(distributed.reduce, tensor, group_dst=0)

    def broadcast(self, tensor):
        """Overwrites a tensor, in place, with that of rank 0, which has the same shape. Each node
        receives it once: its first rank passes it on to the others."""
        if self.levels and tensor.is_cpu:            # NCCL itself does so
            within_node, across_nodes = self.levels
            if within_node.rank == 0:
                across_nodes.broadcast(tensor)
            within_node.broadcast(tensor)
        else:
            self._run(distributed.broadcast, tensor, group_src=0)

    def all_to_all(self, rows):
        """Returns (W, ...) from rows (W, ...): rank r gets row r of every rank."""
        received = rows.clone()                      # of one rank this is the answer already
        self._run(distributed.all_to_all_single, received, rows)
        return received

    def all_gather(self, tensor):
        """Returns every rank's tensor, stacked in order of rank: (...) -> (W, ...)."""
        gathered = torch.stack([tensor] * self.size)     # of one rank this is the answer already
        # `flatten` copies nothing: what torch writes there stands in `gathered`.
        self._run(ALL_GATHER, gathered.flatten(), tensor.flatten())
        return gathered

    def all_gather_object(self, value):
        """Returns the list of every rank's value, in order of rank: any small Python object that
        pickle knows."""
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
        """Calls a collective of torch. If it fails, but not for lack of memory, a rank is gone:
        raises RankLost."""
        if self.size == 1:
            return
        try:
            collective(*arguments, group=self.group, **options)
        except RuntimeError as error:
            # Out of memory is a RuntimeError, too. No rank is lost, and a restart would not help.
            if "memory" in str(error):
                raise
            # Gloo's words name no rank, or a wrong one. `leave` finds out which it is.
            raise RankLost("rank ? died or did not answer in time; the same command resumes (busy? "
                           "raise --timeout; out of reach? set GLOO_SOCKET_IFNAME) "
                           f"({error!r:.400})")


def differences(one, other):
    """Returns the keys in which two dicts differ, as text: "seed 1 (not 0)"."""
    keys = [key for key in sorted(one | other) if one.get(key) != other.get(key)]
    return ", ".join(f"{key} {one.get(key)} (not {other.get(key)})" for key in keys)


# ----- The simple form: average after backward -----

def average_gradients(module, world):
    """Replaces the gradients of a module by their means over all ranks. To be called after
    backward, on ranks that began with equal weights.

    What it costs: the network idles during backward and the processor afterwards, since nothing
    overlaps; each tensor is a call of its own, and a small one costs a whole round trip (BERT base
    has 158 tensors); and all are sent in full, without compression. `Reducer` mends all three.
    (tests/variants/one_by_one.py trains by this function; buckets_after.py sends buckets, still
    after backward.)
    """
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(world.size)          # before the sum, which might overflow fp16
            world.all_reduce(parameter.grad)


# ----- The reducer: gradients averaged while backward runs -----

class Reducer:
    """Averages a module's gradients over the W ranks while backward still runs:

        g = 1/W sum_r g_r           g_r: the sum of rank r's gradients over its micro-batches

    A bucket is a flat fp32 tensor for the gradients of several parameters. It owns them: p.grad is
    a view of it, and so is the gradient of p's master, the fp32 weight that an optimizer steps.

        backward adds to p.grad   -->   bucket, averaged   -->   master.grad, for the optimizer

    A step:

        reducer.zero_grad()
        for k, batch in enumerate(micro_batches):
            reducer.last_micro_batch = k == len(micro_batches) - 1
            loss(batch).backward()
        reducer.finish()                # now every master.grad is g, the same bits on all ranks
        reducer.commit(step_taken)      # for int8 and onebit, see `ErrorFeedback`

    A rank runs several threads:

        main thread             the training loop; on a CPU also backward, with the hooks (`_ready`)
        autograd's thread       on a GPU: backward, with the hooks
        loader thread           makes batches (data.py)
        train.Clock             looks for pauses
        communication thread    averages buckets (`_average`); only if W > 1
        `watch`                 waits until some rank has failed; only if W > 1

    compression: a name in COMPRESSORS. masters: {name: fp32 tensor}, as of optim.cast_with_masters;
    without them the parameters, in fp32, are stepped themselves. After `finish`: `bytes_sent` by
    this rank, and `wait_seconds` for the communication thread. Each bucket notes what its averaging
    took: `bytes_sent`, and by time.perf_counter when it was `launched` (if there is a thread),
    `began` and `ended`.
    """

    # 1. Pack, once. Each parameter gets its place in a bucket. All ranks start from the weights of
    #    rank 0.

    def __init__(self, module, world, compression="none", bucket_mb=2.0, masters=None):
        world.barrier()                            # before NCCL is used, see `World`
        self.world = world
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        masters = masters or {name: p.detach() for name, p in parameters.items()}
        for tensor in [*module.state_dict().values(), *masters.values()]:
            world.broadcast(tensor)
        self.buckets = fill_buckets(parameters, world, compression, bucket_mb)
        self.flats = [bucket.flat for bucket in self.buckets]
        self.views = {}
        for bucket in self.buckets:
            self.views.update(bucket.views)
        for name, p in parameters.items():
            masters[name].grad = self.views[name]
            p.grad_dtype = None                    # p.grad may be fp32 where p has 16 bits
            # `detach` makes a second tensor of the view's memory, not the view itself: if the
            # module is cast later, p.grad alone gets other memory, and `_ready` finds that out.
            p.grad = self.views[name].detach()
            # Autograd calls `_ready` as soon as it has added a gradient to p.grad.
            p.register_post_accumulate_grad_hook(functools.partial(self._ready, name))

        self.thread = self.stream = None
        if world.size > 1:
            # It gets one core. With more it would slow backward down: a step of `tiny` took 1.36
            # times as long.
            self.thread = ThreadPoolExecutor(1, "communication", torch.set_num_threads, [1])
            if world.device.type == "cuda":
                # A stream is a queue of work for a GPU. The averaging gets one of its own, so that
                # it runs beside backward, not after it.
                self.stream = torch.cuda.Stream(world.device)
        self.zero_grad()

    def zero_grad(self, loss_scale=1.0):
        """Begins a step: all gradients are 0. loss_scale: what the step's loss is multiplied by."""
        self.jobs = []             # of the thread in this step, one for each launched bucket
        self.loss_scale = loss_scale
        self.last_micro_batch = True
        self.missing = set(self.views)             # names of those that are not ready
        torch._foreach_zero_(self.flats)

    # 2. Ready. Autograd has added a gradient to p.grad.

    def _ready(self, name, p):
        """In the step's last micro-batch, launches the buckets that are complete now.

        Autograd calls this when it has added to p.grad the sum of all uses of p (the token
        embedding has two): on a CPU in the thread that has called backward, on a GPU in a thread of
        its own. Raises KeyError if there is a backward after that of the last micro-batch, and
        DistError if p.grad is no view of the bucket any longer."""
        if p.grad.data_ptr() != self.views[name].data_ptr():
            raise DistError(f"the gradient of {name} is not in its bucket any longer: cast the "
                            "module before the Reducer is made, let no zero_grad be called but the "
                            "Reducer's, and no backward make a graph (create_graph)")
        if self.last_micro_batch:
            self.missing.remove(name)
            if self.thread:
                self._launch()

    # 3. Launch. A bucket whose gradients are all there is averaged by the communication thread,
    #    while backward goes on. (Only one thread at a time runs Python. But both are nearly always
    #    in C++ code, backward and collectives, which lets others run.)
    #
    #    A GPU computes later than Python calls it: the CPU only puts the work into a stream.

    def _launch(self):
        """Gives the thread each bucket that may start now, and appends its job to `self.jobs`.

        Buckets start in the order of `self.buckets`, on every rank: torch adds up the first
        collective of one rank with the first of the others, and so on. So a bucket that is complete
        waits for those before it.
        """
        for bucket in self.buckets[len(self.jobs):]:         # not launched yet
            if not self.missing.isdisjoint(bucket.shapes):
                return
            gradients_done = None
            if self.stream:
                # A mark in the queue of this thread's stream, after backward's work so far.
                # ("blocking": a thread that waits until the GPU has come there takes no core.)
                gradients_done = torch.cuda.Event(blocking=True)
                gradients_done.record()
            bucket.launched = time.perf_counter()
            self.jobs.append(self.thread.submit(self._average, bucket, gradients_done))

    def _average(self, bucket, gradients_done):
        """Averages a bucket, in the communication thread if there is one. gradients_done: the
        torch.cuda.Event to wait for first, or None."""
        if self.stream:
            # What this thread calls from here on goes to this stream, and to its GPU. (Each thread
            # begins with GPU 0, where it would take memory even to wait.)
            torch.cuda.set_stream(self.stream)
            gradients_done.synchronize()   # this thread sleeps until backward has come to the mark
        bucket.began = time.perf_counter()
        bucket.bytes_sent = bucket.average(self.loss_scale)
        if self.stream:
            self.stream.synchronize()      # only this thread waits, until the bucket is averaged
        bucket.ended = time.perf_counter()

    # 4. Finish. Wait for the communication thread.

    def finish(self):
        """Waits until this rank has the mean of all gradients. Sets `bytes_sent`, `wait_seconds`.
        Raises what went wrong in the thread, say RankLost; before it waits, DistError that names
        the parameters that took no part in the loss: their buckets were never launched."""
        if self.missing:
            raise DistError(f"no gradient for {', '.join(sorted(self.missing))} in the step's last "
                            "backward: each must take part in that loss, or have "
                            "requires_grad=False")
        if self.stream:
            # First let backward end: wait_seconds shall count the averaging alone.
            torch.cuda.current_stream().synchronize()
            self.world.barrier()                   # a rank may have died in backward, see `World`
        if not self.thread:
            # One rank sends nothing. But compression rounds here, too: so one rank shows what that
            # does to a loss.
            for bucket in self.buckets:
                self._average(bucket, None)
        began = time.perf_counter()
        for job in self.jobs:
            job.result()
        self.wait_seconds = time.perf_counter() - began
        self.bytes_sent = sum(bucket.bytes_sent for bucket in self.buckets)

    def norm(self):
        """Returns the 2-norm of all that is in the buckets, as a float; NaN or inf if any of it
        is. After `finish` it is that of the averaged gradients, the same on every rank. Before, it
        is of no use: averaging runs. A rank's own gradients are whole only when `Bucket.average`
        begins, in the communication thread. (A sum in fp32: on a CPU it can be off by 3e-3 where a
        tensor has tens of millions of elements, by 1e-2 where one of them is far larger.)"""
        return float(nn.utils.get_total_norm(self.flats))

    def commit(self, step_taken):
        """Ends a step: int8 and onebit keep, for the next one, what they have not sent. If this
        step is skipped, they keep what they had before it."""
        for bucket in self.buckets:
            bucket.wire.commit(step_taken)

    def forget(self):
        """Drops all that waits to be sent. Done at each save: so a checkpoint does not need it, and
        the run that goes on equals the one that resumes."""
        for bucket in self.buckets:
            bucket.wire.forget()


def fill_buckets(tensors, world, compression, bucket_mb):
    """Returns Buckets of {name: tensor}, the last tensor first: backward begins at the output.

    A bucket is full when it has bucket_mb MB (4 bytes an element) or more. The embeddings begin a
    new one: their gradients come last, and what shared a bucket with them would wait. So does what
    follows them, the small mlm_bias, since torch lists a model's own parameters first. (It waits
    anyway: buckets start in order.)"""
    contents = []                                  # {name: shape} of each bucket
    space = 0.0                                    # what still fits into the last of them, MB
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

    If there are several nodes, there are two levels (Goyal et al., arXiv 1706.02677, section 4.1).
    The first rank of each node is its leader, here 0 and 2:

        node 0: ranks 0 1, node 1: ranks 2 3
        1. reduce            1 -> 0    3 -> 2      a node's mean, at the leader
        2. wire.average      0 <-> 2               the leaders exchange
        3. broadcast         0 -> 1    2 -> 3      and pass the mean on

    So a node sends no more than a single rank would. With one level each rank is a leader. `none`,
    `fp16` and `bf16` have one level on GPUs, where NCCL itself adds up inside a node first.
    """

    def __init__(self, shapes, world, compression):
        self.shapes = shapes                       # {name: shape}, in the order of the flat tensor
        self.wire = COMPRESSORS[compression]()
        self.within_node = World()                 # with one level: this rank alone
        self.across_nodes = world
        if world.levels and (world.device.type == "cpu" or not isinstance(self.wire, Dense)):
            self.within_node, self.across_nodes = world.levels
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.flat = torch.zeros(sum(sizes), device=world.device)
        self.views = {}                            # {name: view of the flat tensor}
        for name, part in zip(shapes, self.flat.split(sizes)):
            self.views[name] = part.view(shapes[name])

    def average(self, loss_scale):
        """Averages the bucket over all ranks, in place; returns the bytes that this rank sent (on
        two levels: to other nodes). loss_scale: the factor that is in the gradients."""
        if self.within_node.size > 1:
            self.flat.div_(self.within_node.size)
            self.within_node.reduce(self.flat)
        sent = 0
        if self.within_node.rank == 0:
            sent = self.wire.average(self.across_nodes, self.flat, loss_scale)
        self.within_node.broadcast(self.flat)
        return sent


# ----- What goes over the wire, from simple to hard -----
#
# Each Bucket has a wire of its own, an object with these functions:
#
#     average(world, flat, loss_scale)    averages flat (n,) over the ranks, in place, to the same
#                                         bits on all; returns the bytes sent by this rank. Called
#                                         by leaders, in `Bucket.average`
#     commit(step_taken)                  ends a step; called by all ranks, in the main thread
#     forget()                            drops what steps have left; as commit
#
# A wire must keep inf and NaN: if one rank has such an element, the mean must have one, too, on all
# ranks, since all must skip the same step.

@dataclasses.dataclass
class Dense:
    """The wire of none, fp16 and bf16: one all-reduce in the format `dtype`, after which nothing is
    left.

    fp16 has the range 6e-8 to 65,504; the loss scale keeps gradients in it. It has 11 significant
    bits, but fewer below 6e-5. bf16 has 8, and the range of fp32. Each addition on the way rounds
    as well: in bf16 the sum of 64 ranks is 1 to 3 % off, that of 512 ranks 2 to 31 %.
    """
    dtype: torch.dtype

    def average(self, world, flat, loss_scale):
        """Divides, casts, sums, in this order. Returns the bytes of ranks that send to the next one
        in a ring: each sends (W - 1) / W of the tensor twice, first to sum it up, then to spread
        the sums."""
        flat.div_(world.size)                      # before the sum, which might overflow fp16
        sent = flat.to(self.dtype)                 # in fp32 it is `flat` itself
        world.all_reduce(sent)
        flat.copy_(sent)
        return 2 * (world.size - 1) * sent.nbytes // world.size

    def commit(self, step_taken):
        """Does nothing."""

    def forget(self):
        """Does nothing."""


BLOCK = 512                  # elements that share a block's scale, see `encode_int8`


class ErrorFeedback:
    """The wire of int8 and onebit. They round what they send. What rounding has lost, the residual,
    is added to what is sent in the next step. It is unscaled, since the loss scale may be another
    one then:

        v_r = b_r / loss_scale + e_r           b_r: rank r's bucket; e_r: its residual, 0 at first
        q = mean(v_r), nearly                  what all get, the same on every rank
        g = loss_scale * q                     what is then in the bucket
        e_r = v_r - c_r                        c_r: v_r rounded, which rank r sends. The next
                                               residual: kept by `commit`, if the step is taken

    If the step is skipped, after an overflow, the next one begins with the same e_r.

    mean: a function (world, value, state) -> (mean, next state, bytes sent):

        value (n + padding,)   v_r, then padding, so that each rank has whole blocks. The padding
                               has a residual, too. The function subtracts c_r in place, which
                               leaves e_r
        mean (n + padding,)    q
        state                  a dict, empty at first: what the function keeps from step to step. It
                               is not changed: the next state is a new one
    """

    def __init__(self, mean):
        self.mean = mean
        self.forget()

    def average(self, world, flat, loss_scale):
        """Averages flat by the equations of the class. What is left of them is `next`."""
        n = len(flat)
        residual, state = self.kept
        if residual is None:
            # n, rounded up to whole blocks for each rank.
            residual = flat.new_zeros(n + -n % (BLOCK * world.size))
        value = torch.empty_like(residual)
        torch.add(residual[:n], flat, alpha=1 / loss_scale, out=value[:n])
        value[n:] = residual[n:]                   # of the padding: onebit sends signs for zeros
        mean, next_state, sent = self.mean(world, value, state)
        self.next = value, next_state              # value is now the next residual
        torch.mul(mean[:n], loss_scale, out=flat)
        return sent

    def commit(self, step_taken):
        """Keeps what `average` has left if the step is taken, else what was kept before."""
        if step_taken:
            self.kept = self.next
        self.next = self.kept

    def forget(self):
        """Drops the residual and the state."""
        self.kept = None, {}                       # residual (n + padding,), state
        self.next = self.kept                      # from `average` to `commit`


def compressed_mean(encode, decode, world, value, state):
    """int8 and onebit: an all-reduce that compresses twice (1-bit Adam, arXiv 2102.02888). The
    value is cut into W parts. Rank j averages part j of all ranks, and sends the average to all.
    C(x) is what x becomes when it is encoded and decoded. An example of two ranks, with a C that
    rounds down to whole numbers, in the first step:

                       rank 0                 rank 1
        value          3.4    1.0             2.0    5.2          part 0 and part 1 of each rank
        encode         3      1               2      5
        left in value  0.4    0.0             0.0    0.2          the next residuals
        all_to_all     3      2               1      5            now part 0 of both; part 1 of both
        mean           2.5                    3.0                 plus s, which is 0 at first
        encode         2                      3                   0.5 and 0.0 are the next s
        all_gather     2      3               2      3            the mean, on both

    The same in letters. Rank r has the value v_r, see `ErrorFeedback`. The rank that averages a
    part keeps a residual of its own, s:

        c_r = C(v_r)              e'_r = v_r - c_r          what rank r sends, and its next residual
        m = mean_r c_r + s
        q = C(m)                  s' = m - q                the mean that all get, and the next s

    Nothing is lost. What comes in goes out or stays: mean_r v_r + s = q + mean_r e'_r + s'.
    """
    parts = value.view(world.size, -1, BLOCK)              # (W, blocks of a part, BLOCK)

    # 1. Send each part to the rank that averages it.
    codes, decoded = encode(parts)                         # codes: (W, blocks, bytes of a block)
    parts -= decoded
    received = world.all_to_all(codes)                     # row r: rank r's codes of our part

    # 2. Average our part over the ranks.
    part_mean = decode(received).mean(0)                   # (blocks of a part, BLOCK)
    part_mean += state.get("part_residual", 0)

    # 3. Send the average to all.
    part_codes, part_decoded = encode(part_mean)
    part_mean -= part_decoded                              # what is left of it
    mean = decode(world.all_gather(part_codes)).view(-1)
    return mean, {"part_residual": part_mean}, 2 * (world.size - 1) * part_codes.numel()


def encode_int8(blocks):
    """Returns the bytes of blocks (..., 512) -> (..., 516), an int8 for each element and a scale in
    fp32 for the block, and C(blocks), what they stand for.

    The element farthest from 0 becomes 127 or -127 (block-wise quantisation as of Dettmers et al.,
    arXiv 2110.02861, section 2.1, here linear):

        block_scale = max |x| / 127     level = round(x / block_scale)     C(x) = block_scale level
    """
    # The clamp is for blocks of zeros. In a block with inf its scale is inf, and what is decoded
    # from it NaN (0 * inf), so that all ranks skip the step.
    scales = blocks.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
    levels = (blocks / scales).round_()
    packed = levels.to(torch.int8).view(torch.uint8)
    return torch.cat([packed, scales.view(torch.uint8)], -1), levels.mul_(scales)


def decode_int8(codes):
    """Returns the blocks (..., 512) that bytes (..., 516) stand for."""
    levels = codes[..., :-4].view(torch.int8).float()
    return levels.mul_(codes[..., -4:].view(torch.float32))


# Both tables are copied to the GPU where they are used. (non_blocking: the CPU goes on meanwhile.)
POWERS = (1 << torch.arange(7, -1, -1)).byte()               # 128, 64, ..., 1: the bits of a byte
# The eight signs that each of the 256 bytes stands for, (256, 8): a bit of 1 is -1. So row 3, which
# is 00000011, is 1 1 1 1 1 1 -1 -1.
SIGNS = 1 - 2.0 * ((torch.arange(256).view(256, 1) & POWERS) > 0)


def encode_onebit(blocks):
    """Returns the bytes of blocks (..., 512) -> (..., 68), a bit for each element and a scale in
    fp32 for the block, and C(blocks), what they stand for.

    1-bit Adam's compressor in the blocks of Zheng et al. (arXiv 1905.10936):

        block_scale = mean |x|      bit = sign of x            C(x) = block_scale or -block_scale

    In the demo LAMB learns much less from it: v, its mean of squares, is then that of such scales.
    So 1-bit LAMB and 1-bit Adam begin with full gradients, and then freeze v (tests/variants).

    mean |x| has the smallest error (Karimireddy et al., arXiv 1901.09847). 1-bit Adam has one
    scale, ||x|| / sqrt(n), for a whole tensor: with that the residual of an embedding, most of
    whose rows have hardly any gradient in a step, grows from step to step.
    """
    scales = blocks.abs().mean(-1, keepdim=True)
    if blocks.is_cpu:                              # NumPy packs several times faster than torch
        packed = torch.from_numpy(np.packbits(np.signbit(blocks.numpy()), axis=-1))
    else:
        eights = blocks.signbit().unflatten(-1, (-1, 8))
        bits = eights * POWERS.to(blocks.device, non_blocking=True)
        packed = bits.sum(-1, dtype=torch.uint8)
    return torch.cat([packed, scales.view(torch.uint8)], -1), torch.copysign(scales, blocks)


def decode_onebit(codes):
    """Returns the blocks (..., 512) that bytes (..., 68) stand for."""
    table = SIGNS.to(codes.device, non_blocking=True)
    signs = nn.functional.embedding(codes[..., :-4].int(), table)                   # (..., 64, 8)
    return signs.flatten(-2).mul_(codes[..., -4:].view(torch.float32))


COMPRESSORS = {              # name: makes the wire of a bucket
    "none": lambda: Dense(torch.float32),
    "fp16": lambda: Dense(torch.float16),
    "bf16": lambda: Dense(torch.bfloat16),
    "int8": lambda: ErrorFeedback(
        functools.partial(compressed_mean, encode_int8, decode_int8)),
    "onebit": lambda: ErrorFeedback(
        functools.partial(compressed_mean, encode_onebit, decode_onebit)),
}


# ===== To run for a week: how ranks meet, stop and fail. Nothing above calls it. =====
#
# When something is wrong, every wait has an end (the names are told below):
#
#     2 s                     `agree` waits for "alive"; `end_torchrun` for others to read "failed"
#     10 s                    `leave` gives up asking the store
#     --timeout               meeting; a collective over Gloo raises an exception
#     2 x --timeout           a collective over NCCL aborts the process
#     30 s after SIGTERM      torchrun kills the ranks of its node that are left. It sends SIGTERM
#                             when a rank of this node has failed
#     60 s after "failed"     `watch` ends its process: on nodes where no rank has ended, torchrun
#                             has sent no SIGTERM

# ----- How the ranks meet -----

def init(timeout=600.0, init_method="env://"):
    """Returns this process's World, by the environment that torchrun sets; without it, a World of
    one rank.

    timeout: seconds that a collective over Gloo waits for a rank; over NCCL twice as many.
    init_method: where the store is, as torch says it; "env://" is torchrun's.

    If there are several ranks, they listen to signals from here on, see `listen_to_signals`, and
    their processes have to end by os._exit: Python's exit aborts while torch's groups are open, and
    to close them can wait for a lost rank. Raises DistError if the nodes are unlike (numbers of
    ranks, GPUs or none) or torchrun is missing, RankLost if the ranks do not meet.
    """
    world = world_of_environment()
    if world.size == 1:
        return world
    limit = datetime.timedelta(seconds=timeout)
    # With this, Gloo opens a socket to a rank when it first sends to it, not to all ranks at once.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        store = meet(world, init_method, limit)
        start_groups(world, store, limit)
        node = {"ranks of its node": world.local_size, "device": world.device.type}
        world.check_same(node, "is on another kind of node than rank 0; set the same "
                               "--nproc_per_node on every node")
        world.levels = two_levels(world, limit)
        return world
    except (RuntimeError, ValueError) as error:
        if "memory" in str(error):                   # see `World._run`
            raise
        raise RankLost(f"rank {world.rank} of {world.size} could not meet others: {error!r:.200}")


def world_of_environment():
    """Returns the World that torchrun's variables tell of, and makes its GPU the current one.
    Raises DistError if srun or mpirun has started several processes without torchrun."""
    # What srun sets, Open MPI's mpirun, and MPICH's. (SLURM_NTASKS would not tell: a batch script,
    # which runs once, has it too.)
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
        # The remainder is for schedulers that show each rank only its own GPU. (Two ranks that get
        # the same one by it are refused in train.py.)
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return World(rank, size, local_size, device)


def meet(world, init_method, limit):
    """Returns a store that all ranks share, and in which nothing is left of earlier processes.
    Raises RuntimeError if node 0 does not answer within `limit`, a timedelta; if ranks do not come
    within another `limit`, naming them; or if this rank's torchrun dies.

    A store is a small dictionary that all ranks share, kept by a process of node 0. Torch's own
    lives as long as torchrun, which may start dead ranks again: new processes would find in it what
    the dead ones have set. (Restarts have numbers, but a torchrun that was itself started again
    counts from 0.)

    So each attempt to meet has a number, and keys of its own, with that number as a prefix. Each
    new process begins an attempt, by adding 1 to a count. While it waits it joins the newest one,
    by setting a key. The ranks meet in an attempt that all have joined:

                                          newest attempt    joined by
        rank 0 comes                      1                 0
        rank 1 comes                      2                 1, then 0: they have met
        both die and are started again
        rank 1 comes                      3                 1
        rank 1 dies, comes once more      4                 1
        rank 0 comes                      5                 0, then 1: they have met

    So a dead process is left behind by the one that takes its place, which begins a newer attempt.
    (If a rank joins and dies within 0.1 s, all meet. The next collective fails.)
    """
    # torch's rendezvous connects to the store of node 0; it yields (store, rank, size), once.
    root, _, _ = next(
        distributed.rendezvous(init_method, world.rank, world.size, timeout=limit))
    root.add("newest attempt", 1)
    deadline = time.monotonic() + limit.total_seconds()
    everyone = [f"here/{rank}" for rank in range(world.size)]
    while True:
        if torchrun_died():
            raise RuntimeError("its torchrun has died")    # a new one may start this rank anew
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
    """Returns the ranks that have not set a word in the store, as "3, 5"."""
    return ", ".join(str(rank) for rank in range(size) if not store.check([f"{word}/{rank}"]))


def start_groups(world, store, limit):
    """Starts torch's process group, Gloo and for GPUs NCCL, and the thread `watch`. From here on
    signals are requests, see `listen_to_signals`."""
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    # Gloo should time out first, since it raises where NCCL aborts: so NCCL gets twice the limit.
    # (Only a private function of torch sets the limit of one of them.)
    distributed.init_process_group(
        backend,
        timeout=2 * limit,
        world_size=world.size,
        rank=world.rank,
        store=store)
    gloo = distributed.group.WORLD._get_backend(torch.device("cpu"))
    gloo = getattr(gloo, "wrapped_pg", gloo)         # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    gloo._set_default_timeout(limit)
    # torchrun sends SIGTERM to all when a rank has died. So that they can still say which one it
    # was, it must not end them at once.
    listen_to_signals()
    threading.Thread(target=watch, args=[world.rank], daemon=True).start()


def two_levels(world, limit):
    """Returns two Worlds: the ranks within this node, and those with this local rank across the
    nodes. None on a single node.

        node 0: ranks 0 1        within nodes:  (0 1) and (2 3)
        node 1: ranks 2 3        across nodes:  (0 2) and (1 3)
    """
    if world.local_size == world.size:
        return None
    if world.device.type == "cuda":
        limit = 2 * limit                            # of NCCL, see `start_groups`
    ranks = torch.arange(world.size).view(-1, world.local_size)    # a row for each node
    levels = []
    for teams in ranks, ranks.T:
        # Every rank must create all groups, in the same order, and gets its own back. (1 3) is not
        # used.
        group, _ = distributed.new_subgroups_by_enumeration(teams.tolist(), limit)
        levels.append(World(group.rank(), group.size(), device=world.device, group=group))
    return levels


# ----- Requests to stop -----

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
                signal.SIGXCPU, signal.SIGQUIT)
# The names of the signals that have come.
stop_requests = []


def listen_to_signals():
    """From now on a signal that asks for a stop (SIGTERM, Ctrl-C, a closed terminal, what
    schedulers send before the end) does not end the process, but adds its name to the list
    `stop_requests`, so that training can stop with a checkpoint. After the first signal, Ctrl-C
    ends the process at once. (torchrun sends SIGTERM for a second Ctrl-C.)

    Without torchrun no signal that is ignored (by nohup) is listened to. Under torchrun all are: it
    passes its own signals on to the ranks, and kills those that ignore them.
    """
    def request(signum, _):
        stop_requests.append(signal.Signals(signum).name)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for signum in STOP_SIGNALS:
        if TORCHRUN or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, request)


def find_torchrun():
    """Returns the process number of the torchrun that started this rank; None without torchrun.

    The parent of a rank may be a wrapper (numactl, bash -c). But torchrun starts each rank in a
    session of its own. A session is a set of processes, and has the number of its first one: of the
    wrapper, or the rank. The parent of that one is torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        # "PID (NAME) STATE PARENT ...", where NAME can be anything.
        status = Path(f"/proc/{os.getsid(0)}/stat").read_text(errors="replace")
        return int(status.rpartition(")")[2].split()[1])
    except OSError:                                # no /proc, or the wrapper is gone
        return os.getppid()


# Looked up once, when this file is imported: that a torchrun died before goes unnoticed.
TORCHRUN = find_torchrun()


def torchrun_died():
    """Returns True if torchrun started this process and is gone: ranks must not train on alone."""
    return find_torchrun() != TORCHRUN


def end_torchrun():
    """Ends the torchrun that started this process, if there is one: it would restart the ranks."""
    if TORCHRUN:
        time.sleep(2)      # node 0's torchrun may keep the store: first let all read "failed"
        if not torchrun_died():
            with contextlib.suppress(ProcessLookupError):        # it has just ended
                os.kill(TORCHRUN, signal.SIGTERM)


# ----- Failures: who failed, said once -----
#
# A rank can die (kill -9, no memory), hang (a stopped machine) or raise an exception. All others
# then get an error in their next collective over Gloo: at once from a dead rank, at the end of
# --timeout from one that hangs. (A rank that waits for a third rank gets the error when the third
# ends. NCCL waits for either, at most twice the --timeout.) So a rank that fails only has to end,
# and all come to `leave`. One of them prints its error: the first to put its number into the store.
# (The error of a collective only tells that some rank is gone. Then the first one asks which.) Keys
# in the store:
#
#     "failed"          set once, by the first rank that fails: "0 True" is rank 0, and that a
#                       restart helps
#     "alive/RANK"      set by a thread of each process (`watch`) when "failed" is set, whatever the
#                       program is busy with. The ranks without it are those that are gone
#
# Rank 2 is killed:
#
#     s     rank 0                        rank 1                     rank 2    torchrun
#     0.0   in a collective               in a collective            killed
#     0.1   error; `leave` sets "failed"  error; `leave`: it is set            SIGTERM, which ranks
#     0.2   `watch` sets "alive/0"        `watch` sets "alive/1"               take as a request
#     2.1   no "alive/2": prints          prints nothing
#           "rank 2 died ..."
#           ends                          ends                                 ends, or restarts all
#
# `agree` decides who waits, and prints:
#
#     this rank                    waits     because                                  prints
#     first, with its own error    no                                                 its error
#     first, with a RankLost       2 s       the living need time to set "alive"      who is lost
#     later                        2 s *     its `watch` has to set "alive"           nothing
#
# * At most, and only until `watch` sets `may_leave`: an error may come late, as it goes from
# neighbour to neighbour.

def open_store():
    """Returns the store of all ranks, with a new connection: another thread may use the old one."""
    return distributed.group.WORLD.get_group_store().clone()


# Set by `watch` 2 s after it saw "failed", or 2 s after it has ended torchrun.
may_leave = threading.Event()
# Set by `watch` if the store is gone before: node 0's torchrun keeps it.
store_gone = threading.Event()


def watch(rank):
    """Waits, in a thread of each process, until a rank has failed. Then says that this process is
    alive, and ends it if it lives a minute later. Where a restart cannot help it ends torchrun as
    well."""
    try:
        store = open_store()
        while not store.check(["failed"]):
            time.sleep(0.1)
        # A timer that ends the process in 60 s, even if all of Python hangs. A program that is
        # saving needs some time. One that waits for a dead rank in NCCL would wait longer.
        faulthandler.dump_traceback_later(60, exit=True)
        store.set(f"alive/{rank}", "")
        if store.get("failed").endswith(b"False"):
            end_torchrun()
        time.sleep(2)
        may_leave.set()
    except RuntimeError:
        store_gone.set()


def leave(message, restart_helps, rank_lost=False):
    """Ends this process after an error, with status 1. The first of all ranks to fail prints its
    message; if its restart_helps is False, torchrun is ended, too.

    rank_lost: whether the error was a RankLost. The first rank to fail finds out who is silent, and
    puts their numbers in place of the "?" in its message.
    """
    try:
        # A request to a host that is stopped or cut off never returns, so a thread makes it.
        agreement = ThreadPoolExecutor().submit(agree, message, restart_helps, rank_lost)
        message, restart_helps = agreement.result(timeout=10)
    except (RuntimeError, TimeoutError):
        # The store is gone with its torchrun, or no memory is left for a thread. Each rank prints
        # an error of its own. That others are lost is printed by one rank of each node, unless its
        # `watch` has seen the failure that torchrun was ended for.
        if rank_lost and TORCHRUN and (os.environ["LOCAL_RANK"] != "0" or may_leave.is_set()):
            message = ""
    if message:
        with contextlib.suppress(OSError, ValueError):           # a closed terminal, a full disk
            print(message, file=sys.stderr, flush=True)
    if not restart_helps:
        end_torchrun()
    end(1)


def end(status):
    """Ends this process, at once if there may be other ranks: Python's own end aborts while torch's
    groups are open, and can wait for a rank that is lost. Without torchrun status 0 returns, and
    another one is a SystemExit: so a profiler writes its file, and a notebook lives."""
    if TORCHRUN or distributed.is_initialized():
        os._exit(status)
    if status:
        sys.exit(status)


def agree(message, restart_helps, rank_lost):
    """Returns (what this rank prints, whether a restart helps), as the first rank to fail decides.
    Raises RuntimeError if the store was gone before this rank could say that it has failed."""
    if not distributed.is_initialized():
        return message, restart_helps              # before they have met each speaks for itself
    if store_gone.is_set():
        raise RuntimeError("to connect to it would take until --timeout")
    store = open_store()
    # compare_set writes ours if the key is not set yet, and returns what it then holds.
    ours = f"{distributed.get_rank()} {restart_helps}"
    first = store.compare_set("failed", "", ours).decode()
    if first != ours:
        may_leave.wait(2)
        return "", first.endswith("True")
    if rank_lost:
        time.sleep(2)
    silent = ""
    with contextlib.suppress(RuntimeError):        # the store has gone meanwhile
        silent = ranks_without(store, "alive", distributed.get_world_size())
    return message.replace("rank ?", f"rank {silent or '?'}"), restart_helps
