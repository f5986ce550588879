"""Tests the model folder in transformers: tokens, offsets, weights, logits, fill-mask, training.

Skipped without transformers, which .ci/run installs; it is not in requirements.txt.
"""
import re
import unicodedata

import numpy as np
import pytest
import sentencepiece
import torch

import bert
import data
import dist
import train
from tests.training import metrics, padded

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

HARD = ["", " ", "\t\n", "  two   spaces ", "No space after.Here", "a▁b", "x" * 300, "-" * 50,
        "Ünïcödé Größe İstanbul ﬁne", "e\u0301 ½ ① Ｗｉｄｅ\u3000space", "漢字 unknown 漢", "ǅ ß ſ Σς",
        "emoji 😀😀 end", "\u200bzero", "soft\u00adhyphen", "1,000.50 $ %", "\ufeffmark \x07bell\x7f",
        "a\u2028line\u2029b",
        "don't 'quote' (brackets) [MASKED] [mask] <unk>"]
SCRIPTS = """
École française, Œuvre, garçon. Straße, Übermut, groß. İstanbul'da ılık Iğdır. Čeština, kůň.
Tiếng Việt rất đẹp, phở ở Huế, Đường Nguyễn. Ὁ ἄνθρωπος τῇ ὁδῷ. Ελληνικός λόγος, Άνθρωπος, ΐ.
Ёлка стоит, йод, Їжак і ґанок. Հայերեն լեզու և գիր։ ქართული ენა, ᲥᲐᲠᲗᲣᲚᲘ.
שָׁלוֹם עֲלֵיכֶם, בְּרֵאשִׁית. اَلْعَرَبِيَّةُ لُغَةٌ، أُمّ، آدم. می‌خواهم.
हिन्दी भाषा, ज़मीन, क़लम।
বাংলা ভাষা, বড়, কোনো, ৌ। தமிழ் மொழி, கொடு, யௌவனம். ภาษาไทยน้ำใจ. ភាសាខ្មែរ។
한국어 문장, 값이 싸다. ｶﾞｷﾞ ﾊﾟﾝ ガギグ、パン、日本語が好き。 ㍿ №5 ﷺ
""".strip().replace(". ", ".\n").split("\n")
MASKED = ["[MASK]", "The [MASK] of", "[MASK] [MASK]", "a[MASK]b", "end [MASK].", " [MASK] ,x",
          "漢[MASK]漢"]


@pytest.fixture(scope="module", params=["uncased", "cased"])
def tokenizers(request, documents, tmp_path_factory):
    """Returns SentencePiece's tokenizer, transformers' tokenizer of the model folder, and the
    folder. The number of pieces is not a multiple of 64."""
    folder = tmp_path_factory.mktemp(request.param)
    corpus = documents + HARD[8:12] + [unicodedata.normalize("NFD", text) for text in SCRIPTS]
    data.prepare(corpus, folder / "shards", 500, shards=1, cased=request.param == "cased")
    path = folder / "shards" / "tokenizer.model"
    ours = sentencepiece.SentencePieceProcessor(model_file=str(path))
    torch.manual_seed(0)
    model = bert.BertForPreTraining(bert.BertConfig(2, 128, 2, 256, 512))
    for p in model.parameters():                   # so that no two are equal
        p.data += 0.1 * torch.randn_like(p)
    torch.nn.init.normal_(model.mlm_bias)          # so that some words are likelier than others
    model.mlm_bias.data[len(ours):] = -10          # rows that only pad are rare, as after training
    bert.save_huggingface(model, path, folder / "model", 64)
    return ours, transformers.AutoTokenizer.from_pretrained(folder / "model"), folder / "model"


def test_token_ids_are_sentencepieces(tokenizers, documents):
    ours, theirs, _ = tokenizers
    texts = "\n".join(documents[:100]).split("\n") + HARD
    texts += [unicodedata.normalize(form, text) for form in ("NFC", "NFD") for text in SCRIPTS]
    texts += [text.upper() for text in SCRIPTS]
    texts += ["\x1cword", "\x7f\u00adword", "\x0b.", "wo\x01rd \x1f word"]
    clean = [unicodedata.normalize("NFKC", re.sub(data.INVISIBLE, "", text)) for text in texts]
    for text, ids in zip(texts, ours.encode(clean)):
        assert theirs(text)["input_ids"] == [data.CLS, *ids, data.SEP], ascii(text)
        assert data.UNK in ids or theirs.decode(ids) == ours.decode(ids), ascii(text)
    for text in MASKED + SCRIPTS:
        text = text.replace("o", "[MASK]").replace("न", "[MASK]")
        assert theirs(text)["input_ids"] == bert.encode_with_masks(ours, text), ascii(text)


def test_token_ids_are_those_of_training(tokenizers, documents):
    _, theirs, folder = tokenizers
    stored = b"".join(path.read_bytes() for path in folder.parent.glob("shards/*.tokens"))
    for text in documents + SCRIPTS:                       # a token has two bytes
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert np.uint16(ids).tobytes() in stored, ascii(text)


def test_special_tokens_and_lengths(tokenizers):
    ours, theirs, folder = tokenizers
    ids = [theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id, theirs.sep_token_id]
    assert [*ids, theirs.mask_token_id] == [0, 1, 2, 3, 4]
    assert len(theirs) == len(ours)
    assert theirs.model_max_length == 64
    assert not theirs.clean_up_tokenization_spaces, "decoding would drop spaces"
    bare = type(theirs.backend_tokenizer).from_file(str(folder / "tokenizer.json"))
    ids = bare.encode("The [MASK] of the school").ids
    assert ids == theirs("The [MASK] of the school")["input_ids"], "tokenizer.json alone differs"


def test_pairs_have_types_and_offsets_of_words_without_spaces(tokenizers):
    ours, theirs, _ = tokenizers
    texts = "Große  ﬁnding", "Ｗｉｄｅ  school 漢 people"
    both = theirs(*texts, return_offsets_mapping=True)
    a, b = (ours.encode(unicodedata.normalize("NFKC", text)) for text in texts)
    assert both["input_ids"] == [data.CLS, *a, data.SEP, *b, data.SEP]
    assert both["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    covered = set()                                        # (number of text, index of character)
    for (begin, end), text in zip(both["offset_mapping"], both.sequence_ids()):
        covered.update((text, i) for i in range(begin, end))
    assert covered == {(number, i) for number, text in enumerate(texts)
                       for i, character in enumerate(text) if character != " "}


def test_the_logits_are_those_of_transformers(tokenizers, shards):
    _, _, folder = tokenizers
    batch = data.PretrainingData(shards, 64).batch(range(9)).to("cpu")
    logits = bert.load_huggingface(folder).eval()(batch)
    theirs, info = transformers.AutoModelForPreTraining.from_pretrained(
        folder, output_loading_info=True)
    assert not info["missing_keys"], "transformers does not find these tensors"
    arguments = padded(batch)
    found = theirs.eval()(**arguments)
    mlm_logits = found.prediction_logits[arguments["attention_mask"].bool()]
    torch.testing.assert_close(mlm_logits[batch.masked_rows], logits["mlm"])
    torch.testing.assert_close(found.seq_relationship_logits, logits["nsp"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_folder_of_save_pretrained_comes_back(tokenizers, tmp_path, dtype):
    _, _, folder = tokenizers
    theirs = transformers.BertForPreTraining.from_pretrained(folder, dtype=dtype)
    theirs.save_pretrained(tmp_path)
    found = bert.load_huggingface(tmp_path).state_dict()
    for name, tensor in bert.load_huggingface(folder).state_dict().items():
        assert found[name].dtype == torch.float32, f"{name} is {found[name].dtype}, not fp32"
        assert torch.equal(found[name], tensor.to(dtype).float()), f"{name} has other values"


def test_fill_mask_is_the_pipelines(tokenizers):
    ours, _, folder = tokenizers
    model, pipeline = bert.load_huggingface(folder), transformers.pipeline("fill-mask", str(folder))
    for text in "The [MASK] of the school.", "The school[MASK] people [MASK]":
        answers = pipeline(text)
        answers = [answers] if text.count("[MASK]") == 1 else answers
        lines = [", ".join(f"{re.sub('^(?!▁)', '##', ours.id_to_piece(answer['token']))} "
                           f"{answer['score']:.0%}" for answer in answers).replace("▁", "")
                 for answers in answers]
        assert lines == bert.fill_mask(model, ours, text), text


def test_training_has_the_losses_of_transformers(train_here, shards, tmp_path):
    # Both have the same initial weights, batches, learning rates and AdamW.
    args = train_here(tmp_path / "ours", *"--optimizer adamw --precision fp32 --batch 8".split(),
                      *"--lr-scale 0.1 --steps 100 0".split())
    bert.save_huggingface(train.build_model(args, dist.World()), shards / "tokenizer.model",
                          tmp_path / "start", 64)
    theirs = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "start").train()
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.01},
         {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0}],
        betas=args.betas, eps=1e-6)
    examples = data.PretrainingData(shards, args.phases[0].seq_len,
                                    mask_fraction=args.mask_fraction)
    lines = metrics(tmp_path / "ours")
    assert len(lines) == 100
    for line, [batch] in zip(lines, data.loader(examples, 0, 8, 8, 0, 1)):
        loss = theirs(**padded(batch.to("cpu"))).loss
        assert line["mlm_loss"] + line["nsp_loss"] == pytest.approx(loss.item(), abs=5e-5), (
            f"step {line['step']}: the loss of train.py is not that of transformers' model")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = line["lr"]
        optimizer.step()
        optimizer.zero_grad()
