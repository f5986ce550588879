"""tests/tools/finetune.py: its scores, its files, what it writes."""
import sys

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
    """Runs the program on two files' bytes, with a model that was never trained."""
    monkeypatch.setitem(bert.MODULE_NAMES, "nsp", bert.MODULE_NAMES["nsp"])      # is put back
    model = bert.BertForPreTraining(bert.BertConfig(1, 64, 1, 64, 320))
    bert.save_huggingface(model, shards / "tokenizer.model", tmp_path / "model", 64)

    def run(train, dev, *flags):
        (tmp_path / "train.tsv").write_bytes(train)
        (tmp_path / "dev.tsv").write_bytes(dev)
        words = [tmp_path / name for name in ("model", "train.tsv", "dev.tsv")]
        monkeypatch.setattr(sys, "argv", ["finetune.py", *map(str, words), *flags])
        finetune.main()

    return run


def test_scores():
    # A bag whose tokens 0 and 1 are sure of the label with their number; nobody guesses 2.
    bag = finetune.BagOfTokens(2, 3, [([], 0)])
    bag.weight.data = torch.eye(2, 3)
    examples = [(np.array([[guess], [0], [0]]), label)
                for guess, label in zip([0, 0, 0, 1, 1], [0, 0, 1, 1, 2])]
    f1s = [2 * 2 / (3 + 2), 2 * 1 / (2 + 2), 0]
    # Gorodkin: 5 examples, 3 right; guessed (3, 2, 0), true (2, 2, 1)
    matthews = (5 * 3 - 10) / ((25 - 13) * (25 - 9)) ** 0.5
    assert finetune.score(bag, examples).tolist() == pytest.approx([3 / 5, sum(f1s) / 3, matthews])


@pytest.mark.parametrize("bad", [b"no tab", b"", b"a\tb\tc\td", b"x\t", b"x\tmaybe", b"\xff\tyes"])
def test_a_bad_line_is_named(finetuned, bad):
    with pytest.raises(SystemExit) as end:
        finetuned(GOOD, b"text\tyes\n" + bad + b"\ntext\tno\n")
    assert "dev.tsv, line 2: " in end.value.code and "\n" not in end.value.code
    with pytest.raises(SystemExit, match="dev.tsv has 0 lines"):
        finetuned(GOOD, b"")


def test_tables(shards, tmp_path, monkeypatch):
    tokenizer = data.load_tokenizer(shards / "tokenizer.model")
    path = tmp_path / "a.tsv"
    path.write_bytes(b"\xef\xbb\xbf" + b"way " * 99 + b"\ttime day\tb\r\n" + b"year\ta\r\n" * 4)
    labels = {"b": 0, "a": 1}                                    # without carriage return
    monkeypatch.setattr(finetune, "LONGEST", 32)
    pair, single, *_ = finetune.read(path, tokenizer, labels)
    year = [2, *tokenizer.encode("year"), 3]
    assert single[0].tolist() == [year, [0] * len(year), list(range(len(year)))]
    first = [2, *tokenizer.encode("way " * 99)[:14], 3]           # cut; no byte order mark
    second = [*tokenizer.encode("time day"), 3]
    assert pair[0][:2].tolist() == [first + second, [0] * len(first) + [1] * len(second)]


def test_learns_and_transformers_gives_its_logits(finetuned, tmp_path, capsys, monkeypatch):
    kept = []
    save = finetune.save
    monkeypatch.setattr(finetune, "save", lambda *words: kept.append(words[0]) or save(*words))
    lines = [f"the {word} of home\tsome day\t{word}é\n" for word in ("water", "money")]
    table = "".join(lines * 60).encode()
    finetuned(table, table, "--out", str(tmp_path / "sorted"))
    rows = {line[:16].strip(): line[16:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["largest class"][0] == "0.500" and rows["largest class"][6] == "0.000"
    assert rows["bag of tokens"][0] == rows["three seeds"][0] == "1.000"

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "sorted")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "sorted")
    examples = finetune.read(tmp_path / "dev.tsv", data.load_tokenizer(
        tmp_path / "sorted" / "tokenizer.model"), dict(theirs.config.label2id))
    with torch.no_grad():
        ours = kept[0](finetune.batch_of(examples[1:2]))["nsp"]
        inputs = tokenizer("the money of home", "some day", return_tensors="pt")
        assert torch.allclose(ours, theirs.eval()(**inputs).logits, atol=1e-5)
    assert theirs.config.id2label[int(ours.argmax())] == "moneyé"


def test_the_best_epoch_is_kept(monkeypatch):
    examples = [(np.array([[2], [0], [0]]), i % 2) for i in range(20)]
    accuracies = iter([0.5, 0.9, 0.7])
    weights = []

    def score(model, held):
        assert len(held) == 4
        weights.append(model.weight.detach().clone())
        return [next(accuracies)]

    monkeypatch.setattr(finetune, "score", score)
    bag = finetune.BagOfTokens(3, 2, examples)
    finetune.fit(bag, examples, 3, 0.1)
    assert torch.equal(bag.weight, weights[1]) and not torch.equal(weights[1], weights[2])
