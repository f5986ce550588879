"""BERT and its two pre-training heads, Hugging Face weights in and out, and a [MASK] filled in.

    python bert.py runs/demo/model "The [MASK] statement leaves a loop."

The original model (Devlin et al., arXiv 1810.04805): post-LayerNorm, GELU with erf, learned
positions, a masked-token head tied to the embeddings and a next-sentence head on [CLS].

Shapes: B examples, T tokens, D width, H heads, M masked tokens of the batch, V vocabulary.
"""
import argparse
import dataclasses
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

PRESETS = {             # layers, width
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


class ModelError(ValueError):
    """A model that cannot be built, loaded or asked; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The shape of a BERT. Field names are this project's; `save_huggingface` translates them."""
    layers: int
    width: int
    heads: int
    feed_forward: int
    vocab_size: int             # a multiple of 64, so that matrix products have friendly shapes
    max_positions: int = 512
    dropout: float = 0.1        # of the hidden states and of the attention weights
    layer_norm_eps: float = 1e-12
    init_std: float = 0.02

    @classmethod
    def preset(cls, name, vocab_size, **changes):
        """Returns a named configuration; vocab_size is rounded up to a multiple of 64.

        Raises ModelError for an unknown name, listing the known ones.
        """
        if name not in PRESETS:
            raise ModelError(f"unknown model {name!r}; known are {', '.join(PRESETS)}")
        layers, width = PRESETS[name]
        return cls(layers, width, width // 64, 4 * width, -(-vocab_size // 64) * 64, **changes)


class Losses(NamedTuple):
    """Sums over a batch, not means: only the caller knows the divisor, the whole step's counts."""
    mlm_sum: torch.Tensor    # () fp32, cross-entropy of the masked tokens, nats
    nsp_sum: torch.Tensor    # () fp32, cross-entropy of the sentence pairs, nats
    mlm_hits: torch.Tensor   # () int64, masked tokens whose likeliest token is the right one
    nsp_hits: torch.Tensor   # () int64, pairs classified rightly


class Embeddings(nn.Module):
    """Sum of token, position and segment embeddings, normalised: (B, T) -> (B, T, D)."""

    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width)
        self.segments = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens, segments):
        positions = self.positions.weight[:tokens.shape[1]]                      # (T, D)
        x = self.tokens(tokens) + positions + self.segments(segments)            # (B, T, D)
        return self.dropout(self.norm(x))


class Block(nn.Module):
    """One encoder layer: attention, then feed-forward, each added to its input, then normalised."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.attention_norm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.up = nn.Linear(config.width, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, config.width)
        self.norm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, mask):
        """x (B, T, D), mask (B, 1, 1, T) with True where there is a token; returns (B, T, D)."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        mixed = mixed.transpose(1, 2).reshape(B, T, D)                           # (B, T, D)
        x = self.attention_norm(x + self.dropout(self.attention_out(mixed)))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


class BertForPreTraining(nn.Module):
    """The encoder with the masked-token (MLM) and the next-sentence (NSP) head."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width)
        self.nsp = nn.Linear(config.width, 2)
        self.mlm_transform = nn.Linear(config.width, config.width)
        self.mlm_norm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.mlm_bias = nn.Parameter(torch.zeros(config.vocab_size))   # the matrix is the embedding
        self.apply(self._initialise)

    def _initialise(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.init_std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def encode(self, tokens, segments, mask):
        """Returns the hidden states (B, T, D) of tokens and segments (B, T), mask (B, T) bool."""
        x = self.embeddings(tokens, segments)
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        return x

    def mlm_logits(self, hidden):
        """Returns the logits (M, V) of hidden states (M, D) at masked positions."""
        hidden = self.mlm_norm(F.gelu(self.mlm_transform(hidden)))
        return F.linear(hidden, self.embeddings.tokens.weight, self.mlm_bias)

    def nsp_logits(self, hidden):
        """Returns the logits (B, 2), true next or random, of hidden states (B, T, D)."""
        return self.nsp(torch.tanh(self.pooler(hidden[:, 0])))

    def forward(self, batch):
        """Returns the Losses of a batch, any object with these fields: tokens, segments, mask
        (B, T), flat positions b * T + t and labels (M,), where -100 does not count, random_b (B,).

        Only the masked positions go through the MLM head: the (B, T, V) logits never exist, which
        is most of what makes small models fast. Cross-entropies are computed in fp32 at least.
        """
        hidden = self.encode(batch.tokens, batch.segments, batch.mask)           # (B, T, D)
        masked = hidden.flatten(0, 1)[batch.positions]                           # (M, D)
        mlm, nsp = _at_least_fp32(self.mlm_logits(masked)), _at_least_fp32(self.nsp_logits(hidden))
        return Losses(F.cross_entropy(mlm, batch.labels, reduction="sum"),
                      F.cross_entropy(nsp, batch.random_b, reduction="sum"),
                      (mlm.argmax(-1) == batch.labels).sum(),
                      (nsp.argmax(-1) == batch.random_b).sum())


def _at_least_fp32(logits):
    return logits if logits.dtype == torch.float64 else logits.float()


def flops_per_example(config, length, masked):
    """Returns the floating-point operations of one example, forward and backward.

    length: its tokens T; masked: its masked tokens M. A multiply-add counts as two operations,
    backward as twice the forward, and with D width, F feed-forward and L layers

        forward = L * T * (8 D^2 + 4 D F + 4 T D) + M * (2 D^2 + 2 D V) + 2 D^2

    which is the matrix products of the layers, of the MLM head at masked tokens and of the pooler.
    """
    D, T, V = config.width, length, config.vocab_size
    layer = T * (8 * D * D + 4 * D * config.feed_forward + 4 * T * D)
    return 3 * (config.layers * layer + masked * (2 * D * D + 2 * D * V) + 2 * D * D)


# ----- Hugging Face folders -----

# Our module -> theirs, outside the layers and inside of one.
OUTER = {
    "embeddings.tokens": "bert.embeddings.word_embeddings",
    "embeddings.positions": "bert.embeddings.position_embeddings",
    "embeddings.segments": "bert.embeddings.token_type_embeddings",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "nsp": "cls.seq_relationship",
    "mlm_transform": "cls.predictions.transform.dense",
    "mlm_norm": "cls.predictions.transform.LayerNorm",
}
INNER = {
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
CONFIG = {               # our field -> theirs
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "dropout": "hidden_dropout_prob",
    "layer_norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
}


def huggingface_names(name):
    """Returns the Hugging Face names of one of our parameters: one, or three for Q, K and V."""
    if name == "mlm_bias":
        return ["cls.predictions.bias"]
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return [f"{OUTER[module]}.{kind}"]
    _, layer, inner = module.split(".")
    theirs = [INNER[inner]] if inner != "qkv" else \
        [f"attention.self.{part}" for part in ("query", "key", "value")]
    return [f"bert.encoder.layer.{layer}.{part}.{kind}" for part in theirs]


def save_huggingface(model, tokenizer, folder):
    """Writes config.json, model.safetensors (fp32) and a copy of the file `tokenizer` to a folder.

    `transformers.AutoModelForMaskedLM.from_pretrained(folder)` gives the same logits. Each file is
    written under a temporary name and renamed. Raises OSError if it cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {theirs: getattr(model.config, ours) for ours, theirs in CONFIG.items()}
    config |= {"architectures": ["BertForPreTraining"], "model_type": "bert", "hidden_act": "gelu",
               "attention_probs_dropout_prob": model.config.dropout, "type_vocab_size": 2,
               "pad_token_id": 0, "tie_word_embeddings": True}
    tensors = {}
    for name, parameter in model.named_parameters():
        names = huggingface_names(name)
        for theirs, part in zip(names, parameter.detach().float().cpu().chunk(len(names))):
            tensors[theirs] = part.contiguous()
    _replace(folder / "model.safetensors", safetensors(tensors))
    _replace(folder / "config.json", [json.dumps(config, indent=2).encode() + b"\n"])
    shutil.copyfile(tokenizer, folder / "tokenizer.model.tmp")
    os.replace(folder / "tokenizer.model.tmp", folder / "tokenizer.model")


def _replace(path, parts):
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        for part in parts:
            file.write(part)
    os.replace(temporary, path)


def safetensors(tensors):
    """Yields the bytes of a safetensors file of fp32 tensors {name: tensor}: the header's length,
    the header as JSON, the raw numbers."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        size = 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.numpy().tobytes()


def read_weights(folder):
    """Returns {name: tensor} of a Hugging Face folder's model.safetensors or pytorch_model.bin.

    Raises ModelError if there is neither, or if the file cannot be read.
    """
    path, pickled = Path(folder) / "model.safetensors", Path(folder) / "pytorch_model.bin"
    if not path.exists() and not pickled.exists():
        raise ModelError(f"{folder} holds neither {path.name} nor {pickled.name}")
    if not path.exists():
        try:
            return torch.load(pickled, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, IndexError):
            raise ModelError(f"{pickled} is damaged, or holds more than weights") from None
    types = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
             "BF16": torch.bfloat16, "I64": torch.int64}
    try:
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        header.pop("__metadata__", None)
        return {name: torch.frombuffer(
                    data, dtype=types[entry["dtype"]], offset=begin + entry["data_offsets"][0],
                    count=torch.Size(entry["shape"]).numel()).view(entry["shape"])
                for name, entry in header.items()}
    except (ValueError, KeyError) as error:
        raise ModelError(f"{path} is cut or damaged ({error})") from None


def load_huggingface(folder):
    """Returns a BertForPreTraining (fp32, training mode) with the weights of a Hugging Face folder.

    The vocabulary is padded to a multiple of 64 by zero rows. Files of BertModel, BertForMaskedLM
    load too: heads that the file lacks keep their random initialisation, and a line on stderr names
    them. Raises ModelError if the folder is not a BERT or a tensor of the encoder is missing.
    """
    try:
        theirs = json.loads((Path(folder) / "config.json").read_text())
    except OSError as error:
        raise ModelError(f"{folder} is no model folder: config.json: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{folder}/config.json is damaged ({error})") from None
    if theirs.get("model_type") != "bert" or theirs.get("hidden_act", "gelu") != "gelu":
        raise ModelError(f"{folder} is not a BERT with GELU (model_type "
                         f"{theirs.get('model_type')!r}, hidden_act {theirs.get('hidden_act')!r})")
    fields = {ours: theirs[name] for ours, name in CONFIG.items() if name in theirs}
    if lacking := {"layers", "width", "heads", "feed_forward", "vocab_size"} - set(fields):
        raise ModelError(f"{folder}/config.json lacks {', '.join(CONFIG[key] for key in lacking)}")
    model = BertForPreTraining(BertConfig(**{
        **fields, "vocab_size": -(-fields["vocab_size"] // 64) * 64}))
    weights = {}
    for name, tensor in read_weights(folder).items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")       # files of 2018 and 2019
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        weights[name if name.startswith(("bert.", "cls.")) else f"bert.{name}"] = tensor
    absent = []
    for name, parameter in model.named_parameters():
        names = huggingface_names(name)
        if all(part in weights for part in names):
            value = torch.cat([weights[part] for part in names])
            if value.shape[1:] != parameter.shape[1:] or len(value) > len(parameter):
                raise ModelError(f"{folder}: {names[0]} has a shape that config.json does not give")
            with torch.no_grad():
                parameter[:len(value)].copy_(value)
                parameter[len(value):].zero_()
        elif names[0].startswith("bert.") and "pooler" not in names[0]:
            raise ModelError(f"{folder}: the weights lack {', '.join(names)}")
        else:
            absent.append(name)
    if absent:
        print(f"{folder}: no weights for {', '.join(absent)}; they stay random", file=sys.stderr)
    return model


# ----- The program: fill in a [MASK] -----

CLS, SEP, MASK = 2, 3, 4           # ids of the control symbols, as data.py's tokenizer has them
STAND_IN = "\ue000"                # a private character in place of [MASK], which no text can spell


def encode_with_masks(tokenizer, text):
    """Returns the token ids [CLS] text [SEP], each "[MASK]" of the text one masked token."""
    tokens = [CLS]
    for piece in tokenizer.encode(text.replace("[MASK]", STAND_IN), out_type=str):
        before, stand_in, after = piece.partition(STAND_IN)
        if not stand_in:
            tokens.append(tokenizer.piece_to_id(piece))
            continue
        if tokens[-1] == tokenizer.piece_to_id("▁") and not before:
            tokens.pop()                            # the word's begin belongs to the masked word
        tokens += [MASK] * (1 + after.count(STAND_IN))
    return tokens + [SEP]


@torch.no_grad()
def fill_mask(model, tokenizer, text, count=5):
    """Returns, for each [MASK] of a text, the `count` likeliest pieces as (piece, probability).

    Leaves the model in evaluation mode. Raises ModelError if there is no [MASK] or the text is
    longer than the model's positions.
    """
    tokens = torch.tensor([encode_with_masks(tokenizer, text)])                  # (1, T)
    if tokens.shape[1] > model.config.max_positions:
        raise ModelError(f"the text has {tokens.shape[1]} tokens, the model reads "
                         f"{model.config.max_positions}; shorten it")
    masked = tokens == MASK
    if not masked.any():
        raise ModelError("the text has no [MASK] to fill in")
    model.eval()
    hidden = model.encode(tokens, torch.zeros_like(tokens), torch.ones_like(masked))
    logits = model.mlm_logits(hidden[masked]).float()[:, :tokenizer.get_piece_size()]
    best = logits.softmax(-1).topk(count)
    return [[(tokenizer.id_to_piece(token), probability)
             for token, probability in zip(tokens, probabilities)]
            for tokens, probabilities in zip(best.indices.tolist(), best.values.tolist())]


def main():
    parser = argparse.ArgumentParser(description="Fill in each [MASK] of a text.")
    parser.add_argument("folder", help="a model folder, for example runs/demo/model")
    parser.add_argument("text", help='a text with [MASK] in it')
    args = parser.parse_args()
    import sentencepiece            # only this program needs it
    try:
        model = load_huggingface(args.folder)
        path = Path(args.folder) / "tokenizer.model"
        if not path.exists():
            raise ModelError(f"{path} is missing; copy there the one of the model's training")
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
        filled = fill_mask(model, tokenizer, args.text)
    except (ModelError, OSError) as error:
        sys.exit(f"bert.py: {error}")
    for number, candidates in enumerate(filled, 1):
        if len(filled) > 1:
            print(f"[MASK] {number}")
        for piece, probability in candidates:
            print(f"{probability:7.1%}  {piece.replace('▁', '')}")


if __name__ == "__main__":
    main()
