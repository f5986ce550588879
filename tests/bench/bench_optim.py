"""What a step of each optimizer costs, beside torch's AdamW, on the parameters of a BERT.

    python tests/bench/bench_optim.py   # BERT-base: 10 GB of memory, 2 minutes

All optimizers step the same parameters, in turn, round after round; the 1-bit ones (variants) are
in their second stage, on one rank, without compression. `temporary` is the largest memory during a
step above what was there before it, in units of the parameters' memory.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import bert  # noqa: E402
import optim  # noqa: E402
from tests.variants import onebit_adam, onebit_lamb, zeroone_adam  # noqa: E402


class ExactMean:
    """The mean of one rank's tensors, without compression: nothing to do."""

    def __call__(self, tensors):
        return 0

    def forget(self):
        """Errors of a compression that there is not."""


def one_bit(kind, groups):
    """Returns a 1-bit optimizer that is not connected to a training."""
    optimizer = kind(groups)
    optimizer.compressed_mean = ExactMean()
    optimizer.reducer = SimpleNamespace(bytes_sent=0)
    optimizer.agreement_steps = 1                # 0/1 Adam's
    return optimizer


def optimizers(groups):
    """Returns {name: optimizer}, torch's AdamW first; one that is not installed is left out."""
    found = {
        "AdamW, foreach": torch.optim.AdamW(groups(), eps=1e-6, foreach=True),
        "AdamW, fused": torch.optim.AdamW(groups(), eps=1e-6, fused=True),
        "LAMB": optim.LAMB(groups()),
        "NVLAMB": optim.LAMB(groups(), adapt_all=True),
        "LANS": optim.LANS(groups()),
        "1-bit Adam": one_bit(onebit_adam.OneBitAdam, groups()),
        "1-bit LAMB": one_bit(onebit_lamb.OneBitLAMB, groups()),
        "0/1 Adam": one_bit(zeroone_adam.ZeroOneAdam, groups()),
    }
    try:
        import pytorch_optimizer

        found["pytorch_optimizer.Lamb"] = pytorch_optimizer.Lamb(groups())
    except ImportError:
        pass
    return found


def memory(device, begin=False):
    """Returns the bytes in use, or with `begin` starts to watch for a peak and returns them."""
    if device.type == "cuda":
        if begin:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return torch.cuda.max_memory_allocated()
    if begin:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is now what is in use
    field = "VmRSS" if begin else "VmHWM"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(optimizer, round_, device):
    """Returns the milliseconds of a step and its temporary bytes."""
    if hasattr(optimizer, "begin_step"):
        optimizer.begin_step(round_ > 1)
    before, began = memory(device, begin=True), time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began), memory(device) - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="base", choices=bert.PRESETS)
    parser.add_argument("--vocab", type=int, default=30522)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = bert.BertForPreTraining(bert.BertConfig.preset(args.model, args.vocab)).to(device)
    params, generator = dict(model.named_parameters()), torch.Generator().manual_seed(0)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator).to(device).mul_(1e-3)
    size = sum(p.numel() for p in params.values())
    every = optimizers(lambda: [
        {"params": [p for p in params.values() if (p.dim() > 1) == bool(decay)],
         "weight_decay": decay} for decay in (0.01, 0.0)])
    results = {name: [] for name in every}
    for round_ in range(args.rounds + 4):      # the first four warm up, two of them in each stage
        for name, optimizer in every.items():
            results[name].append(measure(optimizer, round_, device))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{args.model}: {size:,} parameters in {len(params)} tensors, {where}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'optimizer':<24}{'ms':>8}{'of AdamW':>10}{'state, B/parameter':>20}{'temporary':>11}")
    base = statistics.median(ms for ms, _ in results["AdamW, foreach"][4:])
    for name, optimizer in every.items():
        ms, temporary = map(statistics.median, zip(*results[name][4:]))
        state = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values()
                    if torch.is_tensor(value))
        print(f"{name:<24}{ms:>8.1f}{ms / base:>10.2f}{state / size:>20.1f}"
              f"{temporary / 4 / size:>11.2f}")


if __name__ == "__main__":
    main()
