"""Tests finetune.py: its scores, the files that it reads, and what it writes."""
import io
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bert
import data
from tests.tools import finetune

GOOD = b"a time of people\tyes\nthe way home\tno\n" * 5


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(finetune, "DEVICE", "cpu")


@pytest.fixture
def finetuned(shards, tmp_path, monkeypatch):
    """Returns a function that runs the program on two files' bytes, with an untrained model."""
    monkeypatch.setitem(bert.MODULE_NAMES, "nsp", bert.MODULE_NAMES["nsp"])      # restored later
    monkeypatch.chdir(tmp_path)
    model = bert.BertForPreTraining(bert.BertConfig(1, 64, 1, 64, 320))
    bert.save_huggingface(model, shards / "tokenizer.model", tmp_path / "model", 64)

    def run(train, dev, model="model", more=""):
        (tmp_path / "train.tsv").write_bytes(train)
        (tmp_path / "dev.tsv").write_bytes(dev)
        flags = f"- {model} train.tsv dev.tsv --out sorted {more}"
        monkeypatch.setattr(sys, "argv", flags.split())
        finetune.main()

    return run


def test_scores():
    # A bag in which token 0 predicts label 0, and token 1 label 1. Label 2 is never predicted, and
    # label 3 does not occur.
    bag = finetune.BagOfTokens(2, 4, [([], 2)])
    assert bag.weight.argmax(1).tolist() == [2, 2], (
        "an untrained bag does not predict the largest class")
    bag.weight.data = torch.eye(2, 4)
    examples = [(np.array([[guess], [0], [0]]), label)
                for guess, label in zip([0, 0, 0, 1, 1], [0, 0, 1, 1, 2])]
    # Of 5 examples 3 are right. The labels are predicted p = (3, 2, 0) times, true t = (2, 2, 1).
    f1 = (4 / 5 + 2 / 4 + 0) / 3                     # 2 right / (t + p)
    # Gorodkin: (5 x 3 right - t p) / sqrt((5^2 - p p) (5^2 - t t))
    matthews = (15 - 10) / math.sqrt((25 - 13) * (25 - 9))
    found = finetune.score(bag, examples * 200)      # two batches
    assert found.tolist() == pytest.approx([3 / 5, f1, matthews])
    long = finetune.batch_of([(np.array([[0, 0, 1, 1], [0] * 4, range(4)]), 0)])
    assert bag(long)["nsp"].tolist() == [[0.5, 0.5, 0, 0]], (
        "the logits are not the mean of the tokens' weights")


def test_a_row_has_means_and_deviations(capsys):
    finetune.row("name", [torch.tensor([0.0, 0.5, 0.25]), torch.tensor([1.0, 0.5, 0.75])])
    said = " ".join(capsys.readouterr().out.split())
    assert said == "name 0.500 +- 0.500 0.500 +- 0.000 0.500 +- 0.250"


@pytest.mark.parametrize("bad", [b"yes", b"", b"a\tb\tc\tyes", b"a\tb\tyes", b"x\tmaybe",
                                 b"x\t", b"\xff\tyes"])
def test_a_bad_line_is_named(finetuned, bad):
    with pytest.raises(SystemExit, match="^finetune.py: dev.tsv, line 2: .*$"):
        finetuned(GOOD, b"text\tyes\n" + bad + b"\ntext\tno\n")


def test_a_file_of_pairs_beside_one_of_single_texts_is_refused(finetuned):
    with pytest.raises(SystemExit, match="one of train.tsv and dev.tsv has two texts a line"):
        finetuned(GOOD, b"text\ttext\tyes\n" * 5)


def test_a_model_of_another_tokenizer_is_refused_before_training(
        finetuned, tmp_path, shards, capsys):
    model = bert.BertForPreTraining(bert.BertConfig(1, 64, 1, 64, 128))
    bert.save_huggingface(model, shards / "tokenizer.model", tmp_path / "small", 64)
    with pytest.raises(SystemExit, match="has 128 pieces, and the tokenizer.model 320"):
        finetuned(GOOD, GOOD, model="small")
    assert not capsys.readouterr().out


@pytest.mark.parametrize("written, longest", [
    ('{"model_max_length": 150.0}', 150), ('{"model_max_length": 1e30}', 200),
    ('{"model_max_length": 64}', 128), ('{"model_max_length": NaN}', 128),
    ('{"model_max_length": Infinity}', 128), ("{}", 128), ("[", 128), (None, 128)])
def test_texts_are_cut_at_the_trained_positions_and_that_is_said(
        finetuned, tmp_path, shards, capsys, written, longest):
    model = bert.BertForPreTraining(bert.BertConfig(1, 64, 1, 64, 320, 200))
    bert.save_huggingface(model, shards / "tokenizer.model", tmp_path / "short", 8)
    path = tmp_path / "short" / "tokenizer_config.json"
    path.unlink()
    if written:
        path.write_text(written)
    finetuned(b"way " * 250 + b"\tyes\n" + GOOD, GOOD, model="short")
    said = capsys.readouterr().out
    assert f"train.tsv: 1 of 11 examples are cut at {longest} tokens\n" in said, said
    assert "dev.tsv:" not in said, said
    config = json.loads((tmp_path / "sorted" / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == longest


def test_a_pipe_is_refused_since_it_can_be_read_only_once(finetuned, monkeypatch):
    reads, writes = os.pipe()
    os.write(writes, GOOD)
    os.close(writes)
    paths = {"train.tsv": f"/dev/fd/{reads}"}
    monkeypatch.setattr(data, "path_of", lambda text: Path(paths.get(text, text)))
    with pytest.raises(SystemExit, match=f"/dev/fd/{reads} is a pipe, .* give a file"):
        finetuned(GOOD, GOOD)
    os.close(reads)


def test_too_few_lines_and_a_damaged_model_are_one_line(finetuned, tmp_path):
    with pytest.raises(SystemExit, match="dev.tsv has 4 lines"):
        finetuned(GOOD, b"text\tyes\n" * 4)
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(SystemExit, match="^finetune.py: model holds no model that this program"):
        finetuned(GOOD, GOOD)


def test_a_line_becomes_tokens_segments_and_positions(shards, tmp_path):
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    path = tmp_path / "a.tsv"
    # A byte order mark, carriage returns, a blank; pairs, the first with a text that is too long.
    path.write_bytes(b"\xef\xbb\xbf" + b"way " * 99 + b"\ttime day\tb\r\n" + b"year\t\ta \r\n" * 4)
    (pair, _), (_, label), *_ = finetune.read(path, tokenizer, {"b": 0, "a": 1}, 32)
    assert label == 1
    first = [2, *tokenizer.encode("way " * 99)[:27], 3]
    second = [*tokenizer.encode("time day"), 3]
    segments = [0] * len(first) + [1] * len(second)
    assert pair.tolist() == [first + second, segments, list(range(len(segments)))]
    path.write_bytes(b"year\ta\n" * 5)
    (single, _), *_ = finetune.read(path, tokenizer, {"a": 0})
    assert single[0].tolist() == [2, *tokenizer.encode("year"), 3]


@pytest.mark.parametrize("long, kept", [
    ((99, 2), (27, 2)), ((2, 99), (2, 27)), ((99, 50), (15, 14)), ((50, 50), (14, 15)),
    ((20, 9), (20, 9)), ((99,), (30,))])
def test_a_text_that_is_too_long_is_cut_as_in_transformers(
        shards, tmp_path, long, kept):
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    path = tmp_path / "a.tsv"
    path.write_text("\t".join(["way " * words for words in long] + ["a\n"]) * 5)
    (example, _), *_ = finetune.read(path, tokenizer, {"a": 0}, 32)
    ends = np.flatnonzero(example[0] == bert.SEP)
    assert tuple(np.diff([0, *ends]) - 1) == kept, f"texts of {long} tokens are cut wrongly"


def test_labels_are_in_order_and_one_that_is_there_once_is_said(tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.tsv"
    path.write_bytes(b"sentence\tlabel\n" + b"text\t10\nb\t9 \nc\t9\r\nd\t10\ne\t\n")
    assert finetune.labels_of(path) == {"9": 0, "10": 1, "label": 2}
    assert "header?): label\n" in capsys.readouterr().out
    path.write_bytes("a\tß\nb\tß\nc\té\n".encode())
    ascii_terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_terminal)
    assert len(finetune.labels_of(path)) == 2
    ascii_terminal.seek(0)
    assert "header?): \\xe9\n" in ascii_terminal.read()


def test_few_lines_are_trained_on_and_files_that_are_there_are_left_alone(
        finetuned, tmp_path, capsys):
    (tmp_path / "sorted").touch()
    with pytest.raises(SystemExit, match="File exists"):
        finetuned(GOOD, GOOD)
    assert not capsys.readouterr().out, "that --out exists is found only after training"
    (tmp_path / "sorted").unlink()
    finetuned(GOOD, GOOD)
    folder = tmp_path / "sorted"
    before = (folder / "config.json").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        finetuned(GOOD, GOOD, more="--out=")         # a variable that is not set
    with pytest.raises(SystemExit, match="own folder"):
        finetuned(GOOD, GOOD, model="sorted")
    assert (folder / "config.json").read_bytes() == before


def test_learns_and_transformers_gives_its_logits(finetuned, tmp_path, capsys):
    lines = [f"the {word} of home\tsome day\t{word}é\n" for word in ("water", "money")]
    table = "".join(lines * 60).encode()
    finetuned(table, table)
    said = " ".join(capsys.readouterr().out.split())
    assert "largest class 0.500 0.333 0.000 bag of tokens 1.000 1.000 1.000 three" in said
    assert "three seeds 1.000 +- 0.000" in said

    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "sorted"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("the money of home", "some day", return_tensors="pt")
    logits = theirs.eval()(**inputs).logits
    assert theirs.config.id2label[int(logits.argmax())] == "moneyé"
    _, money, *_ = finetune.read(tmp_path / "dev.tsv", data.load_tokenizer(
        folder / "tokenizer.model"), theirs.config.label2id)
    ours = bert.load_huggingface(folder).eval()(finetune.batch_of([money]))["nsp"]
    assert torch.allclose(ours, logits, atol=1e-5), (
        f"transformers has logits {logits}, ours are {ours}")


def test_the_best_epoch_is_kept(monkeypatch):
    example = np.array([[2], [0], [0]])
    accuracies = iter([0.5, 0.9, 0.9, 0.6])
    weights = []

    def score(model, held):
        assert len(held) == 4, f"{len(held)} of 20 examples are set aside, not a fifth"
        weights.append(model.weight.detach().clone())
        return [next(accuracies)]

    monkeypatch.setattr(finetune, "score", score)
    bag = finetune.BagOfTokens(3, 2, [(example, 0)])
    finetune.fit(bag, [(example, 1)] * 20, 4, 0.1)
    same = [torch.equal(bag.weight, of_epoch) for of_epoch in weights]
    assert same == [False, False, True, False], (
        "it does not have the weights of the third epoch alone")


def test_a_step_has_its_own_clipped_gradient_dropout_and_a_rate_that_falls(monkeypatch):
    example = np.array([[2], [0], [0]])
    bag = finetune.BagOfTokens(3, 2, [(example, 0)])
    bag.weight.data[:, 0] = 9.0                      # certain, and wrong
    steps = []

    class Noted(torch.optim.AdamW):
        def step(self, closure=None):
            steps.append((bag.weight.grad.norm().item(), self.param_groups[0]["lr"], bag.training))
            super().step()

    monkeypatch.setattr(torch.optim, "AdamW", Noted)
    finetune.fit(bag, [(example, 1)] * 20, epochs=20, lr=1.0, size=4)
    norms, rates, modes = zip(*steps)
    assert len(steps) == 20 * 4, f"{len(steps)} steps, not 80: are held-out examples used, too?"
    assert max(norms) == pytest.approx(1), f"gradients have norms up to {max(norms)}, not 1"
    assert norms[-1] < 0.1, "gradients of earlier steps are left"
    assert max(rates) == rates[7] == pytest.approx(1) and rates[-1] < 0.01, (
        "the rate is not a warm-up, then a cosine")
    assert all(modes), "dropout is off after the first epoch"


@pytest.mark.parametrize("flag, pretrained, trains", [
    ("", True, True), ("--frozen", True, False), ("--random", False, True)])
def test_what_a_model_begins_with_and_trains(
        finetuned, tmp_path, monkeypatch, flag, pretrained, trains):
    models, begun = [], []
    make = finetune.classifier

    def noted(*arguments):
        models.append(make(*arguments))
        begun.append({name: p.detach().clone() for name, p in models[-1].named_parameters()})
        return models[-1]

    monkeypatch.setattr(finetune, "classifier", noted)
    folder = bert.load_huggingface(tmp_path / "model")
    finetuned(GOOD, GOOD, more=flag)
    assert len({float(weights["nsp.weight"].sum()) for weights in begun}) == 3, (
        "seeds begin with equal heads")
    for name in "embeddings.tokens.weight", "blocks.0.qkv.weight", "pooler.weight":
        same = torch.equal(folder.get_parameter(name), begun[2][name])
        assert same == pretrained, f"{name} begins pre-trained: {same}, not {pretrained}"
        changed = not torch.equal(begun[2][name], models[2].get_parameter(name))
        assert changed == trains, f"{name} is trained: {changed}, not {trains}"
