"""How many tokens a second does train.py process, beside Hugging Face's BERT or a second checkout?

    python tests/bench/bench_step.py                       # 6 minutes; with transformers installed
    python tests/bench/bench_step.py --beside ../old       # 10 minutes
    python tests/bench/bench_step.py --models large --times 16       # on a GPU

A row of ours is a run of `train.py` as a user starts it: 20 steps that do not count, then --steps.
tokens/s divides the tokens of a step, without padding, by its median time.

"Hugging Face" is its BertForPreTraining with torch's fused AdamW on the same batches, as a data
collator makes them: padded to the longest example, with the label -100 where nothing is masked. In
16 bits it runs under autocast, as in its Trainer. On both sides a thread makes the batches ahead.
"""
import statistics
import tempfile
from types import SimpleNamespace

import beside
import torch

import bert
import data
import optim

CASES = {                    # row: (model, examples, phase of the demo)
    "tiny 32 x 64": ("tiny", 32, 0),
    "mini 32 x 128": ("mini", 32, 1),
    "base 8 x 128": ("base", 8, 1),
    "large 8 x 128": ("large", 8, 1)}
LENGTHS = 64, 128
SKIPPED = 20


def of_train(args, model, examples, phase, shards):
    """Returns the steps per second of train.py."""
    steps = [0, 0]
    steps[phase] = args.steps + SKIPPED
    # One micro-batch a step, like Hugging Face's, even on a GPU.
    micro = [] if args.beside else ["--micro-tokens", examples * LENGTHS[phase]]
    with tempfile.TemporaryDirectory() as out:
        beside.program("train.py", "--data", shards, "--out", out, "--model", model, "--batch",
                       examples, "--steps", *steps, "--precision", args.precision, *micro)
        lines = beside.lines_of(out, "train")[SKIPPED:]
    return statistics.median(line["examples_per_second"] for line in lines) / examples


def tokens_of(dataset):
    """Returns the mean number of tokens of an example."""
    return statistics.mean(dataset.length(spans) for spans in dataset.spans(range(4096)))


def padded_loader(dataset, examples):
    """Returns an iterator over steps on one rank, each a single `padded` micro-batch, made ahead in
    a thread."""
    from tests.training import padded

    def batch(indices):
        return padded(dataset.batch(indices).to("cpu"))

    return data.loader(SimpleNamespace(batch=batch), 0, examples, examples, 0, 1)


def of_huggingface(args, model, vocab_size, loader, steps):
    """Returns the steps per second of Hugging Face's model."""
    import transformers

    config = bert.BertConfig.preset(model, vocab_size, dropout=0.0)
    peer = transformers.BertForPreTraining(transformers.BertConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, intermediate_size=config.feed_forward,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).to(beside.DEVICE).train()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, fused=True)
    dtype = optim.PRECISIONS[optim.choose_precision(args.precision, beside.DEVICE)]

    def step():
        [batch] = next(loader)
        inputs = {name: tensor.to(beside.DEVICE) for name, tensor in batch.items()}
        with torch.autocast(beside.DEVICE.type, dtype, dtype != torch.float32):
            loss = peer(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = [beside.seconds_of(step) for _ in range(steps)]
    return 1 / statistics.median(seconds[len(seconds) // 4:])


def once(args):
    figures = {}
    shards = beside.shards_of()
    for name, (model, examples, phase) in CASES.items():
        if model not in args.models:
            continue
        examples *= args.times
        dataset = data.PretrainingData(shards, LENGTHS[phase], phase, mask_fraction=0.3)
        tokens = examples * tokens_of(dataset)
        rate = of_train(args, model, examples, phase, shards)
        figures[f"{name}, tokens/s"] = rate * tokens
        if not args.beside:
            vocab_size = data.load_manifest(shards)["vocab_size"]
            loader = padded_loader(dataset, examples)
            peer = of_huggingface(args, model, vocab_size, loader, 40) * tokens
            figures[f"{name}, Hugging Face, tokens/s"] = peer
            figures[f"{name}, ours / theirs"] = rate * tokens / peer
    return figures


def flags(add):
    add("--models", nargs="+", default=["tiny", "mini"])
    add("--steps", type=int, default=150)
    add("--times", type=int, default=1, help="examples, times this (for a GPU)")
    add("--precision", default="auto")


if __name__ == "__main__":
    beside.main(once, flags)
