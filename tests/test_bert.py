"""bert.py against transformers, a padded model and torch's own encoder layer, and through its model
folder. AutoTokenizer: test_huggingface.py. Attention itself: course/test_graders.py."""
import io
import json
import re
import resource
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import bert
import data
from tests.ranks import run_script
from tests.tools import plan

CONFIG = bert.BertConfig(layers=2, width=64, heads=2, feed_forward=128, vocab_size=192, dropout=0.0)


def make_model(dtype=torch.float32, seed=0, config=CONFIG):
    """A model whose weights are all different from their initial zeros and ones."""
    torch.manual_seed(seed)
    model = bert.BertForPreTraining(config).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def make_batch(seed=0, lengths=(16, 12, 5), masked=2, vocabulary=192):
    """Examples of these lengths, in this order, as data.Batch has them, with as many masked tokens
    in each; and the same with padding, (B, T) each: `padded`, arguments of transformers, and
    `mask`, true at tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(5, vocabulary, (T,), generator=generator) for T in lengths]
    positions = [torch.arange(T) for T in lengths]
    segments = [(torch.arange(T) >= T // 2).long() for T in lengths]
    full = [torch.ones(T).long() for T in lengths]
    labels = torch.randint(5, vocabulary, (masked * len(lengths),), generator=generator)

    fill = -sum(lengths) % 64
    all_lengths = torch.tensor([*lengths, fill])
    bounds = F.pad(all_lengths.cumsum(0), (1, 0)).int()
    masked_rows = bounds[:-2, None] + 1 + 2 * torch.arange(masked)       # (B, masked)

    def in_line(parts):
        return F.pad(torch.cat(parts), (0, fill))

    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return SimpleNamespace(
        tokens=in_line(tokens), segments=in_line(segments), positions=in_line(positions),
        bounds=bounds, lengths=all_lengths, masked_rows=masked_rows.flatten().long(),
        labels={"mlm": labels, "nsp": torch.arange(len(lengths)) % 2},
        padded=dict(input_ids=pad(tokens), token_type_ids=pad(segments), attention_mask=pad(full)),
        mask=pad(full).bool())


def encode(model, batch):
    """The hidden states of the real tokens alone."""
    return model.encode(torch.arange(batch.bounds[-2]), batch.tokens, batch.segments,
                        batch.positions, batch.bounds, batch.lengths)


def sums_of(logits, batch):
    """The sums of cross-entropy of a model's logits, at least in fp32."""
    dtype = torch.promote_types(logits["mlm"].dtype, torch.float32)
    return [F.cross_entropy(logits[task].to(dtype), labels, reduction="sum")
            for task, labels in batch.labels.items()]


def padded_logits(model, batch):
    """The logits of a model that computes all places of (B, T), its attention written out."""
    e, mask = model.embeddings, batch.mask
    x = e.tokens(batch.padded["input_ids"]) + e.segments(batch.padded["token_type_ids"])
    x = e.norm(x + e.positions.weight[:x.shape[1]])
    for block in model.blocks:
        q, k, v = block.qkv(x).unflatten(2, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask[:, None, None], -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = block.attention_norm(x + block.attention_out(mixed))
        x = block.norm(x + block.down(F.gelu(block.up(x))))
    mlm_logits = model.mlm_logits(x[mask][batch.masked_rows])
    return {"mlm": mlm_logits, "nsp": model.nsp(torch.tanh(model.pooler(x[:, 0])))}


@pytest.fixture
def saved(tmp_path, shards):
    """(our model, the folder that it was saved to, its config.json)"""
    model, folder = make_model(config=replace(CONFIG, dropout=0.25)), tmp_path / "folder"
    bert.save_huggingface(model, shards / "tokenizer.model", folder, 64)
    return model, folder, json.loads((folder / "config.json").read_text())


def test_gradients_are_transformers(saved):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, folder, _ = saved
    theirs = transformers.BertForPreTraining.from_pretrained(folder, attn_implementation="eager")
    ours, theirs, batch = model.double().eval(), theirs.double().eval(), make_batch()
    sum(sums_of(ours(batch), batch)).backward()
    output = theirs(**batch.padded)
    mlm_logits = output.prediction_logits[batch.mask][batch.masked_rows]
    logits = {"mlm": mlm_logits, "nsp": output.seq_relationship_logits}
    sum(sums_of(logits, batch)).backward()
    named = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        expected = torch.cat([named[part].grad for part in bert.huggingface_names(name)])
        assert (p.grad - expected).norm() <= 1e-8 * max(expected.norm(), 1e-6), name


def test_folders_give_the_same_logits_in_transformers_and_back(saved):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, folder, _ = saved
    batch = make_batch()
    expected = model.eval().mlm_logits(encode(model, batch))
    for name, key in ("PreTraining", "prediction_logits"), ("MaskedLM", "logits"):
        theirs = getattr(transformers, f"AutoModelFor{name}").from_pretrained(folder).eval()
        logits = theirs(**batch.padded)[key][batch.mask]
        assert (expected - logits).abs().max() < 1e-5 * expected.abs().max()
        theirs.save_pretrained(folder.parent / name)
        torch.save(theirs.state_dict(), folder.parent / name / "pytorch_model.bin")
    back = bert.load_huggingface(folder.parent / "PreTraining")
    assert back.config == model.config
    assert all(torch.equal(*pair) for pair in zip(back.parameters(), model.parameters()))
    with pytest.raises(bert.ModelError, match="pooler"):             # which MaskedLM does not have
        bert.load_huggingface(folder.parent / "MaskedLM")
    with pytest.raises(bert.ModelError, match="copy it from runs"):
        bert.init_from(folder.parent / "PreTraining", model, folder / "tokenizer.model")


def sums_and_gradients(logits_of, model, batch):
    """Both sums and all gradients in fp64, a list."""
    model.zero_grad()
    sums = sums_of(logits_of(batch), batch)
    sum(sums).backward()
    found = [part.detach() for part in sums] + [p.grad for p in model.parameters()]
    return [part.double() for part in found]


@pytest.mark.parametrize("lengths", [(5, 33, 33, 100, 512), (23,), (64, 64, 64)])
def test_losses_and_gradients_are_those_of_a_padded_model(lengths):
    batch, ours, padded = make_batch(lengths=lengths), {}, {}
    for dtype in torch.float64, torch.float32, torch.bfloat16:
        model = make_model().bfloat16().to(dtype)                 # the same weights in each
        ours[dtype] = sums_and_gradients(model, model, batch)
        padded[dtype] = sums_and_gradients(partial(padded_logits, model), model, batch)
    exact = padded[torch.float64]
    # With AVX2 the padded model in fp32 is itself 1e-6 away from the exact results.
    for dtype, tolerance in (torch.float64, 1e-12), (torch.float32, 1e-6):
        names = ["mlm_sum", "nsp_sum", *(name for name, _ in model.named_parameters())]
        for name, a, b, c in zip(names, ours[dtype], padded[dtype], exact, strict=True):
            error = (a - c).norm()
            bound = max(tolerance * max(c.norm(), 1), 1.2 * (b - c).norm())
            assert error <= bound, f"{name} in {dtype}: {error:.2g}"
    # In bf16 as near to the exact results as the padded model is
    errors = [sum((part - c).norm() / c.norm() for part, c in zip(found[torch.bfloat16], exact))
              for found in (ours, padded)]
    assert errors[0] <= 1.2 * errors[1]


def test_a_block_is_torchs_encoder_layer():
    torch.manual_seed(0)
    block = make_model(torch.float64).blocks[0]
    layer = torch.nn.TransformerEncoderLayer(
        CONFIG.width, CONFIG.heads, CONFIG.feed_forward, dropout=0.0, activation="gelu",
        layer_norm_eps=1e-12, batch_first=True, norm_first=False, dtype=torch.float64)
    theirs = {"attention_out": layer.self_attn.out_proj, "up": layer.linear1, "down": layer.linear2,
              "attention_norm": layer.norm1, "norm": layer.norm2}
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(block.qkv.weight)
        layer.self_attn.in_proj_bias.copy_(block.qkv.bias)
        for name, module in theirs.items():
            module.load_state_dict(getattr(block, name).state_dict())
    batch, x = make_batch(), torch.randn(3, 16, CONFIG.width, dtype=torch.float64)
    mask = batch.mask
    ours = block(x[mask], batch.bounds[:-1], batch.lengths[:-1])
    theirs = layer(x, src_key_padding_mask=~mask)
    assert torch.allclose(ours, theirs[mask], rtol=1e-10, atol=1e-10)


def test_dropout_is_of_embeddings_and_of_both_branches_in_training_alone():
    """A dropout of 1 leaves nothing: embeddings are 0, a block is its two norms."""
    batch, model = make_batch(), make_model(config=replace(CONFIG, dropout=1.0))
    assert not model.embeddings(batch.tokens, batch.segments, batch.positions).any()
    block, x = model.blocks[0], torch.randn(len(batch.tokens), CONFIG.width)
    assert torch.equal(block(x, batch.bounds, batch.lengths), block.norm(block.attention_norm(x)))
    assert torch.equal(encode(model.eval(), batch), encode(make_model(), batch))


def test_a_block_drops_attention_weights_in_training_alone():
    batch, block = make_batch(), bert.Block(replace(CONFIG, dropout=0.5))
    x = torch.randn(len(batch.tokens), CONFIG.width)
    for training in True, False:
        block.train(training)
        block.dropout.eval()                         # that of activations
        some, others = (block(x, batch.bounds, batch.lengths) for _ in range(2))
        assert torch.equal(some, others) != training


@pytest.mark.gpu
@pytest.mark.parametrize("dtype,tolerance,capability", [
    (torch.bfloat16, 0.02, (9, 0)), (torch.float16, 0.01, (9, 0)), (torch.float16, 0.01, (7, 5)),
    (torch.float32, 1e-3, (9, 0))])
def test_attention_on_a_gpu_is_that_of_the_cpu(monkeypatch, dtype, tolerance, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    batch, results = make_batch(lengths=(5, 33, 33, 100, 512, 512)), []
    values = torch.randn(len(batch.tokens), 3, 2, 64).to(dtype)
    for qkv, bounds in (values.float(), batch.bounds), (values.cuda(), batch.bounds.cuda()):
        mixed = bert.attention(qkv.requires_grad_(), bounds, batch.lengths, 0.0)
        mixed.square().sum().backward()
        results.append([part.detach().float().cpu() for part in (mixed, qkv.grad)])
    for cpu, gpu in zip(*results):
        assert (gpu - cpu).norm() < tolerance * cpu.norm()
    with torch.no_grad():
        values[:, 2] = 1.0               # then an output is the sum of the weights that are left
    qkv = values.cuda().requires_grad_()
    sums = bert.attention(qkv, batch.bounds.cuda(), batch.lengths, 0.5)
    assert sums.std() > 0.05 and 0.9 < sums.mean() < 1.1
    sums.sum().backward()                # the gradient of V is what was left of the weights
    assert 0.9 < qkv.grad[:, 2].float().mean() < 1.1 and qkv.grad.isfinite().all()


def test_masked_rows_can_be_padded_or_none():
    model, batch = make_model().eval(), make_batch()
    logits = model(batch)["mlm"]
    batch.masked_rows = F.pad(batch.masked_rows, (0, 5))
    torch.testing.assert_close(model(batch)["mlm"][:6], logits)
    batch.masked_rows = batch.masked_rows[:0]
    assert model(batch)["mlm"].shape == (0, 192)


def test_the_last_block_computes_the_rows_that_are_asked_for():
    model, batch = make_model(torch.float64), make_batch()
    rows, seen = torch.tensor([20, 3, 16]), []
    model.blocks[-1].up.register_forward_hook(lambda module, inputs, _: seen.append(len(*inputs)))
    hidden = model.encode(rows, batch.tokens, batch.segments, batch.positions, batch.bounds,
                          batch.lengths)
    torch.testing.assert_close(hidden, encode(model, batch)[rows], rtol=1e-12, atol=1e-12)
    assert seen == [3, 33]


def test_presets_begin_with_the_loss_of_guessing():
    torch.manual_seed(0)
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 192))
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    mlm_sum, nsp_sum = sums_of(model(make_batch()), make_batch())
    assert abs(mlm_sum / 6 - torch.tensor(192.0).log()) < 0.3
    assert abs(nsp_sum / 3 - torch.tensor(2.0).log()) < 0.1

    weights = model.blocks[0].up.weight, model.embeddings.tokens.weight
    assert [w.std().item() for w in weights] == pytest.approx([0.0486, 0.02], rel=0.02)

    large = bert.BertConfig.preset("large", 30522)
    assert (large.layers, large.width, large.heads, large.feed_forward) == (24, 1024, 16, 4096)
    assert large.vocab_size == 30528 and large.max_positions == 512
    assert large.init_std == 0.02
    with torch.device("meta"):
        model = bert.BertForPreTraining(large)
    assert sum(p.numel() for p in model.parameters()) == 336_232_258  # 336,226,108 with 30,522


def test_saved_weights_come_back_bit_for_bit(saved, shards):
    model, folder, config = saved
    again = bert.load_huggingface(folder)
    assert again.config == model.config and again.training
    for (name, p), q in zip(model.named_parameters(), again.parameters()):
        assert torch.equal(p, q) and q.requires_grad, name
    assert (folder / "tokenizer.model").read_bytes() == (shards / "tokenizer.model").read_bytes()
    assert not list(folder.glob("*.tmp"))
    assert config["attention_probs_dropout_prob"] == model.config.dropout == 0.25


CONFIGS = ["", "{}", "[]", "[" * 10 ** 5, {"num_hidden_layers": 3},
           {"hidden_size": 65}, {"vocab_size": 191}, {"max_position_embeddings": 513},
           {"intermediate_size": 10 ** 12}]                  # it would fill the memory


@pytest.mark.parametrize("config", CONFIGS)
def test_a_wrong_config_is_one_line(saved, config):
    _, folder, right = saved
    text = json.dumps(right | config) if isinstance(config, dict) else config
    (folder / "config.json").write_text(text)
    refused(folder)


def test_cut_and_missing_weights_are_one_line(saved):
    _, folder, _ = saved
    path = folder / "pytorch_model.bin"
    content = path.read_bytes()
    for damaged in content[:-4], content[:5000], b"":
        path.write_bytes(damaged)
        refused(folder)
    weights = torch.load(io.BytesIO(content))
    name = "bert.encoder.layer.0.output.dense.weight"            # (64, 128)
    for wrong in {}, [weights], weights | {name: weights[name].T}, weights | {name: "text"}:
        torch.save(wrong, path)
        refused(folder)
    path.unlink()
    refused(folder)


def refused(folder):
    with pytest.raises(bert.ModelError, match="no model folder") as caught:
        bert.load_huggingface(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_begins_with_a_folder_of_its_shape_and_tokenizer(saved, shards, tmp_path):
    model, folder, _ = saved
    tokenizer = shards / "tokenizer.model"
    other = make_model(seed=1, config=replace(CONFIG, dropout=0.1, init_std=0.1))      # no shapes
    bert.init_from(folder, other, tokenizer)
    for p, q in zip(other.parameters(), model.parameters()):
        assert torch.equal(p, q)
    for field, value in ("vocab_size", 256), ("max_positions", 128), ("layers", 3), ("heads", 1):
        with pytest.raises(bert.ModelError, match="is not of the shape"):
            bert.init_from(folder, make_model(config=replace(CONFIG, **{field: value})), tokenizer)
    (tmp_path / "other.model").write_bytes(b"other pieces")
    with pytest.raises(bert.ModelError, match="not a copy of .*other.model.* --tokenizer"):
        bert.init_from(folder, other, tmp_path / "other.model")


def test_a_write_that_fails_names_the_file_and_leaves_the_old_one(saved, shards):
    model, folder, _ = saved
    before = {path: path.read_bytes() for path in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))      # a write fails there
    try:
        with pytest.raises(OSError, match="File too large.*pytorch_model.bin"):
            bert.save_huggingface(model, shards / "tokenizer.model", folder, 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_fill_in_program(shards, tmp_path, monkeypatch):
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 320))
    bert.save_huggingface(model, shards / "tokenizer.model", tmp_path, 64)
    run = run_script("bert.py", tmp_path, "The [MASK] of the school [MASK].")
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"\d%", run.stdout)) == 10 and run.stdout.count("\n") == 2

    def refuses(text, match):
        monkeypatch.setattr(sys, "argv", ["bert.py", str(tmp_path), text])
        with pytest.raises(SystemExit, match=f"^bert.py: .*{match}"):
            bert.main()

    refuses("nothing to fill in", r"at least one \[MASK\]")
    monkeypatch.setattr(bert, "fill_mask", lambda *_: "ü")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    refuses("[MASK]", "'ascii' codec")
    (tmp_path / "tokenizer.model").write_bytes(b"damaged")
    refuses("[MASK]", "")
    (tmp_path / "config.json").unlink()
    refuses("[MASK]", "no model folder")


def test_flops_are_those_that_torch_counts():
    config = bert.BertConfig.preset("tiny", 192, dropout=0.0)
    model, batch = bert.BertForPreTraining(config), make_batch(lengths=[16] * 4)
    with FlopCounterMode(display=False) as counter:
        sum(sums_of(model(batch), batch)).backward()
    ours = 4 * plan.flops_per_example(config, 16, 2)
    attention = 3 * 4 * config.layers * 4 * 16 * 16 * config.width
    nsp = 3 * 4 * 2 * 2 * config.width                     # too few for us to count
    # Torch counts no attention of the CPU's fused kernel, or five products of its backward where we
    # count four.
    counted = counter.get_total_flops() - nsp
    assert counted in (ours - attention, ours, ours + attention / 6)


@pytest.fixture
def tokenizer(shards):
    return sentencepiece.SentencePieceProcessor(model_file=str(shards / "tokenizer.model"))


def test_fill_mask_takes_pieces_alone_and_as_many_tokens_as_positions(tokenizer):
    text = "The school [MASK]."
    length = len(bert.encode_with_masks(tokenizer, text))
    config = bert.BertConfig.preset("tiny", 384, max_positions=length)       # of 320 pieces
    model = bert.BertForPreTraining(config)
    model.mlm_bias.data[7], model.mlm_bias.data[320:] = 50.0, 100.0
    word = tokenizer.id_to_piece(7).replace("▁", "")
    assert bert.fill_mask(model, tokenizer, text, 1) == [f"{word} 100%"]
    with pytest.raises(bert.ModelError, match=f"at most {length} tokens"):
        bert.fill_mask(model, tokenizer, text + ".")


def test_masks_stand_where_the_words_would(tokenizer):
    whole = bert.encode_with_masks(tokenizer, "school people money.")
    assert whole == [2, *tokenizer.encode("school people money."), 3]
    people = len(tokenizer.encode("people"))
    masked = bert.encode_with_masks(tokenizer, "school [MASK] money.")
    begin = 1 + len(tokenizer.encode("school"))
    assert masked == whole[:begin] + [4] + whole[begin + people:]
    assert bert.encode_with_masks(tokenizer, "[MASK]") == [2, 4, 3]
    assert bert.encode_with_masks(tokenizer, "[MASK] [MASK]") == [2, 4, 4, 3]
    assert bert.encode_with_masks(tokenizer, "[MASK]漢") == [2, 4, 1, 3]
    assert bert.encode_with_masks(tokenizer, "sch\u00adool") == [2, *tokenizer.encode("school"), 3]


def test_special_tokens_and_invisible_characters_are_those_of_data(tokenizer):
    ids = [bert.PAD, bert.UNK, bert.CLS, bert.SEP, bert.MASK]
    assert tokenizer.id_to_piece(ids) == data.SPECIALS and bert.INVISIBLE == data.INVISIBLE
