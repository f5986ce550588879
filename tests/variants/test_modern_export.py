"""Tests that transformers loads modern_export.py's folder as a ModernBERT with the same logits."""
import pytest
import torch

import bert
from tests.training import random_batch
from tests.variants import modern, modern_export


def test_modern_is_transformers_modernbert(shards, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(bert, "huggingface_names", modern_export.huggingface_names)
    torch.manual_seed(0)
    ours = modern.Modern(bert.BertConfig(3, 128, 2, 512, 320)).eval()
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.1)                  # including norms and the bias
    modern_export.save(ours, shards / "tokenizer.model", tmp_path, 64, modern.THETA)
    theirs, info = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == "ModernBertForMaskedLM"
    assert not info["missing_keys"]
    unknown = {f"{head}.{kind}" for head in ("pooler", "nsp") for kind in ("weight", "bias")}
    assert set(info["unexpected_keys"]) == unknown
    batch = random_batch(320, examples=2, length=320)      # longer than a window of local attention
    with torch.no_grad():
        hidden = ours.encode(torch.arange(640), batch.tokens, torch.zeros_like(batch.segments),
                             batch.positions, batch.bounds, batch.lengths)
        expected = theirs.eval()(input_ids=batch.tokens.view(2, 320)).logits.flatten(0, 1)
    torch.testing.assert_close(ours.mlm_logits(hidden), expected, rtol=1e-5, atol=1e-5)
    # The tokenizer returns nothing that the model does not accept.
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(**tokenizer("some text", return_tensors="pt")).logits.shape[2] == 320
