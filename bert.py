"""BERT with two pre-training heads; saves and loads Hugging Face folders, fills in a [MASK].

    python bert.py runs/demo/model "The [MASK] statement leaves a loop."

This is the original model (Devlin et al., arXiv 1810.04805): an encoder with learned position
embeddings and a LayerNorm after each sum. One head, MLM (masked language model), predicts masked
tokens; the other, NSP (next sentence prediction), predicts from [CLS] whether the second text
follows the first.

Hardly anything is computed for padding (Zeng et al., arXiv 2208.08124): the tokens of all examples
are consecutive rows of one matrix. Only attention needs to know which rows belong to one example;
everything else works row by row.

Shapes, as in "x (N, D)", are those of a micro-batch, a data.Batch:
    B   examples
    T   tokens of one example
    N   rows: the tokens of all examples, padded by up to 63 rows to a multiple of 64
    M   masked tokens, padded by up to 15 entries
    R   rows that the heads read: each example's [CLS], and the masked tokens
    D   width of the model, the size of a hidden state; D_ff: inner width of feed-forward
    H   attention heads, each with D/H columns of Q, K and V
    V   size of the vocabulary
"""
import argparse
import dataclasses
import json
import math
import re
import sys
import unicodedata
from pathlib import Path

import torch
import torch.nn.functional as F
from sentencepiece import SentencePieceProcessor
from torch import nn


class ModelError(ValueError):
    """A model cannot be built, loaded or used; the message says why and what to do."""


# ----- Configuration -----

PRESETS = {                     # name: (layers, width)
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024)}


@dataclasses.dataclass
class BertConfig:
    """The shape of a BERT, in our names; `CONFIG_NAMES` has Hugging Face's."""
    layers: int                         # number of blocks
    width: int                          # D, the size of a hidden state
    heads: int                          # H, number of attention heads; must divide the width
    feed_forward: int                   # D_ff, the width between the two feed-forward matrices
    vocab_size: int                     # V, the rows of the embedding; a multiple of 64 in presets
    max_positions: int = 512            # the largest T that the model can read
    dropout: float = 0.1                # fraction set to 0 in training, of embeddings, attention
                                        # weights, attention outputs and feed-forward outputs
    layer_norm_eps: float = 1e-12       # added to a variance to avoid division by 0
    init_std: float = 0.02              # standard deviation of initial matrices, not embeddings

    @classmethod
    def preset(cls, name, vocab_size, **changes):
        """Returns a configuration of PRESETS, with vocab_size rounded up to a multiple of 64.

        Matrix products are fastest at such sizes.
        """
        layers, width = PRESETS[name]
        return cls(
            layers,
            width,
            heads=width // 64,               # 64 columns each, as in the original
            feed_forward=4 * width,
            vocab_size=(vocab_size + 63) // 64 * 64,
            # The original's 0.02 suits a width of 768. With it narrower models would begin to learn
            # a few hundred steps later, so they get 0.55 / width^0.5, which is 0.02 at 768.
            init_std=max(0.02, 0.55 / width ** 0.5),
            **changes)


# ----- The model -----

# The gradient of an embedding, and of a LayerNorm's weight and bias, is a sum over all rows. On a
# CPU, torch adds it up in the format of the weights. In bf16, with 8 significant bits, it was 2 to
# 45 % off after 9,152 rows, so these two layers compute in fp32 if a CPU model has 16 bits. GPU
# kernels, by their source, sum in fp32; but an embedding's kernel for a call with up to 3,072
# indices sums only 32 of them at a time, and adds these sums in 16 bits, which is about 1 % off.

def rounds_sums(tensor):
    """Returns whether a tensor has 16 bits on a CPU, where torch sums whole gradients in them."""
    return tensor.is_cpu and tensor.dtype.itemsize == 2


class Embedding(nn.Embedding):
    """An nn.Embedding that sums its gradient in fp32 on a CPU."""

    def forward(self, indices):
        """Returns the rows of the table at these indices: (N, D) for (N,)."""
        if not rounds_sums(self.weight):
            return super().forward(indices)
        return F.embedding(indices, self.weight.float()).to(self.weight.dtype)


class LayerNorm(nn.LayerNorm):
    """An nn.LayerNorm that sums its gradients in fp32 on a CPU."""

    def forward(self, x):
        """Returns x (N, D) with rows of mean 0 and variance 1, times the weight, plus the bias."""
        if not rounds_sums(x):
            return super().forward(x)
        fp32 = {name: p.float() for name, p in self.named_parameters()}      # weight and bias
        return F.layer_norm(x.float(), self.normalized_shape, eps=self.eps, **fp32).to(x.dtype)


def embedding(rows, width):
    """Returns an initialised Embedding."""
    table = Embedding(rows, width)
    # Small at every width: larger values cost the demo 0.1 nats.
    nn.init.normal_(table.weight, std=0.02)
    return table


def linear(inputs, outputs, std):
    """Returns an nn.Linear with initial weights of this standard deviation and a bias of 0."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer


class Embeddings(nn.Module):
    """The normalised sum of the embeddings of a token, its position and its segment."""

    def __init__(self, config):
        super().__init__()
        width = config.width
        self.tokens = embedding(config.vocab_size, width)
        self.positions = embedding(config.max_positions, width)
        self.segments = embedding(2, width)
        self.norm = LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens, segments, positions):
        """Returns the first hidden states (N, D) for tokens, segments, positions (N,) int64."""
        x = self.tokens(tokens) + self.positions(positions) + self.segments(segments)    # (N, D)
        return self.dropout(self.norm(x))


def plain_attention(qkv):
    """Returns softmax(Q K^T / sqrt(D/H)) V in each head, for a single example.

    qkv (T, 3, H, D/H) holds Q, K and V of its T tokens; the result has shape (T, H, D/H). See
    Vaswani et al., arXiv 1706.03762, equation 1. This is the version to understand; the model calls
    `attention`, which does the same for all examples of a batch, faster and with dropout.
    """
    q, k, v = qkv.permute(1, 2, 0, 3)                            # (H, T, D/H) each
    scores = q @ k.mT / q.shape[2] ** 0.5                        # (H, T, T)
    weights = scores.softmax(-1)                                 # (H, T, T), each row sums to 1
    return (weights @ v).transpose(0, 1)                         # (T, H, D/H)


def attention_by_length(qkv, lengths, dropout):
    """Returns what `attention` returns, by one call of torch's attention for each length."""
    dtype = qkv.dtype
    if dtype.itemsize == 2:
        # On a CPU the code below can take 2.6 times as long in bf16 as in fp32, in fp16 ten times.
        qkv = qkv.float()

    # A group is b consecutive examples of one length T, so its rows are a batch (b, T) without
    # padding. The picture in `attention` has three: (2, 5), (1, 8) and (1, 46). Groups are few,
    # because data.py sorts the examples of a batch by length.
    lengths = lengths[lengths > 0]
    T_of_groups, b_of_groups = torch.unique_consecutive(lengths, return_counts=True)
    groups = qkv.split((b_of_groups * T_of_groups).tolist())
    outputs = []
    for group, b, T in zip(groups, b_of_groups.tolist(), T_of_groups.tolist()):
        batch = group.unflatten(0, (b, T))                               # (b, T, 3, H, D/H)
        q, k, v = batch.permute(2, 0, 3, 1, 4)                           # (b, H, T, D/H) each
        output = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        outputs.append(output.transpose(1, 2).flatten(0, 1))             # (b T, H, D/H)
    return torch.cat(outputs).to(dtype)


def flash_attention(qkv, bounds, longest, dropout):
    """Returns what `attention` returns, by FlashAttention-2 (Dao, arXiv 2307.08691).

    This is the fastest version, on GPUs that support it. bounds: the row where each example begins;
    longest: the largest length. Torch does not document its function, which takes bounds and
    longest for queries and again for keys.
    """
    q, k, v = qkv.unbind(1)                                      # (N, H, D/H) each
    # The last two arguments: no causal mask (a token also sees later ones), no debugging.
    return torch.ops.aten._flash_attention_forward(
        q, k, v, bounds, bounds, longest, longest, dropout, False, False)[0]


def padded_attention(qkv, bounds, longest, dropout):
    """Returns what `attention` returns, by one call of torch's for examples padded to the longest.

    GPUs without FlashAttention use it, and all GPUs in fp32. bounds, longest: as in
    `flash_attention`.

    Torch's _efficient_attention_forward needs no padding, but its dropout is wrong in a call with
    several examples: backward does not draw the random numbers that forward drew, and so takes the
    gradients of other attention weights than those that forward kept. A note in its source, on
    issue 115590, may explain why.
    """
    lengths = bounds.diff()                                      # (b,), on the GPU
    mask = torch.arange(longest, device=qkv.device) < lengths[:, None]       # (b, T)
    # Row i of qkv is row places[i] of the padded batch. Indexing by `mask` would find the same
    # rows, but the CPU would wait for the GPU to count them.
    starts = torch.arange(len(lengths), device=qkv.device) * longest         # (b,)
    shifts = (starts - bounds[:-1]).repeat_interleave(lengths, output_size=len(qkv))     # (N,)
    places = torch.arange(len(qkv), device=qkv.device) + shifts
    batch = qkv.new_zeros(mask.numel(), *qkv.shape[1:]).index_copy(0, places, qkv)
    q, k, v = batch.unflatten(0, mask.shape).permute(2, 0, 3, 1, 4)          # (b, H, T, D/H) each
    # An example without rows, such as empty padding, gives 0 or NaN, which nothing reads.
    output = F.scaled_dot_product_attention(q, k, v, mask[:, None, None], dropout)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, places)      # (N, H, D/H)


def attention(qkv, bounds, lengths, dropout):
    """Returns `plain_attention` of each example in a batch: (N, H, D/H) for qkv (N, 3, H, D/H).

    bounds and lengths define which rows belong to one example. For examples of 5, 5 and 8 tokens,
    as in the picture in data.Batch:

        rows       0 ... 4 | 5 ... 9 | 10 ... 17 | 18 ... 63
                   ex. 0   | ex. 1   | example 2 | padding
        lengths    5       | 5       | 8         | 46                    (B + 1,)
        bounds     0       | 5       | 10        | 18          | 64      (B + 2,)

    Padding counts as one more example, possibly empty; nothing reads its results. lengths is on the
    CPU, bounds on the model's device. dropout applies to the attention weights.
    """
    if not qkv.is_cuda:
        return attention_by_length(qkv, lengths, dropout)
    longest = int(lengths.max())
    # FlashAttention needs 16 bits and a GPU of compute capability 8.0 (Ampere) or newer.
    if qkv.dtype.itemsize == 2 and torch.cuda.get_device_capability() >= (8, 0):
        return flash_attention(qkv, bounds, longest, dropout)
    return padded_attention(qkv, bounds, longest, dropout)


class Block(nn.Module):
    """One layer of the encoder: attention, then feed-forward.

    The output of each is added to its input, and the sum is normalised (post-LayerNorm). Many later
    models normalise the inputs instead.
    """

    def __init__(self, config):
        super().__init__()
        width = config.width
        std = config.init_std
        self.heads = config.heads
        self.qkv = linear(width, 3 * width, std)                 # one matrix product for Q, K, V
        self.attention_out = linear(width, width, std)
        self.attention_norm = LayerNorm(width, config.layer_norm_eps)
        self.up = linear(width, config.feed_forward, std)
        self.down = linear(config.feed_forward, width, std)
        self.norm = LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, bounds, lengths, rows=None):
        """Returns the next hidden states (N, D) for x (N, D). bounds, lengths: as in `attention`.

        With rows (R,), returns only these rows, (R, D). The last block gets the rows that the heads
        read, so that everything after its attention is computed for R rows, not N.
        """
        qkv = self.qkv(x).view(len(x), 3, self.heads, -1)        # (N, 3, H, D/H)
        # Unlike nn.Dropout, torch's attention functions ignore self.training.
        dropout = self.dropout.p if self.training else 0.0
        attended = attention(qkv, bounds, lengths, dropout).flatten(1)   # (N, D)
        if rows is not None:
            x = x.index_select(0, rows)                          # (R, D)
            attended = attended.index_select(0, rows)            # (R, D)

        x = self.attention_norm(x + self.dropout(self.attention_out(attended)))
        hidden = F.gelu(self.up(x))                              # (N or R, D_ff)
        return self.norm(x + self.dropout(self.down(hidden)))


class BertForPreTraining(nn.Module):
    """The encoder with its masked-token (MLM) and next-sentence (NSP) heads."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        width = config.width
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

        # BERT calls the layer between the hidden state of [CLS] and the NSP head "pooler".
        self.pooler = linear(width, width, config.init_std)
        self.nsp = linear(width, 2, config.init_std)

        # There is no output matrix: `mlm_logits` uses the token embeddings.
        self.mlm_transform = linear(width, width, config.init_std)
        self.mlm_norm = LayerNorm(width, config.layer_norm_eps)
        self.mlm_bias = nn.Parameter(torch.zeros(config.vocab_size))

    def encode(self, rows, tokens, segments, positions, bounds, lengths):
        """Returns the last hidden states (R, D) of the rows (R,), all that the heads read.

        The other arguments are fields of data.Batch: tokens, segments and positions (N,) are token
        ids, 0 or 1 for segment A or B, and positions in an example; bounds, lengths: as in
        `attention`. `fill_mask` also calls this, with all segments A.
        """
        x = self.embeddings(tokens, segments, positions)         # (N, D)
        for block in self.blocks[:-1]:
            x = block(x, bounds, lengths)
        return self.blocks[-1](x, bounds, lengths, rows)

    def mlm_logits(self, hidden):
        """Returns the logits (M, V) for the hidden states (M, D) of masked tokens."""
        hidden = self.mlm_norm(F.gelu(self.mlm_transform(hidden)))
        return F.linear(hidden, self.embeddings.tokens.weight, self.mlm_bias)

    def forward(self, batch):
        """Returns the logits of both tasks, named like their labels in data.Batch.

        They are "mlm" (M, V) for the masked tokens and "nsp" (B, 2) for the pairs; without pairs
        nothing reads "nsp".
        """
        # The heads read only [CLS] and the masked tokens, so (N, V) logits of all tokens, which
        # would be most of the work of `tiny`, never exist.
        examples = len(batch.lengths) - 1
        # (R,), R = B + M: the first row of each example, which is [CLS], then the masked rows.
        # masked_rows is padded with row 0, and the labels of this padding are IGNORED.
        rows = torch.cat([batch.bounds[:examples], batch.masked_rows])
        hidden = self.encode(rows, batch.tokens, batch.segments, batch.positions,
                             batch.bounds, batch.lengths)        # (R, D)

        # (B, D). Without pairs the pooler is not trained, see train.build_model.
        pooled = torch.tanh(self.pooler(hidden[:examples]))
        return {"mlm": self.mlm_logits(hidden[examples:]), "nsp": self.nsp(pooled)}


# ----- Hugging Face folders: names -----

MODULE_NAMES = {                     # our module: theirs, outside the blocks
    "embeddings.tokens": "bert.embeddings.word_embeddings",
    "embeddings.positions": "bert.embeddings.position_embeddings",
    "embeddings.segments": "bert.embeddings.token_type_embeddings",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "nsp": "cls.seq_relationship",
    "mlm_transform": "cls.predictions.transform.dense",
    "mlm_norm": "cls.predictions.transform.LayerNorm"}
BLOCK_NAMES = {                      # our module: theirs, within a block; `qkv` has three of theirs
    "qkv": "attention.self.query attention.self.key attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm"}
CONFIG_NAMES = {                     # our field of BertConfig: theirs in config.json
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "dropout": "hidden_dropout_prob",
    "layer_norm_eps": "layer_norm_eps",
    "init_std": "initializer_range"}

# The model_type in config.json: for models with Hugging Face's names, and for others. If you change
# what a model computes, change its type here: then transformers' Auto classes, and programs without
# the change, refuse its folder.
MODEL_TYPES = ["bert", "thriftbert"]

# The ids of the special tokens, and the characters dropped from all text, such as soft hyphens and
# direction marks. data.py defines both, too, so that neither file imports the other.
PAD, UNK, CLS, SEP, MASK = range(5)
INVISIBLE = "[\0\u00ad\u061c\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"


def huggingface_names(name):
    """Returns the Hugging Face names (a list) of one of our parameters.

    The matrix of Q, K and V has three, and so has their bias; others have one. A parameter that
    Hugging Face's BERT lacks keeps our name.
    """
    if name == "mlm_bias":
        return ["cls.predictions.bias"]
    module, _, kind = name.rpartition(".")                   # "nsp.weight" -> "nsp", "weight"
    if kind not in ("weight", "bias"):
        return [name]
    if module in MODULE_NAMES:
        return [f"{MODULE_NAMES[module]}.{kind}"]
    # Others are in a block, such as "blocks.3.qkv.weight".
    block = re.fullmatch(r"blocks\.(\d+)\.(\w+)", module)
    if block and block[2] in BLOCK_NAMES:
        parts = BLOCK_NAMES[block[2]].split()
        return [f"bert.encoder.layer.{block[1]}.{part}.{kind}" for part in parts]
    return [name]


def unlike_huggingface(model):
    """Returns the names (a list) of tensors that only this model or only Hugging Face's BERT has.

    Of Hugging Face's, only weights outside the blocks count. Names do not show what is computed.
    """
    names = model.state_dict().keys()
    added = [name for name in names if huggingface_names(name) == [name]]
    return added + sorted({f"{module}.weight" for module in MODULE_NAMES} - names)


# ----- Hugging Face folders: save -----

def replace(pattern, content):
    """Returns the step of a tokenizer.json that replaces matches of a regular expression."""
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def normalizer_steps(tokenizer):
    """Returns the steps of tokenizer.json that change a text before it is cut into pieces.

    Together they do what data.py does, INVISIBLE and Unicode's form NFKC, and what SentencePiece
    does by its own rule, nmt_nfkc for a cased tokenizer, nmt_nfkc_cf for an uncased one.
    """
    # INVISIBLE and control characters are dropped. At the start they become a space, so that the
    # text begins with a new word.
    dropped = rf"({INVISIBLE}|[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f])+"
    steps = [
        replace(f"^{dropped}", " "),
        replace(dropped, ""),
        # White space, and a few characters that SentencePiece takes for it, become spaces.
        replace("[\t\n\f\r\u1680\u200b\u200c\u2028\u2029\ufffd▁]", " "),
        {"type": "NFKC"},
        # Of several spaces the last remains, next to its word; at the end none does.
        replace(" +(?= |$)", "")]
    if tokenizer.normalize("A") == "▁a":
        # SentencePiece has one small sigma, and leaves the Turkish dotted I a capital.
        steps += [{"type": "Lowercase"}, replace("ς", "σ"), replace("i\u0307", "İ")]
    return steps


def tokenizer_json(tokenizer):
    """Returns the tokenizer.json (a dict) that cuts text as data.py's SentencePieceProcessor does.

    Hugging Face's library `tokenizers` documents the format. Pieces begin with a space where
    SentencePiece's begin with "▁". A token's offsets exclude this space, but at the very beginning
    of a text include the last of the spaces there. Differences from SentencePiece:
    - of two equally likely cuts it may choose the other, because it adds scores in fp64;
    - "[MASK]" in a text becomes the token [MASK], and other special tokens likewise; data.py cuts
      them like any text;
    - a new word begins where one of INVISIBLE follows a [MASK];
    - `tokenizers` has the Unicode of 2018 and does not replace later characters;
    - uncased, a few rare letters, such as Cherokee and a dotted small i, come out differently
      (tests/RESULTS.md counts them).
    """
    vocab = [
        (tokenizer.id_to_piece(i).replace("▁", " "), tokenizer.get_score(i))
        for i in range(len(tokenizer))]
    # "Metaspace" cuts before each space. Text before the first [MASK] begins with a new word; text
    # after a [MASK] does so only after a space, as in `encode_with_masks`.
    spaces = {"type": "Metaspace", "replacement": " ", "prepend_scheme": "first"}
    special_tokens = [
        {"id": i, "content": tokenizer.id_to_piece(i), "special": True, "normalized": False,
         "single_word": False, "lstrip": False, "rstrip": False} for i in range(MASK + 1)]
    return {
        "added_tokens": special_tokens,
        "normalizer": {"type": "Sequence", "normalizers": normalizer_steps(tokenizer)},
        "pre_tokenizer": spaces,
        "model": {"type": "Unigram", "unk_id": UNK, "vocab": vocab},
        "post_processor": {"type": "Sequence", "processors": [
            # Here only for trim_offsets, which excludes the space before a word from its offsets.
            # Nothing is cut into bytes.
            {"type": "ByteLevel", "trim_offsets": True, "add_prefix_space": True},
            {"type": "BertProcessing", "cls": ["[CLS]", CLS], "sep": ["[SEP]", SEP]}]},
        "decoder": spaces}


# What save_pretrained may write in addition: copies, and position numbers.
TIED = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
        "bert.embeddings.position_ids"}
# safetensors' names of formats; some versions of save_pretrained write position numbers, as I64.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def pack(tensors):
    """Returns fp32 tensors, {name: tensor}, as the bytes of a safetensors file.

    The file has 8 bytes for the length of the header, then the header, then the values of the
    tensors one after another. An example of a header:

        {"bert.pooler.dense.bias": {"dtype": "F32", "shape": [128], "data_offsets": [0, 512]}, ...}
    """
    header = {"__metadata__": {"format": "pt"}}              # older transformers require it
    parts = []
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end += tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
        parts.append(tensor.numpy().tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)                          # values begin at a multiple of 8
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def unpack(content):
    """Returns the tensors of a safetensors file, {name: tensor}.

    They share the memory of content, a bytearray, so a header cannot claim more. A wrong header
    can raise any exception.
    """
    values = 8 + int.from_bytes(content[:8], "little")       # where the values begin
    header = json.loads(content[8:values])
    header.pop("__metadata__", None)
    tensors = {}
    place = 0                                                # where the next tensor begins
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        tensor = torch.frombuffer(content, dtype=DTYPES[entry["dtype"]], offset=values + place,
                                  count=math.prod(entry["shape"]))
        end = place + tensor.nbytes
        if entry["data_offsets"] != [place, end]:
            raise ValueError(f"{name} does not have the size of its shape, or is out of place")
        tensors[name] = tensor.view(entry["shape"])
        place = end
    if values + place != len(content):
        raise ValueError("its size does not match its tensors")
    return tensors


def write_file(path, content):
    """Writes bytes to a file. If the program is killed meanwhile, the old file is unchanged."""
    temporary = Path(f"{path}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)           # a full disk raises an error without a file name
        raise


def save_huggingface(model, tokenizer_path, folder, longest):
    """Writes a model folder that Hugging Face's transformers can load.

    It holds model.safetensors (fp32), config.json, tokenizer.json, tokenizer_config.json and a copy
    of the tokenizer.model. `transformers.AutoModelForMaskedLM.from_pretrained(folder)` gives the
    same logits, AutoTokenizer the same tokens, except as listed in `tokenizer_json`. longest, the
    length of rank 0's longest training example in tokens, becomes AutoTokenizer's model_max_length.
    Raises OSError if a file cannot be read or written, RuntimeError or IndexError if
    tokenizer_path is not a tokenizer.
    """
    weights = {}
    for name, tensor in model.state_dict().items():
        names = huggingface_names(name)
        parts = tensor.float().cpu().chunk(len(names))
        weights.update(zip(names, parts))

    model_type = MODEL_TYPES[1] if unlike_huggingface(model) else MODEL_TYPES[0]
    config = {"architectures": ["BertForPreTraining"], "model_type": model_type,
              "pad_token_id": PAD, "attention_probs_dropout_prob": model.config.dropout}
    for ours, theirs in CONFIG_NAMES.items():
        config[theirs] = getattr(model.config, ours)
    tokenizer_model = Path(tokenizer_path).read_bytes()
    tokenizer_config = {
        # Without this line transformers 5 would build the tokenizer of other BERTs, WordPiece.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,       # older transformers would drop spaces
        "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
        "mask_token": "[MASK]"}

    Path(folder).mkdir(parents=True, exist_ok=True)
    write_file(f"{folder}/model.safetensors", pack(weights))
    write_file(f"{folder}/tokenizer.model", tokenizer_model)
    descriptions = {
        "config.json": config,
        "tokenizer.json": tokenizer_json(SentencePieceProcessor(model_proto=tokenizer_model)),
        "tokenizer_config.json": tokenizer_config}
    for name, content in descriptions.items():
        write_file(f"{folder}/{name}", json.dumps(content, indent=1).encode())


# ----- Hugging Face folders: load -----

def load_huggingface(folder):
    """Returns a BertForPreTraining (fp32, training mode) with the weights of a folder.

    Reads the config.json and model.safetensors that `save_huggingface` writes, or save_pretrained
    of transformers' BertForPreTraining in fp32, fp16 or bf16. Raises ModelError if one is missing
    or unreadable, if the model has other tensors or numbers that are not finite, or if config.json
    describes a different computation. There are no checksums: a changed number goes unnoticed.
    """
    try:
        described = json.loads(Path(folder, "config.json").read_text())
        if described["model_type"] not in MODEL_TYPES:
            raise ValueError(f"its type is {described['model_type']}")
        fixed = {"hidden_act": "gelu", "tie_word_embeddings": True, "is_decoder": False}
        for field, ours in fixed.items():
            if described.get(field, ours) != ours:
                raise ValueError(f"its {field} is {described[field]}, not {ours}")
        fields = {}
        for ours, theirs in CONFIG_NAMES.items():
            kind = BertConfig.__annotations__[ours]          # int or float
            fields[ours] = kind(described[theirs])
            if fields[ours] != described[theirs]:
                raise ValueError(f"its {theirs} is {described[theirs]!r}")
        # Tensors on the device "meta" have a shape but no memory: a wrong width cannot use it up.
        # Below, assign=True puts the loaded tensors in their places.
        with torch.device("meta"):
            model = BertForPreTraining(BertConfig(**fields))

        stored = unpack(bytearray(Path(folder, "model.safetensors").read_bytes()))
        weights = {}
        for name in model.state_dict():
            # Q, K and V are the thirds of one matrix.
            parts = [stored.pop(part) for part in huggingface_names(name)]
            weights[name] = torch.cat(parts).float()
            if not weights[name].isfinite().all():
                raise ValueError(f"{name} has inf or NaN")
        left = stored.keys() - TIED
        if left:
            raise ValueError(f"it has {', '.join(sorted(left))}, too")
        model.load_state_dict(weights, assign=True)
        return model
    except Exception as error:
        # A damaged file can raise anything, also an error of several lines.
        words = " ".join(str(error).split())
        raise ModelError(f"{folder} holds no model that this program can load (a run has one in "
                         "model/; of transformers' classes only BertForPreTraining has all "
                         f"weights): {type(error).__name__}: {words:.300}")


def init_from(folder, model, tokenizer_path):
    """Gives a model the weights of a folder.

    Raises ModelError if the folder's model has a different shape, or if its tokenizer.model is not
    a copy of tokenizer_path, because its tokens would be different words.
    """
    own = Path(folder, "tokenizer.model")
    if not own.exists() or own.read_bytes() != Path(tokenizer_path).read_bytes():
        raise ModelError(
            f"{own} is missing or not a copy of {tokenizer_path}; copy it from runs/NAME/model, "
            f"since Hugging Face does not save it, and make shards with data.py --tokenizer {own}")
    loaded = load_huggingface(folder)
    # Dropout and init_std may differ; everything else is compared.
    alike = dataclasses.replace(
        loaded.config, dropout=model.config.dropout, init_std=model.config.init_std)
    if alike != model.config:
        raise ModelError(f"{folder} does not have the shape of --model (by default tiny): it has "
                         f"{loaded.config}")
    model.load_state_dict(loaded.state_dict())


# ----- Fill in a [MASK] -----

# Replaces each [MASK] in a text, because SentencePiece finds no [MASK] there. Unicode guarantees
# that this code point is no character, so programs may use it.
STAND_IN = "\ufffe"


def encode_with_masks(tokenizer, text):
    """Returns the token ids of [CLS] text [SEP], where each "[MASK]" in the text is one token.

    "a [MASK]s." has the pieces "▁a", "▁", STAND_IN, "s", "." and the tokens "▁a", [MASK], "s", ".":
    the lone "▁" is the masked word's own space, so [MASK] stands for it, too.
    """
    text = unicodedata.normalize("NFKC", re.sub(INVISIBLE, "", text))
    # Join the pieces with spaces, which no piece contains. Drop the lone "▁" before a stand-in, and
    # make the stand-in a piece of its own; it can be part of one, because SentencePiece joins
    # adjacent unknown characters.
    pieces = " ".join(tokenizer.encode(text.replace("[MASK]", STAND_IN), out_type=str))
    pieces = pieces.replace(f"▁ {STAND_IN}", STAND_IN).replace(STAND_IN, " [MASK] ")
    # Only at spaces: some rare pieces are white space of another kind.
    words = [piece for piece in pieces.split(" ") if piece]
    return [CLS] + tokenizer.piece_to_id(words) + [SEP]


def fill_mask(model, tokenizer, text, count=5):
    """Returns, for each [MASK] in a text, the `count` likeliest tokens, as "be 12%, ##en 3%".

    Pieces that follow without a space, such as endings, begin with ##. The model is in
    evaluation mode afterwards. The guesses are poor if the text has more tokens than the training
    examples (128 in the demo). Raises ModelError if the text has no [MASK], or more tokens than
    max_positions, or if the tokenizer has more pieces than the model.
    """
    ids = encode_with_masks(tokenizer, text)
    T = len(ids)
    limit = model.config.max_positions
    if MASK not in ids or T > limit:
        raise ModelError(f"a text needs at least one [MASK] and at most {limit} tokens; this one "
                         f"has {ids.count(MASK)} and {T}")
    if len(tokenizer) > model.config.vocab_size:
        raise ModelError("this tokenizer is a different model's; copy this model's tokenizer.model")
    model.eval()
    # Tensors created here without `device=` are on the model's device.
    with torch.no_grad(), model.mlm_bias.device:
        tokens = torch.tensor(ids)                                   # (T,)
        masked_rows = torch.where(tokens == MASK)[0]                 # (M,)
        # One example, and padding of 0 rows.
        bounds = torch.tensor([0, T, T], dtype=torch.int32)
        lengths = torch.tensor([T, 0], device="cpu")
        hidden = model.encode(masked_rows, tokens, torch.zeros_like(tokens), torch.arange(T),
                              bounds, lengths)                       # (M, D)
        # The last columns only pad the vocabulary to a multiple of 64 and belong to no piece.
        logits = model.mlm_logits(hidden)[:, :len(tokenizer)]

    best = logits.softmax(1).topk(count)
    lines = []
    for probabilities, choices in zip(best.values.tolist(), best.indices.tolist()):
        words = []
        for token, p in zip(choices, probabilities):
            word = tokenizer.id_to_piece(token)
            if token > MASK and word[0] != "▁":
                word = f"##{word}"
            words.append(f"{word.removeprefix('▁') or '▁'} {p:.0%}")
        lines.append(", ".join(words))
    return lines


# ----- The program -----

def main():
    """Prints a line of likely words for each [MASK].

    Failures give one line on stderr, wrong arguments argparse's usage.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("text")
    flags = parser.parse_args()
    try:
        model = load_huggingface(flags.folder)
        tokenizer = SentencePieceProcessor(model_file=f"{flags.folder}/tokenizer.model")
        print("\n".join(fill_mask(model, tokenizer, flags.text)), flush=True)
    except (ValueError, OSError, RuntimeError) as error:
        # UnicodeEncodeError, from a terminal without UTF-8, is a ValueError.
        sys.exit(f"bert.py: {error}")


if __name__ == "__main__":
    main()
