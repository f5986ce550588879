"""Writes modern.py's model folder, which Hugging Face's transformers loads as ModernBERT.

`ModernBertForMaskedLM.from_pretrained(folder)` gives the same logits; each of its layers attends to
all tokens. The head for pairs is in the folder under our names, which transformers reports as
unknown.
"""
import json
from pathlib import Path

import bert

NAMES = {                    # our module: ModernBERT's
    "embeddings.tokens": "model.embeddings.tok_embeddings",
    "embeddings.norm": "model.embeddings.norm",
    "attention_norm": "attn_norm", "qkv": "attn.Wqkv", "attention_out": "attn.Wo",
    "norm": "mlp_norm", "up_and_gate": "mlp.Wi", "down": "mlp.Wo",
    "final_norm": "model.final_norm", "mlm_transform": "head.dense", "mlm_norm": "head.norm"}
save_bert = bert.save_huggingface                        # the original, which modern.py replaces


def huggingface_names(name):
    """Returns the ModernBERT name of one of our parameters, in a list."""
    if name == "mlm_bias":
        return ["decoder.bias"]
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        _, layer, inner = module.split(".")
        return [f"model.layers.{layer}.{NAMES[inner]}.{kind}"]
    return [f"{NAMES.get(module, module)}.{kind}"]


def save(model, tokenizer_path, folder, longest, theta):
    """Writes a model folder that transformers loads as ModernBERT. theta: THETA of modern.py."""
    save_bert(model, tokenizer_path, folder, longest)
    config = model.config
    changes = {
        "config.json": {
            "architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert",
            "intermediate_size": model.blocks[0].down.in_features,
            "norm_eps": config.layer_norm_eps, "layer_types": ["full_attention"] * config.layers,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": theta}},
            # The same, for transformers 4.
            "global_attn_every_n_layers": 1, "global_rope_theta": theta,
            "embedding_dropout": config.dropout, "attention_dropout": config.dropout,
            "cls_token_id": bert.CLS, "sep_token_id": bert.SEP, "bos_token_id": bert.CLS,
            "eos_token_id": bert.SEP},
        "tokenizer_config.json": {"model_input_names": ["input_ids", "attention_mask"]}}
    for name, fields in changes.items():
        content = json.loads(Path(folder, name).read_text()) | fields
        bert.write_file(Path(folder, name), json.dumps(content, indent=2).encode())
