"""ALBERT: one block for all layers, and an embedding in two factors, so less to average.

    python tests/variants/albert.py                          # and any flag of train.py but --init
    torchrun --nproc_per_node=2 tests/variants/albert.py --out runs/albert

Lan et al., arXiv 1909.11942, sections 3.1 (both ideas). With V tokens, width D and E much smaller:

    x = block(block(... block(embed(tokens))))      L times the same weights
    embedding (V, D) = table (V, E) widen (E, D)    also as the output matrix of the MLM head

The gradient of a shared weight is the sum of those that its L copies would have. Nothing is saved
in forward and backward: a layer computes what it did. What is saved is memory, of weights and
moments, and bytes to average: 8.7 times fewer at base, 17 at large.

What is changed: bert.BertForPreTraining, by a subclass whose `blocks` hold one block L times, and
whose `tokens` are two modules. The loop, the reducer, the checkpoints and --plan go by
`named_parameters`, which names a shared weight once.

An ALBERT is a BERT with equal layers and an embedding of rank E, so that `written_out` is what is
saved for Hugging Face. For that, positions and segments are D wide and the norm comes after them,
as in BERT and as section 3.1 has it; the authors' code makes them E wide too, and norms before
`widen`. Its head projects to E before the norm, ours after. SOP in place of NSP is --pairs sop.
Also to know: a shared gradient is complete only when backward ends, so nothing hides its average.
"""
import dataclasses
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import bert  # noqa: E402
import train  # noqa: E402

E = 128                      # the paper's, of widths from 768 on; at most half the width
Bert = bert.BertForPreTraining                           # `install` puts Albert in its place


class Albert(Bert):
    """A BERT of config.layers equal layers; see above."""

    def __init__(self, config):
        super().__init__(dataclasses.replace(config, layers=1))
        self.config = config
        inner = min(E, config.width // 2)
        self.blocks = nn.ModuleList([self.blocks[0]] * config.layers)    # one module, L times
        table = nn.Embedding(config.vocab_size, inner)
        widen = nn.Linear(inner, config.width, bias=False)
        # So that elements of the product have BERT's standard deviation
        nn.init.normal_(table.weight, std=config.init_std)
        nn.init.normal_(widen.weight, std=inner ** -0.5)
        self.embeddings.tokens = nn.Sequential(table, widen)

    def mlm_logits(self, hidden):
        """Returns the logits (M, V) of hidden states (M, D) at masked positions."""
        table, widen = self.embeddings.tokens
        hidden = self.mlm_norm(F.gelu(self.mlm_transform(hidden)))
        return F.linear(hidden @ widen.weight, table.weight, self.mlm_bias)


@torch.no_grad()
def written_out(model):
    """Returns the plain BERT (fp32, on the CPU) that computes what an Albert does."""
    plain = Bert(model.config)
    weights = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    table = weights.pop("embeddings.tokens.0.weight")
    widen = weights.pop("embeddings.tokens.1.weight")
    weights["embeddings.tokens.weight"] = table @ widen.T
    plain.load_state_dict(weights)
    return plain


def install():
    """Makes train.py train an Albert. Neither takes up a checkpoint of the other."""
    build = train.build
    same_run = train.same_run
    save = bert.save_huggingface

    def build_albert(plan, world, checkpoint):
        if plan.flags.init:
            raise train.ConfigError("the layers of a BERT are not equal: leave out --init")
        return build(plan, world, checkpoint)

    bert.BertForPreTraining = Albert
    train.build = build_albert
    train.same_run = lambda *arguments: same_run(*arguments) | {"variant": "albert", "E": E}
    # Hugging Face's ALBERT is the authors', not ours
    bert.save_huggingface = lambda model, *where: save(written_out(model), *where)


if __name__ == "__main__":
    install()
    train.main()
