"""Recipes and learning rates, master weights, loss scaling, clipping, AdamW and LAMB.

Each part needs nothing of those below it.
"""
import dataclasses

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


# A recipe has the phases, the optimizer's betas, and defaults for the flags of train.py that have
# the same names.
RECIPES = {
    # A 2x128 model on 5 MB of text, in minutes. With 30 % of the tokens masked it learned faster
    # than with 20. That more than 15 % can be better was found for large models (arXiv 2202.08005).
    "demo": {
        "optimizer": "lamb",
        "betas": (0.9, 0.98),        # v forgets fast: there are few steps
        "dropout": 0.0,              # every text is seen a few times only
        "mask_fraction": 0.3,
        "pairs": "nsp",
        "phases": [
            Phase(seq_len=64, global_batch=32, steps=2300, lr=8e-3, warmup=0.05),
            Phase(seq_len=128, global_batch=32, steps=400, lr=4.8e-3, warmup=0.1),
        ]},
    # BERT-base in about a day on an RTX 4090, by estimate; not yet run. Optimizer, masks, batch and
    # rate are those of MosaicBERT (arXiv 2312.17482; mosaicml/examples, file
    # mosaic-bert-base-uncased.yaml). MosaicBERT takes 70,000 steps, lets the rate end at 2 %, drops
    # no attention weights, and has another weight decay and another encoder. Only the first 128
    # positions are trained here.
    "day": {
        "optimizer": "adamw",
        "betas": (0.9, 0.98),
        "dropout": 0.1,
        "mask_fraction": 0.3,
        "pairs": "none",
        "phases": [
            Phase(seq_len=128, global_batch=4096, steps=20900, lr=5e-4, warmup=0.06, power=1),
        ]},
    # BERT-large with NVIDIA's batches, steps and rates: DeepLearningExamples, PyTorch,
    # pretrain_config.sh. There the rate grows to 6e-3 and then drops at once to 5.076e-3, which is
    # 6e-3 sqrt(1 - 0.2843), since the decay is counted from the start of the phase; likewise in
    # phase 2, from 4e-3. Here it grows to the lower rate, and the decay is the same. Of our own are
    # LAMB's bound, one ratio for Q, K and V, the first bias of the MLM head, and copied positions.
    "nvidia-64k": {
        "optimizer": "lamb",
        "betas": (0.9, 0.999),
        "dropout": 0.1,
        "mask_fraction": 0.15,
        "pairs": "nsp",
        "phases": [
            Phase(seq_len=128, global_batch=65536, steps=7038, lr=5.076e-3, warmup=0.2843),
            Phase(seq_len=512, global_batch=32768, steps=1563, lr=3.735e-3, warmup=0.128),
        ]},
}


def learning_rate(done, phase):
    r"""Returns the learning rate; `done`, in [0, 1), is how far a step is in its phase. The rate
    grows from 0 to lr, and decays to 0:

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

    Of each parameter there are four tensors:

        p              in 16 bits, for forward and backward
        p.grad         in 16 bits, of one micro-batch; dropped when it is added to master.grad
        master         fp32, what the optimizer steps; `copy_to_model` copies it to p
        master.grad    fp32, where the gradients of all micro-batches add up

    A master is the memory that p had before the cast: `detach` returns a tensor that shares it.
    Then `model.to` gives p, which stays the same object, new memory with rounded weights; the
    master keeps the exact ones (arXiv 1710.03740, section 3.1). A weight in bf16 has 8 significant
    bits: an update of less than 0.2 % of it (2^-9) would be rounded away. In fp32 the cast changes
    nothing: p and master are one memory.
    """
    masters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    model.to(dtype)
    return masters


@torch.no_grad()
def copy_to_model(masters, model):
    """Copies master weights, {name: tensor}, to the model's parameters, rounded to their type."""
    for name, master in masters.items():
        model.get_parameter(name).copy_(master)


# ----- Loss scaling and clipping -----

@dataclasses.dataclass
class LossScaler:
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2).

        gradients = backward(scale * loss)      so that small fp16 gradients do not become 0
        overflow:   skip the step, scale = scale / 2
        otherwise:  take the step; after growth_interval of them in a row, scale = 2 * scale

    bf16 and fp32 need no scale, since their range is large enough. There LossScaler(scale=1,
    largest=1) skips steps that are not finite, and stops the training after 15 of them; each
    growth_interval of good steps allows one more.
    """
    scale: float = 2.0 ** 16           # a power of two: to multiply by it rounds nothing
    growth_interval: int = 1000
    smallest: float = 2.0 ** -14       # training stops below it
    largest: float = 2.0 ** 24
    good_steps: int = 0                # in a row
    skipped: int = 0                   # in the whole run

    def update(self, overflow, step):
        """Returns True if step number `step` is to be taken, and adjusts the scale.

        overflow: whether a gradient is not finite, on any rank: all ranks must do the same. Raises
        TrainingStopped, naming the step, when overflows have halved the scale below `smallest`.
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
    # Of two divisors the larger one: `scale` alone, or what makes the norm max_norm. That one
    # divides by the scale as well, since norm has it in it.
    factor = 1 / max(scale, norm / max_norm)
    for tensor in tensors:
        tensor.mul_(factor)


# ----- Optimizers -----
#
# w is a parameter, an fp32 tensor; g is its gradient, m the running mean of g and v that of g^2. b1
# and b2 ("betas") are how slowly m and v forget. t = 1, 2, ... counts the updates. lr is the
# learning rate, eps keeps a divisor from being 0, decay is the weight decay.

class Optimizer(torch.optim.Optimizer):
    """What our optimizers share. Each of them only adds `_update(group, w, g, m, v)`, which changes
    w, m and v of one parameter in place.

    Parameters are fp32, all with a gradient. m and v are made at once, not in the first step, so
    that a checkpoint can be copied into them.

    One tensor after another is slow on a GPU: for base, AdamW took 13 ms a step on an H100, and
    torch's AdamW, on lists of tensors (torch._foreach_*), 4 ms. Of a step of 600 ms, with a batch
    of 4,096, that is little.
    """
    DEFAULTS = {
        "lr": 1e-3,                    # train.py sets it in every step
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "step": 0,                     # t: stands here so that a checkpoint has it
    }

    def __init__(self, params, **options):
        # torch keeps `param_groups`, a list of dicts: parameters ("params") with their options. And
        # `state`, a dict for each parameter.
        super().__init__(params, self.DEFAULTS | options)
        for group in self.param_groups:
            for w in group["params"]:
                self.state[w] = {
                    "exp_avg": torch.zeros_like(w),              # m
                    "exp_avg_sq": torch.zeros_like(w),           # v
                }

    @torch.no_grad()
    def step(self):
        """Applies one update to all parameters, in place."""
        for group in self.param_groups:
            group["step"] += 1
            for w in group["params"]:
                state = self.state[w]
                self._update(group, w, w.grad, state["exp_avg"], state["exp_avg_sq"])


def move_moments(m, v, g, b1, b2):
    """Moves m towards a gradient and v towards its square, in place."""
    m.lerp_(g, 1 - b1)                                           # lerp(a, b, x) = a + x (b - a)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)                      # v = b2 v + (1 - b2) g^2


def adam_update(group, w, g, m, v):
    """Returns u, a new tensor of w's shape, and moves m and v, in place:

        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w

    m and v began at 0, and so are too small at first: the divisors correct them.
    """
    b1, b2 = group["betas"]
    t = group["step"]
    move_moments(m, v, g, b1, b2)
    # The functions with an underscore work in place, and save a tensor each.
    root = (v / (1 - b2 ** t)).sqrt_().add_(group["eps"])
    u = (m / (1 - b1 ** t)).div_(root)
    return u.add_(w, alpha=group["weight_decay"])


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2): w = w - lr u."""

    def _update(self, group, w, g, m, v):
        """Applies one update to one parameter: w, m and v change in place."""
        u = adam_update(group, w, g, m, v)
        w.sub_(u, alpha=group["lr"])


LARGEST_RATIO = 0.3          # the most that LAMB takes for ||w|| / ||u||


class LAMB(Optimizer):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2), with u of `adam_update`:

        w = w - lr ratio u
        ratio = min(||w|| / ||u||, 0.3), also 0.3 if a norm is 0; 1 for tensors without decay

    A tensor moves by the fraction lr of its own norm, or less where the bound of 0.3 holds, however
    large its gradient is. That is what lets training take large batches, which need a large lr.

    The paper's own form has no 0.3; its phi(||w||) bounds the norm. We bound the ratio, as 1-bit
    LAMB does (arXiv 2104.06069). Without a bound the weights grow, and the steps with them: after
    5,000 steps of `tiny` the loss was 0.45 nats higher. Biases and LayerNorm have no decay and no
    ratio, as in the code of the paper's authors and in NVIDIA's. Q, K and V are one tensor here, so
    they share a ratio.
    """

    def _update(self, group, w, g, m, v):
        """Applies one update to one parameter: w, m and v change in place."""
        u = adam_update(group, w, g, m, v)
        if group["weight_decay"]:
            norm = w.norm()
            # A tensor, not a number: to know it, the CPU would have to wait for the GPU.
            ratio = torch.where(norm > 0, norm / u.norm(), LARGEST_RATIO)
            u.mul_(ratio.clamp(max=LARGEST_RATIO))
        w.sub_(u, alpha=group["lr"])


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
