"""What a step of each optimizer costs, beside torch's AdamW, on the parameters of a BERT.

    python tests/bench_optim.py                     # BERT-base: 10 GB of memory, 2 minutes

All optimizers step the same parameters, in turn, round after round; those
that exchange momentum do so on one rank (without a network), in their second stage. `temporary` is
the largest memory during a step above what was there before it, as a share of the parameters.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import bert  # noqa: E402
import optim  # noqa: E402


class Silent:
    """An exchange on one rank, without compression."""

    def __call__(self, tensors):
        pass

    def reset(self):
        pass


def optimizers(groups, device):
    """Returns {name: optimizer}, torch's AdamW first; one that is not installed is left out."""
    found = {
        "AdamW, foreach": torch.optim.AdamW(groups(), eps=1e-6, foreach=True),
        "AdamW, fused": torch.optim.AdamW(groups(), eps=1e-6, fused=True),
        "LAMB": optim.LAMB(groups()),
        "NVLAMB": optim.LAMB(groups(), adapt_all=True, max_grad_norm=1.0),
        "LANS": optim.LANS(groups()),
        "1-bit Adam": optim.OneBitAdam(groups(), Silent()),
        "1-bit LAMB": optim.OneBitLAMB(groups(), Silent()),
        "0/1 Adam": optim.ZeroOneAdam(groups(), Silent()),
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
    names = optim.parameter_groups(model, 0.01)

    def groups():
        return [{"params": [params[n] for n in some], "weight_decay": d} for some, d in names]

    every, times, peaks = optimizers(groups, device), {}, {}
    for round_ in range(args.rounds + 4):
        for name, optimizer in every.items():
            if hasattr(optimizer, "local_gradients"):
                optimizer.local_gradients(round_ > 1)
                if round_ == 3:  # what the second stage allocates once is not a temporary
                    optimizer.synchronise()
            before = memory(device, begin=True)
            began = time.perf_counter()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            if round_ >= 4:
                times.setdefault(name, []).append(1e3 * seconds)
                peaks.setdefault(name, []).append((memory(device) - before) / (4 * size))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{args.model}: {size:,} parameters in {len(params)} tensors, {where}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}")  # fmt: skip
    print(f"{'optimizer':<24}{'ms':>8}{'of AdamW':>10}{'state, B/parameter':>20}{'temporary':>11}")
    base = statistics.median(times["AdamW, foreach"])
    for name, optimizer in every.items():
        state = sum(
            value.numel() * value.element_size()
            for entry in optimizer.state.values()
            for value in entry.values()
            if torch.is_tensor(value)
        )
        middle = statistics.median(times[name])
        print(f"{name:<24}{middle:>8.1f}{middle / base:>10.2f}{state / size:>20.1f}"
              f"{statistics.median(peaks[name]):>11.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
