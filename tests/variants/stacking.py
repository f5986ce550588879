"""Stacking: train few layers, copy them on top, freeze the lower ones, and at last train all.

    python tests/variants/stacking.py                        # and train.py's flags
    torchrun --nproc_per_node=2 tests/variants/stacking.py --steps 900 900 500 250 --out runs/stack

Yang et al., "Progressively Stacking 2.0" (MSLT), arXiv 2011.13635. With L layers and K stages:

    stage k = 1 .. K:       the model has k L / K layers
                            the upper L / K begin as copies of those below them     (k > 1)
                            embeddings and lower layers are frozen: forward only    (k > 1)
    at last:                all layers are trained

Backward ends at the lowest layer that trains, and only what trains is averaged. The abstract has
the stages, what is frozen and what is saved; the copies, the embeddings that train in the first
stage only and the joint end are from memory and from another's summary, not checked.

What is changed:
- optim.RECIPES: the first phase becomes K + 1 phases, so that each stage has a schedule of its own
  (a warm-up; the rate decays in the joint one). --steps takes a number for each phase.
- train.open_phase, which the loop calls before the first step of each phase, begins the stage: it
  copies the layers, sets requires_grad, and lets the same Reducer pack its buckets anew.
- the model's `encode`, which uses as many blocks as the stage has. They all exist from the start,
  so that a checkpoint has the same tensors in each stage; that of a stage's end begins the next.
- the optimizer's `_update`, which leaves weights without a gradient as they are.

A run that is stopped before the last stage has in --out/model its unused layers too, untrained.
"""
import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import bert  # noqa: E402
import dist  # noqa: E402
import optim  # noqa: E402
import train  # noqa: E402

STAGES, JOINT = 2, 0.2       # K, and the last part's fraction of the steps


class GrowingBert(bert.BertForPreTraining):
    """A BERT that uses the first `depth` of its blocks."""

    def __init__(self, config):
        super().__init__(config)
        self.depth = config.layers

    def encode(self, *arguments):
        """As inherited, with the first `depth` blocks."""
        every, self.blocks = self.blocks, self.blocks[:self.depth]
        hidden = super().encode(*arguments)
        self.blocks = every
        return hidden


def staged(phases):
    """Returns a recipe's phases, the first of them cut into the stages and the joint training."""
    first, *others = phases
    steps = round(first.steps * (1 - JOINT) / STAGES)
    stage = dataclasses.replace(first, steps=steps, power=0.0)           # power 0: no decay
    joint = dataclasses.replace(first, steps=first.steps - STAGES * steps)
    return [stage] * STAGES + [joint, *others]


@torch.no_grad()
def begin_stage(parts, plan, world, stage, grow):
    """Sets up stage 0, 1, ...; from number STAGES on all trains. grow: whether to copy layers."""
    model, reducer, masters, _, _ = parts
    each = plan.config.layers // STAGES
    growing = stage < STAGES
    below = stage * each if growing else 0               # layers that are frozen
    model.depth = below + each if growing else plan.config.layers
    for name, master in masters.items():
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
        if layer is None:                                # heads always, but not the tied matrix
            trains = not below or not name.startswith("embeddings.")
        else:
            trains = below <= layer < model.depth
            if grow and trains and below:
                master.copy_(masters[name.replace(f".{layer}.", f".{layer - each}.", 1)])
        model.get_parameter(name).requires_grad_(trains)
    optim.copy_to_model(masters, model)
    reducer.close()
    reducer.__init__(model, world, plan.bucket_mb, plan.compression)     # packs what trains
    # As in train.build: an optimizer finds its gradients in the buckets, or none
    for name, master in masters.items():
        master.grad = reducer.gradients.get(name)


def only_with_gradient(update):
    """Returns an optimizer's `_update` for those of the tensors that have a gradient."""
    def update_some(group, *lists):
        some = [(w, g, *moments) for w, g, *moments in zip(*lists) if g is not None]
        if some:
            update(group, *map(list, zip(*some)))
    return update_some


def install():
    """Makes train.py train in stages. Neither takes up a checkpoint of the other."""
    build, open_phase, same_run = train.build, train.open_phase, train.same_run

    def build_growing(plan, world):
        if plan.config.layers % STAGES or plan.one_bit or dist.is_lossy(plan.compression):
            raise train.ConfigError(f"stacking needs a multiple of {STAGES} layers, and neither a "
                                    "1-bit optimizer nor lossy compression")
        plan.parts = build(plan, world)
        optimizer = plan.parts[3]
        if isinstance(optimizer, optim.Optimizer):       # torch's AdamW does so by itself
            optimizer._update = only_with_gradient(optimizer._update)
        return plan.parts

    def open_stage(plan, world, phase_index, step):
        begins = step == plan.ends[phase_index] - plan.phases[phase_index].steps
        begin_stage(plan.parts, plan, world, phase_index, begins)
        return open_phase(plan, world, phase_index, step)

    bert.BertForPreTraining, train.build, train.open_phase = GrowingBert, build_growing, open_stage
    optim.RECIPES = {name: recipe._replace(phases=staged(recipe.phases))
                     for name, recipe in optim.RECIPES.items()}
    train.same_run = lambda *arguments: same_run(*arguments) | {"variant": f"{STAGES} stages"}


if __name__ == "__main__":
    install()
    train.main()
