"""ALBERT: one block for all layers, an embedding in two factors, and sentence order prediction.

    python tests/variants/albert.py                          # and any flag of train.py but --init
    torchrun --nproc_per_node=2 tests/variants/albert.py --out runs/albert

Lan et al., arXiv 1909.11942, section 3.1. With V tokens, width D and a much smaller E:

    x = block(block(... block(embed(tokens))))      L times the same weights
    embedding (V, D) = table (V, E) widen (E, D)    also the output matrix of the MLM head
    pairs: B always follows A in the document; in half of the examples B is given first (SOP,
    sentence order prediction, in place of NSP, which the topics of A and B give away)

A text without two whole sentences has no order to predict: 42 % of the demo's texts at 64 tokens,
14 % at 128. Of the others, a guess by lengths and end marks alone is right for about 57 %.

A shared weight's gradient is the sum of the gradients that its L copies would have. Only the MLM
head has less to compute. Weights, moments and bytes to average shrink by a factor of 8.7 at base
and 17 at large.

What is changed: bert.BertForPreTraining, by a subclass whose `blocks` hold one block L times and
whose `tokens` are two modules; data.PretrainingData, by a subclass with other pairs, which the log
still calls NSP. Held-out examples have these pairs, too, so losses are not quite comparable with
train.py's. The loop, the reducer and the checkpoints use `named_parameters`, which lists a shared
weight once.

An ALBERT is a BERT with equal layers and an embedding of rank E: `written_out` returns that BERT,
which is saved for Hugging Face. For this, positions and segments have width D and the norm comes
after them, as in BERT and in section 3.1. The authors' code gives them width E and normalises
before `widen`; its head projects to E before the norm, ours after. A shared gradient is complete
only when backward ends, so nothing hides its averaging.
"""
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import bert
import data
from tests.variants import common

E = 128                      # the paper's, for widths from 768 on; at most half the width
Bert = bert.BertForPreTraining                           # the original, which `install` replaces


class Albert(Bert):
    """A BERT whose layers share one block, with an embedding in two factors."""

    def __init__(self, config):
        super().__init__(dataclasses.replace(config, layers=1))
        self.config = config
        inner = min(E, config.width // 2)
        self.blocks = nn.ModuleList([self.blocks[0]] * config.layers)    # one module, L times
        table = bert.Embedding(config.vocab_size, inner)
        widen = nn.Linear(inner, config.width, bias=False)
        # Elements of the product get the standard deviation of BERT's embeddings.
        nn.init.normal_(table.weight, std=0.02)
        nn.init.normal_(widen.weight, std=inner ** -0.5)
        self.embeddings.tokens = nn.Sequential(table, widen)

    def mlm_logits(self, hidden):
        """Returns the logits (M, V) for the hidden states (M, D) of masked tokens."""
        table, widen = self.embeddings.tokens
        hidden = self.mlm_norm(F.gelu(self.mlm_transform(hidden)))
        return F.linear(hidden @ widen.weight, table.weight, self.mlm_bias)


@torch.no_grad()
def written_out(model):
    """Returns a plain BERT (fp32, on the CPU) that computes the same as this Albert."""
    plain = Bert(model.config)
    weights = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    table = weights.pop("embeddings.tokens.0.weight")
    widen = weights.pop("embeddings.tokens.1.weight")
    weights["embeddings.tokens.weight"] = table @ widen.T
    plain.load_state_dict(weights)
    return plain


class OrderedPairs(data.PretrainingData):
    """Examples of two consecutive texts, which are swapped in half of the examples."""

    def text(self, shard, place, length, cut_draw):
        """Returns the inherited Text without incomplete sentences at its beginning and end: half a
        sentence in the middle of a swapped pair would give the swap away. So would the end of a
        document without a mark. A text with fewer than two whole sentences is all A, with no B."""
        text = super().text(shard, place, length, cut_draw)
        if self.pairs == "none":
            return text
        tokens = shard.tokens[text.start:text.end]
        is_cut = self.ends_sentence[tokens[:-1]] & self.begins_sentence[tokens[1:]]
        cuts = text.start + 1 + np.flatnonzero(is_cut)
        if text.start == text.document:
            cuts = np.append(text.start, cuts)
        if text.end == text.document_end and self.ends_sentence[tokens[-1]]:
            cuts = np.append(cuts, text.end)
        if len(cuts) < 3:
            return text._replace(middle=text.end)
        middle = cuts[1 + int(cut_draw * (len(cuts) - 2))]
        return text._replace(start=int(cuts[0]), middle=int(middle), end=int(cuts[-1]))

    def pair(self, i, draws):
        """Returns the Spans of example i; the fourth draw decides whether A and B are swapped.
        Without B the order is not asked for: the label is IGNORED."""
        short_draw, length_draw, cut_draw, true_draw, place_draw = draws
        true = super().pair(i, [short_draw, length_draw, cut_draw, 0.0, place_draw])
        if true.b == true.b_end:
            return true._replace(pair_label=data.IGNORED)
        if true_draw < 0.5:
            return true
        return true._replace(a=true.b, a_end=true.b_end, b=true.a, b_end=true.a_end, pair_label=1)


def install():
    """Makes train.py train an Albert. Plain train.py refuses its checkpoints, and vice versa."""
    save = bert.save_huggingface

    def refuse(folder, model, tokenizer_path):
        raise bert.ModelError("the layers of a BERT are not equal: leave out --init")

    bert.BertForPreTraining = Albert
    bert.init_from = refuse
    # The saved folder is a BERT: Hugging Face's ALBERT is the authors', not ours.
    bert.unlike_huggingface = lambda model: []
    bert.save_huggingface = lambda model, *where: save(written_out(model), *where)
    data.PretrainingData = OrderedPairs
    common.name_run(f"albert, E = {E}")


if __name__ == "__main__":
    install()
    common.main()
