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
import socket
import statistics
import struct
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
    group: object = None     # torch's process group; None is all processes
    levels: tuple = ()       # on several nodes with several ranks each, see `two_levels`

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
                torch.distributed.all_reduce(tensor, group=self.group)

    def all_to_all(self, rows):
        """Returns, for rows (size, k) of which row j is for rank j, the rows (size, k) meant for
        this rank, in order of rank."""
        received = rows.clone()
        if self.size > 1:
            with self.answering():
                torch.distributed.all_to_all_single(received, rows, group=self.group)
        return received

    def reduce_scatter(self, tensor):
        """Returns part `rank` of the `size` equal parts of a flat tensor (n,), summed over the
        ranks: (n / size,); with one rank the tensor itself."""
        if self.size == 1:
            return tensor
        part = torch.empty_like(tensor[:len(tensor) // self.size])
        with self.answering():
            torch.distributed.reduce_scatter(part, list(tensor.chunk(self.size)), group=self.group)
        return part

    def all_gather(self, tensor):
        """Returns every rank's tensor, stacked in order of rank: (...) -> (size, ...)."""
        gathered = tensor.repeat(self.size, *[1] * tensor.dim()).view(self.size, *tensor.shape)
        if self.size > 1:
            with self.answering():
                torch.distributed.all_gather(list(gathered.unbind()), tensor.contiguous(),
                                             group=self.group)
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
                torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    @contextlib.contextmanager
    def answering(self):
        """Turns the failure of a collective into a RankLost, or into a DistError if torch's backend
        lacks it."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            words = str(error).strip().splitlines()[0][:160]
            if isinstance(error, NotImplementedError) or "not support" in words:
                raise DistError(f"torch {torch.__version__} cannot do this on {self.device.type} "
                                f"({words}); take another --compression, or on several nodes one "
                                "rank a node") from error
            raise RankLost(f"rank {self.rank}: another rank died or did not answer in time "
                           f"({words}); start the same command again to go on from the last "
                           "checkpoint") from error

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
    timeout: seconds that a collective waits for a rank. Raises DistError if the nodes have unequal
    numbers of ranks, RankLost if the ranks do not meet.
    """
    env = {key: int(os.environ.get(key, default)) for key, default in
           dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1).items()}
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if env["LOCAL_WORLD_SIZE"] > torch.cuda.device_count():
            raise DistError(f"{env['LOCAL_WORLD_SIZE']} ranks on a node with "
                            f"{torch.cuda.device_count()} GPUs; set --nproc_per_node to that")
        device = torch.device("cuda", env["LOCAL_RANK"])
        torch.cuda.set_device(device)
    world = World(env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"],
                  env["RANK"] // env["LOCAL_WORLD_SIZE"],
                  env["WORLD_SIZE"] // env["LOCAL_WORLD_SIZE"], device)
    if world.size > 1:
        if interface := interface_towards(os.environ.get("MASTER_ADDR", ""), world.nodes):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        limit = datetime.timedelta(seconds=timeout)
        try:
            torch.distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", init_method=init_method,
                rank=world.rank, world_size=world.size, timeout=limit)
            n, places = world.local_size, world.gather((world.local_rank, world.local_size))
            if world.size % n or places != [(rank % n, n) for rank in range(world.size)]:
                world.close()
                raise DistError(f"nodes of {sorted({size for _, size in places})} ranks, "
                                f"{world.size} in all; set the same --nproc_per_node on every node")
            if world.nodes > 1 and world.local_size > 1:
                world = dataclasses.replace(world, levels=two_levels(world, limit))
        except DistError:
            raise
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"rank {world.rank} of {world.size} could not meet the others: "
                           f"{str(error).strip().splitlines()[0][:200]}") from error
    return world


def interface_towards(address, nodes):
    """Returns the name of the network interface whose address packets to `address` leave from, or
    None if that is not known.

    Gloo otherwise takes the interface of the host's own name, often the wrong one where there are
    several, or one that other nodes cannot reach. Looked up on Linux only.
    """
    try:
        import fcntl
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))                # sends nothing: it only picks the route
            ours = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):     # 0x8915 is SIOCGIFADDR
                    found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
                    if socket.inet_ntoa(found[20:24]) == ours:
                        return None if ours.startswith("127.") and nodes > 1 else name
    except (ImportError, OSError):
        pass
    return None


def two_levels(world, timeout):
    """Returns two Worlds: the ranks of this node, and those with this local rank on all nodes."""
    n, ranks = world.local_size, range(world.size)
    both = []
    for mine, teams in [(world.node, [ranks[k * n:(k + 1) * n] for k in range(world.nodes)]),
                        (world.local_rank, [ranks[k::n] for k in range(n)])]:
        groups = [torch.distributed.new_group(list(team), timeout=timeout) for team in teams]
        both.append(World(teams[mine].index(world.rank), len(teams[mine]), device=world.device,
                          group=groups[mine]))
    return tuple(both)


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
    padding = 0              # numbers behind the residual, for chunks of equal length

    def __init__(self, world, shapes, **options):
        self.world, self.count = world, sum(math.prod(shape) for shape in shapes)
        self.state = self.new_state(shapes, **options)
        self.pending = {name: tensor.clone() for name, tensor in self.state.items()}

    def new_state(self, shapes):
        """Returns all that a step leaves to the next, {name: tensor}: at least "residual"
        (n + padding,)."""
        return {"residual": torch.zeros(self.count + self.padding, device=self.world.device)}

    def average(self, bucket, scale=1.0):
        """Puts the lossy mean over the ranks into a flat fp32 bucket (n,) of gradients that are
        multiplied by `scale`; returns the bytes that this rank sent.

        Subclasses have `exchange(value, mean)`: value (n + padding,) is what shall be sent, and
        becomes what was not; the mean of what was sent goes to `mean` (n,).
        """
        value = self.pending["residual"]
        torch.add(self.state["residual"][:self.count], bucket, alpha=1 / scale,
                  out=value[:self.count])
        sent = self.exchange(value, bucket)
        if scale != 1:
            bucket.mul_(scale)
        return sent

    def commit(self, counts):
        """Makes the step's residual the one of the next step, if the step counts."""
        if counts:
            self.state, self.pending = self.pending, self.state

    def factors(self):
        """Returns what is kept for single tensors beside the residual, by the tensor's number."""
        return {}

    def fold(self):
        """Averages what was not yet sent over the ranks, in place, and returns it (n,)."""
        self.state["residual"].div_(self.world.size)
        self.world.all_reduce(self.state["residual"])
        return self.state["residual"][:self.count]


class TwoPhase(ErrorFeedback):
    """A compressed all-reduce in two phases (1-bit Adam, arXiv 2102.02888, section 4.2): chunk j of
    every rank goes to rank j (all_to_all), which averages the chunks, compresses the average again
    with an error of its own, the server error, and sends it to all (all_gather).

        q_i = C(g_i + e_i)                e_i = g_i + e_i - q_i                worker i, all chunks
        q = C(mean_i q_i + e)             e = mean_i q_i + e - q               server j, chunk j

    Subclasses turn rows of fp32 numbers, from row `first` of all on, into rows of bytes, `encode`,
    and leave in the rows what the bytes lack; and turn them back, `decode`.
    """
    UNIT = 1                 # a chunk is a multiple of this

    def new_state(self, shapes):
        n = self.world.size
        self.chunk = -(-self.count // (n * self.UNIT)) * self.UNIT
        self.padding = n * self.chunk - self.count
        self.rows = torch.empty(n, self.chunk, device=self.world.device)
        return super().new_state(shapes) | {"server": torch.zeros_like(self.rows[0])}

    def exchange(self, value, mean):
        """Sends value (n + padding,), keeps the errors of both phases; see ErrorFeedback."""
        value[self.count:] = 0
        wire = self.encode(value.view_as(self.rows), 0)
        value[self.count:] = 0
        received = self.decode(self.world.all_to_all(wire))
        mine = self.pending["server"].copy_(self.state["server"])
        padding = max(0, self.count - self.world.rank * self.chunk)          # begins here
        for row in received:
            mine.add_(row, alpha=1 / self.world.size)
        mine[padding:] = 0
        answer = self.encode(mine[None], self.world.rank)
        mine[padding:] = 0
        mean.copy_(self.decode(self.world.all_gather(answer[0])).view(-1)[:self.count])
        return 2 * (self.world.size - 1) * wire.shape[1]

    def fold(self):
        """Averages what was not yet sent, the server errors as well, and returns it (n,)."""
        server = self.world.all_gather(self.state["server"]).view(-1)[:self.count]
        self.state["server"].zero_()
        return super().fold().add_(server)


class OneBitCompression(TwoPhase):
    """Sends one sign a number and one scale a block of 512: 1-bit Adam's compressor (arXiv
    2102.02888) in the blocks of Zheng et al. (arXiv 1905.10936).

        s = mean |x|          q = s sign(x), where sign(0) = +1

    1-bit Adam scales a whole chunk by ||x|| / sqrt(n). Where a few numbers are much larger than the
    rest, as in the rows of an embedding, q is then further from x than 0 is, and the errors grow;
    the mean of |x| is the scale that is closest to x (Karimireddy et al., arXiv 1901.09847).

    On a CPU the work is NumPy's: its comparison, `packbits` and `take` of eight signs at a time
    are several times faster than torch's comparison and `index_select`.
    """
    UNIT = 512

    def new_state(self, shapes):
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
        self.signs = torch.from_numpy(1 - 2.0 * bits).float().to(self.world.device)     # (256, 8)
        state = super().new_state(shapes)
        starts = torch.arange(0, self.rows.numel(), self.UNIT, device=self.world.device)
        self.sizes = (self.count - starts).clamp(1, self.UNIT).view(len(self.rows), -1)
        return state

    def encode(self, rows, first):
        """Returns rows of bytes (R, chunk / 8 + chunk / 128): packed signs, then the scales;
        subtracts what they stand for from the rows (R, chunk)."""
        blocks = rows.unflatten(1, (-1, self.UNIT))
        scales = blocks.abs().sum(2)
        scales /= self.sizes[first:first + len(rows)]              # without the padding
        if rows.is_cuda:
            shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=rows.device)
            signs = (rows < 0).unflatten(1, (-1, 8)).to(torch.uint8)
            packed = (signs << shifts).sum(-1, dtype=torch.uint8)
        else:
            packed = torch.from_numpy(np.packbits(rows.numpy() < 0, axis=1))
        blocks.addcmul_(self.unpack(packed).view_as(blocks), scales[:, :, None], value=-1)
        return torch.cat([packed, scales.view(torch.uint8)], 1)

    def unpack(self, packed):
        """Returns the signs, 1 or -1, of rows of bytes (R, chunk / 8) as rows (R, chunk), in a
        buffer that the next call overwrites."""
        rows, packed = self.rows[:len(packed)], packed.reshape(-1)
        eights = rows.view(-1, 8)
        if packed.is_cuda:
            torch.index_select(self.signs, 0, packed.int(), out=eights)
        else:
            np.take(self.signs.numpy(), packed.numpy(), 0, out=eights.numpy(), mode="clip")
        return rows

    def decode(self, wire):
        """Returns the rows (R, chunk) that rows of bytes stand for, in a buffer that the next call
        overwrites."""
        rows = self.unpack(wire[:, :self.chunk // 8])
        scales = wire[:, self.chunk // 8:].contiguous().view(torch.float32)
        rows.unflatten(1, (-1, self.UNIT)).mul_(scales[:, :, None])
        return rows


class Int8Compression(TwoPhase):
    """Sends 8 bits a number and one fp32 scale a block of 256, the largest of which becomes 127
    (block-wise quantisation as of Dettmers et al., arXiv 2110.02861, section 2.1, here linear).

        s = max |x| / 127            q = s round(x / s)
    """
    UNIT = 256

    def encode(self, rows, first):
        """Returns rows of bytes (R, chunk + chunk / 64): the numbers, then the scales; subtracts
        what they stand for from the rows (R, chunk)."""
        blocks = rows.unflatten(1, (-1, self.UNIT))                             # (R, blocks, 256)
        scales = blocks.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-30)
        numbers = self.rows[:len(rows)].view_as(blocks)
        torch.mul(blocks, 1 / scales, out=numbers).round_()
        wire = torch.cat([numbers.to(torch.int8).flatten(1).view(torch.uint8),
                          scales.flatten(1).view(torch.uint8)], 1)
        blocks.sub_(numbers.mul_(scales))
        return wire

    def decode(self, wire):
        """Returns the rows (R, chunk) that rows of bytes stand for, in a buffer that the next call
        overwrites."""
        rows = self.rows[:len(wire)]
        rows.copy_(wire[:, :self.chunk].view(torch.int8))
        scales = wire[:, self.chunk:].view(torch.float32)
        rows.unflatten(1, (-1, self.UNIT)).mul_(scales[:, :, None])
        return rows


def check_share(fraction, flag):
    """Raises DistError if a share of the numbers to send is not in (0, 1]."""
    if not 0 < fraction <= 1:
        raise DistError(f"a share of {fraction} cannot work; set {flag} in (0, 1]")


class TopKCompression(ErrorFeedback):
    """Sends each rank's largest `fraction` of the numbers, with their places, by all_gather
    (Deep Gradient Compression, arXiv 1712.01887, without its momentum correction).

        S = the k largest |g + e|        q = g + e on S, 0 elsewhere        e = g + e - q

    A number costs 8 bytes and goes to all N - 1 others, (N - 1) 8 k bytes against 2 (N - 1) / N 4 n
    of fp32 by a ring: with k = fraction n, dense wins from N = 1 / fraction ranks on.
    """

    def new_state(self, shapes, fraction=0.01):
        check_share(fraction, "--topk-fraction")
        if fraction * self.world.size > 1:
            raise DistError(f"topk of a share of {fraction} sends more than fp32 on "
                            f"{self.world.size} ranks; set --topk-fraction below "
                            f"{1 / self.world.size:.4g}")
        self.k = max(1, int(fraction * self.count))
        return super().new_state(shapes)

    def exchange(self, value, mean):
        """Sends the largest of value (n,), keeps the rest; see ErrorFeedback."""
        places = largest(value, self.k)
        wire = torch.stack([value[places], places.int().view(torch.float32)])           # (2, k)
        wire[0, 0] += 0 * value.dot(value)             # an overflow must be seen, wherever it was
        value.index_fill_(0, places, 0)
        mean.zero_()
        for numbers, places in self.world.all_gather(wire):
            mean.index_add_(0, places.view(torch.int32), numbers / self.world.size)
        return (self.world.size - 1) * wire.numel() * 4


def largest(x, k):
    """Returns the places (k,) of the k largest |x| of a flat tensor, in any order.

    On a CPU, a sample of 1 in 97 gives a threshold that a little more than k numbers should pass,
    and only those are sorted (as Deep Gradient Compression does, section 3.4, but exact).
    """
    if x.is_cuda:
        return x.abs().topk(k, sorted=False).indices
    a = np.abs(x.numpy())
    sample = np.sort(a[::97])
    threshold = sample[max(0, len(sample) - 8 - int(1.2 * k / 97))]
    places = np.flatnonzero(a >= threshold)
    if len(places) < k:                                # an unlucky sample, or NaN in it
        places = np.arange(len(a))
    return torch.from_numpy(places[np.argpartition(a[places], len(places) - k)[-k:]])


class ChunkCompression(ErrorFeedback):
    """Sends the chunks with the largest norms: GradientFlow's coarse-grained sparse communication
    (arXiv 1902.06855, section 3.2). All ranks add up the L1 norms of their chunks, so all pick the
    same ones, and a plain all-reduce of those is enough, on any number of ranks.

        S = the k chunks c with the largest sum_i ||g_i[c] + e_i[c]||_1
        q = mean_i (g_i + e_i) on S, 0 elsewhere        e_i = 0 on S, g_i + e_i elsewhere
    """
    CHUNK = 1024

    def new_state(self, shapes, fraction=0.05):
        check_share(fraction, "--chunk-fraction")
        chunks = -(-self.count // self.CHUNK)
        self.k = max(1, round(fraction * chunks))
        self.padding = chunks * self.CHUNK - self.count
        return super().new_state(shapes)

    def exchange(self, value, mean):
        """Sends the chosen chunks of value (n + padding,), keeps the rest; see ErrorFeedback."""
        chunks = value.view(-1, self.CHUNK)
        norms = torch.linalg.vector_norm(chunks, ord=1, dim=1)
        self.world.all_reduce(norms)
        chosen = norms.topk(self.k).indices
        sums = chunks[chosen].div_(self.world.size)
        self.world.all_reduce(sums)
        chunks.index_fill_(0, chosen, 0)
        whole = torch.zeros_like(chunks).index_copy_(0, chosen, sums)
        mean.copy_(whole.view(-1)[:self.count])
        return sum(all_reduce_bytes(tensor, self.world.size) for tensor in (norms, sums))


def split(flat, shapes):
    """Returns the tensors of these shapes that lie in a flat one (n,), as views."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes)]


class PowerSGDCompression(ErrorFeedback):
    """Sends a rank-r factorisation of each matrix (PowerSGD, arXiv 1905.13727, algorithm 1).

        P = sum_i M_i Q        P = orthonormal(P)        Q = mean_i M_i^T P        M = P Q^T

    with M_i = G_i + E_i of rank i, and E_i = M_i - M kept. Q is the next step's start. Vectors, and
    matrices a x b with 2 r (a + b) >= a b, go dense. Factors are stored as rows, (r, a) and (r, b):
    products with them read the matrix once.
    """

    @staticmethod
    def gains(shape, rank=4):
        """Returns whether factors of this rank are worth it for a tensor of this shape."""
        return len(shape) == 2 and rank <= min(shape) and \
            2 * rank * sum(shape) < shape[0] * shape[1]

    def new_state(self, shapes, rank=4):
        if rank < 1:
            raise DistError(f"a rank of {rank} cannot work; set --powersgd-rank to 1 or more")
        self.shapes, self.low = shapes, [self.gains(s, rank) for s in shapes]
        generator = torch.Generator().manual_seed(0)               # the same Q on every rank
        return super().new_state(shapes) | {
            f"q{i}": torch.randn(rank, s[1], generator=generator).to(self.world.device)
            for i, (s, low) in enumerate(zip(shapes, self.low)) if low}

    def exchange(self, value, mean):
        """Sends value (n,) as factors, keeps what they lack; see ErrorFeedback."""
        parts = split(value, self.shapes)
        low = {i: m for i, m in enumerate(parts) if self.low[i]}
        dense = [i for i in range(len(parts)) if i not in low]
        left, sent = self.sums([self.state[f"q{i}"] @ m.T for i, m in low.items()])
        left = [torch.linalg.qr(p.T).Q.T.contiguous() for p in left]                    # (r, a)
        right, more = self.sums([p @ m for p, m in zip(left, low.values())]
                                + [parts[i] for i in dense])
        means = split(mean, self.shapes)
        for (i, m), p, q in zip(low.items(), left, right):
            self.pending[f"q{i}"].copy_(q)
            torch.mm(p.T, q, out=means[i])
            m.sub_(means[i])
        for i, part in zip(dense, right[len(low):]):
            means[i].copy_(part)
            parts[i].zero_()
        return sent + more

    def factors(self):
        """Returns Q (r, b) of each matrix that goes as factors, by the matrix's number."""
        return {i: self.state[f"q{i}"] for i, low in enumerate(self.low) if low}

    def sums(self, tensors):
        """Returns (the means over the ranks of some tensors, bytes sent), in one all-reduce."""
        if not tensors:
            return [], 0
        flat = torch.cat([tensor.flatten() for tensor in tensors]).div_(self.world.size)
        self.world.all_reduce(flat)
        return (split(flat, [tensor.shape for tensor in tensors]),
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
        self.jobs.append(self.pool.submit(self._timed, job))

    @staticmethod
    def _timed(job):
        began = time.perf_counter()
        job()
        return time.perf_counter() - began

    def wait(self):
        """Waits for all jobs; returns the seconds that took and the list of each job's seconds.
        Raises the first job's exception."""
        began, jobs, self.jobs = time.perf_counter(), self.jobs, []
        each = [job.result() for job in jobs]
        return time.perf_counter() - began, each

    def close(self):
        self.pool.shutdown(cancel_futures=True)


class StreamLane:
    """Runs jobs on a CUDA stream of their own, each behind what its caller's stream has queued."""

    def __init__(self, device):
        self.stream, self.events = torch.cuda.Stream(device), []

    def submit(self, job):
        """Queues a function without arguments; its kernels run on the lane."""
        self.stream.wait_stream(torch.cuda.current_stream())
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        with torch.cuda.stream(self.stream):
            events[0].record()
            job()
            events[1].record()
        self.events.append(events)

    def wait(self):
        """Waits for backward, then for the lane; returns the seconds that the lane took longer and
        the list of each job's seconds."""
        torch.cuda.current_stream().synchronize()
        began = time.perf_counter()
        self.stream.synchronize()
        seconds, events, self.events = time.perf_counter() - began, self.events, []
        return seconds, [first.elapsed_time(last) / 1e3 for first, last in events]

    def close(self):
        self.stream.synchronize()


# ----- The reducer -----

class Bucket:
    """One flat fp32 tensor, which of its parameters are not ready yet, and how it is averaged.

    On several nodes with several ranks each, in two levels (as Goyal et al., arXiv 1706.02677,
    section 4.2): each rank of a node adds up its part of the node's buckets, exchanges it with its
    peers on the other nodes through the compressor, and the node's ranks gather the parts again.
    So a node sends no more than a single rank would, and only there is compression lossy.
    """

    def __init__(self, parameters, world, compression, options):
        self.shapes = {name: p.shape for name, p in parameters}
        self.inner, outer = world.levels or (World(device=world.device), world)
        count = sum(p.numel() for _, p in parameters)
        part = -(-count // self.inner.size)
        self.padded = torch.zeros(part * self.inner.size, device=world.device)
        self.flat = self.padded[:count]
        begin = min(count, part * self.inner.rank)
        self.mine = slice(begin, min(count, begin + part))         # of the flat bucket
        self.pieces = pieces(self.shapes, self.mine.start, self.mine.stop)
        self.compressor = make_compressor(compression, outer, [shape for _, shape in self.pieces],
                                          **options)
        self.clear()

    def clear(self):
        """Begins a step: no gradient is there."""
        self.empty, self.missing = set(self.shapes), set(self.shapes)

    def views(self, flat):
        """Returns {name: view} of a flat tensor with the bucket's layout."""
        return dict(zip(self.shapes, split(flat, self.shapes.values())))

    def average(self, scale):
        """Averages the bucket over all ranks; returns the bytes that this rank sent: to the other
        nodes, or on a single node to the other ranks."""
        if self.inner.size > 1:
            self.padded.div_(self.inner.size)
        part = self.inner.reduce_scatter(self.padded)
        real = self.mine.stop - self.mine.start        # none in the last parts of a small bucket
        sent = self.compressor.average(part[:real], scale) if real else 0
        if self.inner.size > 1:
            self.padded.copy_(self.inner.all_gather(part).view(-1))
        return sent

    def fold(self):
        """Returns {name: what was not yet sent of it}, averaged over all ranks, and leaves that as
        every rank's residual; and what the compressors keep beside it, {name@local_rank: tensor}.
        """
        part = torch.zeros(len(self.padded) // self.inner.size, device=self.padded.device)
        if self.mine.stop > self.mine.start:
            part[:self.mine.stop - self.mine.start] = self.compressor.fold()
        whole = self.inner.all_gather(part).view(-1)[:len(self.flat)]
        factors = {f"{self.pieces[i][0]}@{self.inner.rank}": factor.cpu()
                   for i, factor in self.compressor.factors().items()}
        for other in self.inner.gather(factors):
            factors |= other
        return self.views(whole), factors

    def unfold(self, residual, factors):
        """Takes up what `fold` returned on any number of ranks and nodes."""
        whole = torch.cat([residual[name].flatten() for name in self.shapes])
        self.compressor.state["residual"][:self.compressor.count] = whole[self.mine]
        for i, factor in self.compressor.factors().items():
            name = f"{self.pieces[i][0]}@"                # the rows of one matrix have one start
            others = [key for key in sorted(factors) if key.startswith(name)]
            for key in others[:1] + [key for key in others if key == f"{name}{self.inner.rank}"]:
                factor.copy_(factors[key])


def pieces(shapes, start, stop):
    """Returns [(name, shape)] of what lies between two places of a flat bucket of tensors, {name:
    shape}: whole tensors, whole rows of one, and as vectors the rows that are cut through."""
    found, at = [], 0
    for name, shape in shapes.items():
        count, width = math.prod(shape), math.prod(shape[1:])
        begin, end = max(start - at, 0), min(stop - at, count)
        first, last = -(-begin // width), end // width             # rows that are whole
        if begin < end and first >= last:
            found.append((name, (end - begin,)))
        elif begin < end:
            parts = (first * width - begin,), (last - first, *shape[1:]), (end - last * width,)
            found += [(name, part) for part in parts if math.prod(part)]
        at += count
    return found


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
    `buckets` lists the flat tensors; all is allocated here, once. A bucket takes parameters until
    it holds bucket_mb MB of gradients; by default a 12th of all, but 1 to 25 MB.

    After `finish`, `bytes_sent` is what this rank sent in the step (between nodes, where there are
    several), `wait_seconds` how long `finish` waited for the lane, and `bucket_seconds` how long
    the lane took for each bucket; `commit` tells the compressors whether the step counts. The
    embedding that is tied to the MLM head is ready last: its bucket, the last one, cannot hide
    behind backward.
    """

    def __init__(self, module, world, bucket_mb=None, compression="none", **options):
        if bucket_mb is not None and not bucket_mb > 0:
            raise DistError(f"a bucket of {bucket_mb} MB is not possible; set --bucket-mb above 0")
        self.world = world
        cuda = world.device.type == "cuda"
        world.broadcast([t.detach() for t in [*module.parameters(), *module.buffers()]])
        self._pack(module, bucket_mb, compression, options)
        self.lane = StreamLane(world.device) if cuda else ThreadLane()
        for p in self.names:
            p.register_post_accumulate_grad_hook(self._ready)
        self.synchronising = True
        self.zero_grad()

    # Pack: parameters in reverse order, roughly the order in which their gradients become ready;
    # those of modules that hold an embedding come last, in buckets of their own.

    def _pack(self, module, bucket_mb, compression, options):
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if compression == "powersgd" and not any(
                PowerSGDCompression.gains(p.shape, **options) for _, p in trainable):
            raise DistError(f"powersgd with {options} gains nothing for any matrix of this model; "
                            "set a lower --powersgd-rank")
        trainable.sort(key=lambda pair: "." not in pair[0])   # the module's own are its output's
        inputs = {p for owner in module.modules() for p in owner.parameters()
                  if any(isinstance(child, torch.nn.Embedding) for child in owner.children())}
        if bucket_mb is None:
            bucket_mb = min(25.0, max(1.0, sum(p.numel() for _, p in trainable) * 4e-6 / 12))
        self.names, self.gradients, groups = {}, {}, []
        for late in (False, True):
            room = 0
            for name, p in reversed([pair for pair in trainable if (pair[1] in inputs) == late]):
                if room <= 0:
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

    @property
    def buckets(self):
        """The flat gradients, fp32 (n,) each."""
        return [bucket.flat for bucket in self._buckets]

    def zero_grad(self, scale=1.0):
        """Begins a step: no parameter has a gradient, nothing is under way. scale: what the loss is
        multiplied by in this step, so that residuals can be kept unscaled."""
        self.scale = scale
        for p in self.names:
            p.grad = None
        for bucket in self._buckets:
            bucket.clear()
        self.launched, self.bytes_sent, self.wait_seconds, self.bucket_seconds = 0, 0, 0.0, []

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
        view, bucket = self.gradients[name], self.bucket_of[name]
        if name in bucket.empty:           # the step's first gradient needs no zeros to add to
            view.copy_(p.grad)
            bucket.empty.remove(name)
        elif p.grad is not view:
            view.add_(p.grad)
        p.grad = view if p.dtype == torch.float32 else None
        if self.synchronising:
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
        self.bytes_sent += bucket.average(self.scale)

    def finish(self):
        """Waits until every bucket is averaged; afterwards all ranks hold the same gradients.

        Raises DistError if a parameter took no part in the loss, naming it; RankLost if a rank died
        or does not answer.
        """
        unused = [name for bucket in self._buckets for name in bucket.missing]
        if unused:
            raise DistError(f"no gradient for {', '.join(sorted(unused))}: it takes no part in the "
                            "loss; set requires_grad=False or leave it out of the model")
        self.wait_seconds, self.bucket_seconds = self.lane.wait()

    def commit(self, counts):
        """Tells the compressors whether the step counts; if not, their residuals stay as before."""
        for bucket in self._buckets:
            bucket.compressor.commit(counts)

    def state_dict(self):
        """Returns what the compressors keep from step to step, {kind: {name: tensor}}: {} without
        lossy compression. All ranks call it together: what they have not sent yet is averaged over
        them, here and in the run that goes on, so that any number of ranks can take it up."""
        state = {}
        for bucket in self._buckets:
            if bucket.compressor.state:
                residual, factors = bucket.fold()
                state.setdefault("residual", {}).update(residual)
                state.setdefault("factors", {}).update(factors)
        return state

    def load_state_dict(self, state):
        """Takes up what `state_dict` returned, on any number of ranks and with any bucket size."""
        for bucket in self._buckets:
            if bucket.compressor.state:
                bucket.unfold(state["residual"], state["factors"])

    def close(self):
        """Ends the background lane."""
        self.lane.close()


class Exchange:
    """Averages the same tensors over the ranks whenever it is called, by 1-bit compression with its
    error feedback: what optimizers use that send momentum in place of gradients.

        exchange = Exchange(model.named_parameters(), world)
        exchange([momentum of each parameter])          # the list now holds the means
    """

    def __init__(self, named, world):
        self.bucket, self.bytes_sent = Bucket(list(named), world, "onebit", {}), 0

    def take_bytes(self):
        """Returns what this rank sent since the last time."""
        sent, self.bytes_sent = self.bytes_sent, 0
        return sent

    def __call__(self, tensors):
        """Replaces tensors, of the shapes and in the order of `named`, by their means."""
        views = list(self.bucket.views(self.bucket.flat).values())
        torch._foreach_copy_(views, tensors)
        self.bytes_sent += self.bucket.average(1.0)
        self.bucket.compressor.commit(True)
        torch._foreach_copy_(tensors, views)

    def reset(self):
        """Forgets what was not yet sent."""
        for tensor in self.bucket.compressor.state.values():
            tensor.zero_()

    def state_dict(self):
        """Returns what was not yet sent, {name: tensor}; collective, as Reducer.state_dict."""
        return self.bucket.fold()[0]

    def load_state_dict(self, state):
        """Takes up what `state_dict` returned, on any number of ranks."""
        self.bucket.unfold(state, {})


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
    bucket, seconds, errors = Bucket([("matrix", torch.empty(rows, 1024))], world, name, {}), [], []
    for _ in range(rounds + 1):                                        # the first one warms up
        bucket.flat.copy_(gradient)
        world.sum([0])                                                 # all ranks start together
        began = time.perf_counter()
        sent = bucket.average(1.0)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(max(world.gather(time.perf_counter() - began)))
        errors.append(float((bucket.flat - exact).norm() / exact.norm()))
        bucket.compressor.commit(True)
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
                try:
                    row = measure(world, name, megabytes)
                except RankLost:
                    raise
                except DistError as error:             # the same on every rank
                    if world.rank == 0:
                        print(f"{name:<12}{megabytes:>6g}  {error}", flush=True)
                    continue
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
