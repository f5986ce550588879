"""BERT and its two pre-training heads, Hugging Face weights in and out, and a [MASK] filled in.

    python bert.py runs/demo/model "The [MASK] statement leaves a loop."

The original model (Devlin et al., arXiv 1810.04805): post-LayerNorm, GELU with erf, learned
positions, a masked-token head (MLM) tied to the embeddings and a next-sentence head (NSP) on [CLS].

Hardly anything is computed for padding (Zeng et al., arXiv 2208.08124): the tokens of all examples
stand one after another, as N rows, and only attention asks which example a row is of.

Read first: `Block`, `attention` and `BertForPreTraining.forward`. The second half of the file,
Hugging Face folders and the program, can be skipped.

Shapes: B examples, N rows (tokens of all examples, and up to 63 that round N up to a multiple of
64), T tokens of one example, b examples of one length, R rows that a head reads, D width, H heads,
M masked tokens of the batch, V vocabulary.
"""
import argparse
import base64
import hashlib
import io
import itertools
import json
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PRESETS = {"tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512),
           "base": (12, 768), "large": (24, 1024)}           # layers, width
# cuDNN's attention is planned anew for each shape, and may round dropout to a multiple of 1/16
torch.backends.cuda.enable_cudnn_sdp(False)


class ModelError(ValueError):
    """A model that cannot be built, loaded or asked; the message says why and what to do."""


class BertConfig(NamedTuple):
    """The shape of a BERT. Field names are this project's; `CONFIG` below translates them."""
    layers: int
    width: int                  # D
    heads: int                  # H; a preset has width / 64 of them
    feed_forward: int           # 4 D in a preset
    vocab_size: int             # V, a multiple of 64: matrix products are fastest at such shapes
    max_positions: int = 512
    dropout: float = 0.1        # of the hidden states and of the attention weights
    layer_norm_eps: float = 1e-12
    init_std: float = 0.02

    @classmethod
    def preset(cls, name, vocab_size, **changes):
        """Returns a configuration of PRESETS; vocab_size is rounded up to a multiple of 64."""
        layers, width = PRESETS[name]
        return cls(layers, width, width // 64, 4 * width, -(-vocab_size // 64) * 64, **changes)


class Losses(NamedTuple):
    """Sums over a batch, not means: only the caller knows the divisor, the whole step's counts."""
    mlm_sum: torch.Tensor    # () fp32, cross-entropy of the masked tokens, nats
    nsp_sum: torch.Tensor    # () fp32, cross-entropy of the sentence pairs, nats
    # In evaluation only: looking through all logits again takes 3 % of a small model's step
    mlm_hits: torch.Tensor = None    # () int64, masked tokens whose likeliest token is right
    nsp_hits: torch.Tensor = None    # () int64, pairs classified rightly


class Embeddings(nn.Module):
    """Sum of token, position and segment embeddings, normalised: (N,) -> (N, D)."""

    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width)
        self.segments = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens, segments, positions):
        x = self.tokens(tokens) + self.positions(positions) + self.segments(segments)    # (N, D)
        return self.dropout(self.norm(x))


class Block(nn.Module):
    """One encoder layer: attention, then feed-forward, each added to its input, then normalised."""

    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)     # one matrix product for Q, K, V
        self.attention_out = nn.Linear(config.width, config.width)
        self.attention_norm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.up = nn.Linear(config.width, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, config.width)
        self.norm = nn.LayerNorm(config.width, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, bounds, lengths, rows=None):
        """Returns (N, D) for x (N, D), or (R, D) for the rows (R,) alone; bounds and lengths say
        which rows are an example's, as in `data.Batch`."""
        qkv = self.qkv(x).view(len(x), 3, self.heads, -1)                        # (N, 3, H, D/H)
        dropout = self.dropout.p if self.training else 0.0       # torch looks at no .training here
        mixed = attention(qkv, bounds, lengths, dropout).flatten(1)              # (N, D)
        if rows is not None:
            x, mixed = x.index_select(0, rows), mixed.index_select(0, rows)
        # Post-LayerNorm: the sum is normalised, not the branch's input as in later models
        x = self.attention_norm(x + self.dropout(self.attention_out(mixed)))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


def attention(qkv, bounds, lengths, dropout):
    """Returns (N, H, D/H) for Q, K and V (N, 3, H, D/H): softmax(Q K^T / sqrt(D/H)) V in each head,
    for each example by itself. bounds, lengths: as in `data.Batch`; the rows that only fill up N
    come last and count as one more example (a length of 0 can be left out). dropout: of the
    attention weights. 16 bits in, 16 bits out."""
    if qkv.is_cuda and qkv.dtype == torch.bfloat16 and not dropout:   # fp16 means an old GPU
        from torch.nn.attention.varlen import varlen_attn        # takes a second to import
        longest = int(lengths.max())
        return varlen_attn(*qkv.unbind(1), bounds, bounds, longest, longest)
    # The CPU's kernel takes twice as long for the backward of 16 bits
    values = qkv.float() if qkv.dtype.itemsize == 2 and not qkv.is_cuda else qkv
    # Neighbours of the same length are a rectangle, which needs neither padding nor a mask
    runs = [(len([*run]), T) for T, run in itertools.groupby(lengths.tolist()) if T]
    mixed = []
    for rows, (b, T) in zip(values.split([b * T for b, T in runs]), runs):
        q, k, v = rows.unflatten(0, (b, T)).permute(2, 0, 3, 1, 4)           # (b, H, T, D/H) each
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        mixed.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(mixed).to(qkv.dtype)


class BertForPreTraining(nn.Module):
    """The encoder with the masked-token (MLM) and the next-sentence (NSP) head."""

    recompute = False       # activations of the blocks: less memory, a third more work

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
        for name, parameter in self.named_parameters():      # LayerNorm's weights stay 1
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.init_std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def encode(self, rows, tokens, segments, positions, bounds, lengths):
        """Returns the hidden states (R, D) of the rows (R,); other arguments as in `data.Batch`."""
        x = self.embeddings(tokens, segments, positions)
        for block in self.blocks[:-1]:
            # Activation checkpointing (Chen et al., arXiv 1604.06174): backward runs it once more
            x = (checkpoint(block, x, bounds, lengths, use_reentrant=False) if self.recompute
                 else block(x, bounds, lengths))
        # No head reads the other rows, so the last block drops them after attention
        return self.blocks[-1](x, bounds, lengths, rows)

    def mlm_logits(self, hidden):
        """Returns the logits (M, V) of hidden states (M, D) at masked positions."""
        hidden = self.mlm_norm(F.gelu(self.mlm_transform(hidden)))
        return F.linear(hidden, self.embeddings.tokens.weight, self.mlm_bias)

    def forward(self, batch):
        """Returns the Losses of a batch, any object with the fields of `data.Batch`."""
        # The heads see [CLS] and masked positions only: the (N, V) logits of all tokens never
        # exist, which is most of what makes small models fast
        first = batch.bounds[:-2]                                                # (B,), of [CLS]
        hidden = self.encode(torch.cat([first, batch.masked_positions]), batch.tokens,
                             batch.segments, batch.positions, batch.bounds, batch.lengths)
        nsp = self.nsp(torch.tanh(self.pooler(hidden[:len(first)])))             # (B, 2)
        mlm = self.mlm_logits(hidden[len(first):])                               # (M, V)
        heads = (mlm, batch.labels), (nsp, batch.pair_labels)
        hits = [] if self.training else [(logits.argmax(-1) == labels).sum()
                                         for logits, labels in heads]
        # Not before: it overwrites the logits
        return Losses(*(CrossEntropy.apply(*head) for head in heads), *hits)


class CrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(logits)[label] over (M, V) logits; a label of -100 does not count. Its
    gradient is softmax(logits), less 1 at the label; 0 where the label does not count. The
    log-softmax overwrites the logits, if they are not in 16 bits, and the gradient overwrites the
    log-softmax: each array of that size is memory that the system hands out and takes back every
    step."""

    @staticmethod
    def forward(ctx, logits, labels):
        # A sum of V exponentials needs more than 16 bits; fp64 stays, for tests
        logs = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        torch.log_softmax(logs, -1, out=logs)
        ctx.save_for_backward(logs, labels)
        return F.nll_loss(logs, labels, reduction="sum")

    @staticmethod
    def backward(ctx, gradient):
        logs, labels = ctx.saved_tensors
        counts = (labels >= 0).to(logs.dtype)[:, None]                           # (M, 1), 0 or 1
        difference = logs.exp_().scatter_add_(1, labels.clamp(min=0)[:, None], -counts)
        return difference.mul_(gradient * counts), None


def flops_per_example(config, length, masked):
    """Returns the floating-point operations of one example, forward and backward.

    length: its tokens T; masked: its masked tokens M. A multiply-add counts as two operations,
    backward as twice the forward, and with D width, F feed-forward and L layers

        forward = L * T * (6 D^2 + 4 T D) + ((L - 1) * T + M + 1) * (2 D^2 + 4 D F)
                  + M * (2 D^2 + 2 D V) + 2 D^2

    which is attention, the rest of the layers (the last one's at [CLS] and masked tokens only), the
    MLM head at masked tokens, the pooler.
    """
    D, F, T, V = config.width, config.feed_forward, length, config.vocab_size
    layers = config.layers * T * (6 * D * D + 4 * T * D)
    layers += ((config.layers - 1) * T + masked + 1) * (2 * D * D + 4 * D * F)
    return 3 * (layers + masked * (2 * D * D + 2 * D * V) + 2 * D * D)


def activation_bytes(config, tokens, masked, size, recompute=False):
    """Returns the bytes that a forward pass keeps for backward, about.

    tokens, masked: how many there are in the micro-batch; size: bytes of an element. As Korthikanti
    et al. count them (arXiv 2205.05198, section 4.1), but for our `Block`, whose attention keeps no
    (T, T) matrix. With D width and F feed-forward, a token leaves 9 D + 2 F elements in a layer
    (its input; Q, K, V; what attention mixed; two sums and two norms; up and its GELU), and with
    dropout three masks of D (attention's is taken for one); with `recompute` its input alone, but
    for the layer under way. A masked token leaves V numbers in fp32, and in 16 bits V gradients.
    """
    D, L = config.width, config.layers
    layer = size * (9 * D + 2 * config.feed_forward) + 3 * D * (config.dropout > 0)
    layers = layer + (L - 1) * size * D if recompute else L * layer
    return tokens * layers + masked * config.vocab_size * (4 + size * (size < 4))


def state_gigabytes(config, size, lossy, one_bit):
    """Returns what a rank holds besides activations, {part: GB}. size: bytes of a weight; lossy,
    one_bit: whether compression or a 1-bit optimizer keeps residuals. Two moments are in fp32."""
    elements = sum(shape.numel() for shape in parameter_shapes(config))
    parts = {"weights": size, "masters": 4 * (size < 4), "gradients": 4, "moments": 8,
             "residuals": 8 * lossy + 16 * one_bit}
    return {part: 1e-9 * elements * each for part, each in parts.items()}


def parameter_shapes(config):
    """Returns the shapes of all parameters, a tuple; no memory is taken."""
    with torch.device("meta"):
        return tuple(parameter.shape for parameter in BertForPreTraining(config).parameters())


def measure_tflops(config, device, dtype, examples=16, length=128):
    """Returns the TFLOP/s that this machine reaches in forward and backward of one layer."""
    # Here: when it is imported it asks for GPUs, after which no process may be forked
    from torch.utils.benchmark import Timer
    block = Block(config).to(device, dtype)
    lengths = torch.tensor([length] * examples + [0])
    bounds = F.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    x = torch.randn(examples * length, config.width, device=device, dtype=dtype, requires_grad=True)
    timer = Timer("block(x, bounds, lengths).sum().backward()", globals=locals(),
                  num_threads=torch.get_num_threads())               # it waits for a GPU
    # What a layer more takes: of the last one most is computed for a few rows only
    one, two = (flops_per_example(config._replace(layers=n), length, 0) for n in (1, 2))
    return 1e-12 * examples * (two - one) / timer.blocked_autorange(min_run_time=1).median


def profiled(batches, path):
    """Yields from an iterator over steps, and traces the sixth to the tenth of them (and all that
    follows, if no eleventh is asked for): PATH.json (for chrome://tracing or Perfetto) and the ten
    costliest operations, PATH.txt."""
    def write(profiler):
        profiler.export_chrome_trace(f"{path}.json")
        sort = f"self_{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
        Path(f"{path}.txt").write_text(profiler.key_averages().table(sort_by=sort, row_limit=10))

    yield from itertools.islice(batches, 5)                  # the first ones are not typical
    with torch.profiler.profile(on_trace_ready=write):       # also where training stops amid them
        yield from itertools.islice(batches, 5)
    yield from batches


# ----- Hugging Face folders -----

# Our module -> theirs, outside the blocks and inside of one.
OUTER = {
    "embeddings.tokens": "bert.embeddings.word_embeddings",
    "embeddings.positions": "bert.embeddings.position_embeddings",
    "embeddings.segments": "bert.embeddings.token_type_embeddings",
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "pooler": "bert.pooler.dense",
    "nsp": "cls.seq_relationship",
    "mlm_transform": "cls.predictions.transform.dense",
    "mlm_norm": "cls.predictions.transform.LayerNorm"}
INNER = {
    "qkv": "attention.self.query attention.self.key attention.self.value",       # three of theirs
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm"}
CONFIG = {               # our field -> theirs
    "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
    "feed_forward": "intermediate_size", "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings", "dropout": "hidden_dropout_prob",
    "layer_norm_eps": "layer_norm_eps", "init_std": "initializer_range"}
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]    # as data.py's tokenizer has them
PAD, UNK, CLS, SEP, MASK = range(5)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16,
          "BF16": torch.bfloat16, "I64": torch.int64}


def huggingface_names(name):
    """Returns the Hugging Face names of one of our parameters: one, or three for Q, K and V."""
    if name == "mlm_bias":
        return ["cls.predictions.bias"]
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return [f"{OUTER[module]}.{kind}"]
    _, layer, inner = module.split(".")
    return [f"bert.encoder.layer.{layer}.{part}.{kind}" for part in INNER[inner].split()]


def save_huggingface(model, tokenizer, folder):
    """Writes config.json, model.safetensors (fp32), a copy of the file `tokenizer`, tokenizer.json
    and its tokenizer_config.json, and SHA256SUMS, the digests of the five, to a folder.

    `transformers.AutoModelForMaskedLM.from_pretrained(folder)` gives the same logits, AutoTokenizer
    the same tokens. Each file is written under a temporary name and renamed. Raises OSError, with
    the path, if it cannot be; ModelError as `tokenizer_json` does.
    """
    config = {theirs: getattr(model.config, ours) for ours, theirs in CONFIG.items()}
    config |= {"architectures": ["BertForPreTraining"], "model_type": "bert", "hidden_act": "gelu",
               "attention_probs_dropout_prob": model.config.dropout, "type_vocab_size": 2,
               "pad_token_id": 0, "tie_word_embeddings": True}
    tensors = {}
    for name, parameter in model.named_parameters():
        names = huggingface_names(name)
        # The one matrix of Q, K and V becomes their three
        tensors.update(zip(names, parameter.detach().float().cpu().chunk(len(names))))
    # Without this class transformers 5 makes a WordPiece tokenizer, as other BERTs have
    about = {"tokenizer_class": "PreTrainedTokenizerFast",
             "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
             "model_max_length": model.config.max_positions,
             **{f"{name[1:-1].lower()}_token": name for name in SPECIALS}}
    contents = {"model.safetensors": safetensors(tensors),
                "config.json": [json.dumps(config, indent=2).encode() + b"\n"],
                "tokenizer.json": [tokenizer_json(Path(tokenizer).read_bytes())],
                "tokenizer_config.json": [json.dumps(about, indent=2).encode() + b"\n"],
                "tokenizer.model": [Path(tokenizer).read_bytes()],
                "SHA256SUMS": sha256_sums(folder)}       # a generator: it reads the five above
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, parts in contents.items():
        path, temporary = Path(folder) / name, Path(folder) / f"{name}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.writelines(parts)
            temporary.replace(path)                # a killed program leaves the old file whole
        except OSError as error:                   # that of a full disk does not name the file
            temporary.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from None


def sha256_sums(folder):
    """Yields what `sha256sum` prints of the files in a folder of ours, a line (bytes) each."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer.model",
                 "tokenizer_config.json"):
        yield f"{hashlib.sha256(Path(folder, name).read_bytes()).hexdigest()}  {name}\n".encode()


def safetensors(tensors):
    """Yields the bytes of a safetensors file of fp32 tensors {name: tensor}: the length of the
    header, the header (JSON), the raw numbers in its order."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)                # so that the numbers are aligned in the file
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.numpy().tobytes()


def tokenizer_json(model):
    """Returns the tokenizer.json (bytes) that cuts text as a SentencePiece model (bytes) does.

    Ids differ where two ways to cut a text are equally likely: Hugging Face's `tokenizers` adds
    scores in fp64, SentencePiece in fp32; `tokenizers` also drops an accent that its letter cannot
    have. And text can spell [MASK], as in all their tokenizers. Raises ModelError for models unlike
    data.py's that would differ in more. Field numbers are those of sentencepiece_model.proto.
    """
    pieces = [dict(protobuf(value)) for part, value in protobuf(model) if part == 1]
    trainer, normalizer = (dict(protobuf(dict(protobuf(model))[part])) for part in (2, 3))
    # Its type; pieces that are neither normal, unknown nor control; what it does with spaces
    if (trainer.get(3, 1) != 1 or {piece.get(3, 1) for piece in pieces} - {1, 2, 3}
            or trainer.get(24) or 0 in [trainer.get(22), *map(normalizer.get, (3, 4))]):
        raise ModelError("the tokenizer.model is no plain unigram model; make one with data.py")
    vocab = [(piece[1].decode(), struct.unpack("<f", piece[2])[0]) for piece in pieces]
    added = [{"id": i, "content": name, "special": True, "normalized": False,
              "lstrip": False, "rstrip": False, "single_word": False}
             for i, name in enumerate(SPECIALS)]
    # As in `encode_with_masks`, the text between two [MASK] loses a space at its end, and begins a
    # word only after a space or if it is the first
    spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    charsmap = base64.b64encode(normalizer.get(2, b"")).decode()     # Unicode's rules, if any
    cleaning = [{"type": "Precompiled", "precompiled_charsmap": charsmap}] if charsmap else []
    cleaning += [{"type": "Strip", "strip_left": False, "strip_right": True},
                 {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    unigram = {"type": "Unigram", "unk_id": UNK, "vocab": vocab, "byte_fallback": False}
    return json.dumps({
        "version": "1.0", "added_tokens": added, "pre_tokenizer": spaces, "decoder": spaces,
        "normalizer": {"type": "Sequence", "normalizers": cleaning}, "model": unigram,
        "post_processor": {"type": "BertProcessing", "cls": ["[CLS]", CLS], "sep": ["[SEP]", SEP]}
    }).encode()


def protobuf(message):
    """Yields (number, value) of each field of a protobuf message (bytes); value is an int for a
    varint, else the field's bytes (https://protobuf.dev/programming-guides/encoding)."""
    stream = io.BytesIO(message)
    while (tag := varint(stream)) is not None:
        number, kind = tag >> 3, tag & 7
        value = varint(stream) if kind in (0, 2) else stream.read({1: 8, 5: 4}[kind])
        yield number, stream.read(value) if kind == 2 else value


def varint(stream):
    """Returns the next varint, seven bits a byte, lowest first; None at the end of the stream."""
    number = shift = 0
    while byte := stream.read(1):
        number |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return number
        shift += 7


def load_huggingface(folder):
    """Returns a BertForPreTraining (fp32, training mode) with the weights of a Hugging Face folder.

    The vocabulary is padded to a multiple of 64 by zero rows. Files of BertModel, BertForMaskedLM
    load too: heads that the file lacks keep their random initialisation, and a line on stderr names
    them. Raises ModelError if the folder is not a BERT, its weights are not all those that
    config.json asks for, or a file is damaged. Without SHA256SUMS a wrong number passes for a
    weight.
    """
    config, weights, absent = read_config(folder), read_weights(folder), []
    # An encoder has this many weights at least: no wrong number may fill the memory
    least = config.width * (config.layers * config.width + config.feed_forward
                            + config.max_positions + config.vocab_size)
    if (least > sum(map(torch.numel, weights.values())) or config.width % config.heads
            or f"bert.encoder.layer.{config.layers}.output.dense.weight" in weights):
        raise ModelError(f"{folder}: config.json does not describe the weights")
    model = BertForPreTraining(config._replace(vocab_size=-(-config.vocab_size // 64) * 64))
    for name, parameter in model.named_parameters():
        names = huggingface_names(name)
        if weights.keys() >= {*names}:
            for part, target in zip(names, parameter.data.zero_().chunk(len(names))):
                if name in ("embeddings.tokens.weight", "mlm_bias"):
                    target = target[:config.vocab_size]
                if weights[part].shape != target.shape or not weights[part].isfinite().all():
                    raise ModelError(f"{folder}: {part} is not finite or has the wrong shape")
                target.copy_(weights[part])
        elif name.startswith(("embeddings.", "blocks.")):
            raise ModelError(f"{folder}: the weights lack {', '.join(names)}")
        else:
            absent.append(name)
    if absent:
        print(f"{folder}: no weights for {', '.join(absent)}; they stay random", file=sys.stderr)
    return model


def copy_weights(folder, model, tokenizer):
    """Gives a model the weights of a folder; raises ModelError if its shape is another, or if its
    tokenizer.model is not the file `tokenizer`: other tokens would mean other words."""
    found, own = load_huggingface(folder), Path(folder) / "tokenizer.model"
    if not own.exists() or own.read_bytes() != Path(tokenizer).read_bytes():
        raise ModelError(f"{tokenizer} is not {own}; make shards with data.py --tokenizer {own}")
    if found.config[:6] != model.config[:6]:
        raise ModelError(f"{folder} is {found.config[:6]}, the plan {model.config[:6]}")
    model.load_state_dict(found.state_dict())


def modern(name):
    """Returns today's name of a tensor: files of 2018 say gamma and beta, BertModel has no prefix.
    """
    name = name.replace("Norm.gamma", "Norm.weight").replace("Norm.beta", "Norm.bias")
    return name if name.startswith(("bert.", "cls.")) else f"bert.{name}"


def read_config(folder):
    """Returns the BertConfig of a folder's config.json, its vocabulary not padded; raises
    ModelError if it is no BERT's."""
    try:
        theirs = json.loads((Path(folder) / "config.json").read_text())
        if (theirs["model_type"], theirs.get("hidden_act", "gelu")) != ("bert", "gelu"):
            raise ValueError("not a BERT with GELU")
        config = BertConfig(**{our: theirs[name] for our, name in CONFIG.items() if name in theirs})
        for (ours, kind), value in zip(BertConfig.__annotations__.items(), config):
            # Whole numbers from 1 on; fractions, 0 of which may stand there without a point
            if type(value) not in (int, kind) or not (0 < value if kind is int else 0 <= value < 1):
                raise ValueError(f"{CONFIG[ours]} cannot be {value!r}")
        return config
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{folder} is no model folder: config.json: {error}") from None


def read_weights(folder):
    """Returns {today's name: tensor} of a folder's model.safetensors; raises ModelError if it is
    damaged, or a file is not what SHA256SUMS says."""
    path = Path(folder) / "model.safetensors"
    try:
        sums = path.with_name("SHA256SUMS")
        if sums.exists() and sums.read_bytes() != b"".join(sha256_sums(folder)):
            raise ValueError("`sha256sum -c SHA256SUMS` there tells which file")
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header, data = json.loads(data[8:begin]), memoryview(bytearray(data[begin:]))
        header.pop("__metadata__", None)
        begins, ends = zip(*sorted(entry["data_offsets"] for entry in header.values()))
        if [*begins, len(data)] != [0, *ends]:
            raise ValueError("tensors overlap or leave gaps")
        return {modern(name): torch.frombuffer(data[slice(*entry["data_offsets"])],
                                               dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
                for name, entry in header.items()}
    except Exception as error:          # a damaged header can be anything
        reason = " ".join(str(error).split())[:200]              # torch's can have many lines
        raise ModelError(f"{path} is missing, cut or damaged ({reason})") from None


# ----- The program: fill in a [MASK] -----

STAND_IN = "\ue000"                # a private character for [MASK], whose token no text can spell


def fill_mask(model, tokenizer, text, count=5):
    """Returns, for each [MASK] of a text, the `count` likeliest words, as "be 12%, have 3%".

    Of more tokens than it was trained on (128 in the demo) a model guesses. Raises ModelError if
    there is no [MASK] or the text is longer than the model's positions.
    """
    device, training = model.mlm_bias.device, model.training
    tokens = torch.tensor(encode_with_masks(tokenizer, text), device=device)     # (T,)
    if len(tokens) > model.config.max_positions:
        raise ModelError(f"{len(tokens)} tokens; the model reads {model.config.max_positions}")
    masked = tokens == MASK
    if not masked.any():
        raise ModelError("the text has no [MASK] to fill in")
    model.eval()
    with torch.no_grad():
        bounds = torch.tensor([0, len(tokens)], dtype=torch.int32, device=device)
        hidden = model.encode(masked.nonzero().flatten(), tokens, torch.zeros_like(tokens),
                              torch.arange(len(tokens), device=device), bounds,
                              torch.tensor([len(tokens)]))
        logits = model.mlm_logits(hidden).float()
    model.train(training)
    # Without the rows that only pad the vocabulary to a multiple of 64
    best = logits[:, :tokenizer.get_piece_size()].softmax(-1).topk(count)
    return [", ".join(f"{tokenizer.id_to_piece(token).replace('▁', '')} {probability:.0%}"
                      for token, probability in zip(ids, probabilities))
            for ids, probabilities in zip(best.indices.tolist(), best.values.tolist())]


def encode_with_masks(tokenizer, text):
    """Returns the token ids [CLS] text [SEP], each "[MASK]" of the text one masked token."""
    tokens, blank = [CLS], tokenizer.piece_to_id("▁")
    for piece in tokenizer.encode(text.replace("[MASK]", STAND_IN), out_type=str):
        # Characters that the tokenizer does not know share a piece, the stand-in among them
        for part in filter(None, piece.replace(STAND_IN, f" {STAND_IN} ").split(" ")):
            if part == STAND_IN and tokens[-1] == blank:
                tokens.pop()                       # the word's begin belongs to the masked word
            tokens.append(MASK if part == STAND_IN else tokenizer.piece_to_id(part))
    return tokens + [SEP]


def main():
    """Prints a line of likely words for each [MASK]; one line on stderr if that cannot be done."""
    parser = argparse.ArgumentParser(description="Fill in each [MASK] of a text.")
    parser.add_argument("folder", help="a model folder, for example runs/demo/model")
    parser.add_argument("text", help='a text with [MASK] in it')
    args = parser.parse_args()
    import sentencepiece                           # only this program needs it
    try:
        model = load_huggingface(args.folder)
        tokenizer = sentencepiece.SentencePieceProcessor(args.folder + "/tokenizer.model")
        print(*fill_mask(model, tokenizer, args.text), sep="\n")
    except (ModelError, OSError, RuntimeError) as error:     # the last: sentencepiece
        sys.exit(f"bert.py: {error}")


if __name__ == "__main__":
    main()
