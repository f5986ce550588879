"""Is the encoder of use? It classifies WordNet's glosses, and chooses between "is" and "are".

    python tests/bench/useful_text.py --root root          # on this machine: writes shards/useful
    python tests/bench/bench_useful.py                     # on one GPU, 8.4 minutes
    CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 python tests/bench/bench_useful.py --model tiny \
        --minutes 97 --pretrain 36 --sizes 256 1000 4000 16000 --workers 1 -- --batch 32

train.py pre-trains --model for --pretrain minutes on shards/useful/shards, which hold nothing of
WordNet. All steps take 64 tokens, and five checkpoints are kept. Classifiers of
tests/tools/finetune.py then learn the 45 lexicographer files as labels, from 256, 1,000, 4,000,
16,000 and all lines of train.tsv. A seed draws the lines, their order and the initial weights.
--workers processes share the GPU, which one small model leaves idle. When --minutes are over, the
rest is left out.

A line gives the checkpoint's held-out loss, the number of labels, the kind of classifier, the mean
and standard deviation of its accuracy on test.tsv, and the number of seeds.

What counts as proof was written down before the first run:

1. With 256, 1,000, 4,000 and 16,000 labels, fine-tuned beats random weights by more than two
   standard deviations over the seeds, the larger of the two.
2. Fine-tuned with a quarter of the labels is at least as good as random weights: 256 labels against
   1,000, 1,000 against 4,000, 4,000 against 16,000.
3. Of five checkpoints of a run, each with a lower held-out loss has a higher accuracy: the mean
   over the seeds, with 4,000 labels. Fewer checkpoints are no proof.

"agree, is are same" is the fraction of the lines with this label in agreement.tsv in which the
model finds "is", the original verb, more likely than "are". For a model that ignores the subject,
this fraction and that of "are is same" sum to 100 %. With "other", the noun nearest to the verb
differs from it in number, so choosing by that noun gives 0 %. Fewer than 500 lines are an anecdote.
"""
import argparse
import functools
import multiprocessing
import random
import statistics
import tempfile
import time

import beside
import torch

import bert
import data
import dist
import train
from tests.tools import finetune

USEFUL = beside.ROOT / "shards" / "useful"
VOCABULARY = 16384                       # at least as many as useful_text.py makes
ALL = 10 ** 6                            # labels; more than there are
# labels: (epochs, batch size)
PLAN = {256: (20, 16), 1000: (12, 32), 4000: (8, 64), 16000: (4, 128), ALL: (2, 256)}
FINE, RANDOM, BAG, FROZEN = ROWS = (
    "fine-tuned", "random weights", "bag of tokens", "frozen")


def pretrain(args, out):
    """Trains a model. Returns {folder: held-out loss} of its five checkpoints, in order."""
    def export(flags, world, log, state):
        if state.counters.step > 1:      # train.py also saves after the first step
            bert.save_huggingface(state.model, flags.data / "tokenizer.model",
                                  f"{out}/{state.counters.step}", 64)

    torch.zeros(1, device=finetune.DEVICE)       # The first tensor takes seconds.
    flags = ["--data", USEFUL / "shards", "--out", out, "--model", args.model, "--steps", 1, 0,
             "--hours", args.pretrain / 60, "--save-every", 10 ** 8, *args.flags]
    train.save = export
    train.SAVE_SECONDS = 60 * args.pretrain / 5
    train.STARTED = time.monotonic()
    dist.listen_to_signals = list        # Ctrl-C then ends the benchmark
    train.train(train.parse_arguments([str(flag) for flag in flags]), dist.init())
    losses = {}
    for line in beside.lines_of(out, "eval"):
        losses[f"{out}/{line['step']}"] = line["mlm_loss"]
        print(f"step {line['step']:,}: held-out loss {line['mlm_loss']:.3f}, unigram "
              f"{line['unigram_loss']:.3f}", flush=True)
    return losses


@torch.no_grad()
def agree(folder):
    """Prints how often the model finds the right verb more likely."""
    model = bert.load_huggingface(folder).to(finetune.DEVICE).eval()
    tokenizer = data.load_tokenizer(f"{folder}/tokenizer.model")
    verbs = finetune.labels_of(USEFUL / "agreement.tsv")         # {"is are same": number}
    places = finetune.read(USEFUL / "agreement.tsv", tokenizer, verbs)
    for label, number in verbs.items():
        right, wrong, _ = label.split()
        right, wrong = tokenizer.piece_to_id([f"▁{right}", f"▁{wrong}"])
        batch = finetune.batch_of([place for place in places if place[1] == number])
        batch.masked_rows = torch.where(batch.tokens == data.MASK)[0]
        logits = model(batch)["mlm"]
        agrees = (logits[:, right] > logits[:, wrong]).double().mean()
        print(f"agree, {label}: {agrees:.1%} of {len(logits):,}", flush=True)


@functools.cache
def tables():
    """Returns the examples of train.tsv and of test.tsv, and the number of labels. Each process
    reads them once."""
    torch.set_float32_matmul_precision("high")           # TF32 on a GPU
    tokenizer = data.load_tokenizer(USEFUL / "shards" / "tokenizer.model")
    labels = finetune.labels_of(USEFUL / "train.tsv")
    examples = finetune.read(USEFUL / "train.tsv", tokenizer, labels)
    return examples, finetune.read(USEFUL / "test.tsv", tokenizer, labels), len(labels)


def classify(folder, row, size, seed):
    """Returns the accuracy on test.tsv of one classifier, in %."""
    examples, test, labels = tables()
    examples = random.Random(seed).sample(examples, min(size, len(examples)))
    torch.manual_seed(seed)
    epochs, batch = PLAN[size]
    if row == BAG:
        model = finetune.BagOfTokens(VOCABULARY, labels, examples)
        finetune.fit(model, examples, 20, 0.1, batch)
    else:
        model = finetune.classifier(folder, labels, row == RANDOM, row == FROZEN)
        lr = 0.01 if row == FROZEN else 0.1 / model.config.width
        finetune.fit(model, examples, epochs, lr, batch)
    return 100 * finetune.score(model, test)[0].item()


def classify_all(args, pool, losses):
    """Trains all classifiers and prints their accuracies. losses: from `pretrain`."""
    folders = list(losses)
    jobs = [(folder, FINE, 4000) for folder in folders]
    jobs += [(folders[-1], row, size) for size in args.sizes for row in ROWS]
    tasks = {}
    for job in dict.fromkeys(jobs):      # without repeats; workers take them in order
        tasks[job] = [pool.apply_async(classify, (*job, seed)) for seed in range(args.seeds)]
    agree(folders[-1])
    for (folder, row, size), seeds in tasks.items():
        found = []
        for task in seeds:
            try:
                found.append(task.get(max(0, args.end - time.monotonic())))
            except multiprocessing.TimeoutError:
                pass                         # the minutes are over
            except RuntimeError as error:    # the other tasks go on
                print(f"{size:,} labels, {row}: {error!r:.300}", flush=True)
        if len(found) > 1:
            print(f"loss {losses[folder]:.3f}, {size:,} labels, {row}: "
                  f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} % "
                  f"({len(found)} seeds)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=8.4)
    add("--model", default="medium")
    add("--pretrain", type=float, default=3.75)
    add("--sizes", nargs="+", type=int, choices=PLAN, default=list(PLAN))
    add("--seeds", type=int, default=5)
    add("--workers", type=int, default=6)
    add("flags", nargs="*", help="flags of train.py, after --",
        default="--batch 256 --lr-scale 0.12 --dropout 0.1".split())
    args = parser.parse_args()
    args.end = time.monotonic() + 60 * args.minutes
    print(f"{finetune.DEVICE}, torch {torch.__version__}, {args}", flush=True)
    context = multiprocessing.get_context("spawn")       # CUDA does not survive a fork
    with context.Pool(args.workers, tables) as pool, tempfile.TemporaryDirectory() as place:
        classify_all(args, pool, pretrain(args, place))


if __name__ == "__main__":
    main()
