"""What does a step of each optimizer cost on the parameters of a BERT, beside torch's AdamW?

    python tests/bench/bench_optim.py                      # BERT-base: 6 GB of memory, 2 minutes
    python tests/bench/bench_optim.py --beside ../old

torch's AdamW is measured in its default form, which is "foreach" over lists of tensors on a GPU and
one tensor after another on a CPU, and fused in one kernel.

    ms      median of --steps steps; the optimizers step the same parameters in turn
    peak    the most memory that a step adds, divided by the memory of the parameters

"peak" is measured while freed memory goes back at once, and ms afterwards, when it is kept as in
train.py. On a CPU, this needs Linux.
"""
import functools
import statistics
from pathlib import Path

import beside
import torch

import bert
import optim


def memory(field):
    """Returns the bytes that this process holds now (VmRSS) or has held at most (VmHWM); on a GPU,
    the bytes that torch has allocated there."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        return torch.cuda.memory_allocated() if field == "VmRSS" else peak
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024


def forget_peak():
    """Restarts the measurement of the peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")        # Linux


def once(args):
    torch.manual_seed(0)
    model = bert.BertForPreTraining(bert.BertConfig.preset(args.model, 30522)).to(beside.DEVICE)
    groups = {0.01: [], 0.0: []}
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
        groups[0.01 if p.dim() > 1 else 0.0].append(p)
    size = sum(p.nbytes for p in model.parameters())

    form = "foreach" if beside.DEVICE.type == "cuda" else "one by one"
    fused = functools.partial(torch.optim.AdamW, fused=True)
    makers = {"LAMB": optim.LAMB, "AdamW": optim.AdamW,
              f"torch's AdamW, {form}": torch.optim.AdamW, "torch's AdamW, fused": fused}
    seconds = {}
    figures = {}
    optimizers = {}
    for name, make in makers.items():
        optimizers[name] = make([{"params": list(params), "weight_decay": decay}
                                 for decay, params in groups.items()])
        seconds[name] = []
    for step in range(args.steps + 4):                       # the first four warm up
        if step == 2:
            beside.keep_freed_memory()
        for name, optimizer in optimizers.items():
            forget_peak()
            before = memory("VmRSS")
            seconds[name].append(beside.seconds_of(optimizer.step))
            if step == 1:
                figures[f"{name}, peak"] = (memory("VmHWM") - before) / size
    for name in makers:
        figures[f"{name}, ms"] = 1e3 * statistics.median(seconds[name][4:])
    return figures


def flags(add):
    add("--model", default="base")
    add("--steps", type=int, default=9)


if __name__ == "__main__":
    beside.main(once, flags)
