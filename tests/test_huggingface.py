"""The model folder in transformers: models, tokenizer, fill-mask, question answering.

Needs transformers, which is not in requirements.txt (.ci/run installs it); skips without.
"""
import collections
import re
import string

import pytest
import sentencepiece
import torch

import bert
import data
from tests.variants import modern, modern_export

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

HARD = ["", " ", "\t\n", "  two   spaces ", "No space after.Here", "a▁b", "x" * 300, "-" * 50,
        "Ünïcödé Größe İstanbul ﬁne", "e\u0301 ½ ① Ｗｉｄｅ\u3000space", "漢字 unknown 漢", "ǅ ß ſ Σς",
        "emoji 😀😀 end", "\u200bzero", "soft\u00adhyphen", "1,000.50 $ %",
        "don't 'quote' (brackets) [MASKED] [mask] <unk>"]
MASKED = ["[MASK]", "The [MASK] of", "[MASK] [MASK]", "a[MASK]b", "end [MASK].", " [MASK] ,x",
          "漢[MASK]"]


@pytest.fixture(scope="module", params=["uncased", "cased"])
def tokenizers(request, documents, tmp_path_factory):
    """(sentencepiece's tokenizer, transformers' of the model folder, the folder); its 300 pieces
    are no multiple of 64."""
    folder = tmp_path_factory.mktemp(request.param)
    sentences = "\n".join([*documents, *HARD[8:12]]).split("\n")
    path = folder / "some.model"
    path.write_bytes(data.train_tokenizer(iter(sentences), 300, cased=request.param == "cased"))
    torch.manual_seed(0)
    model = bert.BertForPreTraining(bert.BertConfig(2, 128, 2, 256, 320))
    torch.nn.init.normal_(model.mlm_bias)          # so that some words are likelier than others
    model.mlm_bias.data[300:] = -10                # as training leaves the rows that only pad
    bert.save_huggingface(model, path, folder / "model")
    ours = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return ours, transformers.AutoTokenizer.from_pretrained(folder / "model"), folder / "model"


def test_token_ids_are_sentencepieces(tokenizers, documents):
    ours, theirs, _ = tokenizers
    sentences = "\n".join(documents[:100]).split("\n") + HARD
    assert len(sentences) > 500 and theirs.is_fast and len(theirs) == ours.get_piece_size() == 300
    assert theirs.model_max_length == 512
    assert theirs(sentences, add_special_tokens=False)["input_ids"] == ours.encode(sentences)
    for sentence in MASKED + sentences[:20]:
        assert theirs(sentence)["input_ids"] == bert.encode_with_masks(ours, sentence), sentence
        ids = [i for i in ours.encode(sentence) if i != data.UNK]
        assert theirs.decode(ids) == ours.decode(ids)
    special = [theirs.pad_token, theirs.unk_token, theirs.cls_token, theirs.sep_token]
    assert [*special, theirs.mask_token] == data.SPECIALS == ours.id_to_piece([0, 1, 2, 3, 4])


def test_pairs_have_types_and_offsets_into_the_text(tokenizers):
    ours, theirs, _ = tokenizers
    a, b = "  Große ﬁnding", "Ｗｉｄｅ  school 漢 people"
    both = theirs(a, b, return_offsets_mapping=True)
    ids = ours.encode(a), ours.encode(b)
    assert both["input_ids"] == [2, *ids[0], 3, *ids[1], 3]
    assert both["token_type_ids"] == [0] * (len(ids[0]) + 2) + [1] * (len(ids[1]) + 1)
    for text, sequence in (a, 0), (b, 1):
        spans = [span for span, of in zip(both["offset_mapping"], both.sequence_ids())
                 if of == sequence]
        assert [text[begin:end].strip() for begin, end in spans if text[begin:end].strip()]
        covered = {i for begin, end in spans for i in range(begin, end)}
        assert covered >= {i for i, character in enumerate(text) if character != " "}
    school = {i for i, (begin, end) in enumerate(both["offset_mapping"])
              if both.sequence_ids()[i] == 1 and begin < 12 and end > 6}
    assert ours.decode([both["input_ids"][i] for i in sorted(school)]) == "school"


def test_the_model_classes_load(tokenizers):
    _, _, folder = tokenizers
    own = {"MaskedLM": set(), "PreTraining": set(),
           "QuestionAnswering": {"qa_outputs.weight", "qa_outputs.bias"},
           "SequenceClassification": {"classifier.weight", "classifier.bias"}}
    ours = dict(bert.load_huggingface(folder).named_parameters())
    for kind, missing in own.items():
        model, info = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
            folder, output_loading_info=True)
        assert set(info["missing_keys"]) == missing, kind
        theirs = dict(model.named_parameters())
        for name, parameter in ours.items():
            names = bert.huggingface_names(name)
            if names[0] in theirs:
                value = torch.cat([theirs[part] for part in names])
                assert torch.equal(value, parameter), name
        assert sum(name.startswith("bert.encoder") for name in theirs) == 2 * 16


def test_losses_are_ours(shards, tmp_path):
    torch.manual_seed(0)
    ours = bert.BertForPreTraining(bert.BertConfig(2, 64, 1, 128, 320)).eval()
    torch.nn.init.normal_(ours.mlm_bias)
    bert.save_huggingface(ours, shards / "tokenizer.model", tmp_path)
    theirs = transformers.AutoModelForPreTraining.from_pretrained(tmp_path).eval()
    examples = data.PretrainingData(shards, 64)
    for i in range(4):
        example, losses = examples[i], ours(examples.batch([i]).to("cpu"))
        tokens, t = torch.from_numpy(example.tokens)[None], torch.arange(len(example.tokens))
        output = theirs(input_ids=tokens, token_type_ids=(t >= example.b_start).long()[None])
        mlm = torch.nn.functional.cross_entropy(
            output.prediction_logits[0, example.masked_positions],
            torch.from_numpy(example.labels), reduction="sum")
        nsp = -output.seq_relationship_logits[0].log_softmax(-1)[example.pair_label]
        torch.testing.assert_close(losses.mlm_sum, mlm, rtol=1e-5, atol=0)
        torch.testing.assert_close(losses.nsp_sum, nsp, rtol=1e-5, atol=0)


def test_modern_is_transformers_modernbert(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(bert, "huggingface_names", modern_export.huggingface_names)
    torch.manual_seed(0)
    ours = modern.Modern(bert.BertConfig(3, 128, 2, 512, 320)).eval()
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.1)                  # also the weights of norms and the bias
    modern_export.save(ours, shards / "tokenizer.model", tmp_path, modern.THETA)
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


def test_fill_mask_is_the_pipelines(tokenizers):
    ours, _, folder = tokenizers
    model, pipeline = bert.load_huggingface(folder), transformers.pipeline("fill-mask", str(folder))
    for text in ["The [MASK] of the school.", "The school[MASK] people [MASK]"]:
        answers = pipeline(text)
        answers = [answers] if text.count("[MASK]") == 1 else answers
        lines = [", ".join(f"{ours.id_to_piece(answer['token']).replace('▁', '')} "
                           f"{answer['score']:.0%}" for answer in answers) for answers in answers]
        assert lines == bert.fill_mask(model, ours, text)
        assert all(answer["token_str"] == ours.decode(answer["token"]) for answer in answers[0]
                   if answer["token"] > 4)


# Question answering as SQuAD's, fine-tuned as transformers' run_qa.py does it

def make_questions(documents, count):
    """Returns `count` questions about documents in the format of SQuAD 1.1: for two words that
    occur once, which two follow them?"""
    articles = []
    for number, document in enumerate(documents):
        # Characters that normalisation makes longer or shorter: offsets are of the raw text
        context = "  ".join(document.split("\n")[:3]).replace("fi", "ﬁ").replace("Wa", "Ｗa")
        words = [*re.finditer(r"\w+", context)]
        qas = []
        for i in range(2, len(words) - 5, 9):
            asked = context[words[i].start():words[i + 1].end()]
            begin, end = words[i + 2].start(), words[i + 3].end()
            if context.count(asked) == 1 and len(qas) < 2:
                qas.append({"id": f"{number}-{i}", "question": f" What follows {asked}?",
                            "answers": [{"text": context[begin:end], "answer_start": begin}]})
        articles.append({"title": str(number), "paragraphs": [{"context": context, "qas": qas}]})
        if sum(len(a["paragraphs"][0]["qas"]) for a in articles) >= count:
            return {"version": "1.1", "data": articles}


def features_of(questions, tokenizer, length=72, stride=24):
    """Returns (tokenizer's output, questions, start and end tokens of the answers) of a list of
    (context, question and answer): a long context becomes several features."""
    contexts, qas = zip(*questions)
    features = tokenizer([qa["question"].lstrip() for qa in qas], list(contexts),
                         truncation="only_second", max_length=length, stride=stride,
                         return_overflowing_tokens=True, return_offsets_mapping=True,
                         padding="max_length", return_tensors="pt")
    labels = []
    for i, offsets in enumerate(features["offset_mapping"].tolist()):
        answer = qas[features["overflow_to_sample_mapping"][i]]["answers"][0]
        begin, end = answer["answer_start"], answer["answer_start"] + len(answer["text"])
        context = [t for t, of in enumerate(features.sequence_ids(i)) if of == 1]
        inside = offsets[context[0]][0] <= begin and offsets[context[-1]][1] >= end
        labels.append((max(t for t in context if offsets[t][0] <= begin),
                       min(t for t in context if offsets[t][1] >= end)) if inside else (0, 0))
    return features, torch.tensor(labels)


@torch.no_grad()
def answers_of(model, features, questions):
    """Returns the likeliest span of its context for each question, as text."""
    output = model.eval()(**{key: features[key] for key in (
        "input_ids", "token_type_ids", "attention_mask")})
    best = collections.defaultdict(lambda: (-torch.inf, ""))
    for i, question in enumerate(features["overflow_to_sample_mapping"].tolist()):
        context = torch.tensor([of == 1 for of in features.sequence_ids(i)])
        scores = output.start_logits[i][:, None] + output.end_logits[i]          # (T, T)
        allowed = (context[:, None] & context).triu() & ~(context[:, None] & context).triu(30)
        score, place = scores.masked_fill(~allowed, -torch.inf).flatten().max(0)
        start, end = divmod(int(place), len(context))
        begin, end = features["offset_mapping"][i, start, 0], features["offset_mapping"][i, end, 1]
        best[question] = max(best[question], (float(score), questions[question][0][begin:end]))
    return [best[i][1] for i in range(len(questions))]


def f1(answer, truth):
    """Returns SQuAD's F1 of an answer: of words without case, punctuation and articles."""
    plain = ["".join(c for c in text.lower() if c not in string.punctuation)
             for text in (answer, truth)]
    words = [re.sub(r"\b(a|an|the)\b", " ", text).split() for text in plain]
    same = sum((collections.Counter(words[0]) & collections.Counter(words[1])).values())
    return 2 * same / (len(words[0]) + len(words[1])) if same else 0.0


@pytest.fixture
def one_thread():
    """Models this small are slower on several threads, and much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("tokenizers", ["uncased"], indirect=True)
def test_question_answering_learns_from_our_folder(documents, tokenizers, one_thread):
    _, tokenizer, folder = tokenizers
    squad = make_questions(documents, 30)
    questions = [(paragraph["context"], qa) for article in squad["data"]
                 for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    features, labels = features_of(questions, tokenizer)
    assert len(labels) > len(questions) >= 30 and "ﬁ" in "".join(c for c, _ in questions)
    for i, types in enumerate(features["token_type_ids"].tolist()):
        context = [of == 1 for of in features.sequence_ids(i)]
        separator = max(t for t, of in enumerate(context) if of) + 1     # belongs to the context
        assert types == [int(of or t == separator) for t, of in enumerate(context)]
    for i, (start, end) in enumerate(labels.tolist()):         # of whole words, to the character
        context, qa = questions[features["overflow_to_sample_mapping"][i]]
        begin, end = features["offset_mapping"][i, start, 0], features["offset_mapping"][i, end, 1]
        assert context[begin:end].lstrip() == qa["answers"][0]["text"] or end == 0
    torch.manual_seed(0)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(
        folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    steps = 300
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 30, 1 - step / steps))
    inputs = {key: features[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
    for _ in range(steps):
        rows = torch.randint(len(labels), (16,))
        loss = model.train()(**{key: value[rows] for key, value in inputs.items()},
                             start_positions=labels[rows, 0], end_positions=labels[rows, 1]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    scores = [f1(answer, qa["answers"][0]["text"]) for answer, (_, qa) in zip(
        answers_of(model, features, questions), questions)]
    assert sum(scores) / len(scores) > 0.9
