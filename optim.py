"""Recipes and learning rates, master weights, loss scaling, clipping, and LAMB with its relatives.

Each part needs nothing of those below it.

In an update, w are weights, g gradients, m their running mean and v the running mean of their
squares: lists of fp32 tensors, one for each parameter. t = 1, 2, ... counts the updates, b1 and b2
are how slowly m and v forget ("betas"), lr is the learning rate, decay the weight decay.
"""
import collections
import dataclasses
import functools
import math
from typing import NamedTuple

import torch


class TrainingStopped(ArithmeticError):
    """Training cannot begin or go on; the message says why."""


# ----- Recipes: batches and learning rates over the steps -----

@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of pre-training with one sequence length and one schedule. Most recipes have two: most
    steps take short texts, which are cheap; the last ones take long texts, since short ones do not
    reach the higher positions."""
    seq_len: int             # tokens of an example, the special ones included
    global_batch: int        # examples of a step, over all ranks and micro-batches
    steps: int
    lr: float                # the highest learning rate
    warmup: float            # the fraction of the steps in which the rate grows to lr
    decay_from: float        # the fraction of the steps after which the rate decays
    power: float = 1.0       # 1: the rate decays along a straight line; 0.5: slowly at first
    micro_batch: int = 0     # examples that a rank takes at a time; train.py sets it


class Recipe(NamedTuple):
    """How a model is pre-trained: what the phases have in common, and the phases."""
    optimizer: str
    betas: tuple             # where steps are few the second one must forget sooner
    dropout: float           # 0 where every text is seen a few times only
    attention_dropout: float # 0 lets bf16 GPUs take all lengths at once, see bert.attention
    mask_fraction: float     # of the tokens; small models learn faster with more (arXiv 2202.08005)
    pairs: str               # "nsp", "sop" or "none", see --pairs
    phases: list


RECIPES = {
    # A 2x128 model on 5 MB of text, in minutes.
    "demo": Recipe(
        optimizer="lamb", betas=(0.9, 0.98), dropout=0.0, attention_dropout=0.0,
        mask_fraction=0.3, pairs="nsp",
        phases=[
            Phase(seq_len=64, global_batch=32, steps=2300, lr=1e-2, warmup=0.05, decay_from=0.05),
            Phase(seq_len=128, global_batch=32, steps=400, lr=6e-3, warmup=0.1, decay_from=0.1),
        ]),
    # BERT-base in about a day on one GPU of 24 GB, or in hours on eight; with --hours it ends on
    # time. Not yet run. All but the steps is of MosaicBERT (arXiv 2312.17482; mosaicml/examples,
    # mosaic-bert-base-uncased.yaml), which takes 70,000 steps, lets the rate end at 2 % and has
    # another encoder. 24hBERT (2104.07705) trains BERT-large so, at a rate of 1e-3 and with 15 % of
    # masks. 20,900 steps are a day at the 69 TFLOP/s of an RTX 4090, see bert.GPUS. Only the first
    # 128 positions are trained.
    "day": Recipe(
        optimizer="adamw", betas=(0.9, 0.98), dropout=0.1, attention_dropout=0.0,
        mask_fraction=0.3, pairs="none",
        phases=[Phase(128, 4096, 20900, lr=5e-4, warmup=0.06, decay_from=0.06)]),
    # BERT-large as NVIDIA trains it: DeepLearningExamples, PyTorch, pretrain_config.sh. Their
    # script leaves use_nvlamb off, so the optimizer is "lamb".
    "nvlamb-64k": Recipe(
        optimizer="lamb", betas=(0.9, 0.999), dropout=0.1, attention_dropout=0.1,
        mask_fraction=0.15, pairs="nsp",
        phases=[
            Phase(128, 65536, 7038, lr=6e-3, warmup=0.2843, decay_from=0.0, power=0.5),
            Phase(512, 32768, 1563, lr=4e-3, warmup=0.128, decay_from=0.0, power=0.5),
        ]),
    # BERT-large in 54 minutes (arXiv 2006.13484). The batches and the shape of the schedule were
    # read in the paper; the steps, rates and fractions were not checked against it.
    "lans-96k": Recipe(
        optimizer="lans", betas=(0.9, 0.999), dropout=0.1, attention_dropout=0.1,
        mask_fraction=0.15, pairs="nsp",
        phases=[
            Phase(128, 98304, 3519, lr=6.75e-3, warmup=0.4265, decay_from=0.7),
            Phase(512, 33792, 782, lr=5e-3, warmup=0.192, decay_from=0.3),
        ]),
}


def learning_rate(phase_step, phase):
    r"""Returns the learning rate of step 0, 1, ... of a phase. It grows, holds and decays to 0
    (LANS, arXiv 2006.13484, section 3.3):

        lr |       _________
           |     /           \
           |   /               \
         0 | /___________________\    fraction of the phase that is done
            0   warmup  decay_from 1

    phase_step + 1 of steps + 1 parts are done, so no step has a rate of 0. In the decay the rate is
    lr (what is left of the decay, 1 to 0)^power.

    With decay_from = 0 it is NVIDIA's PolyWarmUp: the decay is counted from the start of the phase.
    So at the end of the warm-up the rate drops at once, from lr to lr (1 - warmup)^power: in phase
    1 of "nvlamb-64k" from 6e-3 to 5.1e-3.
    """
    # This lies strictly between 0 and 1, so that no step has a rate of 0.
    done = (phase_step + 1) / (phase.steps + 1)
    if done < phase.warmup:
        return phase.lr * done / phase.warmup
    left = min(1.0, (1 - done) / (1 - phase.decay_from))     # 1 before the decay begins
    return phase.lr * left ** phase.power


# ----- Precision: 16-bit models and their fp32 master weights -----

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(name, device):
    """Returns the name of the precision to train in: for "auto" the fastest of the device, for any
    other name that name. Raises TrainingStopped for "bf16" on a GPU that would only emulate it."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if name == "bf16" and not has_bf16:
            raise TrainingStopped("this GPU has no bf16; take --precision fp16")
        otherwise = "fp16"
    else:
        # A CPU without instructions for bf16 takes 10 to 200 times as long with it as with fp32.
        features = torch.cpu.get_capabilities()
        has_bf16 = features.get("avx512_bf16") or features.get("amx_bf16") or features.get("bf16")
        otherwise = "fp32"
    if name != "auto":
        return name
    return "bf16" if has_bf16 else otherwise


def master_weights(model, dtype):
    """Casts a model to a format, in place. Returns the weights that the optimizer updates, {name:
    fp32 tensor}: of all parameters but the frozen ones (requires_grad is False). In 16 bits they
    are copies of the parameters from before the cast; in fp32 they are the parameters themselves
    (arXiv 1710.03740, section 3.1)."""
    masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if dtype.itemsize == 2:
        # bf16 keeps 8 bits: an update of less than 0.2 % of a weight would be rounded away.
        masters = {name: p.detach().clone() for name, p in masters.items()}
    model.to(dtype)
    return masters


@torch.no_grad()
def copy_to_model(masters, model):
    """Copies master weights, {name: tensor}, to the model's parameters, rounded to their type."""
    parameters = [model.get_parameter(name) for name in masters]
    # Where master and parameter are one tensor this changes nothing.
    torch._foreach_copy_(parameters, list(masters.values()))


# ----- Loss scaling and clipping -----

@dataclasses.dataclass
class LossScaler:
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2).

        gradients = backward(scale loss)        so that small fp16 gradients do not become 0
        overflow:   skip the step, scale = scale / 2
        otherwise:  take the step; after growth_interval of them in a row, scale = 2 scale

    bf16 and fp32 need no scale, since their range is large enough. There LossScaler(scale=1,
    largest=1) skips steps that are not finite, and stops the training when they have halved the
    scale 15 times more often than it has grown back.
    """
    scale: float = 2.0 ** 16           # always a power of two, which rounds no gradient
    growth_interval: int = 1000
    smallest: float = 2.0 ** -14       # training stops below it
    largest: float = 2.0 ** 24
    good_steps: int = 0                # in a row
    skipped: int = 0                   # in the whole run

    def update(self, overflow, step, gradients):
        """Returns True if the step is to be taken, and adjusts the scale.

        overflow: whether a gradient is not finite, on any rank: all ranks must do the same.
        step, gradients ({name: tensor}): for the message of TrainingStopped, which has the step and
        `name_of_broken`, and is raised when overflows have halved the scale below `smallest`.
        """
        if not overflow:
            self.good_steps += 1
            if self.good_steps % self.growth_interval == 0:
                self.scale = min(2 * self.scale, self.largest)
            return True

        self.good_steps = 0
        self.skipped += 1
        self.scale /= 2
        if self.scale < self.smallest:
            broken = name_of_broken(gradients)
            raise TrainingStopped(f"step {step}: gradient of {broken} is not finite at the scale's "
                                  f"floor of {self.smallest:g}; start anew at a lower --lr-scale")
        return False


def name_of_broken(gradients):
    """Returns the name of the first gradient that is not finite, of {name: tensor}."""
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            return name
    return "another rank"              # averaged gradients are the same on all, so not in train.py


# Returns the 2-norm of all elements of a list of tensors, as a tensor of one number; NaN or inf if
# one of them is.
global_norm = torch.nn.utils.get_total_norm


def unscale_and_clip_(tensors, norm, scale, max_norm):
    """Divides gradients by the loss scale, in place, and shrinks them to a global norm of at most
    max_norm. norm: their global norm before this, so still times `scale`."""
    factor = 1 / scale
    if norm / scale > max_norm:
        factor = max_norm / norm       # norm has the scale in it, so this divides by it as well
    # With scale 1 and a small norm there is nothing to do: save the pass over memory.
    if factor != 1:
        torch._foreach_mul_(tensors, factor)


# ----- Optimizers -----

def lamb_equations(w, g, m, v, t, lr, b1, b2, eps, decay):
    """Returns the new (w, m, v) of one tensor after step t = 1, 2, ... of LAMB (You et al., arXiv
    1904.00962, algorithm 2).

        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
        w = w - lr (||w|| / ||u||) u            the ratio is 1 where a norm is 0

    Nothing calls this: it is here to be read. The class LAMB computes the same, for tensors that
    decay, in fewer passes over memory, and a test compares the two.
    """
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g ** 2

    # m and v began at 0, and so are too small at first: this corrects them.
    corrected_m = m / (1 - b1 ** t)
    corrected_v = v / (1 - b2 ** t)
    u = corrected_m / (corrected_v.sqrt() + eps) + decay * w

    # Every tensor moves by the fraction lr of its own norm, however large its gradient is. That
    # is what lets training take large batches, which need a large lr.
    ratio = 1.0
    if w.norm() > 0 and u.norm() > 0:
        ratio = w.norm() / u.norm()
    w = w - lr * ratio * u
    return w, m, v


class Optimizer(torch.optim.Optimizer):
    """What our optimizers share; each of them only adds its `_update`.

    An update computes on lists of tensors by `torch._foreach_*`: on a GPU a few kernels for a list,
    not a few for each tensor. Parameters are fp32 (fp64 in tests), all with a gradient; `state`
    has m and v of each, under the names of torch's AdamW, which train.check_weights reads.
    """
    DEFAULTS = {
        "lr": 1e-3,                    # train.py sets it in every step
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "step": 0,                     # t: one number for a group, saved with its options
    }

    def __init__(self, params, **options):
        super().__init__(params, self.DEFAULTS | options)

    def add_param_group(self, group, most=2 ** 21):
        """Adds parameters: torch's constructor calls this for each group, {"params": list} with the
        options that are the group's own.

        One group becomes several, the tensor groups, which are updated one after another: so the
        temporary tensors of an update stay small. A new one begins about every `most` elements.
        """
        tensor_groups = collections.defaultdict(list)
        elements = 0
        for p in group["params"]:
            self.state[p] = {
                "exp_avg": torch.zeros_like(p),              # m
                "exp_avg_sq": torch.zeros_like(p),           # v
            }
            tensor_groups[elements // most].append(p)
            elements += p.numel()
        for tensors in tensor_groups.values():
            super().add_param_group(group | {"params": tensors})

    @torch.no_grad()
    def step(self):
        """Applies one update to all parameters, in place."""
        for group in self.param_groups:
            group["step"] += 1
            w = group["params"]
            g = [p.grad for p in w]
            m = [self.state[p]["exp_avg"] for p in w]
            v = [self.state[p]["exp_avg_sq"] for p in w]
            self._update(group, w, g, m, v)


def move_moments(m, v, g, b1, b2):
    """Moves m towards the gradients and v towards their squares, in place."""
    torch._foreach_lerp_(m, g, 1 - b1)                       # lerp(a, b, x) = a + x (b - a)
    torch._foreach_mul_(v, b2)
    torch._foreach_addcmul_(v, g, g, value=1 - b2)


def corrected_roots(v, t, b2, eps):
    """Returns sqrt(v / (1 - b2^t)) + eps, as new tensors."""
    roots = torch._foreach_sqrt(v)
    torch._foreach_div_(roots, math.sqrt(1 - b2 ** t))
    torch._foreach_add_(roots, eps)
    return roots


def norms(tensors):
    """Returns the 2-norms of n tensors, (n,)."""
    return torch.stack(torch._foreach_norm(tensors))


def safe_ratios(a, b):
    """Returns a / b, elementwise, and 1 where one of them is 0."""
    return torch.where((a > 0) & (b > 0), a / b, 1.0)


class LAMB(Optimizer):
    """LAMB as in `lamb_equations`, on lists of tensors; but the ratio of tensors without decay
    (biases, LayerNorm) is 1, as in the code of the paper's authors.

    adapt_all=True gives all tensors ratios of their own: NVIDIA's "NVLAMB" (use_nvlamb in
    fused_lamb.py). NVIDIA's also clips gradients to a global norm of 1, as train.py does before
    every optimizer. Q, K and V are one tensor in our model, and three in theirs.
    """
    DEFAULTS = Optimizer.DEFAULTS | {"adapt_all": False}

    def _update(self, group, w, g, m, v):
        """Applies one update to the tensors of one group: w, m and v change in place. The step in
        group["step"] is already counted."""
        b1, b2 = group["betas"]
        t = group["step"]
        decay = group["weight_decay"]
        move_moments(m, v, g, b1, b2)

        # u = decay w + (m / roots) / (1 - b1^t). `addcdiv` is u += value * m / roots, in one pass.
        roots = corrected_roots(v, t, b2, group["eps"])
        u = torch._foreach_mul(w, decay)
        torch._foreach_addcdiv_(u, m, roots, value=1 / (1 - b1 ** t))

        ratios = w[0].new_ones(len(w))
        if decay or group["adapt_all"]:
            ratios = safe_ratios(norms(w), norms(u))
        # `unbind` makes a list of n tensors of one number each: for n numbers of Python the CPU
        # would have to wait for the GPU.
        torch._foreach_mul_(u, (-group["lr"] * ratios).unbind())
        torch._foreach_add_(w, u)


class LANS(Optimizer):
    """LAMB with a Nesterov term and normalised gradients, for batches of 96K (Zheng et al., arXiv
    2006.13484, algorithm 2; its kernel in dmlc/gluon-nlp). All tensors have ratios, those without
    decay too. Ratios, and 1 / ||g||, are 1 where a norm is 0.

        g = g / ||g||                           so that their scale does not matter
        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        d = sqrt(v / (1 - b2^t)) + eps
        r = (m / (1 - b1^t)) / d + decay w      from the running mean
        s = g / d + decay w                     from the gradient alone
        w = w - lr (b1 (||w|| / ||r||) r + (1 - b1) (||w|| / ||s||) s)
    """

    def _update(self, group, w, g, m, v):
        """Applies one update to the tensors of one group, in place."""
        b1, b2 = group["betas"]
        t = group["step"]
        decay = group["weight_decay"]

        g_norms = norms(g)
        unit_g = torch._foreach_mul(g, safe_ratios(torch.ones_like(g_norms), g_norms).unbind())
        move_moments(m, v, unit_g, b1, b2)
        d = corrected_roots(v, t, b2, group["eps"])

        r = torch._foreach_div(m, d)
        torch._foreach_div_(r, 1 - b1 ** t)
        torch._foreach_add_(r, w, alpha=decay)
        s = torch._foreach_div(unit_g, d)
        torch._foreach_add_(s, w, alpha=decay)

        # Both ratios are of w as it was before the step.
        w_norms = norms(w)
        for direction, fraction in ((r, b1), (s, 1 - b1)):
            ratios = safe_ratios(w_norms, norms(direction))
            torch._foreach_mul_(direction, (-group["lr"] * fraction * ratios).unbind())
            torch._foreach_add_(w, direction)


# This one is torch's own; "fused" updates many tensors in one kernel.
AdamW = functools.partial(torch.optim.AdamW, eps=1e-6, fused=True)

OPTIMIZERS = {
    "lamb": LAMB,
    "nvlamb": functools.partial(LAMB, adapt_all=True),
    "lans": LANS,
    "adamw": AdamW,
}


def make_optimizer(name, masters, betas):
    """Returns the optimizer of this name for master weights, {name: tensor}. Matrices decay;
    vectors, which are all biases and the weights of LayerNorm, do not."""
    matrices = [w for w in masters.values() if w.dim() > 1]
    vectors = [w for w in masters.values() if w.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return OPTIMIZERS[name](groups, betas=betas)
