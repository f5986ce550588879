"""The kernels of each layer fused by torch.compile.

    python tests/variants/compiled.py                        # and any other flag of train.py

A GPU reads and writes a layer's activations once for each small operation (GELU, dropout, sums,
LayerNorm). A compiler makes one kernel of several, so that they are read and written once (Ansel et
al., "PyTorch 2", ASPLOS 2024). Compilation takes a minute or more, so short runs lose by it. The
results are those of train.py but for rounding; with dropout the compiler drops other activations.
Its speed on a GPU was not measured.

What is changed: the blocks of the model, after it is built; and its parameters have no gradient in
forward. The weights have the same names, so the folder and the checkpoints are those of train.py;
but neither takes up a checkpoint of the other.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it says how torch's threads wait

import torch

import bert
from tests.variants import common


def compile_blocks(args, world, state):
    """Compiles the blocks of a new State's model, one by one: so backward still completes their
    gradients one after another."""
    for block in state.model.blocks:
        # "dynamic": the number of rows differs from batch to batch.
        block.compile(dynamic=True)
    gradients = {}

    # The compiler passes over operations on a 16-bit parameter whose gradient is fp32, LayerNorm
    # for instance. So there is none while it looks, and backward finds it again.
    def hide_gradients(model, inputs):
        for p in model.parameters():
            gradients[p], p.grad = p.grad, None

    def show_gradients(model, inputs, logits):
        for p, gradient in gradients.items():
            p.grad = gradient

    state.model.register_forward_pre_hook(hide_gradients)
    state.model.register_forward_hook(show_gradients)


def install():
    """Makes train.py compile the blocks."""
    # Attention depends on the lengths of a batch, so it would be compiled again and again.
    bert.attention = torch.compiler.disable(bert.attention)
    common.after_build(compile_blocks)
    common.name_run("compiled")


if __name__ == "__main__":
    install()
    common.main()
