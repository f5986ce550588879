"""An encoder as one would write it today: pre-normalisation, rotary positions, GeGLU, no biases.

    python tests/variants/modern.py                          # and any flag of train.py but --init
    torchrun --nproc_per_node=2 tests/variants/modern.py --out runs/modern

These are the choices of ModernBERT (Warner et al., arXiv 2412.13663, section 2.1), except its local
attention and its tokenizer. For tokens t at positions p (the two middle lines are one layer):

    x = norm(table[t])
    x = x + out attention(turned(qkv norm(x), p))            the first layer has no norm here
    x = x + down (gelu(a) * b)                               a, b: the halves of up_and_gate norm(x)
    x = norm(x)                                              after the last layer

- Layers normalise what they read, never the sum x itself (Xiong et al., arXiv 2002.04745).
- Pairs of elements of Q and K are rotated by angles that grow with the position (Su et al., arXiv
  2104.09864). A product of Q and K then depends on positions only by their distance.
- Feed-forward is a product of two halves (Shazeer, arXiv 2002.05202), of 2/3 of BERT's width,
  rounded to a multiple of 64. Its parameters and operations are within 7 % of BERT's.
- The only biases are those of the MLM output and of the head for pairs. There are no segments, as
  in ModernBERT: the [SEP] between A and B must suffice.

What is changed: bert.BertForPreTraining, by a subclass with its own blocks and `encode`. The rows
stay packed, and attention is still bert.attention.

transformers' ModernBertForMaskedLM loads the saved folder, see modern_export.py. bert.py does not,
so the command that a run prints at its end fails.
"""
import dataclasses
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch
import torch.nn.functional as F
from torch import nn

import bert
from tests.variants import common, modern_export

THETA = 10000.0              # positions up to about this stay distinct; ModernBERT's is 160,000
Bert = bert.BertForPreTraining                           # the original, which `install` replaces


def cos_sin(positions, size):
    """Returns the cosines and sines, (N, 1, 1, size / 2) each, of each row's angles,
    position / THETA^(2i / size) for i = 0, 1, ... positions: (N,); size: the columns of a head."""
    exponents = torch.arange(0, size, 2, device=positions.device) / size
    angles = positions[:, None, None, None] * THETA ** -exponents
    return angles.cos(), angles.sin()


def turned(qkv, turns):
    """Returns qkv (N, 3, H, D/H) with columns i and i + D/H/2 of Q and K rotated by the i-th angle
    of their row. turns: from `cos_sin`."""
    cos, sin = turns
    qk, v = qkv.split([2, 1], 1)
    a, b = qk.chunk(2, -1)
    qk = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)           # fp32, like the angles
    return torch.cat([qk.to(v.dtype), v], 1)


class Block(bert.Block):
    """One layer: attention, then feed-forward. Each reads a normalised x, and its result is added
    to x itself."""

    def __init__(self, config):
        super().__init__(config)
        inner = 64 * max(1, round(config.feed_forward / 96))
        del self.up
        self.up_and_gate = bert.linear(config.width, 2 * inner, config.init_std)
        self.down = bert.linear(inner, config.width, config.init_std)

    def forward(self, x, turns, bounds, lengths, rows=None):
        """Returns the next hidden states. turns: from `cos_sin`; the rest as in bert.Block."""
        qkv = self.qkv(self.attention_norm(x)).view(len(x), 3, self.heads, -1)
        dropout = self.dropout.p if self.training else 0.0
        attended = bert.attention(turned(qkv, turns), bounds, lengths, dropout).flatten(1)
        if rows is not None:
            x = x.index_select(0, rows)
            attended = attended.index_select(0, rows)
        x = x + self.dropout(self.attention_out(attended))
        a, b = self.up_and_gate(self.norm(x)).chunk(2, -1)
        return x + self.dropout(self.down(F.gelu(a) * b))


class Modern(Bert):
    """The model above, with BERT's heads."""

    def __init__(self, config):
        super().__init__(dataclasses.replace(config, layers=0))
        self.config = config
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.blocks[0].attention_norm = nn.Identity()    # its input is already normalised
        self.final_norm = bert.LayerNorm(config.width, config.layer_norm_eps)
        del self.embeddings.positions, self.embeddings.segments
        for name, module in self.named_modules():
            if hasattr(module, "bias") and name not in ("pooler", "nsp"):
                module.bias = None

    def encode(self, rows, tokens, segments, positions, bounds, lengths):
        """Returns the last hidden states (R, D) of the rows (R,), as BERT's `encode` does, but
        ignores the segments."""
        x = self.embeddings.norm(self.embeddings.tokens(tokens))
        x = self.embeddings.dropout(x)
        turns = cos_sin(positions, self.config.width // self.config.heads)
        for block in self.blocks[:-1]:
            x = block(x, turns, bounds, lengths)
        return self.final_norm(self.blocks[-1](x, turns, bounds, lengths, rows))


def install():
    """Makes train.py train a Modern. Plain train.py refuses its checkpoints, and vice versa."""
    def refuse(folder, model, tokenizer_path):
        raise bert.ModelError("a BERT has other blocks: leave out --init")

    bert.BertForPreTraining = Modern
    bert.init_from = refuse
    bert.huggingface_names = modern_export.huggingface_names
    bert.unlike_huggingface = lambda model: []       # none: it is a ModernBERT
    bert.save_huggingface = functools.partial(modern_export.save, theta=THETA)
    common.name_run("modern")


if __name__ == "__main__":
    install()
    common.main()
