"""Fine-tunes a pre-trained model to classify texts, and compares it with two simple baselines.

    python tests/tools/finetune.py runs/demo/model train.tsv dev.tsv --out runs/sorted
    python tests/tools/finetune.py runs/demo/model train.tsv dev.tsv --random    # not pre-trained

Each line of a .tsv file is a text and its label or, in all lines alike, two texts and a label, with
tabs between them, in UTF-8, without a header. Examples are cut at 128 tokens, or at more if the
model's last pre-training read longer ones: later positions are untrained. If it never read more
than 64, so are those from 64 on.

A new linear layer replaces the NSP head, to predict any number of labels from [CLS], not just two.
It trains together with the encoder, or alone with --frozen. A fifth of train.tsv, at most 2,000
lines, is set aside to choose the best of 10 epochs. dev.tsv is scored once, at the end.

The table gives accuracy; macro F1, the mean F1 of the labels that occur in dev.tsv or are guessed;
and Matthews' correlation, which is 0 for guesses that ignore the text: means and standard
deviations over three seeds. The baselines are the largest class, which is the most frequent label,
and a bag of tokens, a logistic regression on the tokens of a text in any order. --out writes the
model of the last seed, as a folder for AutoModelForSequenceClassification of transformers.
"""
import contextlib
import copy
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, random_split

import bert
import data

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# ----- Files -> examples (table, label) -> batches -----

def labels_of(path):
    """Returns the labels of a .tsv file, {text: number}, with shorter texts first: 9, then 10."""
    counts = Counter()
    for line in path.read_bytes().splitlines():
        label = line.rpartition(b"\t")[2].decode(errors="replace").strip()
        if label:
            counts[label] += 1
    once = [label for label, count in counts.items() if count == 1]
    if once:
        data.say(f"warning: {path} has these labels only once (is its first line a header?): "
                 f"{', '.join(once):.80}")
    in_order = sorted(counts, key=lambda label: (len(label), label))
    return {label: number for number, label in enumerate(in_order)}


def positions_of(folder, config):
    """Returns how many positions of a model to use: its folder's model_max_length, which the last
    training has written, or 128 if that is less or missing; at most all."""
    longest = 128
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, OverflowError):
        described = json.loads((folder / "tokenizer_config.json").read_text())
        longest = max(longest, int(described["model_max_length"]))
    return min(longest, config.max_positions)


def read(path, tokenizer, labels, longest=128):
    """Returns the examples of a .tsv file, a list of (table, number of the label). A table (3, T)
    has tokens, segments and positions; T is at most `longest`. Too long a pair loses the end of its
    longer text, then of both, as in transformers. labels: from `labels_of`. Says how many were too
    long. Raises DataError or OSError."""
    examples = []
    cut = 0                                              # examples that were too long
    columns = None                                       # texts in each line
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            *texts, label = line.decode("utf-8-sig").split("\t")         # drops a byte order mark
            label = label.strip()
            columns = columns or len(texts)
            if columns not in (1, 2) or len(texts) != columns or label not in labels:
                raise ValueError("not one or two texts, as many as in other lines, and a label to "
                                 f"train on, tabs between them; its last part is {label!r:.40}")
        except ValueError as error:                      # or UnicodeDecodeError
            raise data.DataError(f"{path}, line {number}: {error}")
        # Without [CLS] and [SEP].
        parts = [bert.encode_with_masks(tokenizer, text)[1:-1] for text in texts]
        room = longest - 1 - len(parts)
        cut += sum(map(len, parts)) > room
        shorter, longer = sorted([[], *parts], key=len)[-2:]             # [] if there is one text
        del shorter[room // 2:]
        del longer[room - len(shorter):]
        tokens = [bert.CLS]
        segments = [0]
        for segment, part in enumerate(parts):
            tokens += part + [bert.SEP]
            segments += [segment] * (len(part) + 1)
        examples.append((np.array([tokens, segments, range(len(tokens))]), labels[label]))
    if len(examples) < 5:
        raise data.DataError(f"{path} has {len(examples)} lines, which are too few")
    if cut:
        data.say(f"{path}: {cut:,} of {len(examples):,} examples are cut at {longest} tokens")
    return examples


def batch_of(examples):
    """Returns examples as a data.Batch without masked tokens, with their labels as "nsp"."""
    tables, labels = zip(*sorted(examples, key=lambda example: example[0].shape[1]))
    lengths = np.array([table.shape[1] for table in tables] + [0])       # 0: no padding
    bounds = np.append(0, lengths.cumsum()).astype(np.int32)
    tokens, segments, positions = np.concatenate(tables, axis=1)
    masked_rows = np.array([], np.int64)
    return data.Batch(tokens, segments, positions, masked_rows, {"nsp": np.array(labels)}, bounds,
                      lengths).to(DEVICE)


# ----- Models: a batch -> {"nsp": logits (B, labels)} -----

def classifier(folder, labels, random=False, frozen=False):
    """Returns the BertForPreTraining in a folder, with a new linear layer for `labels` labels as
    its NSP head. random: replaces the weights by random ones. frozen: trains the new layer only."""
    model = bert.load_huggingface(folder)
    if random:
        model = bert.BertForPreTraining(model.config)
    model.requires_grad_(not frozen)
    model.nsp = nn.Linear(model.config.width, labels)
    return model.to(DEVICE)


class BagOfTokens(nn.EmbeddingBag):
    """A logistic regression: each token has weights (labels,), and the logits of a text are their
    mean. Initially the weights are the logarithms of the label counts: the guess is the largest
    class."""

    def __init__(self, vocab_size, labels, examples):
        super().__init__(vocab_size, labels, device=DEVICE)
        counts = torch.tensor([label for _, label in examples]).bincount(minlength=labels)
        self.weight.data[:] = (counts + 1).log()         # + 1 avoids log(0)

    def forward(self, batch):
        return {"nsp": super().forward(batch.tokens, batch.bounds[:-2].long())}


# ----- Train, score -----

@torch.no_grad()
def score(model, examples):
    """Returns accuracy, macro F1 and Matthews' correlation of a model, a tensor (3,), and leaves
    the model in evaluation mode. For more than two labels the correlation is that of Gorodkin,
    Comput. Biol. Chem. 28, 2004."""
    model.eval()
    table = 0                            # (labels, labels): how often label i was guessed as j
    for batch in DataLoader(examples, 512, collate_fn=batch_of):
        logits = model(batch)["nsp"]
        both = torch.stack([batch.labels["nsp"], logits.argmax(1)])
        truth, guesses = F.one_hot(both, logits.shape[1]).double()       # (B, labels)
        table += truth.T @ guesses
    n = table.sum()
    right = table.diag()
    t = table.sum(1)                     # how often each label is true
    p = table.sum(0)                     # how often each was guessed
    f1 = (2 * right / (t + p))[t + p > 0].mean()
    # If all guesses are one label, this would be 0 / 0, and clamp makes it 0 / 1.
    matthews = (n * right.sum() - t @ p) / ((n * n - t @ t) * (n * n - p @ p)).sqrt().clamp(min=1)
    return torch.stack([right.sum() / n, f1, matthews]).cpu()


def fit(model, examples, epochs, lr, size=32):
    """Trains a model in batches of `size`, and leaves it with the weights of its best epoch: that
    with the highest accuracy on examples set aside."""
    apart = min(len(examples) // 5, 2000)
    held, rest = random_split(examples, [apart, len(examples) - apart])
    batches = DataLoader(rest, size, shuffle=True, collate_fn=batch_of)
    optimizer = torch.optim.AdamW(model.parameters())
    # The rate grows to `lr` in the first tenth of the steps, at least two, then falls along a
    # cosine. Meanwhile beta1 goes from 0.95 to 0.85, and back.
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=steps, pct_start=max(0.1, 2 / steps))
    best = -1.0
    for _ in range(epochs):
        model.train()
        for batch in batches:
            F.cross_entropy(model(batch)["nsp"], batch.labels["nsp"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        accuracy = score(model, held)[0]
        if accuracy >= best:             # on a tie, the later epoch: its rate was lower
            best = accuracy
            weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)


# ----- The program -----

def save(model, labels, source, folder, longest):
    """Writes a folder that AutoModelForSequenceClassification and AutoTokenizer load. source: the
    folder of the pre-trained model. longest: of `read`."""
    bert.MODULE_NAMES["nsp"] = "classifier"
    bert.save_huggingface(model, source / "tokenizer.model", folder, longest)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["BertForSequenceClassification"],
        "label2id": labels,
        "id2label": {number: label for label, number in labels.items()}}
    path.write_text(json.dumps(config, indent=1))


def row(name, found):
    """Prints the means of a list of `score`s, with standard deviations if there are several."""
    line = f"{name:<16}"
    for column in torch.stack(found).T:
        deviation = f"+- {column.std(correction=0):.3f}" if len(found) > 1 else ""
        line += f"{column.mean():>7.3f} {deviation:<8}  "
    data.say(line.rstrip())


def run(args):
    """Trains, prints the table and writes the folder."""
    if args.out:                             # fail now, not after the training
        if args.out.resolve() == args.model.resolve():
            raise data.DataError("--out is the model's own folder; take another one")
        args.out.mkdir(parents=True, exist_ok=True)
    if args.train.is_fifo():
        raise data.DataError(f"{args.train} is a pipe, which can be read only once; give a file")
    tokenizer = data.load_tokenizer(args.model / "tokenizer.model")
    config = bert.load_huggingface(args.model).config
    if config.vocab_size < len(tokenizer):
        raise data.DataError(f"the model has {config.vocab_size} pieces, and the tokenizer.model "
                             f"{len(tokenizer)}")
    longest = positions_of(args.model, config)
    labels = labels_of(args.train)
    examples = read(args.train, tokenizer, labels, longest)
    dev = read(args.dev, tokenizer, labels, longest)
    if examples[0][0][1].any() != dev[0][0][1].any():        # segment 1 is that of second texts
        raise data.DataError(f"one of {args.train} and {args.dev} has two texts a line, the other "
                             "one")
    data.say(f"{len(examples):,} and {len(dev):,} examples, {len(labels)} labels\n"
             f"{'':<16}accuracy         macro F1         Matthews")
    torch.manual_seed(0)
    bag = BagOfTokens(len(tokenizer), len(labels), examples)
    row("largest class", [score(bag, dev)])
    fit(bag, examples, epochs=20, lr=0.1)
    row("bag of tokens", [score(bag, dev)])
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = classifier(args.model, len(labels), args.random, args.frozen)
        fit(model, examples, epochs=10, lr=0.01 if args.frozen else 0.1 / model.config.width)
        found.append(score(model, dev))
    row("three seeds", found)
    if args.out:
        save(model, labels, args.model, args.out, longest)


def main():
    """Runs the program. Unusable input is one line on stderr and status 1; a wrong flag, 2."""
    parser = data.Parser(description="Fine-tune a model to tell texts apart.")
    add = parser.add_argument
    add("model", type=data.path_of, help="a folder such as runs/NAME/model")
    add("train", type=data.path_of, help="a .tsv file to learn from")
    add("dev", type=data.path_of, help="a .tsv file to be scored on")
    add("--frozen", action="store_true", help="train the linear layer alone")
    add("--random", action="store_true", help="begin with random weights, of the same shape")
    add("--out", type=data.path_of, help="write a folder for transformers")
    args = parser.parse_args()
    torch.set_num_threads(data.usable_cores())
    try:
        run(args)
        data.end_terminal()
    except (data.DataError, bert.ModelError, OSError) as error:
        sys.exit(f"finetune.py: {error}")


if __name__ == "__main__":
    main()
