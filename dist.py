"""Ranks, and gradients averaged over them while backward still runs.

    torchrun --nproc_per_node=2 dist.py          # what your network does with each compressor

A `Reducer` packs gradients into flat fp32 buckets and averages each bucket over the ranks as soon
as it is complete, in one background lane, so that the network works while backward computes (Li et
al., "PyTorch Distributed", arXiv 2006.15704, section 3.2). A compressor decides what crosses the
wire.

This is the only file that imports torch.distributed. With one rank every collective is a no-op.
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import statistics
import sys
import time

import numpy as np
import torch
import torch.distributed


class DistError(RuntimeError):
    """Settings or a model that ranks cannot train with; the message says what to change."""


class RankLost(DistError):
    """A rank died, did not answer in time or never came. Leave by os._exit: else exit can hang."""


# ----- Ranks -----

@dataclasses.dataclass(frozen=True)
class World:
    """This process among all of them, and the few small collectives that the training loop needs.

    A context manager: leaving it, also by an exception, closes the process group. The small
    collectives go over Gloo also where gradients go over NCCL, so that a rank that died is an
    exception here instead of an aborted process.
    """
    rank: int = 0            # among all processes
    size: int = 1
    local_rank: int = 0      # among those of this node
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    device: torch.device = torch.device("cpu")

    def sum(self, values):
        """Returns the sums over all ranks of a list of numbers, as floats; NaN and inf survive.

        Exact for integers below 2^53. The answer is the same on every rank.
        """
        total = torch.tensor(values, dtype=torch.float64)
        self.all_reduce(total)
        return total.tolist()

    def all_reduce(self, tensor):
        """Sums a tensor over all ranks, in place; raises RankLost if a rank does not answer."""
        if self.size > 1:
            with self.answering():
                torch.distributed.all_reduce(tensor)

    def all_to_all(self, rows):
        """Returns, for rows (size, k) of which row j is for rank j, the rows (size, k) meant for
        this rank, in order of rank."""
        received = rows.clone()
        if self.size > 1:
            with self.answering():
                torch.distributed.all_to_all_single(received, rows)
        return received

    def all_gather(self, tensor):
        """Returns every rank's tensor, stacked in order of rank: (...) -> (size, ...)."""
        gathered = tensor.repeat(self.size, *[1] * tensor.dim()).view(self.size, *tensor.shape)
        if self.size > 1:
            with self.answering():
                torch.distributed.all_gather(list(gathered.unbind()), tensor.contiguous())
        return gathered

    def broadcast(self, tensors):
        """Overwrites a list of tensors with rank 0's, in place."""
        if self.size > 1:
            with self.answering():
                for tensor in tensors:
                    torch.distributed.broadcast(tensor, 0)

    def share(self, value):
        """Returns rank 0's value (any picklable object), on every rank."""
        values = [value]
        if self.size > 1:
            with self.answering():
                torch.distributed.broadcast_object_list(values, 0)
        return values[0]

    def gather(self, value):
        """Returns the list of every rank's value (any small picklable object), in order of rank."""
        values = [value] * self.size
        if self.size > 1:
            with self.answering():
                torch.distributed.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def answering(self):
        """Turns the failure of a collective into a RankLost."""
        try:
            yield
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank}: another rank died or did not answer in time "
                           f"({str(error).strip().splitlines()[0][:160]}); start the same command "
                           "again to go on from the last checkpoint") from error

    def close(self):
        """Closes the process group, if there is one; a group left open aborts at exit."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or not issubclass(kind, RankLost):     # closing would wait for that rank
            self.close()


def init(timeout=600.0, init_method="env://"):
    """Returns the World of this process, from the environment that torchrun sets.

    Ranks talk by NCCL where there is CUDA and by Gloo on CPU; without torchrun there is one rank.
    timeout: seconds that a collective waits for a rank. Raises RankLost if the ranks do not meet.
    """
    env = {key: int(os.environ.get(key, default)) for key, default in
           dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, GROUP_RANK=0).items()}
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if env["LOCAL_WORLD_SIZE"] > torch.cuda.device_count():
            raise DistError(f"{env['LOCAL_WORLD_SIZE']} ranks on a node with "
                            f"{torch.cuda.device_count()} GPUs; set --nproc_per_node to that")
        device = torch.device("cuda", env["LOCAL_RANK"])
        torch.cuda.set_device(device)
    world = World(env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"],
                  env["GROUP_RANK"], env["WORLD_SIZE"] // env["LOCAL_WORLD_SIZE"], device)
    if world.size > 1:
        try:
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", init_method=init_method,
                rank=world.rank, world_size=world.size,
                timeout=datetime.timedelta(seconds=timeout))
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"rank {world.rank} of {world.size} could not meet the others: "
                           f"{str(error).strip().splitlines()[0][:200]}") from error
    return world


# ----- Compressors: what crosses the wire -----

class NoCompression:
    """Sends fp32, by all-reduce. The trivial compressor, and the default."""
    state = {}               # what a step leaves to the next: nothing

    def __init__(self, world, shapes):
        self.world = world

    def average(self, bucket, scale=1.0):
        """Averages a flat fp32 bucket (n,) over the ranks, in place; returns the bytes that this
        rank sent. Division comes before the sum, which might overflow a 16-bit format."""
        bucket.div_(self.world.size)
        self.world.all_reduce(bucket)
        return all_reduce_bytes(bucket, self.world.size)

    def commit(self, counts):
        """Nothing is pending."""


class CastCompression(NoCompression):
    """Sends fp16 or bf16: half of the bytes. The sum is rounded to that format at each addition.

    fp16 rounds to 11 bits, and needs the loss scaling that keeps gradients inside its range of
    6e-8 to 65,504; bf16 has the range of fp32 and rounds to 8 bits.
    """

    def __init__(self, world, shapes, dtype):
        super().__init__(world, shapes)
        self.wire = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=world.device)

    def average(self, bucket, scale=1.0):
        """Averages a flat fp32 bucket (n,) over the ranks, in place; returns the bytes sent."""
        self.wire.copy_(bucket.div_(self.world.size))
        self.world.all_reduce(self.wire)
        bucket.copy_(self.wire)
        return all_reduce_bytes(self.wire, self.world.size)


class ErrorFeedback:
    """What the lossy compressors share: what this rank could not send is added to its next bucket.

    Residuals are fp32 and unscaled, so that a change of the loss scale between two steps changes
    none. A step's new residual is pending until `commit` is told that the step counts: an overflow
    leaves no trace. On the mean over the ranks, in + old residual = out + new residual.
    """

    def __init__(self, world, shapes, **options):
        self.world, self.count = world, sum(math.prod(shape) for shape in shapes)
        self.state = self.new_state(shapes, **options)
        self.pending = {name: tensor.clone() for name, tensor in self.state.items()}

    def new_state(self, shapes):
        """Returns all that a step leaves to the next, {name: tensor}: at least "residual" (n,)."""
        return {"residual": torch.zeros(self.count, device=self.world.device)}

    def average(self, bucket, scale=1.0):
        """Puts the lossy mean over the ranks into a flat fp32 bucket (n,) of gradients that are
        multiplied by `scale`; returns the bytes that this rank sent."""
        bucket.mul_(1 / scale).add_(self.state["residual"])
        sent = self.exchange(bucket)
        bucket.mul_(scale)
        return sent

    def commit(self, counts):
        """Makes the step's residual the one of the next step, if the step counts."""
        if counts:
            self.state, self.pending = self.pending, self.state

    def factors(self, names):
        """Returns what is kept for single tensors beside the residual, by their names."""
        return {}

    def fold(self):
        """Averages what was not yet sent over the ranks, in place, and returns it (n,)."""
        self.state["residual"].div_(self.world.size)
        self.world.all_reduce(self.state["residual"])
        return self.state["residual"]


class TwoPhase(ErrorFeedback):
    """A compressed all-reduce in two phases (1-bit Adam, arXiv 2102.02888, section 4.2): chunk j of
    every rank goes to rank j (all_to_all), which averages the chunks, compresses the average again
    with an error of its own, the server error, and sends it to all (all_gather).

    Subclasses turn rows of fp32 numbers into rows of bytes, `encode`, and back, `decode`.
    """
    UNIT = 32                # a chunk is a multiple of this: 32 signs are as long as the scale

    def new_state(self, shapes):
        n = self.world.size
        self.chunk = -(-self.count // (n * self.UNIT)) * self.UNIT
        starts = torch.arange(n, device=self.world.device) * self.chunk
        self.lengths = (self.count - starts).clamp(1, self.chunk)           # without the padding
        self.padded = torch.zeros(n, self.chunk, device=self.world.device)
        return super().new_state(shapes) | {"server": torch.zeros_like(self.padded[0])}

    def exchange(self, value):
        """Replaces value (n,) by the mean; the errors of both phases are pending."""
        rank = self.world.rank
        self.padded.view(-1)[:self.count] = value
        wire = self.encode(self.padded, self.lengths)
        kept = self.padded - self.decode(wire)
        self.pending["residual"].copy_(kept.view(-1)[:self.count])
        mine = self.decode(self.world.all_to_all(wire)).mean(0).add_(self.state["server"])
        mine[max(0, self.count - rank * self.chunk):] = 0                   # the padding
        answer = self.encode(mine[None], self.lengths[rank:rank + 1])
        torch.sub(mine, self.decode(answer)[0], out=self.pending["server"])
        self.pending["server"][max(0, self.count - rank * self.chunk):] = 0
        value.copy_(self.decode(self.world.all_gather(answer[0])).view(-1)[:self.count])
        return 2 * (self.world.size - 1) * wire.shape[1]

    def fold(self):
        """Averages what was not yet sent, the server errors as well, and returns it (n,)."""
        server = self.world.all_gather(self.state["server"]).view(-1)[:self.count]
        self.state["server"].zero_()
        return super().fold().add_(server)


class OneBitCompression(TwoPhase):
    """Sends one sign a number and one scale a chunk: 1-bit Adam's compressor (arXiv 2102.02888).

        s = ||x|| / sqrt(n)          q = s sign(x), where sign(0) = +1
    """

    def new_state(self, shapes):
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
        self.signs = torch.from_numpy(bits * 2.0 - 1).float().to(self.world.device)     # (256, 8)
        return super().new_state(shapes)

    def encode(self, rows, lengths):
        """Returns rows of bytes (R, chunk / 8 + 4): packed signs, then the scale."""
        scales = torch.linalg.vector_norm(rows, dim=1).div_(lengths.sqrt())
        positive = rows >= 0
        if rows.is_cuda:
            shifts = torch.arange(7, -1, -1, device=rows.device)
            packed = (positive.unflatten(1, (-1, 8)) << shifts).sum(-1).to(torch.uint8)
        else:
            packed = torch.from_numpy(np.packbits(positive.numpy(), axis=1))
        return torch.cat([packed, scales[:, None].view(torch.uint8)], 1)

    def decode(self, wire):
        """Returns the rows (R, chunk) that rows of bytes stand for."""
        scales = wire[:, -4:].view(torch.float32)                               # (R, 1)
        signs = self.signs.index_select(0, wire[:, :-4].flatten().int())
        return signs.view(len(wire), -1).mul_(scales)


class Int8Compression(TwoPhase):
    """Sends 8 bits a number and one fp32 scale a block of 256, the largest of which becomes 127."""
    UNIT = 256

    def encode(self, rows, lengths):
        """Returns rows of bytes (R, chunk + chunk / 64): the numbers, then the scales."""
        blocks = rows.unflatten(1, (-1, self.UNIT))                             # (R, blocks, 256)
        scales = blocks.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
        numbers = (blocks / scales).round_().to(torch.int8)
        return torch.cat([numbers.flatten(1).view(torch.uint8),
                          scales.flatten(1).view(torch.uint8)], 1)

    def decode(self, wire):
        """Returns the rows (R, chunk) that rows of bytes stand for."""
        numbers = wire[:, :self.chunk].view(torch.int8).unflatten(1, (-1, self.UNIT)).float()
        scales = wire[:, self.chunk:].view(torch.float32)
        return numbers.mul_(scales[:, :, None]).flatten(1)


class TopKCompression(ErrorFeedback):
    """Sends each rank's largest `fraction` of the numbers, with their places, by all_gather
    (Deep Gradient Compression, arXiv 1712.01887, without its momentum correction).

    A number costs 8 bytes and goes to all N - 1 others: from N = 1 / fraction ranks on, fp32 by a
    ring sends less.
    """

    def new_state(self, shapes, fraction=0.01):
        if not 0 < fraction <= 1:
            raise DistError(f"a share of {fraction} cannot work; set --topk-fraction in (0, 1]")
        self.k = max(1, int(fraction * self.count))
        return super().new_state(shapes)

    def exchange(self, value):
        """Replaces value (n,) by the mean of what the ranks sent; the rest is pending."""
        places = value.abs().topk(self.k, sorted=False).indices
        wire = torch.stack([value[places], places.int().view(torch.float32)])           # (2, k)
        self.pending["residual"].copy_(value).index_fill_(0, places, 0)
        value.zero_()
        for numbers, places in self.world.all_gather(wire):
            value.index_add_(0, places.view(torch.int32), numbers / self.world.size)
        return (self.world.size - 1) * wire.numel() * 4


class ChunkCompression(ErrorFeedback):
    """Sends the chunks with the largest norms: GradientFlow's coarse-grained sparse communication
    (arXiv 1902.06855, section 3.2). All ranks add up the L1 norms of their chunks, so all pick the
    same ones, and a plain all-reduce of those is enough.
    """
    CHUNK = 1024

    def new_state(self, shapes, fraction=0.05):
        if not 0 < fraction <= 1:
            raise DistError(f"a share of {fraction} cannot work; set --chunk-fraction in (0, 1]")
        chunks = -(-self.count // self.CHUNK)
        self.k = max(1, round(fraction * chunks))
        self.padded = torch.zeros(chunks, self.CHUNK, device=self.world.device)
        return super().new_state(shapes)

    def exchange(self, value):
        """Replaces value (n,) by the mean of the chosen chunks and 0; the rest is pending."""
        self.padded.view(-1)[:self.count] = value
        norms = self.padded.abs().sum(1)
        self.world.all_reduce(norms)
        chosen = norms.topk(self.k).indices
        sums = self.padded[chosen].div_(self.world.size)
        self.world.all_reduce(sums)
        self.padded[chosen] = 0
        self.pending["residual"].copy_(self.padded.view(-1)[:self.count])
        self.padded.zero_()[chosen] = sums
        value.copy_(self.padded.view(-1)[:self.count])
        return sum(all_reduce_bytes(tensor, self.world.size) for tensor in (norms, sums))


class PowerSGDCompression(ErrorFeedback):
    """Sends a rank-r factorisation of each matrix (PowerSGD, arXiv 1905.13727, algorithm 1).

        P = sum_i M_i Q        P = orthonormal(P)        Q = mean_i M_i^T P        M = P Q^T

    Q is the next step's start. Vectors, and matrices a x b with 2 r (a + b) >= a b, go dense.
    """

    def new_state(self, shapes, rank=4):
        if rank < 1:
            raise DistError(f"a rank of {rank} cannot work; set --powersgd-rank to 1 or more")
        self.shapes = shapes
        self.low = [len(s) == 2 and 2 * rank * (s[0] + s[1]) < s[0] * s[1] and rank <= min(s)
                    for s in shapes]
        generator = torch.Generator().manual_seed(0)               # the same Q on every rank
        starts = [torch.randn(s[1], rank, generator=generator).to(self.world.device)
                  for s, low in zip(shapes, self.low) if low]
        return super().new_state(shapes) | {f"q{i}": q for i, q in enumerate(starts)}

    def exchange(self, value):
        """Replaces value (n,) by the mean of low rank; what it lacks is pending."""
        kept = self.pending["residual"].copy_(value)
        parts = [part.view(shape) for part, shape in
                 zip(value.split([math.prod(s) for s in self.shapes]), self.shapes)]
        low = [part for part, is_low in zip(parts, self.low) if is_low]
        dense = [part for part, is_low in zip(parts, self.low) if not is_low]
        left, sent = self.sums([m @ self.state[f"q{i}"] for i, m in enumerate(low)])
        left = [torch.linalg.qr(p).Q for p in left]
        right, more = self.sums([m.T @ p for m, p in zip(low, left)] + dense)
        for i, (m, p) in enumerate(zip(low, left)):
            q = self.pending[f"q{i}"].copy_(right[i])
            torch.mm(p, q.T, out=m)
        for part, mean in zip(dense, right[len(low):]):
            part.copy_(mean)
        kept.sub_(value)
        at = 0
        for part, is_low in zip(parts, self.low):                  # dense parts keep nothing back
            if not is_low:
                kept[at:at + part.numel()] = 0
            at += part.numel()
        return sent + more

    def factors(self, names):
        """Returns Q of each matrix that goes as factors."""
        low = [name for name, is_low in zip(names, self.low) if is_low]
        return {name: self.state[f"q{i}"] for i, name in enumerate(low)}

    def sums(self, tensors):
        """Returns (the means over the ranks of some tensors, bytes sent), in one all-reduce."""
        if not tensors:
            return [], 0
        flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(self.world.size)
        self.world.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return ([part.view_as(tensor) for part, tensor in zip(parts, tensors)],
                all_reduce_bytes(flat, self.world.size))


COMPRESSORS = {
    "none": NoCompression,
    "fp16": functools.partial(CastCompression, dtype=torch.float16),
    "bf16": functools.partial(CastCompression, dtype=torch.bfloat16),
    "int8": Int8Compression,
    "onebit": OneBitCompression,
    "topk": TopKCompression,              # option: fraction
    "chunk": ChunkCompression,            # option: fraction
    "powersgd": PowerSGDCompression,      # option: rank
}


def make_compressor(name, world, shapes, **options):
    """Returns a compressor, by its name, for one bucket of tensors of these shapes; raises
    DistError for an unknown name, listing the known ones, or an option that cannot work."""
    if name not in COMPRESSORS:
        raise DistError(f"unknown compression {name!r}; known are {', '.join(COMPRESSORS)}")
    return COMPRESSORS[name](world, shapes, **options)


def all_reduce_bytes(tensor, size):
    """Returns the bytes that each of `size` ranks sends when a tensor is all-reduced by a ring: of
    its `size` parts, each goes round once to be summed and once to be spread."""
    return 2 * (size - 1) * tensor.numel() * tensor.element_size() // size


# ----- The background lane: where buckets are averaged while backward goes on -----

class ThreadLane:
    """Runs jobs one after another in a thread; Gloo's collectives let other threads run."""

    def __init__(self):
        self.pool = concurrent.futures.ThreadPoolExecutor(1, "reducer")
        self.jobs = []

    def submit(self, job):
        """Queues a function without arguments."""
        self.jobs.append(self.pool.submit(job))

    def wait(self):
        """Waits for all jobs; returns the seconds that took. Raises the first job's exception."""
        began, jobs, self.jobs = time.perf_counter(), self.jobs, []
        for job in jobs:
            job.result()
        return time.perf_counter() - began

    def close(self):
        self.pool.shutdown(cancel_futures=True)


class StreamLane:
    """Runs jobs on a CUDA stream of their own, each behind what its caller's stream has queued."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)

    def submit(self, job):
        """Queues a function without arguments; its kernels run on the lane."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            job()

    def wait(self):
        """Waits for backward, then for the lane; returns the seconds that the lane took longer."""
        torch.cuda.current_stream().synchronize()
        began = time.perf_counter()
        self.stream.synchronize()
        return time.perf_counter() - began

    def close(self):
        self.stream.synchronize()


# ----- The reducer -----

class Bucket:
    """One flat fp32 tensor, its compressor, and which of its parameters are not ready yet."""

    def __init__(self, parameters, world, compression, options):
        self.shapes = {name: p.shape for name, p in parameters}
        self.flat = torch.zeros(sum(p.numel() for _, p in parameters), device=world.device)
        self.compressor = make_compressor(compression, world, list(self.shapes.values()), **options)
        self.missing = set(self.shapes)

    def views(self, flat):
        """Returns {name: view} of a flat tensor with the bucket's layout."""
        parts = flat.split([math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts)}


class Reducer:
    """Averages a module's gradients over the ranks, overlapped with backward.

        reducer = Reducer(model, world)
        reducer.zero_grad()
        with reducer.accumulate():                 # all micro-batches of a step but the last
            loss(first).backward()
        loss(last).backward()                      # starts each bucket once it is complete
        reducer.finish()                           # now reducer.gradients are equal on all ranks

    It makes every rank's parameters and buffers those of rank 0, and gives each trainable parameter
    a view into a bucket: fp32 parameters find it as `p.grad`; fp16 and bf16 ones have theirs added
    to it and dropped, so that micro-batches add up in fp32. `gradients` maps names to the views,
    `buckets` lists the flat tensors; all is allocated here, once. After `finish`, `bytes_sent` and
    `wait_seconds` tell what this step cost; `commit` tells the compressors whether it counts. The
    embedding that is tied to the MLM head is ready last: its bucket cannot hide behind backward.
    """

    def __init__(self, module, world, bucket_mb=4.0, compression="none", **options):
        if bucket_mb <= 0:
            raise DistError(f"a bucket of {bucket_mb} MB is not possible; set --bucket-mb above 0")
        self.world = world
        cuda = world.device.type == "cuda"
        self.lane = StreamLane(world.device) if cuda else ThreadLane()
        world.broadcast([t.detach() for t in [*module.parameters(), *module.buffers()]])
        self._pack(module, bucket_mb, compression, options)
        for _, p in self._trainable(module):
            p.register_post_accumulate_grad_hook(self._ready)
        self.synchronising = True
        self.zero_grad()

    @staticmethod
    def _trainable(module):
        return [(name, p) for name, p in module.named_parameters() if p.requires_grad]

    # Pack: parameters in reverse order, roughly the order in which their gradients become ready.

    def _pack(self, module, bucket_mb, compression, options):
        self.names, self.gradients, groups, room = {}, {}, [], 0
        for name, p in reversed(self._trainable(module)):
            if p.numel() * 4 > room:
                groups.append([])
                room = bucket_mb * 1e6
            groups[-1].append((name, p))
            room -= p.numel() * 4
        self._buckets = [Bucket(group, self.world, compression, options) for group in groups]
        self.bucket_of = {}
        for bucket, group in zip(self._buckets, groups):
            self.gradients |= bucket.views(bucket.flat)
            for name, p in group:
                self.names[p], self.bucket_of[name] = name, bucket
                p.grad = self.gradients[name] if p.dtype == torch.float32 else None

    @property
    def buckets(self):
        """The flat gradients, fp32 (n,) each."""
        return [bucket.flat for bucket in self._buckets]

    def zero_grad(self, scale=1.0):
        """Begins a step: all gradients become zero, nothing is under way. scale: what the loss is
        multiplied by in this step, so that residuals can be kept unscaled."""
        self.scale = scale
        torch._foreach_zero_(self.buckets)
        for bucket in self._buckets:
            bucket.missing = set(bucket.shapes)
        self.launched, self.bytes_sent, self.wait_seconds = 0, 0, 0.0

    @contextlib.contextmanager
    def accumulate(self):
        """While inside, gradients add up on this rank and nothing is sent."""
        self.synchronising = False
        try:
            yield
        finally:
            self.synchronising = True

    # Ready: autograd calls this with the parameter (not the gradient) once its gradient is there.

    def _ready(self, p):
        name = self.names[p]
        view = self.gradients[name]
        if p.grad is not view:
            view.add_(p.grad)
            p.grad = view if p.dtype == torch.float32 else None
        if self.synchronising:
            bucket = self.bucket_of[name]
            if name not in bucket.missing:
                raise DistError(f"the gradient of {name} was ready twice in one step; wrap every "
                                "backward but the last in accumulate(), and call zero_grad()")
            bucket.missing.remove(name)
            self._launch()

    # Launch: complete buckets start in order, the same on every rank, whatever order they fill in.

    def _launch(self):
        while self.launched < len(self._buckets) and not self._buckets[self.launched].missing:
            bucket = self._buckets[self.launched]
            self.lane.submit(lambda bucket=bucket: self._average(bucket))
            self.launched += 1

    def _average(self, bucket):
        self.bytes_sent += bucket.compressor.average(bucket.flat, self.scale)

    def finish(self):
        """Waits until every bucket is averaged; afterwards all ranks hold the same gradients.

        Raises DistError if a parameter took no part in the loss, naming it; RankLost if a rank died
        or does not answer.
        """
        unused = [name for bucket in self._buckets for name in bucket.missing]
        if unused:
            raise DistError(f"no gradient for {', '.join(sorted(unused))}: it takes no part in the "
                            "loss; set requires_grad=False or leave it out of the model")
        self.wait_seconds = self.lane.wait()

    def commit(self, counts):
        """Tells the compressors whether the step counts; if not, their residuals stay as before."""
        for bucket in self._buckets:
            bucket.compressor.commit(counts)

    def state_dict(self):
        """Returns what the compressors keep from step to step, by kind and parameter: {} without
        lossy compression. All ranks call it together: what they have not sent yet is averaged over
        them, here and in the run that goes on, so that any number of ranks can take it up."""
        state = {}
        for bucket in self._buckets:
            if bucket.compressor.state:
                state.setdefault("residual", {}).update(bucket.views(bucket.compressor.fold()))
                for name, factor in bucket.compressor.factors(list(bucket.shapes)).items():
                    state.setdefault("factors", {})[name] = factor
        return state

    def load_state_dict(self, state):
        """Takes up what `state_dict` returned, on any number of ranks and with any bucket size."""
        for bucket in self._buckets:
            if bucket.compressor.state:
                for name, view in bucket.views(bucket.compressor.state["residual"]).items():
                    view.copy_(state["residual"][name])
                for name, factor in bucket.compressor.factors(list(bucket.shapes)).items():
                    factor.copy_(state["factors"][name])

    def close(self):
        """Ends the background lane."""
        self.lane.close()


# ----- The program: what this network does -----

def measure(world, name, megabytes, rounds=5):
    """Returns a dict of what it takes to average fp32 gradients of one matrix with a compressor:
    milliseconds, the median of some rounds on the slowest rank; bytes that each rank sends; GB/s of
    gradients; the error, relative to the exact mean, of the first round, before any feedback."""
    rows = max(1, int(megabytes * 1e6 / 4 / 1024))
    generator = torch.Generator().manual_seed(world.rank)
    gradient = torch.randn(rows * 1024, generator=generator).to(world.device)
    exact = gradient / world.size
    world.all_reduce(exact)
    compressor, seconds, errors = make_compressor(name, world, [(rows, 1024)]), [], []
    for _ in range(rounds + 1):                                        # the first one warms up
        bucket = gradient.clone()
        world.sum([0])                                                 # all ranks start together
        began = time.perf_counter()
        sent = compressor.average(bucket)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(max(world.gather(time.perf_counter() - began)))
        errors.append(float((bucket - exact).norm() / exact.norm()))
        compressor.commit(True)
    median = statistics.median(seconds[1:])
    return {"compression": name, "megabytes": megabytes, "milliseconds": 1e3 * median,
            "bytes_sent": sent, "gigabytes_per_second": megabytes / 1e3 / median,
            "error": errors[0]}


def main():
    parser = argparse.ArgumentParser(description="Measure how fast gradients are averaged here.")
    add = parser.add_argument
    add("--mb", type=float, nargs="+", default=[1, 25, 100, 400], help="sizes of the gradients")
    add("--json", metavar="FILE", help="write the table there as well")
    add("--timeout", type=float, default=600, help="seconds to wait for a rank")
    args = parser.parse_args()
    try:
        with init(args.timeout) as world:
            table = []
            if world.rank == 0:
                print(f"{world.size} ranks on {world.nodes} node(s), {world.device.type}. GB/s is "
                      "of fp32 gradients averaged, whatever crossed the wire; error is that of one "
                      "step on random numbers, before feedback.")
                print(f"{'compression':<12}{'MB':>6}{'ms':>10}{'MB sent':>10}{'GB/s':>8}"
                      f"{'error':>10}")
            for name, megabytes in itertools.product(COMPRESSORS, args.mb):
                row = measure(world, name, megabytes)
                table.append(row)
                if world.rank == 0:
                    print(f"{name:<12}{megabytes:>6g}{row['milliseconds']:>10.2f}"
                          f"{row['bytes_sent'] / 1e6:>10.2f}{row['gigabytes_per_second']:>8.2f}"
                          f"{row['error']:>10.1e}", flush=True)
            if args.json and world.rank == 0:
                with open(args.json, "w") as file:
                    json.dump({"ranks": world.size, "nodes": world.nodes, "rows": table}, file)
    except (DistError, OSError) as error:
        sys.exit(f"dist.py: {error}")


if __name__ == "__main__":
    main()
