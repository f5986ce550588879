"""Stacking: train few layers, copy them on top, freeze the lower ones, and finally train all.

    python tests/variants/stacking.py                        # and any flag of train.py but --init
    torchrun --nproc_per_node=2 tests/variants/stacking.py --steps 900 900 500 250 --out runs/stack

Yang et al., "Progressively Stacking 2.0" (MSLT), arXiv 2011.13635. With L layers and K stages:

    stage k = 1 .. K:       the model has k L / K layers
                            the upper L / K begin as copies of those below them     (k > 1)
                            embeddings and lower layers are frozen: forward only    (k > 1)
    finally:                all layers are trained

Backward ends at the lowest layer that trains, and only what trains is averaged. The abstract gives
the stages, the frozen parts and the savings. The copies, the embeddings' training in the first
stage only, and the joint end are from memory and from a second-hand summary, not checked.

What is changed:
- optim.RECIPES: the first phase becomes K + 1 phases, so that each stage has its own schedule: a
  warm-up, then a constant rate; only in the joint phase the rate decays. --steps takes a number for
  each phase.
- train.begin_phase, which the loop calls before the first step of each phase, begins the stage: it
  copies the layers, sets requires_grad, and makes the Reducer pack what trains. The residuals of
  int8 are already gone then, since each phase ends with a checkpoint. A stage of 0 steps
  copies, too. train.restore sets the stage of a new run or of a checkpoint.
- the model's `encode`, which uses only the blocks of the stage. All blocks exist from the start, so
  a checkpoint has the same tensors in each stage, and the one at the end of a stage begins the
  next.
- the optimizer's groups, which hold only what trains.

The optimizer's step count t goes on, so the moments of a copied layer, which start at 0, are not
corrected. Its updates are too long; under LAMB only those of its vectors, and of matrices so large
that the bound of LAMB's ratio applies. With constant gradients they are up to 1.6 times as long for
some fifty steps with the demo's b2 of 0.98, up to 6.6 times for a thousand with 0.999; with pure
noise, 3 and 14 times at first.

A run that stops before the last stage also has its unused, untrained layers in --out/model.
"""
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import train  # first: it sets how torch's threads wait

import torch

import bert
import dist
import optim
from tests.variants import common

STAGES, JOINT = 2, 0.2       # K, and the joint training's fraction of the steps


class GrowingBert(bert.BertForPreTraining):
    """A BERT that uses the first `depth` of its blocks."""

    def __init__(self, config):
        super().__init__(config)
        self.depth = config.layers

    def encode(self, *arguments):
        """As inherited, with only the first `depth` blocks."""
        all_blocks = self.blocks
        self.blocks = all_blocks[:self.depth]
        hidden = super().encode(*arguments)
        self.blocks = all_blocks
        return hidden


def staged(phases):
    """Returns a recipe's phases, with the first one cut into the stages and the joint training."""
    first = phases[0]
    steps = round(first.steps * (1 - JOINT) / STAGES)
    stage = dataclasses.replace(first, steps=steps, power=0.0)           # power 0: no decay
    joint = dataclasses.replace(first, steps=first.steps - STAGES * steps)
    return [stage] * STAGES + [joint] + phases[1:]


@torch.no_grad()
def begin_stage(args, state, stage, grow):
    """Sets up stage 0, 1, ...; from STAGES on everything trains. grow: whether to copy layers."""
    layers = state.model.config.layers
    each = layers // STAGES
    below = 0                                            # number of frozen layers
    state.model.depth = layers
    if stage < STAGES:
        below = stage * each
        state.model.depth = below + each

    for name, master in state.masters.items():
        if name.startswith("blocks."):
            layer = int(name.split(".")[1])
            trains = below <= layer < state.model.depth
            if grow and trains and below > 0:
                source = name.replace(f".{layer}.", f".{layer - each}.", 1)
                master.copy_(state.masters[source])
        else:                                            # heads always, but not the tied matrix
            trains = below == 0 or not name.startswith("embeddings.")
        state.model.get_parameter(name).requires_grad_(trains).grad = None
    optim.copy_to_model(state.masters, state.model)

    # The Reducer gets new buckets and keeps its hooks, which nothing calls for frozen weights.
    reducer = state.reducer
    named = state.model.named_parameters()
    trainable = {name: p for name, p in named if p.requires_grad}
    reducer.buckets = dist.fill_buckets(
        trainable, reducer.world, args.compression, args.bucket_mb)
    reducer.flats = [bucket.flat for bucket in reducer.buckets]
    reducer.views = {}
    for bucket in reducer.buckets:
        reducer.views.update(bucket.views)
    for name, master in state.masters.items():           # None if frozen
        master.grad = reducer.views.get(name)
    for name, p in trainable.items():
        p.grad = reducer.views[name].detach()
    for group, everything in zip(state.optimizer.param_groups, state.groups):
        group["params"] = [master for master in everything if master.grad is not None]


def prepare(args, world, state):
    """Keeps the optimizer's whole groups in `state.groups`. Raises train.ConfigError if the new
    State cannot be trained in stages."""
    if state.model.config.layers % STAGES:
        raise train.ConfigError(f"stacking needs a multiple of {STAGES} layers")
    if args.init:
        raise train.ConfigError("stacking copies layers over those of --init: leave it out")
    state.groups = [group["params"] for group in state.optimizer.param_groups]


def install():
    """Makes train.py train in stages. The two programs do not resume each other's checkpoints."""
    begin_phase = train.begin_phase
    restore = train.restore

    def begin_staged_phase(args, world, state, phase_index):
        for stage in range(state.counters.phase + 1, phase_index + 1):
            begin_stage(args, state, stage, grow=True)
        return begin_phase(args, world, state, phase_index)

    def restore_stage(args, world, log, state):
        restore(args, world, log, state)
        begin_stage(args, state, state.counters.phase, grow=False)

    bert.BertForPreTraining = GrowingBert
    train.begin_phase = begin_staged_phase
    train.restore = restore_stage
    common.after_build(prepare)
    common.change_recipes(lambda recipe: {"phases": staged(recipe["phases"])})
    common.name_run(f"{STAGES} stages")


if __name__ == "__main__":
    install()
    common.main()
