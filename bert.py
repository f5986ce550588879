"""BERT and its two pre-training heads, Hugging Face weights in and out, and a [MASK] filled in.

    python bert.py runs/demo/model "The [MASK] statement leaves a loop."

The original model (Devlin et al., arXiv 1810.04805): post-LayerNorm, GELU with erf, learned
positions. Two heads are trained with it. One predicts masked tokens (MLM, masked language model),
the other predicts from [CLS] whether the second text follows the first (NSP, next sentence).

Hardly anything is computed for padding (Zeng et al., arXiv 2208.08124). The tokens of all examples
stand one after another, as rows of one matrix. Attention alone has to know which rows belong to one
example; everything else treats each row by itself.

What to read: first the model, from `BertConfig` to `BertForPreTraining`. The three parts after it
can be skipped: Hugging Face folders, filling in a [MASK], the arithmetic of `train.py --plan`.

Shapes, as in "x (N, D)":
    B   examples of the batch
    T   tokens of one example
    N   rows: the tokens of all examples, and up to 63 rows more to make N a multiple of 64
    M   masked tokens of the batch, and up to 15 entries that pad them
    R   rows that the heads read: one [CLS] an example, and the masked tokens
    D   width of the model, the size of a hidden state; D_ff: that inside of feed-forward
    H   heads of attention, each with D/H columns of Q, K and V
    V   size of the vocabulary
"""
import argparse
import base64
import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sentencepiece import SentencePieceNormalizer, SentencePieceProcessor
from torch import nn
from torch.utils.checkpoint import checkpoint

# cuDNN's attention is off: it prepares anew for every shape, which is slow here.
torch.backends.cuda.enable_cudnn_sdp(False)


class ModelError(ValueError):
    """A model that cannot be built, loaded or asked; the message says why and what to do."""


# ----- Configuration -----

PRESETS = {                     # name: (layers, width)
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024)}


def multiple_of_64(size):
    """Returns a size rounded up to a multiple of 64; matrix products are fastest at such shapes."""
    return math.ceil(size / 64) * 64


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The shape of a BERT. The names are ours; `CONFIG_NAMES` has those of Hugging Face."""
    layers: int                         # L, the number of blocks
    width: int                          # D, the size of a hidden state
    heads: int                          # H, the heads of attention; they divide the width
    feed_forward: int                   # D_ff, the width between the two matrices of feed-forward
    vocab_size: int                     # V, the rows of the embedding, a multiple of 64
    max_positions: int = 512            # the largest T that the model can read
    dropout: float = 0.1                # the fraction of hidden states that is set to 0 in training
    attention_dropout: float = 0.0      # the same of attention weights; 0.1 in the original
    layer_norm_eps: float = 1e-12       # is added to a variance, so that nothing is divided by 0
    init_std: float = 0.02              # the standard deviation of initial weights

    @classmethod
    def preset(cls, name, vocab_size, **changes):
        """Returns a configuration of PRESETS; vocab_size is rounded up to a multiple of 64."""
        layers, width = PRESETS[name]
        return cls(
            layers,
            width,
            heads=width // 64,
            feed_forward=4 * width,
            vocab_size=multiple_of_64(vocab_size),
            **changes)


# ----- The model -----

class Embeddings(nn.Module):
    """The sum of a token's, its position's and its segment's embedding, normalised."""

    def __init__(self, config):
        super().__init__()
        width = config.width
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_positions, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens, segments, positions):
        """Returns the first hidden states (N, D). tokens, segments, positions: (N,) int64."""
        x = self.tokens(tokens) + self.positions(positions) + self.segments(segments)    # (N, D)
        return self.dropout(self.norm(x))


def plain_attention(qkv):
    """Returns softmax(Q K^T / sqrt(D/H)) V in each head, for one example alone.

    qkv (T, 3, H, D/H) holds Q, K and V of its T tokens; the result has the shape (T, H, D/H). See
    Vaswani et al., arXiv 1706.03762, equation 1. This is what to understand; what the model calls
    is `attention` below, which does the same for all examples of a batch, and faster.
    """
    q, k, v = qkv.permute(1, 2, 0, 3)                            # (H, T, D/H) each
    scores = q @ k.mT / math.sqrt(q.shape[2])                    # (H, T, T)
    weights = scores.softmax(-1)                                 # (H, T, T), each row sums to 1
    return (weights @ v).transpose(0, 1)                         # (T, H, D/H)


def attention(qkv, bounds, lengths, dropout):
    """Returns `plain_attention` of each example in a batch: (N, H, D/H) for qkv (N, 3, H, D/H).

    bounds and lengths say which rows belong to one example. With examples of 3, 3 and 6 tokens, and
    drawn as if N were filled up to a multiple of 16, not of 64:

        row        0  1  2 | 3  4  5 | 6  7  8  9 10 11 | 12 13 14 15  |
                   ex. 0   | ex. 1   | example 2        | only fill up |
        lengths    3       | 3       | 6                | 4            |        (B + 1,)
        bounds     0       | 3       | 6                | 12           | 16     (B + 2,)

    The rows that only fill up N are one more example, whose result nobody reads; its length can be
    0. lengths is on the CPU always, since it decides shapes. It is enough on a CPU; bounds is for
    kernels that take all lengths at once. dropout is that of the attention weights.
    """
    if qkv.is_cuda and qkv.dtype == torch.bfloat16 and dropout == 0:
        # This kernel takes examples of all lengths at once. It has no dropout, and old GPUs, which
        # need fp16, do not have it. Its import takes a second, so it stands here.
        from torch.nn.attention.varlen import varlen_attn
        q, k, v = qkv.unbind(1)                                  # (N, H, D/H) each
        longest = int(lengths.max())
        return varlen_attn(q, k, v, bounds, bounds, longest, longest)

    dtype = qkv.dtype
    if dtype.itemsize == 2 and not qkv.is_cuda:
        # On a CPU, backward takes twice as long in 16 bits as in fp32.
        qkv = qkv.float()

    # A run of b neighbours that have the same length T is a rectangle (b, T), which needs neither
    # padding nor a mask. The picture has three runs: 2 x 3, 1 x 6 and 1 x 4. data.py sorts the
    # examples of a batch by length, so runs are long.
    lengths = lengths[lengths > 0]
    T_of_runs, b_of_runs = torch.unique_consecutive(lengths, return_counts=True)
    runs = qkv.split((b_of_runs * T_of_runs).tolist())
    outputs = []
    for run, b, T in zip(runs, b_of_runs.tolist(), T_of_runs.tolist()):
        rectangle = run.unflatten(0, (b, T))                             # (b, T, 3, H, D/H)
        q, k, v = rectangle.permute(2, 0, 3, 1, 4)                       # (b, H, T, D/H) each
        output = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        outputs.append(output.transpose(1, 2).flatten(0, 1))             # (b T, H, D/H)
    return torch.cat(outputs).to(dtype)


class Block(nn.Module):
    """One layer of the encoder: attention, then feed-forward. The output of each is added to its
    input, and the sum is normalised."""

    def __init__(self, config):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.qkv = nn.Linear(width, 3 * width)                   # one matrix product for Q, K, V
        self.attention_out = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.up = nn.Linear(width, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, width)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.attention_dropout = config.attention_dropout

    def forward(self, x, bounds, lengths, rows=None):
        """Returns the next hidden states (N, D) for x (N, D). With rows (R,) it returns those rows
        alone, (R, D). The last block is called with rows, since the heads read no others. bounds,
        lengths: as in `attention`."""
        qkv = self.qkv(x).view(len(x), 3, self.heads, -1)        # (N, 3, H, D/H)
        # Torch's function for attention does not know whether the model is in training.
        dropout = self.attention_dropout if self.training else 0.0
        attended = attention(qkv, bounds, lengths, dropout).flatten(1)   # (N, D)
        if rows is not None:
            x = x.index_select(0, rows)                          # (R, D)
            attended = attended.index_select(0, rows)            # (R, D)

        # Later models normalise what goes into attention and feed-forward; BERT, the sums.
        x = self.attention_norm(x + self.dropout(self.attention_out(attended)))
        hidden = F.gelu(self.up(x))                              # (N or R, D_ff)
        return self.norm(x + self.dropout(self.down(hidden)))


class Losses(NamedTuple):
    """Sums over a batch, not means: the caller divides them by the counts of the whole step on all
    ranks, which a batch does not know."""
    mlm_sum: torch.Tensor            # (), fp32: cross-entropy of the masked tokens, nats
    nsp_sum: torch.Tensor            # (), fp32: cross-entropy of the sentence pairs, nats

    # The hits are counted in evaluation only: they take 3 % of a small model's step.
    mlm_hits: torch.Tensor = None    # (), int64: masked tokens whose likeliest token is right
    nsp_hits: torch.Tensor = None    # (), int64: pairs that are classified rightly


class CrossEntropy(torch.autograd.Function):
    """The sum of -log softmax(logits)[label] over logits (M, V) and labels (M,). A label of -100,
    which pads a batch or says that there are no pairs, does not count.

    F.cross_entropy computes the same, with three arrays of (M, V). Here one is enough, since each
    result overwrites what it is made of; to allocate large arrays is slow (a step of the demo takes
    1.15 times as long with F.cross_entropy). So backward can be called only once.
    """

    @staticmethod
    def forward(ctx, logits, labels):
        # A sum of V exponentials needs at least fp32. (Tests use fp64, which stays.)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        # (M, V). In fp32 this is the memory of the logits, which nobody reads again.
        logs = logits.detach().to(dtype)
        torch.log_softmax(logs, -1, out=logs)
        ctx.save_for_backward(logs, labels)
        return F.nll_loss(logs, labels, reduction="sum")

    @staticmethod
    def backward(ctx, loss_gradient):
        """Returns the gradient of the logits, loss_gradient * (softmax(logits) - one_hot(labels)),
        in rows whose label counts, and 0 in others; autograd casts it to the logits' format. The
        labels have none."""
        logs, labels = ctx.saved_tensors
        is_counted = (labels >= 0).to(logs.dtype).unsqueeze(1)   # (M, 1), 1 or 0
        columns = labels.clamp(min=0).unsqueeze(1)               # (M, 1)

        # It starts as softmax(logits). Then 1 is subtracted at each label that counts.
        gradient = logs.exp_()                                   # (M, V)
        gradient.scatter_add_(1, columns, -is_counted)
        gradient.mul_(loss_gradient * is_counted)
        return gradient, None


class BertForPreTraining(nn.Module):
    """The encoder with the masked-token (MLM) and the next-sentence (NSP) head."""

    # Activation checkpointing (Chen et al., arXiv 1604.06174): backward computes the activations of
    # each block but the last again instead of keeping them: less memory, a third more work.
    recompute = False

    def __init__(self, config):
        super().__init__()
        self.config = config
        width = config.width
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

        self.pooler = nn.Linear(width, width)
        self.nsp = nn.Linear(width, 2)

        # There is no output matrix here: `mlm_logits` uses the token embeddings.
        self.mlm_transform = nn.Linear(width, width)
        self.mlm_norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.mlm_bias = nn.Parameter(torch.zeros(config.vocab_size))

        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=config.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def encode(self, rows, tokens, segments, positions, bounds, lengths):
        """Returns the last hidden states (R, D) of the rows (R,). tokens, segments and positions
        are numbers (N,): a token's id, 0 or 1 for A or B, and its position in its example. bounds,
        lengths: as in `attention`."""
        x = self.embeddings(tokens, segments, positions)         # (N, D)
        for block in self.blocks[:-1]:
            if self.recompute:
                x = checkpoint(block, x, bounds, lengths, use_reentrant=False)
            else:
                x = block(x, bounds, lengths)
        # No head reads the other rows, so the last block drops them after its attention.
        return self.blocks[-1](x, bounds, lengths, rows)

    def mlm_logits(self, hidden):
        """Returns the logits (M, V) of hidden states (M, D) at masked positions."""
        hidden = self.mlm_norm(F.gelu(self.mlm_transform(hidden)))
        return F.linear(hidden, self.embeddings.tokens.weight, self.mlm_bias)

    def forward(self, batch):
        """Returns the Losses of a batch (data.Batch). Beside the arguments of `encode` it has
        masked_positions (M,), rows of the batch; labels (M,), the tokens that stood there; and
        pair_labels (B,), 0 where B follows A and 1 where not."""
        # The heads read [CLS] and the masked tokens only. So the (N, V) logits of all tokens never
        # exist, which is most of what makes small models fast.
        examples = len(batch.pair_labels)
        first_rows = batch.bounds[:examples]                     # (B,), the rows of [CLS]
        rows = torch.cat([first_rows, batch.masked_positions])   # (R,), where R = B + M
        hidden = self.encode(rows, batch.tokens, batch.segments, batch.positions,
                             batch.bounds, batch.lengths)        # (R, D)

        pooled = torch.tanh(self.pooler(hidden[:examples]))      # (B, D)
        nsp_logits = self.nsp(pooled)                            # (B, 2)
        mlm_logits = self.mlm_logits(hidden[examples:])          # (M, V)

        nsp_hits = mlm_hits = None
        if not self.training:
            nsp_hits = (nsp_logits.argmax(1) == batch.pair_labels).sum()
            mlm_hits = (mlm_logits.argmax(1) == batch.labels).sum()

        # These come last: to save memory, CrossEntropy writes into the logits.
        mlm_sum = CrossEntropy.apply(mlm_logits, batch.labels)
        nsp_sum = CrossEntropy.apply(nsp_logits, batch.pair_labels)
        return Losses(mlm_sum, nsp_sum, mlm_hits, nsp_hits)


# ----- Hugging Face folders: names -----

MODULE_NAMES = {                     # our module: theirs, outside of the blocks
    "embeddings.tokens": "bert.embeddings.word_embeddings",
    "embeddings.positions": "bert.embeddings.position_embeddings",
    "embeddings.segments": "bert.embeddings.token_type_embeddings",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "nsp": "cls.seq_relationship",
    "mlm_transform": "cls.predictions.transform.dense",
    "mlm_norm": "cls.predictions.transform.LayerNorm"}
BLOCK_NAMES = {                      # our module: theirs, within a block; `qkv` is three of theirs
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
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_eps": "layer_norm_eps",
    "init_std": "initializer_range"}

# The first pieces of each tokenizer that data.py makes, in the order of their ids. They stand in
# data.py, too: the two files do not import each other.
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)


def huggingface_names(name):
    """Returns the Hugging Face names (a list) of one of our parameters: three for Q, K and V, else
    one."""
    if name == "mlm_bias":
        return ["cls.predictions.bias"]
    module, _, kind = name.rpartition(".")                   # The kind is weight or bias.
    if module in MODULE_NAMES:
        return [f"{MODULE_NAMES[module]}.{kind}"]
    _, layer, inner = module.split(".")                      # The module is blocks.3.qkv, say.
    parts = BLOCK_NAMES[inner].split()
    return [f"bert.encoder.layer.{layer}.{part}.{kind}" for part in parts]


# ----- Hugging Face folders: save -----

def safetensors(tensors):
    """Returns a safetensors file (bytes) of fp32 tensors {name: tensor}: the length of the header,
    the header (JSON), then the elements of each tensor."""
    header = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + 4 * tensor.numel()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [begin, end]}
        begin = end

    text = json.dumps(header).encode()
    while len(text) % 8:
        text += b" "                         # The elements have to begin at a multiple of 8 bytes.
    length = len(text).to_bytes(8, "little")
    elements = [tensor.numpy() for tensor in tensors.values()]
    return b"".join([length, text] + elements)


# A unigram model of SentencePiece has a score for each piece, and cuts a text so that the sum of
# the scores is the highest. A "▁" stands for the space before a word.

def is_plain_unigram(tokenizer, vocab):
    """Returns whether our tokenizer.json can do what a SentencePieceProcessor does. vocab: its
    pieces and their scores, [(piece, score)]."""
    try:
        # Models of other kinds cannot tell the second-best way to cut a text, and raise.
        tokenizer.nbest_encode("a", nbest_size=2)
    except RuntimeError:
        return False
    # Each word has to begin with a "▁", and spaces must not count otherwise.
    if tokenizer.normalize(" a  b ") != "▁a▁b":
        return False
    for piece, score in vocab[len(SPECIALS):]:
        # data.py makes no piece with a score of 0 (a single byte, or a symbol that a user defines),
        # and none with a "▁" in it, which would span two words.
        if score == 0 or "▁" in piece[1:]:
            return False
    return True


def normalizer_steps(tokenizer_model):
    """Returns what a SentencePiece model (bytes) does to a text before it cuts it, as the steps of
    tokenizer.json: it replaces characters by its table, if it has one, and drops needless spaces.
    """
    normalizer = SentencePieceNormalizer(model_proto=tokenizer_model)
    spec = normalizer.serialized_normalizer_spec()
    # The spec is a protobuf message of two fields. Its bytes are, if the name has n of them:
    #     0: tag   1: n   2 to n + 1: the name   n + 2: tag   n + 3: length of the table, the table
    # The length takes up to 4 bytes of 7 bits each; the highest bit says whether another follows.
    at = spec[1] + 3
    while spec[at] >= 128:
        at += 1
    table = spec[at + 1:]

    steps = [
        {"type": "Strip", "strip_left": False, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    if table:
        # "Precompiled" is Hugging Face's name for such a table.
        charsmap = base64.b64encode(table).decode()
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": charsmap})
    return steps


def tokenizer_json(tokenizer_model):
    """Returns the tokenizer.json (bytes) that cuts text as a SentencePiece model (bytes) does.

    Three things differ in Hugging Face's `tokenizers`:
    - of two equally likely cuts it can take the other one, since it adds the scores in fp64;
    - where no character stands for a letter with its accent, as in "x\u0301", the accent is lost;
    - the text "[MASK]" becomes the token [MASK]; data.py cuts it as any other text.
    Raises ModelError for a SentencePiece model of which more would differ.
    """
    tokenizer = SentencePieceProcessor(model_proto=tokenizer_model)
    ids = list(range(len(tokenizer)))
    vocab = list(zip(tokenizer.id_to_piece(ids), tokenizer.get_score(ids)))
    if not is_plain_unigram(tokenizer, vocab):
        raise ModelError("the tokenizer.model is no plain unigram model; make one with data.py")

    added = []
    for i, special in enumerate(SPECIALS):
        added.append({
            "id": i, "content": special, "special": True, "normalized": False,
            "lstrip": False, "rstrip": False, "single_word": False})

    # "Metaspace" puts a "▁" for each space. Text before the first [MASK] begins with a new word;
    # text after a [MASK] does so only if it begins with a space, as in `encode_with_masks`.
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    return json.dumps({
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": spaces,
        "decoder": spaces,
        "normalizer": {"type": "Sequence", "normalizers": normalizer_steps(tokenizer_model)},
        "model": {
            "type": "Unigram",
            "unk_id": UNK,
            "vocab": vocab,
            "byte_fallback": False},
        "post_processor": {"type": "BertProcessing", "cls": ["[CLS]", CLS], "sep": ["[SEP]", SEP]}
    }).encode()


def write_file(path, content):
    """Writes bytes to a file. If the program is killed meanwhile, the old file stays as it was."""
    temporary = Path(f"{path}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # The error of a full disk does not name a file.
        error.filename = str(path)
        raise


def save_huggingface(model, tokenizer_path, folder):
    """Writes a model folder that Hugging Face's transformers load: model.safetensors (fp32),
    config.json, tokenizer.json, tokenizer_config.json and a copy of the tokenizer.model.

    `transformers.AutoModelForMaskedLM.from_pretrained(folder)` gives the same logits, AutoTokenizer
    the same tokens. Raises OSError, with the path, if a file cannot be written, and ModelError as
    `tokenizer_json` does.
    """
    tokenizer_model = Path(tokenizer_path).read_bytes()
    exported_tokenizer = tokenizer_json(tokenizer_model)

    tensors = {}
    for name, parameter in model.named_parameters():
        names = huggingface_names(name)
        parts = parameter.detach().float().cpu().chunk(len(names))
        tensors.update(zip(names, parts))

    config = {theirs: getattr(model.config, ours) for ours, theirs in CONFIG_NAMES.items()}
    config |= {
        "architectures": ["BertForPreTraining"], "model_type": "bert", "hidden_act": "gelu",
        "type_vocab_size": 2, "pad_token_id": PAD, "tie_word_embeddings": True}

    tokenizer_config = {
        # Without this class, transformers 5 make the tokenizer of other BERTs, WordPiece.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "model_max_length": model.config.max_positions}
    for special in SPECIALS:
        name = special.strip("[]").lower()
        tokenizer_config[f"{name}_token"] = special

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "model.safetensors", safetensors(tensors))
    write_file(folder / "config.json", json.dumps(config, indent=2).encode())
    write_file(folder / "tokenizer.json", exported_tokenizer)
    write_file(folder / "tokenizer_config.json", json.dumps(tokenizer_config, indent=2).encode())
    write_file(folder / "tokenizer.model", tokenizer_model)


# ----- Hugging Face folders: load -----

DTYPES = {                           # safetensors' name of a type: torch's
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64}


def read_config(folder):
    """Returns the BertConfig that a folder's config.json describes. Raises ModelError if that is no
    BERT, or has numbers that cannot be."""
    try:
        content = json.loads(Path(folder, "config.json").read_text())
        if content["model_type"] != "bert" or content.get("hidden_act", "gelu") != "gelu":
            raise ValueError("not a BERT with GELU")
        fields = {}
        for ours, theirs in CONFIG_NAMES.items():
            if theirs in content:
                value = content[theirs]
                kind = BertConfig.__annotations__[ours]              # int, or float for fractions
                limit = 1 if kind is float else math.inf
                if not isinstance(value, (int, kind)) or not 0 <= value < limit:
                    raise ValueError(f"{theirs} is {value}")
                fields[ours] = value
        config = BertConfig(**fields)
        if config.width % config.heads:
            raise ValueError(f"{config.heads} heads do not divide {config.width}")
        return config
    except Exception as error:
        # JSON can hold anything, and so raise anything.
        raise ModelError(f"{folder} is no model folder: config.json: {error}") from None


def modern(name):
    """Returns today's name of a tensor. Files of 2018 say gamma and beta; those of BertModel, the
    encoder alone, lack the prefix."""
    name = name.replace("Norm.gamma", "Norm.weight").replace("Norm.beta", "Norm.bias")
    if not name.startswith(("bert.", "cls.")):
        name = f"bert.{name}"
    return name


def read_weights(folder):
    """Returns {today's name: tensor} of a folder's model.safetensors; see `safetensors` for its
    format. Raises ModelError if it is missing or damaged."""
    path = Path(folder, "model.safetensors")
    try:
        if not path.is_file():
            raise FileNotFoundError                  # a pipe or a device could be read for ever
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        header.pop("__metadata__", None)

        elements = memoryview(bytearray(content[begin:]))        # torch wants memory to write to
        weights = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensor = torch.frombuffer(elements[first:last], dtype=DTYPES[entry["dtype"]])
            weights[modern(name)] = tensor.view(entry["shape"])
        return weights
    except Exception as error:
        # A damaged header can hold anything, and so raise anything.
        raise ModelError(f"{path} is missing, cut or damaged: {error!r}") from None


def load_huggingface(folder):
    """Returns a BertForPreTraining (fp32, training mode) with the weights of a Hugging Face folder.

    The vocabulary is padded to a multiple of 64 by zero rows. Files of BertModel and of
    BertForMaskedLM load, too: heads that the file lacks keep their random initialisation, and a
    line on stderr names them. Raises ModelError if the folder is no BERT's, if a file is damaged,
    or if the weights are not those that config.json describes.
    """
    config = read_config(folder)
    weights = read_weights(folder)
    layers = sum(name.endswith("intermediate.dense.weight") for name in weights)
    if layers != config.layers:
        raise ModelError(f"{folder} has weights of {layers} layers, not {config.layers}")
    padded = dataclasses.replace(config, vocab_size=multiple_of_64(config.vocab_size))
    # A wrong number in config.json must not fill the memory. The model may be larger than the file,
    # by heads that this lacks and by the padding of the vocabulary, but not twice as large.
    described = parameter_count(padded)
    found = sum(tensor.numel() for tensor in weights.values())
    if described > 2 * found:
        raise ModelError(f"{folder}: config.json describes {described:,} parameters, and "
                         f"model.safetensors has {found:,}")
    model = BertForPreTraining(padded)

    absent = []
    for name, parameter in model.named_parameters():
        names = huggingface_names(name)
        lacking = [part for part in names if part not in weights]
        if not lacking:
            # Rows that only pad the vocabulary stay 0. Q, K and V are the thirds of one matrix.
            parameter.data.zero_()
            targets = parameter.data.chunk(len(names))
            for part, target in zip(names, targets):
                if name in ("embeddings.tokens.weight", "mlm_bias"):
                    target = target[:config.vocab_size]
                if weights[part].shape != target.shape or not weights[part].isfinite().all():
                    raise ModelError(f"{folder}: {part} has the wrong shape or is not finite")
                target.copy_(weights[part])
        elif name.startswith(("embeddings.", "blocks.")):
            raise ModelError(f"{folder}: the weights lack {', '.join(lacking)}")
        else:
            absent.append(name)
    if absent:
        print(f"{folder}: no weights for {', '.join(absent)}; they stay random", file=sys.stderr)
    return model


def copy_weights(folder, model, tokenizer_path):
    """Gives a model the weights of a folder.

    Raises ModelError if the folder's model has another shape, or if its tokenizer.model is not a
    copy of tokenizer_path: then its tokens would be other words.
    """
    found = load_huggingface(folder)
    own = Path(folder, "tokenizer.model")
    if not own.exists() or own.read_bytes() != Path(tokenizer_path).read_bytes():
        raise ModelError(
            f"{tokenizer_path} is not {own}; make shards with data.py --tokenizer {own}")
    for field in ("layers", "width", "heads", "feed_forward", "vocab_size", "max_positions"):
        theirs = getattr(found.config, field)
        wanted = getattr(model.config, field)
        if theirs != wanted:
            raise ModelError(f"{folder} has {field} {theirs}, not {wanted}: take another --model")
    model.load_state_dict(found.state_dict())


# ----- Fill in a [MASK] -----

# SentencePiece does not find [MASK] in a text, so this character stands for it there. It is one of
# Unicode's private ones, which no tokenizer knows.
STAND_IN = "\ue000"


def encode_with_masks(tokenizer, text):
    """Returns the token ids of [CLS] text [SEP], where each "[MASK]" in the text is one token. Of
    "a [MASK]s" the pieces are "▁a", "▁", STAND_IN, "s", and the tokens "▁a", [MASK], "s"."""
    tokens = [CLS]
    for piece in tokenizer.encode(text.replace("[MASK]", STAND_IN), out_type=str):
        # Unknown characters that stand together are one piece, with the stand-in among them. The
        # parentheses make `split` return the stand-ins, too.
        for part in re.split(f"({STAND_IN})", piece):
            if part == STAND_IN:
                # A lone "▁" before it is the space of the masked word, which [MASK] stands for.
                if tokens[-1] == tokenizer.piece_to_id("▁"):
                    tokens.pop()
                tokens.append(MASK)
            elif part:
                tokens.append(tokenizer.piece_to_id(part))
    return tokens + [SEP]


def fill_mask(model, tokenizer, text, count=5):
    """Returns, for each [MASK] of a text, the `count` likeliest words, as "be 12%, have 3%".

    The guesses are bad if the text has more tokens than the examples of training (128 in the demo).
    Raises ModelError if there is no [MASK], or if the text has more tokens than max_positions.
    """
    device = model.mlm_bias.device
    tokens = torch.tensor(encode_with_masks(tokenizer, text), device=device)     # (T,)
    T = len(tokens)
    if T > model.config.max_positions:
        raise ModelError(f"{T} tokens; the model reads {model.config.max_positions}")
    if MASK not in tokens:
        raise ModelError("the text has no [MASK] to fill in")

    masked_positions = (tokens == MASK).nonzero().flatten()                      # (M,)
    segments = torch.zeros_like(tokens)
    positions = torch.arange(T, device=device)
    bounds = torch.tensor([0, T, T], dtype=torch.int32, device=device)
    lengths = torch.tensor([T, 0])
    was_training = model.training
    model.eval()
    with torch.no_grad():
        hidden = model.encode(masked_positions, tokens, segments, positions, bounds, lengths)
        logits = model.mlm_logits(hidden).float()                                # (M, V)
    model.train(was_training)

    # The last rows only pad the vocabulary to a multiple of 64: no pieces belong to them.
    best = logits[:, :len(tokenizer)].softmax(1).topk(count)
    lines = []
    for probabilities, ids in zip(best.values.tolist(), best.indices.tolist()):
        words = []
        for probability, piece in zip(probabilities, tokenizer.id_to_piece(ids)):
            words.append(f"{piece.replace('▁', '')} {probability:.0%}")
        lines.append(", ".join(words))
    return lines


# ----- The arithmetic of `train.py --plan` -----

# name: (TFLOP/s that one of them reached in training BERT-large in 16 bits, GB of memory). They are
# the examples a second that somebody has published, times `flops_per_example`; none was measured
# with this program. Sources are letters:
#   A   pre-training, 128 tokens: NVIDIA, DeepLearningExamples, PyTorch BERT, README.md
#   B   fine-tuning on SQuAD, 384 tokens, which is a little slower: Lambda, deeplearning-benchmark,
#       pytorch-train-throughput-fp16.csv
#   C   MLPerf Training v3.1, BERT without padding, 256 tokens on average, evaluation included
#   D   fine-tuning of ModernBERT-base on a T4, one blog; an upper bound
GPUS = {
    "t4": (9, 16),               # D
    "v100": (38, 16),            # A, container 20.06: 164 examples a second
    "a100": (97, 40),            # A, container 20.06: 415
    "a100-80g": (136, 80),       # A, container 21.11: 580
    "h100": (229, 80),           # B: 310
    "a6000": (50, 48),           # B: 68
    "rtx2080ti": (17, 11),       # B: 23
    "rtx3090": (38, 24),         # B: 52
    "rtx4090": (69, 24),         # B: 93
    "l4": (25, 24),              # C, xFusion: 53
}


def flops_per_example(config, length, masked):
    """Returns the floating-point operations of one example, forward and backward.

    length: its tokens, T; masked: its masked tokens, M. A multiply-add counts as two operations,
    and backward as twice the forward. With L layers:

        attention   L T (6 D^2 + 4 T D)                       Q, K, V; Q K^T and weights V
        other       ((L - 1) T + M + 1) (2 D^2 + 4 D D_ff)    attention_out; up and down. The last
                                                              layer does it for M + 1 rows only.
        heads       M (2 D^2 + 2 D V) + 2 D^2                 MLM; pooler
        all         3 (attention + other + heads)
    """
    D = config.width
    attention_flops = config.layers * length * (6 * D**2 + 4 * length * D)
    other_rows = (config.layers - 1) * length + masked + 1
    other_flops = other_rows * (2 * D**2 + 4 * D * config.feed_forward)
    head_flops = masked * (2 * D**2 + 2 * D * config.vocab_size) + 2 * D**2
    return 3 * (attention_flops + other_flops + head_flops)


def activation_bytes(config, tokens, masked, size, recompute=False):
    """Returns about how many bytes a forward pass keeps for backward.

    tokens, masked: how many there are in the micro-batch; size: bytes of an element. Counted as in
    Korthikanti et al., arXiv 2205.05198, section 4.1, but for our `Block`, whose attention keeps no
    (T, T) matrix. Of a token, a layer keeps 9 D + 2 D_ff elements: its input (D), Q, K and V (3 D),
    what attention returns and its copy by torch.cat (2 D), two sums (2 D), the first norm (D; the
    second is the next layer's input), `up` and its GELU (2 D_ff).
    """
    width = config.width
    per_layer = size * (9 * width + 2 * config.feed_forward)
    # The masks of dropout have a byte an element: two of D in the block, about D in attention.
    if config.dropout > 0:
        per_layer += 2 * width
    if config.attention_dropout > 0:
        per_layer += width
    per_token = config.layers * per_layer
    if recompute:
        # Each layer keeps its input alone, but for the one that is being computed again.
        per_token = per_layer + (config.layers - 1) * size * width

    per_logit = 4                                # CrossEntropy keeps fp32.
    if size < 4:
        per_logit += size                        # The gradient in 16 bits is an array of its own.
    return tokens * per_token + masked * config.vocab_size * per_logit


def parameter_shapes(config):
    """Returns the shapes of all parameters, a tuple; no memory is taken."""
    with torch.device("meta"):
        return tuple(parameter.shape for parameter in BertForPreTraining(config).parameters())


def parameter_count(config):
    """Returns how many numbers all parameters have together."""
    return sum(shape.numel() for shape in parameter_shapes(config))


def state_gigabytes(config, size, lossy):
    """Returns what a rank holds besides activations, {part: GB}. size: bytes of a weight; lossy:
    whether compression keeps residuals."""
    elements = parameter_count(config)
    parts = {
        "weights": size,
        "masters": 4 if size < 4 else 0,
        "gradients": 4,
        "moments": 8,                            # two of them
        "residuals": 8 if lossy else 0}          # the last one, and the one that is being made
    return {part: 1e-9 * elements * each for part, each in parts.items()}


# ----- The program -----

def main():
    """Prints a line of likely words for each [MASK]; one line on stderr if that cannot be done."""
    parser = argparse.ArgumentParser(description="Fill in each [MASK] of a text.")
    parser.add_argument("folder", help="a model folder, for example runs/demo/model")
    parser.add_argument("text", help="a text with [MASK] in it")
    flags = parser.parse_args()
    try:
        model = load_huggingface(flags.folder)
        tokenizer = SentencePieceProcessor(model_file=f"{flags.folder}/tokenizer.model")
        first_pieces = tokenizer.id_to_piece(list(range(len(SPECIALS))))
        if first_pieces != SPECIALS or multiple_of_64(len(tokenizer)) != model.config.vocab_size:
            raise ModelError(f"the tokenizer.model in {flags.folder} is not that of the model")
        print("\n".join(fill_mask(model, tokenizer, flags.text)))
    except (ModelError, OSError, RuntimeError) as error:     # SentencePiece raises the last two.
        sys.exit(f"bert.py: {error}")


if __name__ == "__main__":
    main()
