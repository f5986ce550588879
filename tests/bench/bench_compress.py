"""What it costs to average gradients on this machine: ms and MB of each compressor and size.

    torchrun --nproc_per_node=2 tests/bench/bench_compress.py
    python tests/bench/bench_compress.py --beside ../old   # two ranks, 3 minutes

A module of one parameter of --mb in fp32; a row is the median time of backward, which launches its
bucket, and of waiting for the mean.
"""
import statistics
import time

import beside
import torch

import dist


def once(args):
    torch.set_num_threads(1)
    beside.keep_freed_memory()
    figures = {}
    world = dist.init(60)
    for mb in args.mb:
        for name in args.compressions:
            module = torch.nn.Linear(int(mb * 250_000), 1, bias=False)
            x = torch.randn(len(module.weight[0]))
            reducer = dist.Reducer(module, world, compression=name, bucket_mb=2 * mb)
            seconds = []
            for _ in range(args.steps + 3):              # three warm up
                reducer.zero_grad()
                loss = module(x)
                world.barrier()
                began = time.perf_counter()
                loss.backward()
                reducer.finish()
                reducer.commit(True)
                seconds.append(time.perf_counter() - began)
            figures[f"{name}, {mb:g} MB, ms"] = 1e3 * statistics.median(seconds[3:])
            figures[f"{name}, {mb:g} MB, MB sent"] = 1e-6 * reducer.bytes_sent
    return figures if world.rank == 0 else None


def flags(add):
    add("--mb", type=float, nargs="+", default=[1, 25])
    add("--compressions", nargs="+", default=["none", "fp16", "bf16", "int8", "onebit"])
    add("--steps", type=int, default=20)


if __name__ == "__main__":
    beside.main(once, flags, launcher=["-m", "torch.distributed.run", "--standalone",
                                       "--nproc_per_node=2"])
