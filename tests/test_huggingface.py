"""The model folder in transformers: tokens, offsets, model classes, fill-mask.

Needs transformers, which is not in requirements.txt (.ci/run installs it); skips without.
"""
import re
import unicodedata

import numpy as np
import pytest
import sentencepiece
import torch

import bert
import data
from tests.variants import modern, modern_export

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

HARD = ["", " ", "\t\n", "  two   spaces ", "No space after.Here", "a▁b", "x" * 300, "-" * 50,
        "Ünïcödé Größe İstanbul ﬁne", "e\u0301 ½ ① Ｗｉｄｅ\u3000space", "漢字 unknown 漢", "ǅ ß ſ Σς",
        "emoji 😀😀 end", "\u200bzero", "soft\u00adhyphen", "1,000.50 $ %", "\ufeffmark \x07bell",
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
    """(sentencepiece's tokenizer, transformers' of the model folder, the folder); its pieces are no
    multiple of 64."""
    folder = tmp_path_factory.mktemp(request.param)
    corpus = documents + HARD[8:12] + [unicodedata.normalize("NFD", text) for text in SCRIPTS]
    data.prepare(corpus, folder / "shards", 500, shards=1, cased=request.param == "cased")
    path = folder / "shards" / "tokenizer.model"
    ours = sentencepiece.SentencePieceProcessor(model_file=str(path))
    torch.manual_seed(0)
    model = bert.BertForPreTraining(bert.BertConfig(2, 128, 2, 256, 512))
    torch.nn.init.normal_(model.mlm_bias)          # so that some words are likelier than others
    model.mlm_bias.data[len(ours):] = -10          # as training leaves the rows that only pad
    bert.save_huggingface(model, path, folder / "model", 64)
    return ours, transformers.AutoTokenizer.from_pretrained(folder / "model"), folder / "model"


def test_token_ids_are_sentencepieces(tokenizers, documents):
    ours, theirs, folder = tokenizers
    texts = "\n".join(documents[:100]).split("\n") + HARD
    texts += [unicodedata.normalize(form, text) for form in ("NFC", "NFD") for text in SCRIPTS]
    texts += [text.upper() for text in SCRIPTS]
    clean = [unicodedata.normalize("NFKC", re.sub(data.INVISIBLE, "", text)) for text in texts]
    for text, ids in zip(texts, ours.encode(clean)):
        assert theirs(text)["input_ids"] == [2, *ids, 3], ascii(text)
        assert data.UNK in ids or theirs.decode(ids) == ours.decode(ids), ascii(text)
    stored = b"".join(path.read_bytes() for path in folder.parent.glob("shards/*.tokens"))
    for text in documents + SCRIPTS:                       # what training reads, two bytes a token
        assert np.uint16(theirs(text)["input_ids"][1:-1]).tobytes() in stored, ascii(text)
    for text in MASKED + SCRIPTS:
        text = text.replace("o", "[MASK]").replace("न", "[MASK]")
        assert theirs(text)["input_ids"] == bert.encode_with_masks(ours, text), ascii(text)
    special = [theirs.pad_token, theirs.unk_token, theirs.cls_token, theirs.sep_token]
    assert [*special, theirs.mask_token] == data.SPECIALS == ours.id_to_piece([0, 1, 2, 3, 4])
    assert len(theirs) == len(ours) and theirs.model_max_length == 64


def test_pairs_have_types_and_offsets_of_words_without_spaces(tokenizers):
    ours, theirs, _ = tokenizers
    texts = "Große  ﬁnding", "Ｗｉｄｅ  school 漢 people"
    both = theirs(*texts, return_offsets_mapping=True)
    ids = [ours.encode(unicodedata.normalize("NFKC", text)) for text in texts]
    assert both["input_ids"] == [2, *ids[0], 3, *ids[1], 3]
    assert both["token_type_ids"] == [0] * (len(ids[0]) + 2) + [1] * (len(ids[1]) + 1)
    for sequence, text in enumerate(texts):
        spans = [span for span, of in zip(both["offset_mapping"], both.sequence_ids())
                 if of == sequence]
        covered = {i for begin, end in spans for i in range(begin, end)}
        assert covered == {i for i, character in enumerate(text) if character != " "}


def test_transformers_collator_masks_whole_words(tokenizers, documents):
    _, theirs, _ = tokenizers
    collator = transformers.DataCollatorForLanguageModeling(
        theirs, whole_word_mask=True, mlm_probability=0.3, mask_replace_prob=1,
        random_replace_prob=0, seed=0)
    text = " ".join(documents[:20])
    encoded = theirs(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    masked = (collator([dict(encoded)])["labels"][0] >= 0).tolist()
    starts = [piece[0] in " [" for piece in encoded.tokens()]
    words = torch.tensor(starts).cumsum(0)                 # the number of each token's word
    for word in range(1, words.max() + 1):
        assert len({masked[t] for t in (words == word).nonzero().flatten()}) == 1
    assert 0.2 < sum(masked) / len(masked) < 0.4


def test_the_model_classes_load(tokenizers):
    _, _, folder = tokenizers
    own = {"MaskedLM": set(), "PreTraining": set(),
           "QuestionAnswering": {"qa_outputs.weight", "qa_outputs.bias"},
           "SequenceClassification": {"classifier.weight", "classifier.bias"}}
    for kind, missing in own.items():
        _, info = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
            folder, output_loading_info=True)
        assert set(info["missing_keys"]) == missing, kind


def test_fill_mask_is_the_pipelines(tokenizers):
    ours, _, folder = tokenizers
    model, pipeline = bert.load_huggingface(folder), transformers.pipeline("fill-mask", str(folder))
    for text in "The [MASK] of the school.", "The school[MASK] people [MASK]":
        answers = pipeline(text)
        answers = [answers] if text.count("[MASK]") == 1 else answers
        lines = [", ".join(f"{ours.id_to_piece(answer['token']).replace('▁', '')} "
                           f"{answer['score']:.0%}" for answer in answers) for answers in answers]
        assert lines == bert.fill_mask(model, ours, text)


def test_modern_is_transformers_modernbert(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(bert, "huggingface_names", modern_export.huggingface_names)
    torch.manual_seed(0)
    ours = modern.Modern(bert.BertConfig(3, 128, 2, 512, 320)).eval()
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.1)                  # also the weights of norms and the bias
    modern_export.save(ours, shards / "tokenizer.model", tmp_path, 64, modern.THETA)
    theirs, info = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == "ModernBertForMaskedLM" and not info["missing_keys"]
    unknown = {f"{head}.{kind}" for head in ("pooler", "nsp") for kind in ("weight", "bias")}
    assert set(info["unexpected_keys"]) == unknown
    tokens = torch.randint(5, 320, (2, 300))               # more than a window of local attention
    segments, positions = torch.zeros(600, dtype=torch.int64), torch.arange(300).repeat(2)
    bounds, lengths = torch.tensor([0, 300, 600], dtype=torch.int32), torch.tensor([300, 300])
    with torch.no_grad():
        hidden = ours.encode(torch.arange(600), tokens.flatten(), segments, positions, bounds,
                             lengths)
        expected = theirs.eval()(input_ids=tokens).logits.flatten(0, 1)
        torch.testing.assert_close(ours.mlm_logits(hidden), expected, rtol=1e-5, atol=1e-5)
    # The tokenizer asks for nothing that the model does not take
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(**tokenizer("some text", return_tensors="pt")).logits.shape[2] == 320
