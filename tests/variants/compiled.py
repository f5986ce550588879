"""Fuses the kernels of each layer with torch.compile.

    python tests/variants/compiled.py                        # and any other flag of train.py

A GPU reads and writes a layer's activations once for each small operation (GELU, dropout, sums,
LayerNorm). A compiler fuses several operations into one kernel, which reads and writes the
activations once (Ansel et al., "PyTorch 2", ASPLOS 2024). Compilation takes a minute or more, so
short runs get slower. Results equal those of train.py up to rounding; dropout drops different
activations. The speed on a GPU was not measured.

What is changed: the blocks of the model, after it is built; and its parameters have no gradient in
forward. The weights keep their names, so the model folder and the checkpoints are like those of
train.py, but the two programs refuse each other's checkpoints.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import bert
from tests.variants import common


def compile_blocks(args, world, state):
    """Compiles the blocks of a new State's model one by one, so that backward still completes their
    gradients one after another."""
    for block in state.model.blocks:
        # dynamic: the number of rows differs from batch to batch.
        block.compile(dynamic=True)
    gradients = {}

    # The compiler skips operations on a 16-bit parameter whose gradient is fp32, such as LayerNorm.
    # The hooks therefore hide gradients in forward, when it looks, and restore them for backward.
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
    # Attention depends on the lengths of a batch, so it would be recompiled again and again.
    bert.attention = torch.compiler.disable(bert.attention)
    common.after_build(compile_blocks)
    common.name_run("compiled")


if __name__ == "__main__":
    install()
    common.main()
