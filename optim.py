"""Recipes and learning rates, master weights, loss scaling, clipping, LAMB and AdamW.

Each part needs nothing of those below it.

In an update, w are weights, g gradients, m their running mean and v the running mean of their
squares: lists of fp32 tensors, one for each parameter. t = 1, 2, ... counts the updates, b1 and b2
are how slowly m and v forget ("betas"), lr is the learning rate, eps keeps a divisor from being 0,
decay is the weight decay.
"""
import dataclasses
import math

import torch


class TrainingStopped(ArithmeticError):
    """Training cannot go on; the message says why and what to do."""


# ----- Recipes: batches and learning rates over the training -----

@dataclasses.dataclass
class Phase:
    """A part of pre-training with one sequence length and one schedule. Most recipes have two: most
    steps take short texts, which are cheap; the last ones take long texts, since short ones do not
    reach the higher positions."""
    seq_len: int             # tokens of an example, the special ones included
    global_batch: int        # examples of a step, over all ranks and micro-batches
    steps: int
    lr: float                # the highest learning rate
    warmup: float            # the fraction of the phase in which the rate grows to lr
    power: float = 0.5       # of the decay, see learning_rate

    @property
    def step_tokens(self):
        """The tokens of a step, as if no example were shorter than seq_len."""
        return self.global_batch * self.seq_len

    @property
    def tokens(self):
        """The tokens of all steps."""
        return self.steps * self.step_tokens


# A recipe has the phases, the optimizer's betas, and defaults for flags of train.py: `dropout` is
# that of --dropout.
RECIPES = {
    # A 2x128 model on 5 MB of text, in minutes. Small models learn faster with more than 15 % of
    # the tokens masked (arXiv 2202.08005).
    "demo": {
        "optimizer": "lamb",
        "betas": (0.9, 0.98),        # so few steps need a v that forgets soon
        "dropout": 0.0,              # every text is seen a few times only
        "mask_fraction": 0.3,
        "pairs": "nsp",
        "phases": [
            Phase(seq_len=64, global_batch=32, steps=2300, lr=8e-3, warmup=0.05),
            Phase(seq_len=128, global_batch=32, steps=400, lr=4.8e-3, warmup=0.1),
        ]},
    # BERT-base in about a day on one GPU of 24 GB, or in hours on eight; not yet run. Optimizer,
    # masks, batch and rate are those of MosaicBERT (arXiv 2312.17482; mosaicml/examples,
    # mosaic-bert-base-uncased.yaml), which takes 70,000 steps, lets the rate end at 2 %, drops no
    # attention weights and has another encoder. 20,900 steps are a day at the 69 TFLOP/s of an RTX
    # 4090. Only the first 128 positions are trained.
    "day": {
        "optimizer": "adamw",
        "betas": (0.9, 0.98),
        "dropout": 0.1,
        "mask_fraction": 0.3,
        "pairs": "none",
        "phases": [Phase(128, 4096, 20900, lr=5e-4, warmup=0.06, power=1)]},
    # BERT-large as NVIDIA trains it: DeepLearningExamples, PyTorch, pretrain_config.sh. There the
    # rate grows to 6e-3 and then drops at once to 5.076e-3, which is 6e-3 sqrt(1 - 0.2843), since
    # the decay is counted from the start of the phase; likewise in phase 2, from 4e-3. Here it
    # grows to the lower rate, and the decay is the same.
    "nvidia-64k": {
        "optimizer": "lamb",
        "betas": (0.9, 0.999),
        "dropout": 0.1,
        "mask_fraction": 0.15,
        "pairs": "nsp",
        "phases": [
            Phase(128, 65536, 7038, lr=5.076e-3, warmup=0.2843),
            Phase(512, 32768, 1563, lr=3.735e-3, warmup=0.128),
        ]},
}


def learning_rate(done, phase):
    r"""Returns the learning rate; done is the finished fraction of a phase, in [0, 1). It grows
    from 0 to lr, and decays to 0:

        lr |     /\
           |   /     \
         0 | /_________\    done
            0  warmup   1

    In the decay the rate is lr * left^power, where `left` falls from 1 to 0. The picture has power
    1, as in BERT (arXiv 1810.04805, appendix A.2); with 0.5, NVIDIA's, it decays slowly at first.
    """
    if done < phase.warmup:
        return phase.lr * done / phase.warmup
    left = (1 - done) / (1 - phase.warmup)
    return phase.lr * left ** phase.power


# ----- Precision: 16-bit models and their fp32 master weights -----

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(name, device):
    """Returns the name of the precision to train in: for "auto" the fastest of the device, for any
    other name that name."""
    if name != "auto":
        return name
    if device.type == "cuda":
        # Old GPUs (T4, V100) can only emulate bf16.
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    # A CPU without instructions for bf16 takes 10 to 200 times as long with it as with fp32.
    features = torch.cpu.get_capabilities()
    return "bf16" if features.get("avx512_bf16") else "fp32"


def cast_with_masters(model, dtype):
    """Casts a model to a format, in place. Returns its master weights {name: fp32 tensor}, which
    the optimizer steps: those of all parameters but frozen ones (requires_grad=False).

    A master is the memory that the parameter had before the cast. A cast to 16 bits gives the
    parameter new memory, so that the master is a second, exact copy (arXiv 1710.03740, section
    3.1): bf16 keeps 8 bits, and an update of less than 2^-9, 0.2 % of a weight, would be rounded
    away. A cast to fp32 changes nothing, and master and parameter are one memory.
    """
    masters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    model.to(dtype)
    return masters


@torch.no_grad()
def copy_to_model(masters, model):
    """Copies master weights, {name: tensor}, to the model's parameters, rounded to their type."""
    parameters = [model.get_parameter(name) for name in masters]
    # torch._foreach_* does the same to each tensor of a list, on a GPU by a few calls for all.
    torch._foreach_copy_(parameters, list(masters.values()))


# ----- Loss scaling and clipping -----

@dataclasses.dataclass
class LossScaler:
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2).

        gradients = backward(scale loss)        so that small fp16 gradients do not become 0
        overflow:   skip the step, scale = scale / 2
        otherwise:  take the step; after growth_interval of them in a row, scale = 2 scale

    bf16 and fp32 need no scale, since their range is large enough. There LossScaler(scale=1,
    largest=1) skips steps that are not finite, and stops the training after 15 of them, if no
    growth_interval of good steps lies between.
    """
    scale: float = 2.0 ** 16           # always a power of two, which rounds no gradient
    growth_interval: int = 1000
    smallest: float = 2.0 ** -14       # training stops below it
    largest: float = 2.0 ** 24
    good_steps: int = 0                # in a row
    skipped: int = 0                   # in the whole run

    def update(self, overflow, step):
        """Returns True if step number `step` is to be taken, and adjusts the scale.

        overflow: whether a gradient is not finite, on any rank: all ranks must do the same. Raises
        TrainingStopped when overflows have halved the scale below `smallest`.
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
            raise TrainingStopped(f"step {step}: the gradients are not finite at the scale's floor "
                                  f"of {self.smallest:g}; start anew at a lower --lr-scale")
        return False


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

LARGEST_RATIO = 0.3          # the most that LAMB takes for ||weights|| / ||update||


def lamb_equations(w, g, m, v, t, lr, b1, b2, eps, decay):
    """Returns the new (w, m, v) of one tensor after step t = 1, 2, ... of LAMB (You et al., arXiv
    1904.00962, algorithm 2).

        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
        w = w - lr min(||w|| / ||u||, 0.3) u    0.3 as well where a norm is 0

    The paper's own form has no 0.3. It lets a function phi bound ||w||; we bound the ratio, as
    1-bit LAMB does (arXiv 2104.06069). Without a bound the weights grow, and the steps with them:
    embeddings of the model `tiny` grew from 0.04 (root mean square) to 1.0 in 6,500 steps, and the
    loss stood 0.3 nats higher.

    Training does not call this: it is here to be read. The class LAMB computes the same, for
    tensors that decay, in fewer passes over memory, and a test compares the two.
    """
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g ** 2

    # m and v began at 0, and so are too small at first: this corrects them.
    corrected_m = m / (1 - b1 ** t)
    corrected_v = v / (1 - b2 ** t)
    u = corrected_m / (corrected_v.sqrt() + eps) + decay * w

    # A tensor moves by the fraction lr of its own norm, up to the bound, however large its gradient
    # is. That is what lets training take large batches, which need a large lr.
    ratio = LARGEST_RATIO
    if w.norm() > 0 and u.norm() > 0:
        ratio = min(w.norm() / u.norm(), LARGEST_RATIO)
    w = w - lr * ratio * u
    return w, m, v


class Optimizer(torch.optim.Optimizer):
    """What our optimizers share; each of them only adds its `_update`.

    An update computes on lists of tensors by `torch._foreach_*`, see `copy_to_model`. Parameters
    are fp32 (fp64 in tests), all with a gradient. m and v are made at once, not in the first step,
    so that a checkpoint can be copied into them.
    """
    DEFAULTS = {
        "lr": 1e-3,                    # train.py sets it in every step
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "step": 0,                     # t: stands here so that a checkpoint has it
    }

    def __init__(self, params, **options):
        super().__init__(params, self.DEFAULTS | options)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "exp_avg": torch.zeros_like(p),              # m
                    "exp_avg_sq": torch.zeros_like(p),           # v
                }

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


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2): LAMB without the ratio.

        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
        w = w - lr u
    """

    def _update(self, group, w, g, m, v):
        """Applies one update to the tensors of one group: w, m and v change in place. The step in
        group["step"] is already counted."""
        b1, b2 = group["betas"]
        t = group["step"]
        move_moments(m, v, g, b1, b2)
        roots = corrected_roots(v, t, b2, group["eps"])
        torch._foreach_mul_(w, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(w, m, roots, value=-group["lr"] / (1 - b1 ** t))


class LAMB(Optimizer):
    """LAMB as in `lamb_equations`, on lists of tensors; but the ratio of tensors without decay
    (biases, LayerNorm) is 1, as in the code of the paper's authors and in NVIDIA's.

    NVIDIA's also clips gradients to a global norm of 1, as train.py does before every optimizer. Q,
    K and V are one tensor in our model, so they share a ratio; in theirs they are three.
    """

    def _update(self, group, w, g, m, v):
        """Applies one update to the tensors of one group, in place."""
        b1, b2 = group["betas"]
        t = group["step"]
        decay = group["weight_decay"]
        move_moments(m, v, g, b1, b2)

        # u = decay w + (m / roots) / (1 - b1^t). `addcdiv` is u += value * m / roots, in one pass.
        roots = corrected_roots(v, t, b2, group["eps"])
        u = torch._foreach_mul(w, decay)
        torch._foreach_addcdiv_(u, m, roots, value=1 / (1 - b1 ** t))

        ratios = w[0].new_ones(len(w))
        if decay:
            ratios = safe_ratios(norms(w), norms(u)).clamp(max=LARGEST_RATIO)
        # `unbind` makes a list of n tensors of one number each, which stay on the GPU: to know them
        # as numbers of Python the CPU would have to wait.
        torch._foreach_mul_(u, (-group["lr"] * ratios).unbind())
        torch._foreach_add_(w, u)


OPTIMIZERS = {"lamb": LAMB, "adamw": AdamW}


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
