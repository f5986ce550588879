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
import os
import statistics
import sys
import time

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

    def __init__(self, world):
        self.world = world

    def average(self, bucket):
        """Averages a flat fp32 bucket (n,) over the ranks, in place; returns the bytes that this
        rank sent. Division comes before the sum, which might overflow a 16-bit format."""
        bucket.div_(self.world.size)
        self.world.all_reduce(bucket)
        return all_reduce_bytes(bucket, self.world.size)


class CastCompression:
    """Sends fp16 or bf16: half of the bytes. The sum is rounded to that format at each addition.

    fp16 rounds to 11 bits, and needs the loss scaling that keeps gradients inside its range of
    6e-8 to 65,504; bf16 has the range of fp32 and rounds to 8 bits.
    """

    def __init__(self, world, dtype):
        self.world, self.dtype, self.wires = world, dtype, {}

    def average(self, bucket):
        """Averages a flat fp32 bucket (n,) over the ranks, in place; returns the bytes sent."""
        key = bucket.data_ptr()
        if key not in self.wires:
            self.wires[key] = torch.empty_like(bucket, dtype=self.dtype)
        wire = self.wires[key]                       # allocated once a bucket
        wire.copy_(bucket.div_(self.world.size))
        self.world.all_reduce(wire)
        bucket.copy_(wire)
        return all_reduce_bytes(wire, self.world.size)


COMPRESSORS = {
    "none": NoCompression,
    "fp16": lambda world: CastCompression(world, torch.float16),
    "bf16": lambda world: CastCompression(world, torch.bfloat16),
}


def make_compressor(name, world):
    """Returns a compressor by its name; raises DistError that lists the known ones."""
    if name not in COMPRESSORS:
        raise DistError(f"unknown compression {name!r}; known are {', '.join(COMPRESSORS)}")
    return COMPRESSORS[name](world)


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
    """One flat fp32 tensor, and the names of those of its parameters that are not ready yet."""

    def __init__(self, parameters, device):
        self.names = [name for name, _ in parameters]
        self.flat = torch.zeros(sum(p.numel() for _, p in parameters), device=device)
        self.missing = set(self.names)


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
    `wait_seconds` tell what this step cost. The embedding that is tied to the MLM head is ready
    last, so its bucket is the one that cannot hide behind backward.
    """

    def __init__(self, module, world, bucket_mb=4.0, compression="none"):
        if bucket_mb <= 0:
            raise DistError(f"a bucket of {bucket_mb} MB is not possible; set --bucket-mb above 0")
        self.world, self.compressor = world, make_compressor(compression, world)
        cuda = world.device.type == "cuda"
        self.lane = StreamLane(world.device) if cuda else ThreadLane()
        world.broadcast([t.detach() for t in [*module.parameters(), *module.buffers()]])
        self._pack(module, bucket_mb)
        for _, p in self._trainable(module):
            p.register_post_accumulate_grad_hook(self._ready)
        self.synchronising = True
        self.zero_grad()

    @staticmethod
    def _trainable(module):
        return [(name, p) for name, p in module.named_parameters() if p.requires_grad]

    # Pack: parameters in reverse order, roughly the order in which their gradients become ready.

    def _pack(self, module, bucket_mb):
        self.names, self.gradients, groups, room = {}, {}, [], 0
        for name, p in reversed(self._trainable(module)):
            if p.numel() * 4 > room:
                groups.append([])
                room = bucket_mb * 1e6
            groups[-1].append((name, p))
            room -= p.numel() * 4
        self._buckets = [Bucket(group, self.world.device) for group in groups]
        self.bucket_of = {}
        for bucket, group in zip(self._buckets, groups):
            parts = bucket.flat.split([p.numel() for _, p in group])
            for (name, p), part in zip(group, parts):
                self.names[p], self.bucket_of[name] = name, bucket
                self.gradients[name] = part.view_as(p)
                p.grad = self.gradients[name] if p.dtype == torch.float32 else None

    @property
    def buckets(self):
        """The flat gradients, fp32 (n,) each."""
        return [bucket.flat for bucket in self._buckets]

    def zero_grad(self):
        """Begins a step: all gradients become zero, nothing is under way."""
        torch._foreach_zero_(self.buckets)
        for bucket in self._buckets:
            bucket.missing = set(bucket.names)
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
            flat = self._buckets[self.launched].flat
            self.lane.submit(lambda flat=flat: self._average(flat))
            self.launched += 1

    def _average(self, flat):
        self.bytes_sent += self.compressor.average(flat)

    def finish(self):
        """Waits until every bucket is averaged; afterwards all ranks hold the same gradients.

        Raises DistError if a parameter took no part in the loss, naming it; RankLost if a rank is.
        """
        unused = [name for bucket in self._buckets for name in bucket.missing]
        if unused:
            raise DistError(f"no gradient for {', '.join(sorted(unused))}: it takes no part in the "
                            "loss; set requires_grad=False or leave it out of the model")
        self.wait_seconds = self.lane.wait()

    def close(self):
        """Ends the background lane."""
        self.lane.close()


# ----- The program: what this network does -----

def measure(world, name, megabytes, rounds=5):
    """Returns (milliseconds, bytes) that one bucket of fp32 gradients takes to be averaged with a
    compressor: the median of some rounds on the slowest rank, and what each rank sends."""
    bucket = torch.ones(int(megabytes * 1e6 / 4), device=world.device)
    compressor, seconds, sent = make_compressor(name, world), [], 0
    for _ in range(rounds + 1):                                        # the first one warms up
        bucket.fill_(1.0)
        world.sum([0])                                                 # all ranks start together
        began = time.perf_counter()
        sent = compressor.average(bucket)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(max(world.gather(time.perf_counter() - began)))
    return 1e3 * statistics.median(seconds[1:]), sent


def main():
    parser = argparse.ArgumentParser(description="Measure how fast gradients are averaged here.")
    add = parser.add_argument
    add("--mb", type=float, nargs="+", default=[1, 25, 100], help="sizes of the fp32 gradients")
    add("--timeout", type=float, default=600, help="seconds to wait for a rank")
    args = parser.parse_args()
    try:
        with init(args.timeout) as world:
            if world.rank == 0:
                print(f"{world.size} ranks on {world.nodes} node(s), {world.device.type}. GB/s is "
                      "of fp32 gradients averaged, whatever crossed the wire.")
                print(f"{'compression':<12}{'MB':>8}{'ms':>10}{'MB sent':>10}{'GB/s':>8}")
            for name in COMPRESSORS:
                for megabytes in args.mb:
                    milliseconds, sent = measure(world, name, megabytes)
                    if world.rank == 0:
                        print(f"{name:<12}{megabytes:>8g}{milliseconds:>10.2f}{sent / 1e6:>10.2f}"
                              f"{megabytes / milliseconds:>8.2f}", flush=True)
    except DistError as error:
        sys.exit(f"dist.py: {error}")


if __name__ == "__main__":
    main()
