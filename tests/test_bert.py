"""Tests bert.py: logits and gradients, against torch's own encoder; the model folder; fill_mask.

test_huggingface.py tests the folder in transformers, and its tokenizer; course/test_graders.py
tests attention by itself.
"""
import io
import json
import math
import re
import runpy
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import bert
import data
from tests.conftest import ROOT
from tests.ranks import no_room

CONFIG = bert.BertConfig(
    layers=2, width=128, heads=2, feed_forward=192, vocab_size=320, dropout=0.0)


def make_model(seed=0, **changes):
    """Returns a model in fp64, with noise on all weights, so that none is an initial 0 or 1."""
    torch.manual_seed(seed)
    model = bert.BertForPreTraining(replace(CONFIG, **changes)).double()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def make_batch(shards, seq_len=64, examples=9, mask_fraction=0.15, device="cpu"):
    """Returns a batch of data.py, as tensors."""
    dataset = data.PretrainingData(shards, seq_len, mask_fraction=mask_fraction)
    return dataset.batch(range(examples)).to(device)


# ----- The model beside torch's nn.TransformerEncoderLayer, which gets one example at a time -----

THEIRS = {"self_attn.in_proj_": "qkv.", "self_attn.out_proj.": "attention_out.", "linear1.": "up.",
          "linear2.": "down.", "norm1.": "attention_norm.", "norm2.": "norm."}


def torchs_block(block, x):
    """Returns the output (T, D) of torch's layer with the weights of a Block, for one example."""
    layer = nn.TransformerEncoderLayer(CONFIG.width, CONFIG.heads, CONFIG.feed_forward, 0.0, "gelu",
                                       CONFIG.layer_norm_eps, dtype=torch.float64)
    weights = {theirs + kind: block.get_parameter(ours + kind)
               for theirs, ours in THEIRS.items() for kind in ("weight", "bias")}
    return functional_call(layer, weights, x)


def torchs_stages(model, batch):
    """Returns the outputs of the parts of a BERT made of torch's layers, {part: tensor}: hidden
    states of the rows that our model computes, then logits."""
    embeddings = model.embeddings
    examples = defaultdict(list)
    for rows in torch.arange(batch.bounds[-2]).split(batch.lengths[:-1].tolist()):
        x = embeddings.tokens(batch.tokens[rows]) + embeddings.segments(batch.segments[rows])
        x = embeddings.norm(x + embeddings.positions.weight[:len(rows)])
        examples["embeddings"].append(x)
        for number, block in enumerate(model.blocks):
            x = torchs_block(block, x)
            examples[f"blocks.{number}"].append(x)
    stages = {name: torch.cat(parts) for name, parts in examples.items()}
    last = stages["blocks.1"]
    cls, masked = last[batch.bounds[:-2]], last[batch.masked_rows]
    stages["blocks.1"] = torch.cat([cls, masked])
    hidden = F.gelu(model.mlm_transform(masked))
    stages["mlm"] = model.mlm_norm(hidden) @ embeddings.tokens.weight.T + model.mlm_bias
    stages["nsp"] = model.nsp(torch.tanh(model.pooler(cls)))
    return stages


def our_stages(model, batch):
    """Returns the outputs of the same parts of our model, and of all its other modules."""
    stages = {}
    for name, module in model.named_modules():
        def keep(module, inputs, output, name=name):
            stages[name] = output

        module.register_forward_hook(keep)
    return stages | model(batch)


def on_gpu(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


def device_of(name, monkeypatch):
    """Returns the device of this name. "padded" is the CPU with the attention of a GPU that lacks
    FlashAttention."""
    if name != "padded":
        return name

    def padded(qkv, bounds, lengths, dropout):
        return bert.padded_attention(qkv, bounds, int(lengths.max()), dropout)

    monkeypatch.setattr(bert, "attention", padded)
    return "cpu"


@pytest.mark.parametrize("seq_len, examples, mask_fraction, device, dtype, tolerance", [
    (128, 9, 0.15, "cpu", torch.float64, 1e-10),
    (16, 1, 0.5, "cpu", torch.float64, 1e-10),
    (32, 6, 1e-9, "cpu", torch.float64, 1e-10),                  # masks no token
    (128, 9, 0.15, "cpu", torch.float32, 1e-5),
    (128, 9, 0.15, "cpu", torch.bfloat16, 0.1),
    (128, 9, 0.15, "padded", torch.float64, 1e-10),
    (16, 1, 0.5, "padded", torch.float64, 1e-10),
    on_gpu(512, 9, 0.15, "cuda", torch.float32, 1e-3),
    on_gpu(512, 9, 0.15, "cuda", torch.bfloat16, 0.1),
    on_gpu(512, 9, 0.15, "cuda", torch.float16, 0.05)])
def test_logits_and_gradients_are_those_of_torchs_layers(
        shards, monkeypatch, seq_len, examples, mask_fraction, device, dtype, tolerance):
    device = device_of(device, monkeypatch)
    # fp16 takes the path of an older GPU, without FlashAttention.
    capability = (7, 5) if dtype == torch.float16 else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    batch = make_batch(shards, seq_len, examples, mask_fraction)
    exact_model = make_model()
    model = make_model().to(device, dtype)
    exact_model.load_state_dict(model.state_dict())              # rounded to dtype
    exact = torchs_stages(exact_model, batch)
    found = our_stages(model, make_batch(shards, seq_len, examples, mask_fraction, device))
    for stages in exact, found:
        loss = stages["mlm"].square().sum() + stages["nsp"].square().sum()
        (loss / len(batch.tokens)).backward()
    for name, right in exact.items():
        ours = found[name][:len(right)].cpu()                    # without the rows of padding
        error = (ours - right).norm() / right.norm().clamp(min=1e-9)
        assert error < tolerance, (
            f"the output of {name} differs from that of torch's layers by {error:.2g} of its norm; "
            f"the parts before it, in the order {', '.join(exact)}, are right")
    total = nn.utils.get_total_norm([p.grad for p in exact_model.parameters()])
    for name, p in exact_model.named_parameters():
        error = (model.get_parameter(name).grad.cpu() - p.grad).norm() / total
        assert error < tolerance, (
            f"the gradient of {name} is off by {error:.2g} of the norm of all gradients")
    rows, wanted = len(found["blocks.1.up"]), examples + len(batch.masked_rows)
    assert rows == wanted, f"the last block computes {rows} rows, but the heads read {wanted}"


@pytest.mark.parametrize("device, dtype", [
    ("cpu", torch.bfloat16), ("cpu", torch.float16), on_gpu("cuda", torch.bfloat16)])
def test_gradients_in_16_bits_are_sums_in_more(shards, device, dtype):
    """There are so many rows that sums in 16 bits would be off by a tenth."""
    shape = dict(layers=1, width=64, heads=1, layer_norm_eps=0.5)
    model, exact = make_model(**shape).to(device, dtype), make_model(**shape)
    exact.load_state_dict(model.state_dict())
    for each, place in (model, device), (exact, "cpu"):
        logits = each(make_batch(shards, 128, 80, device=place))
        (1000 * (logits["mlm"].mean() + logits["nsp"].mean())).backward()
    for name, p in exact.named_parameters():
        error = (model.get_parameter(name).grad.cpu() - p.grad).norm() / p.grad.norm()
        assert error < 0.05, f"the gradient of {name} is off by {error:.1%}"


def test_dropout_is_of_embeddings_weights_and_both_branches_in_training_alone(shards):
    batch, model = make_batch(shards), make_model(dropout=1.0)               # drops everything
    x = model.embeddings(batch.tokens, batch.segments, batch.positions)
    assert not x.any(), "dropout does not act on embeddings"
    x, rows = torch.randn_like(x), (batch.bounds, batch.lengths)
    block = model.blocks[0]
    norms = block.norm(block.attention_norm(x))
    assert torch.equal(block(x, *rows), norms), "dropout does not act on a branch of a block"
    evaluated, undropped = model.eval()(batch)["mlm"], make_model()(batch)["mlm"]
    assert torch.equal(evaluated, undropped), "dropout acts in evaluation mode"
    block.train().dropout.p = 0.5
    block.dropout.eval()
    same = torch.equal(block(x, *rows), block(x, *rows))
    assert not same, "dropout does not act on attention weights"


@pytest.mark.parametrize("device, dtype", [
    ("cpu", torch.float32), ("padded", torch.float32),
    on_gpu("cuda", torch.float32), on_gpu("cuda", torch.bfloat16)])
def test_gradients_are_those_of_the_weights_that_dropout_has_left(monkeypatch, device, dtype):
    """The batch has many short examples, as in fine-tuning."""
    device = device_of(device, monkeypatch)
    lengths = torch.tensor([5] * 100 + [17] * 100 + [60] * 56 + [0])
    bounds = F.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    torch.manual_seed(0)
    qkv = torch.randn(bounds[-1], 3, 2, 64)
    qkv[:, 2] = 1 + qkv[:, 2] / 2
    qkv = qkv.to(device, dtype).requires_grad_()

    def attended(qkv):
        torch.manual_seed(1)             # always drops the same weights
        return bert.attention(qkv, bounds, lengths, 0.5).double()

    found = attended(qkv)
    fixed = found.detach()
    assert (fixed - bert.attention(qkv, bounds, lengths, 0.0)).std() > 0.05, "no weight is dropped"
    assert 0.95 < fixed.mean() < 1.05, "the weights that are not dropped are not scaled up"
    (found * fixed).sum().backward()
    gradient = qkv.grad.double()
    along_v = (gradient * qkv)[:, 2].sum().item()                # the output is linear in V
    assert along_v == pytest.approx(fixed.square().sum().item(), 0.01), "the gradient of V is wrong"
    if dtype == torch.float32:
        for part, name in enumerate("QK"):
            step = torch.zeros_like(qkv)
            step[:, part] = 0.01 * qkv.grad[:, part] / qkv.grad[:, part].std()
            change = ((attended(qkv + step) - attended(qkv - step)) * fixed).sum()
            expected = 2 * (gradient * step).sum()
            assert change.item() == pytest.approx(expected.item(), 0.02), (
                f"the gradient of {name} is wrong")


def test_presets_and_initial_weights():
    torch.manual_seed(0)
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 192))
    assert model.config.vocab_size == 192, "192 is a multiple of 64, but rounded up"
    for name, p in model.named_parameters():
        expected = 0.02 if "embeddings" in name else 0.55 / 128 ** 0.5
        assert p.dim() < 2 or p.std().item() == pytest.approx(expected, rel=0.1), name
        assert "bias" not in name or not p.any(), f"{name} is not 0 initially"
    assert bert.BertConfig.preset("large", 30522) == bert.BertConfig(24, 1024, 16, 4096, 30528)


# ----- The model folder -----

@pytest.fixture
def saved(tmp_path, shards):
    """Returns a model, its folder and the tokenizer's path; the model is in fp32, as the folder is.
    """
    model, folder = make_model(dropout=0.25, init_std=0.03), tmp_path / "folder"
    bert.save_huggingface(model, shards / "tokenizer.model", folder, 64)
    return model.float(), folder, shards / "tokenizer.model"


def weights_in(folder):
    """Returns the tensors of a folder's model.safetensors, {Hugging Face's name: tensor}."""
    return bert.unpack(bytearray((folder / "model.safetensors").read_bytes()))


def assert_same_weights(ours, theirs):
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) and q.requires_grad, f"{name} has changed, or is frozen"


def assert_refused(folder, what):
    """Checks that a wrong folder is refused in one line. what: its fault, for the message."""
    with pytest.raises(bert.ModelError,
                       match=f"^{folder} holds no model that this program can load.*$"):
        bert.load_huggingface(folder)
        pytest.fail(f"{what} is loaded without an error")


def test_a_folder_comes_back_bit_for_bit(saved):
    model, folder, tokenizer = saved
    again = bert.load_huggingface(folder)
    assert_same_weights(model, again)
    assert again.config == model.config
    assert again.training, "the model is not in training mode"
    assert (folder / "tokenizer.model").read_bytes() == tokenizer.read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config["attention_probs_dropout_prob"] == config["hidden_dropout_prob"] == 0.25, (
        "config.json has another dropout than the model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 64, "this is not 64, the longest training example"

    stored = weights_in(folder)
    thirds = model.blocks[1].qkv.weight.chunk(3)
    for name, third in zip(["query", "key", "value"], thirds):
        weight = stored[f"bert.encoder.layer.1.attention.self.{name}.weight"]
        assert torch.equal(weight, third), f"the stored {name} matrix is not its third of `qkv`"


def test_a_tensor_that_transformers_do_not_know_is_kept_and_said(saved):
    model, folder, tokenizer = saved
    model.not_of_bert = nn.Linear(64, 3)
    model.blocks[0].up.scale = nn.Parameter(torch.ones(1))
    bert.save_huggingface(model, tokenizer, folder, 64)
    names = {"not_of_bert.weight", "not_of_bert.bias", "blocks.0.up.scale"}
    assert names <= {*bert.unlike_huggingface(model)}
    del model.embeddings.positions
    assert "embeddings.positions.weight" in bert.unlike_huggingface(model), (
        "a removed tensor is not reported")
    assert torch.equal(weights_in(folder)["not_of_bert.bias"], model.not_of_bert.bias)
    with pytest.raises(bert.ModelError, match=f"it has {', '.join(sorted(names))}, too"):
        bert.load_huggingface(folder)                                # a model without them
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    assert kind != "bert", "transformers would load it as BERT and compute something else"


@pytest.mark.parametrize("content", [
    b"", b"{}", b"[]", b"[" * 10 ** 5, {"num_hidden_layers": 3}, {"hidden_size": 65},
    {"vocab_size": 191}, {"max_position_embeddings": 513}, {"hidden_act": "relu"},
    {"tie_word_embeddings": False}, {"is_decoder": True}, {"model_type": "roberta"},
    {"layer_norm_eps": "1e-12"}, {"num_hidden_layers": 2.9}, {"num_attention_heads": "2"},
    {"intermediate_size": 10 ** 12}])                            # more than fits in memory
def test_a_wrong_config_is_one_line(saved, content):
    _, folder, _ = saved
    path = folder / "config.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content).encode()
    path.write_bytes(content)
    assert_refused(folder, "a wrong config.json")


def test_weights_that_another_program_has_written_are_read(saved):
    """The file has a different order, no metadata, and a tensor that old transformers add."""
    model, folder, _ = saved
    path = folder / "model.safetensors"
    ids = {"bert.embeddings.position_ids": torch.zeros(512)}
    content = bert.pack(weights_in(folder) | ids)
    size = int.from_bytes(content[:8], "little")
    assert size % 8 == 0, "in this format the tensors begin at a multiple of 8 bytes"
    header = json.loads(content[8:8 + size])
    del header["__metadata__"]
    text = json.dumps(dict(reversed(header.items()))).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size:])
    assert_same_weights(model, bert.load_huggingface(folder))


WRONG_ENTRIES = {                    # for a matrix (2, 128)
    "dtype": ["F64", "F8_E4M3", None],
    "shape": [[2 ** 62, 2 ** 62], [-1], [0], [1e9], ["a"], None, [128, 2]],
    "data_offsets": [[4, 1024], [4, 1028], [-8, 1016], [2 ** 62, 2 ** 62 + 1024], [0], None]}


def test_damaged_weights_are_one_line(saved):
    _, folder, _ = saved
    path = folder / "model.safetensors"
    content = path.read_bytes()
    # The header ends with spaces, so that without its last byte it is JSON with a wrong length.
    size = int.from_bytes(content[:8], "little") + 8
    content = b"".join([size.to_bytes(8, "little"), content[8:size], b" " * 8, content[size:]])
    header = json.loads(content[8:8 + size])
    name = "cls.seq_relationship.weight"
    headers = [[1, 2], {"a": 1}, {}, None, "x", 3]
    for key, values in WRONG_ENTRIES.items():
        headers += [header | {name: header[name] | {key: value}} for value in values]
    wrong = {f"a file cut to [:{length}]": content[:length] for length in (0, 4, 8, 100, 5000, -4)}
    wrong["a weight that is inf"] = content[:-4] + torch.tensor(math.inf).numpy().tobytes()
    for length in 0, size // 2, size - 1, 2 ** 64 - 1:
        wrong[f"a header length of {length} bytes"] = length.to_bytes(8, "little") + content[8:]
    for damaged in headers:
        text = json.dumps(damaged).encode()
        entry = damaged.get(name) if isinstance(damaged, dict) else damaged
        wrong[f"a header with {entry}"] = b"".join(
            [len(text).to_bytes(8, "little"), text, content[8 + size:]])
    for what, damaged in wrong.items():
        path.write_bytes(damaged)
        assert_refused(folder, what)


def test_a_model_begins_with_a_folder_of_its_shape_and_tokenizer(saved):
    model, folder, tokenizer = saved
    other = make_model(seed=1, dropout=0.1, init_std=0.1).float()            # not part of the shape
    bert.init_from(folder, other, tokenizer)
    assert_same_weights(model, other)
    for change in ({"vocab_size": 256}, {"max_positions": 128}, {"layers": 3}, {"heads": 1},
                   {"layer_norm_eps": 1e-5}):
        with pytest.raises(bert.ModelError, match="does not have the shape"):
            bert.init_from(folder, make_model(**change), tokenizer)
    own = folder / "tokenizer.model"
    for spoil in lambda: own.write_bytes(b"other pieces"), own.unlink:
        spoil()
        with pytest.raises(bert.ModelError, match=f"missing or not a copy of {tokenizer}; copy it "
                                                  "from runs.* --tokenizer"):
            bert.init_from(folder, other, tokenizer)


def test_a_write_that_fails_names_the_file_and_leaves_the_old_one(saved):
    model, folder, tokenizer = saved
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with no_room(100_000), pytest.raises(OSError, match="File too large.*model.safetensors"):
        bert.save_huggingface(model, tokenizer, folder, 64)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


# ----- [MASK] -----

@pytest.fixture
def tokenizer(shards):
    return data.load_tokenizer(shards / "tokenizer.model")


def test_the_program_prints_a_line_for_each_mask_or_one_line_that_says_why_not(
        saved, monkeypatch, capsys):
    _, folder, _ = saved
    monkeypatch.setattr(sys, "argv", ["bert.py", str(folder), "The [MASK] of the school [MASK]."])
    runpy.run_path(str(ROOT / "bert.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert [len(re.findall(r"\d%", line)) for line in printed.splitlines()] == [5, 5], (
        f"two masks do not have five words each: {printed}")

    def assert_ends(message):
        with pytest.raises(SystemExit, match=f"^bert.py: .*{message}"):
            bert.main()

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
        patch.setattr(bert, "fill_mask", lambda *_: "ü")
        assert_ends("'ascii' codec")
    path = folder / "tokenizer.model"
    path.write_bytes(b"damaged")
    assert_ends(path.name)
    path.unlink()
    assert_ends(path.name)
    (folder / "config.json").unlink()
    assert_ends("holds no model that this program can load")


def test_fill_mask_takes_pieces_alone_and_as_many_tokens_as_positions(tokenizer):
    text = "The school [MASK]."
    length = len(bert.encode_with_masks(tokenizer, text))
    config = bert.BertConfig.preset("tiny", 384, max_positions=length)       # for 320 pieces
    model = bert.BertForPreTraining(config)
    model.embeddings.tokens.weight.data.zero_()                  # the logits are the biases
    ids = [tokenizer.encode("school")[0], *tokenizer.piece_to_id(["▁", "s", "[MASK]"])]
    model.mlm_bias.data[ids] = torch.tensor([4.0, 3.0, 2.0, 1.0]).log() + 50
    model.mlm_bias.data[320:] = 100.0
    found = bert.fill_mask(model, tokenizer, text, 4)
    assert found == ["school 40%, ▁ 30%, ##s 20%, [MASK] 10%"], (
        f"{found}: the probabilities of all pieces at a [MASK] must add up to 100 %, by a softmax "
        "over the vocabulary without the columns of padding")
    assert not model.training, "the model is not in evaluation mode"
    for refused in text + ".", "The":
        with pytest.raises(bert.ModelError, match=rf"one \[MASK\] and at most {length} tokens"):
            bert.fill_mask(model, tokenizer, refused)
    smaller = bert.BertForPreTraining(replace(config, vocab_size=319))
    with pytest.raises(bert.ModelError, match="a different model's"):
        bert.fill_mask(smaller, tokenizer, text)


def test_masks_stand_where_the_words_would(tokenizer):
    school, people, money = map(tokenizer.encode, ("school", "people", "school people money."))
    expected = {
        "school people money.": money,
        "sch\u00adool [MASK] money.": [*school, data.MASK, *money[len(school) + len(people):]],
        "[MASK]": [data.MASK],
        "[MASK] [MASK]": [data.MASK, data.MASK],
        "[MASK]漢\ue000": [data.MASK, data.UNK],
        "school\x85": [*school, data.UNK],             # white space to Python alone
        "school～": tokenizer.encode("school~")}       # by NFKC, not by SentencePiece
    for text, tokens in expected.items():
        found = bert.encode_with_masks(tokenizer, text)
        assert found == [data.CLS, *tokens, data.SEP], f"{text!r} has the wrong tokens {found}"


def test_special_tokens_and_invisible_characters_are_those_of_data(tokenizer):
    ids = [bert.PAD, bert.UNK, bert.CLS, bert.SEP, bert.MASK]
    assert tokenizer.id_to_piece(ids) == data.SPECIALS
    assert bert.INVISIBLE == data.INVISIBLE
