"""What pre-training is worth on a real task: definitions of WordNet's nouns, into 18 classes.

    pip install transformers==5.23.0
    python tests/bench/dictionaries.py --out budget             # the task, see there
    python tests/bench/bench_glosses.py runs/NAME/model ...     # minutes for each model

Fine-tunes each model folder with Hugging Face's AutoModelForSequenceClassification and
AutoTokenizer, on the first 1,000 definitions of budget/task/train.tsv and on all, and the same from
random weights; tests on the 1,998 of test.tsv. AdamW (weight decay 0.01, gradients clipped to 1),
batches of 32, at most 64 tokens, dropout 0.1, the rate rises for a tenth of the steps and falls to
0; 12 epochs of 1,000 definitions, 6 of all. The rate is the one of --rates that is best with seed 0
when the first 1,000 are trained on and the last 500 of train.tsv tested; for each model and start
apart. The seed draws the new weights, the order and dropout.

The table: how many are right in the test, with each seed and in the mean. Naive Bayes is a
classifier that only counts words (one added to each count), for comparison.
"""
import argparse
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

BATCH = 32
LONGEST = 64                         # tokens
FEW = 1000                           # definitions
EPOCHS = 12, 6                       # of FEW, of all
CHOICE = 500                         # definitions on which the rate is chosen


def read_task(path):
    """Returns (texts, labels), two lists of str, of a file of the task."""
    lines = path.read_text("utf-8").splitlines()
    texts, labels = zip(*[line.split("\t") for line in lines])
    return list(texts), list(labels)


# ----- Fine-tuning -----

class Task:
    """The task as tokens of one model's tokenizer: examples are (ids, number of the class)."""

    def __init__(self, folder, model_folder):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
        texts, labels = read_task(folder / "train.tsv")
        self.classes = sorted(set(labels))
        self.train = self.encode(texts, labels)
        self.test = self.encode(*read_task(folder / "test.tsv"))

    def encode(self, texts, labels):
        """Returns a list of (ids, number of the class)."""
        ids = self.tokenizer(texts, truncation=True, max_length=LONGEST)["input_ids"]
        return list(zip(ids, map(self.classes.index, labels)))

    def batch(self, examples):
        """Returns the inputs of a model for some examples (dict of tensors), and their classes."""
        inputs = self.tokenizer.pad({"input_ids": [ids for ids, _ in examples]},
                                    return_tensors="pt")
        return inputs, torch.tensor([label for _, label in examples])


def new_model(model_folder, classes, pretrained):
    """Returns a classifier with the weights of a folder, or with random ones of the same shape."""
    config = transformers.AutoConfig.from_pretrained(
        model_folder, num_labels=classes, hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1)
    kind = transformers.AutoModelForSequenceClassification
    if pretrained:
        return kind.from_pretrained(model_folder, config=config)
    return kind.from_config(config)


def fine_tune(model, task, examples, rate, epochs):
    """Trains a classifier on a list of examples, in place."""
    steps = epochs * math.ceil(len(examples) / BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(examples)).split(BATCH):
            inputs, labels = task.batch([examples[i] for i in chosen])
            loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


@torch.no_grad()
def accuracy(model, task, examples):
    """Returns the fraction of examples that a classifier gets right."""
    model.eval()
    right = 0
    for begin in range(0, len(examples), 200):
        inputs, labels = task.batch(examples[begin:begin + 200])
        right += int((model(**inputs).logits.argmax(-1) == labels).sum())
    return right / len(examples)


class Training(NamedTuple):
    """What one training begins with."""
    model_folder: str
    pretrained: bool         # whether with the weights of the folder
    rate: float
    epochs: int
    seed: int


def result(training, task, train, test):
    """Returns the accuracy on `test` after training on `train`, both lists of examples."""
    torch.manual_seed(training.seed)
    model = new_model(training.model_folder, len(task.classes), training.pretrained)
    fine_tune(model, task, train, training.rate, training.epochs)
    return accuracy(model, task, test)


def best_rate(rates, training, task):
    """Returns the rate that is best for a Training, whose own rate does not matter; see the top."""
    results = {}
    for rate in rates:
        results[rate] = result(training._replace(rate=rate), task, task.train[:FEW],
                               task.train[-CHOICE:])
    return max(results, key=results.get)


def print_results(args, model_folder):
    """Trains and prints all that the table has of a model."""
    task = Task(args.task, model_folder)
    for pretrained in True, False:
        training = Training(model_folder, pretrained, 0.0, EPOCHS[0], 0)
        training = training._replace(rate=best_rate(args.rates, training, task))
        for count, epochs in zip((FEW, len(task.train)), EPOCHS):
            rights = []
            for seed in range(args.seeds):
                rights.append(result(training._replace(seed=seed, epochs=epochs), task,
                                     task.train[:count], task.test))
            weights = "pre-trained" if pretrained else "random"
            each = "  ".join(f"{right:.1%}" for right in rights)
            print(f"{count:>8,}  {weights:<12} {training.rate:>6g} {epochs:>6}  "
                  f"{sum(rights) / len(rights):>6.1%}  {each}", flush=True)


# ----- For comparison -----

def naive_bayes(train, test):
    """Returns the accuracy of naive Bayes; train and test are (texts, labels)."""
    counts = defaultdict(Counter)            # {class: {word: how often}}
    for text, label in zip(*train):
        counts[label].update(text.lower().split())
    vocabulary = len(set().union(*counts.values()))
    right = 0
    for text, label in zip(*test):
        scores = {}
        for name, words in counts.items():
            total = sum(words.values()) + vocabulary
            scores[name] = sum(math.log((words[word] + 1) / total)
                               for word in text.lower().split())
        right += max(scores, key=scores.get) == label
    return right / len(test[0])


# ----- The program -----

def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("models", nargs="+", help="folders that train.py has written: runs/NAME/model")
    add("--task", type=Path, default=Path("budget/task"), help="written by dictionaries.py")
    add("--seeds", type=int, default=3)
    add("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3])
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()       # it warns that the classifier is new
    transformers.utils.logging.disable_progress_bar()

    texts, labels = read_task(args.task / "train.tsv")
    for count in FEW, len(texts):
        right = naive_bayes((texts[:count], labels[:count]), read_task(args.task / "test.tsv"))
        print(f"naive Bayes, {count:,} examples: {right:.1%}")
    print(f"{'examples':>8}  {'weights':<12} {'rate':>6} {'epochs':>6}  {'mean':>6}  "
          f"seeds 0 to {args.seeds - 1}")
    for model_folder in args.models:
        print(model_folder)
        print_results(args, model_folder)


if __name__ == "__main__":
    main()
