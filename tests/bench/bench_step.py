"""Whole optimizer steps beside Hugging Face's BertForPreTraining with torch's AdamW.

    python tests/bench/bench_step.py   # all models: 20 minutes on two cores
    python tests/bench/bench_step.py --models mini --dropout 0 --formats fp32
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tests/bench/bench_step.py \\
        --models mini --tables real

Both take the same batches: theirs as a data collator makes them, padded to the longest example,
with labels of -100 where nothing is masked. In bf16 theirs runs under autocast, as its Trainer does
it; ours with bf16 weights and fp32 masters. Both clip, and step with fused AdamW. Their steps take
turns in one run; a time is the sum over batches of the median over rounds. With torchrun each rank
has batches of its own, dealt by length; theirs is in DistributedDataParallel; the figures are of
one rank.

The table "real" has text of prepared shards, "full" a batch of random tokens without any padding.
TFLOP/s are those of `bert.flops_per_example`; `of mm` is their fraction of what a product of two
matrices of 2,048 x 2,048 reaches, measured in between. MB is the peak of memory above what the
imported packages take, in a process of each side's own. `work` is their operations over ours: their
layers compute padding too, and their heads all tokens. At the same operations a second it is the
ratio.
"""
import argparse
import contextlib
import math
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).parents[2]))

import bert  # noqa: E402
import data  # noqa: E402
import dist  # noqa: E402
import optim  # noqa: E402
from tests.training import random_batch  # noqa: E402

try:
    import transformers
except ImportError:
    transformers = None

CASES = {                    # model: batches as (examples, tokens), vocabulary of the full ones
    "tiny": ([(32, 64)], 8192),
    "mini": ([(32, 128), (8, 512)], 30522),
    "base": ([(8, 128), (2, 512)], 30522),
    "large": ([(8, 128), (2, 512)], 30522)}
HEADER = (f"{'':<37}{'---------------- ours ----------------':<44}-- Hugging Face --\n"
          f"{'batch':<18}{'format':>8}{'dropout':>9}{'examples/s':>12}{'TFLOP/s':>9}{'of mm':>11}"
          f"{'MB':>8}{'examples/s':>14}{'MB':>8}{'ratio':>8}{'work':>7}")


class Ours:
    """The model and a step as in train.py."""

    def __init__(self, world, config, precision):
        torch.manual_seed(0)
        self.world, self.model = world, bert.BertForPreTraining(config)
        self.model.to(world.device)
        self.masters = optim.master_weights(self.model, optim.PRECISIONS[precision])
        self.reducer = dist.Reducer(self.model, world)
        for name, master in self.masters.items():
            master.grad = self.reducer.gradients[name]
        self.optimizer = optim.AdamW([*self.masters.values()], lr=1e-4, fused=True)

    def step(self, batch):
        self.reducer.zero_grad()
        losses = self.model(batch)
        masked = (batch.labels != data.IGNORED).sum()
        (losses.mlm_sum / masked + losses.nsp_sum / len(batch.pair_labels)).backward()
        self.reducer.finish()
        self.reducer.commit(True)
        norm = self.reducer.norm()
        optim.unscale_and_clip_(self.reducer.flats, norm, 1.0, 1.0)
        self.optimizer.step()
        optim.copy_to_model(self.masters, self.model)


class Theirs:
    """Hugging Face's model and a step as its Trainer takes it."""

    def __init__(self, world, config, precision):
        torch.manual_seed(0)
        self.device, self.autocast = world.device, precision == "bf16"
        self.model = transformers.BertForPreTraining(transformers.BertConfig(
            vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=config.layers,
            num_attention_heads=config.heads, intermediate_size=config.feed_forward,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.attention_dropout))
        self.model.to(world.device).train()
        if world.size > 1:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, inputs):
        with torch.autocast(self.device.type, torch.bfloat16, self.autocast):
            loss = self.model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def padded(batch):
    """Returns a Batch as the keyword arguments of a Hugging Face model."""
    labels = torch.full_like(batch.tokens, data.IGNORED)
    kept = batch.labels != data.IGNORED
    labels[batch.masked_positions[kept]] = batch.labels[kept]

    def rows(values, fill=0):
        return pad_sequence(values.split(batch.lengths.tolist())[:-1], True, fill)

    return {"input_ids": rows(batch.tokens), "token_type_ids": rows(batch.segments),
            "attention_mask": rows(torch.ones_like(batch.tokens)),
            "labels": rows(labels, data.IGNORED), "next_sentence_label": batch.pair_labels}


def real_batches(world, folder, examples, length, count):
    """Returns Batches (on the CPU) of prepared shards, dealt as train.py --balance does."""
    dataset = data.PretrainingData(folder, length)
    batches = []
    for step in range(count):
        mine = data.micro_batches(step, examples * world.size, examples, world.rank, world.size,
                                  dataset.lengths)
        batches.append(dataset.batch(mine[0]).to("cpu"))
    return batches


def on(device, batch):
    """Returns a Batch of tensors on a device; `lengths`, which are shapes, stay on the CPU."""
    moved = data.Batch(*(tensor.to(device) for tensor in batch))
    return moved._replace(lengths=batch.lengths)


def seconds(device, function, *arguments):
    """Returns how long a call takes."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peak(side, config, precision, batches):
    """Returns the MB that three steps take, in this process."""
    world, before = dist.init(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    model = side(world, config, precision)
    for batch in batches[:3]:
        model.step(on(world.device, batch) if side is Ours else
                   {key: value.to(world.device) for key, value in padded(batch).items()})
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before


def compare(world, config, precision, batches, rounds):
    """Returns a row's text: both sides' rates and memory."""
    sides = [Ours, Theirs] if transformers else [Ours]
    models = [side(world, config, precision) for side in sides]
    inputs = [[on(world.device, batch) for batch in batches],
              [{key: value.to(world.device) for key, value in padded(batch).items()}
               for batch in batches]]
    matrix = torch.randn(2048, 2048, dtype=optim.PRECISIONS[precision], device=world.device)
    times, products = [[[] for _ in batches] for _ in sides], []
    for r in range(rounds + 1):                                  # the first one warms up
        for k in range(len(batches)):
            for model, own, found in zip(models, inputs, times):
                found[k] += [seconds(world.device, model.step, own[k])][:r]
        products.append(seconds(world.device, torch.mm, matrix, matrix))
    totals = [sum(map(statistics.median, found)) for found in times]
    examples = sum(len(batch.pair_labels) for batch in batches)
    flops = sum(bert.flops_per_example(config, n, masked_of(batch) / len(batch.pair_labels))
                for batch in batches for n in batch.lengths[:-1].tolist())
    theirs = sum(bert.flops_per_example(config, n, n) * len(batch.pair_labels)
                 for batch in batches for n in [int(batch.lengths[:-1].max())])
    with multiprocessing.get_context("forkserver").Pool(1, maxtasksperchild=1) as pool:
        memory = [pool.apply(peak, (side, config, precision, batches))
                  if world.size == 1 else math.nan for side in sides]
    rate = flops / totals[0]
    row = (f"{examples / totals[0]:>12.1f}{rate / 1e12:>9.3f}"
           f"{rate * statistics.median(products[1:]) / 2 / 2048 ** 3:>11.0%}{memory[0]:>8.0f}")
    if transformers:
        row += f"{examples / totals[1]:>14.1f}{memory[1]:>8.0f}{totals[1] / totals[0]:>8.2f}"
        row += f"{theirs / flops:>7.2f}"
    return row


def masked_of(batch):
    """Returns how many tokens are to be predicted."""
    return int((batch.labels != data.IGNORED).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="shards/docs", help="prepared by python data.py")
    parser.add_argument("--models", nargs="+", default=["tiny", "mini", "base"], choices=CASES)
    parser.add_argument("--tables", nargs="+", default=["real", "full"], choices=["real", "full"])
    parser.add_argument("--formats", nargs="+", choices=["fp32", "bf16"])
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--times", type=int, default=1, help="examples, times this (for a GPU)")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with contextlib.closing(dist.init()) as world:
        say = print if world.rank == 0 else (lambda *_, **__: None)
        best = optim.choose_precision("auto", world.device)
        formats = args.formats or ["fp32", "bf16"][:1 + (best == "bf16")]
        say(f"torch {torch.__version__}, {world.size} rank(s) x {torch.get_num_threads()} threads")
        if not transformers:
            say("transformers is not installed: ours alone")
        for table in args.tables:
            say(f"\n{table}\n{HEADER}")
            for model, precision, dropout in (
                    (m, p, d) for m in args.models for p in formats for d in args.dropout):
                shapes, vocabulary = CASES[model]
                for examples, length in shapes:
                    examples *= args.times
                    if table == "real":
                        vocabulary = data.load_manifest(args.data)["vocab_size"]
                        batches = real_batches(world, args.data, examples, length, args.batches)
                    else:
                        batches = [random_batch(vocabulary, examples, length)] * args.batches
                    config = bert.BertConfig.preset(
                        model, vocabulary, dropout=dropout, attention_dropout=dropout)
                    row = compare(world, config, precision, batches, args.rounds)
                    say(f"{f'{model}, {examples} x {length}':<18}{precision:>8}{dropout:>9g}{row}",
                        flush=True)


if __name__ == "__main__":
    main()
