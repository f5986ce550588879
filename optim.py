"""Recipes and learning rates, master weights, loss scaling, clipping, AdamW and LAMB."""
import dataclasses

import torch


class TrainingStopped(ArithmeticError):
    """Training cannot go on; the message says why and what to do."""


# ----- Recipes: batches and learning rates over the training -----

@dataclasses.dataclass
class Phase:
    """A part of pre-training with one sequence length and one schedule. Most recipes have two: most
    steps take short texts, which are cheap. The last ones take long texts, which alone train the
    embeddings of the later positions."""
    seq_len: int             # tokens of a full example, special ones included
    global_batch: int        # examples of a step, over all ranks and micro-batches
    steps: int               # with --hours only a share of the time
    lr: float                # the highest learning rate
    warmup: float            # the fraction of the phase in which the rate grows to lr
    power: float = 0.5       # of the decay, see learning_rate; 0: none

    @property
    def step_tokens(self):
        """The tokens of a step, as if no example were shorter than seq_len."""
        return self.global_batch * self.seq_len

    @property
    def tokens(self):
        """The tokens of all steps."""
        return self.steps * self.step_tokens


# A recipe: the phases, the optimizer's two betas, and what four flags of train.py (--optimizer,
# --dropout, --mask-fraction, --pairs) are if they are not given. Each needs all six keys.
RECIPES = {
    # A model of 2 layers on 5 MB of text, in minutes. With 30 % of the tokens masked it learned
    # faster than with 20; BERT masks 15 %. (For large models: arXiv 2202.08005.)
    "demo": {
        "optimizer": "lamb",
        "betas": (0.9, 0.98),        # not 0.999, since there are few steps
        "dropout": 0.0,              # nothing is learned by heart: each text comes a few times only
        "mask_fraction": 0.3,
        "pairs": "nsp",
        "phases": [
            Phase(seq_len=64, global_batch=32, steps=2300, lr=8e-3, warmup=0.05),
            Phase(seq_len=128, global_batch=32, steps=400, lr=4.8e-3, warmup=0.1),
        ]},
    # BERT-base in about a day on an RTX 4090, by estimate; not yet run. Optimizer, masks, batch and
    # rate are MosaicBERT's (arXiv 2312.17482; mosaicml/examples, mosaic-bert-base-uncased.yaml).
    # Unlike there: the encoder, 20,900 steps (there 70,000), the rate's end (there 2 %), weight
    # decay, dropout of attention weights. Only the first 128 positions are trained.
    "day": {
        "optimizer": "adamw",
        "betas": (0.9, 0.98),
        "dropout": 0.1,
        "mask_fraction": 0.3,
        "pairs": "none",
        "phases": [
            Phase(seq_len=128, global_batch=4096, steps=20900, lr=5e-4, warmup=0.06, power=1),
        ]},
    # BERT-large with NVIDIA's batches, steps and rates (DeepLearningExamples, PyTorch,
    # pretrain_config.sh). There warm-up ends at 6e-3, in phase 2 at 4e-3, and then the rate drops
    # to sqrt(1 - warmup) of that. Here warm-up ends at this lower rate; the decay is the same. What
    # else differs: t of `adam_update` goes on in phase 2; see `LAMB`, and in train.py
    # `set_bias_to_frequencies` and `copy_positions`.
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
    r"""Returns the learning rate. done: the part of the phase that is over, from 0 to 1. The rate
    grows from 0 to lr, and decays to 0 (with power 0 it stays):

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
    """Returns the name of the precision to train in. "auto" is 16 bits where the device computes
    faster with them, preferably bf16; any other name is returned as it is."""
    if name != "auto":
        return name
    if device.type == "cuda":
        # Old GPUs (T4, V100) can only emulate bf16, slowly.
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    # A CPU without instructions for bf16 takes up to 200 times as long with it as with fp32.
    features = torch.cpu.get_capabilities()
    return "bf16" if features.get("avx512_bf16") else "fp32"


def cast_with_masters(model, dtype):
    """Casts a model to a format, in place. Returns its master weights {name: fp32 tensor}, which
    the optimizer steps: those of all parameters but frozen ones (requires_grad=False).

    In 16 bits a parameter has three pieces of memory:

        p              in 16 bits, for forward and backward
        master         fp32, what the optimizer steps; `copy_to_model` copies it to p
        p.grad and     fp32, one memory, a view of a bucket (dist.Reducer): there autograd adds up
        master.grad    the 16-bit gradients of all micro-batches; then the Reducer averages these
                       sums over the ranks, and the optimizer reads them

    Why masters (arXiv 1710.03740, section 3.1): a step changes a weight by a small part of it. In
    bf16 a number and the next one differ by 0.4 to 0.8 %; a change of less than half of that would
    be rounded away.

    No weight is copied in fp32. `detach` makes a second tensor of p's memory, the master, and then
    `model.to` gives p new memory:

        before        p -> [0.1234567]                                   fp32
        detach        p -> [0.1234567] <- master
        model.to      p -> [0.1235]       [0.1234567] <- master          16 bits, and fp32

    Where dtype is fp32, `model.to` does nothing: p and its master stay one memory.
    """
    masters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    model.to(dtype)
    return masters


@torch.no_grad()
def copy_to_model(masters, model):
    """Copies master weights, {name: tensor}, at least one, to the model's parameters, rounded to
    their type. (In fp32 they are one memory: then this does nothing, and who copies other weights
    into the model, say an average, overwrites the masters.)"""
    parameters = dict(model.named_parameters())
    torch._foreach_copy_([parameters[name] for name in masters], list(masters.values()))


# ----- Loss scaling and clipping -----

@dataclasses.dataclass
class LossScaler:
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2).

        gradients = backward(scale * loss)      so that small fp16 gradients do not become 0
        overflow:   skip the step, scale = scale / 2
        otherwise:  take the step; after growth_interval of them in a row, scale = 2 * scale

    bf16 and fp32 need no scale, since their range is large enough: LossScaler(scale=1, largest=1,
    growth_interval=100). It, too, skips steps that are not finite, and its scale only counts them:
    each halves it, and 100 good steps in a row double it again, up to 1. After 15 halvings it is
    below `smallest`, and the training stops; so a bad step now and then is forgiven. (Gradients
    times such a scale, a power of two, lose no bits.)
    """
    scale: float = 2.0 ** 16           # a power of two: to multiply by it rounds nothing
    growth_interval: int = 1000
    smallest: float = 2.0 ** -14       # below it training stops
    largest: float = 2.0 ** 24
    good_steps: int = 0                # in a row
    skipped: int = 0                   # in the whole run

    def update(self, overflow, step):
        """Returns True if step number `step` is to be taken, and adjusts the scale and the counts.

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
            raise TrainingStopped(f"step {step}: the gradients of {self.skipped} of {step} steps "
                                  "were not finite; start anew at a lower --lr-scale")
        return False


def unscale_and_clip_(tensors, norm, scale, max_norm):
    """Divides gradients by the loss scale, in place, and shrinks them to a global norm of at most
    max_norm. norm: their global norm before this, so still times `scale`. (Who measures gradients
    later measures clipped ones. The gradients of all losses are clipped together, by this norm.)"""
    factor = 1 / scale
    if norm * factor > max_norm:
        factor = max_norm / norm                   # unscales as well: the norm has `scale` in it
    torch._foreach_mul_(tensors, factor)


# ----- Optimizers -----
#
# w is a parameter, an fp32 tensor; g is its gradient. The moments m and v are running means, of g
# and of g^2; b1 and b2 ("betas") are how slowly they forget. t = 1, 2, ... counts the updates. lr
# is the learning rate; eps keeps a divisor from being 0; decay (weight decay) pulls w towards 0.
#
# In `_update` w, g, m and v are lists: some parameters, and the gradient and the moments of each,
# in the same order. A GPU computes a small tensor faster than Python can ask for it. So torch has
# functions that take whole lists: torch._foreach_mul_(v, b2) multiplies each tensor of v by b2.
# As everywhere in torch, a name that ends with an underscore says "in place".

class Optimizer(torch.optim.Optimizer):
    """What our optimizers share. Each of them only adds `_update`, which changes the tensors of the
    lists w, m and v in place. One that keeps other moments names them in MOMENTS. `_update` can go
    through the lists one by one, which is slower on a GPU (tests/test_optim.py counts calls):

        def _update(self, group, w_list, g_list, m_list, v_list):
            for w, g, m, v in zip(w_list, g_list, m_list, v_list):
                w.sub_(g, alpha=group["lr"])

    Parameters are fp32, all with a gradient. Moments are made at once, not in the first step, so
    that a checkpoint can be copied into them.
    """
    MOMENTS = "exp_avg", "exp_avg_sq"  # m and v
    DEFAULTS = {
        "lr": 1e-3,                    # train.py sets it in every step
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "step": 0,                     # t: stands here so that a checkpoint has it
    }

    def __init__(self, params, **options):
        # Makes `param_groups`, a list of dicts {"params": [p, ...], "lr": 0.001, ...}: parameters
        # with their options. And `state`, {p: what is kept for p}, empty at first.
        super().__init__(params, self.DEFAULTS | options)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {moment: torch.zeros_like(p) for moment in self.MOMENTS}

    @torch.no_grad()
    def step(self):
        """Applies one update to all parameters, in place."""
        for group in self.param_groups:
            group["step"] += 1
            for w in lists_of(group["params"]):
                g = [p.grad for p in w]
                moments = [[self.state[p][moment] for p in w] for moment in self.MOMENTS]
                self._update(group, w, g, *moments)


def lists_of(tensors):
    """Returns tensors in lists of at most 64 MB, on a CPU 8 MB, or of one tensor that is larger.

    An update makes new tensors of a list's size, so a list of all tensors would take too much
    memory. A CPU is fastest with lists that fit into its cache.
    """
    lists = []
    space = -1.0                                   # what still fits into the last list, MB
    for tensor in tensors:
        size = 1e-6 * tensor.nbytes
        if size > space:
            lists.append([])
            space = 8.0 if tensor.is_cpu else 64.0
        lists[-1].append(tensor)
        space -= size
    return lists


def adam_update(group, w, g, m, v):
    """Returns u, a list of new tensors of w's shapes, and moves m and v, in place. For each:

        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w

    m and v began at 0, and so are too small at first: the divisors correct them.
    """
    b1, b2 = group["betas"]
    t = group["step"]
    # m = b1 m + (1 - b1) g                        lerp(a, b, x) = a + x (b - a)
    torch._foreach_lerp_(m, g, 1 - b1)

    # v = b2 v + (1 - b2) g^2
    torch._foreach_mul_(v, b2)
    torch._foreach_addcmul_(v, g, g, value=1 - b2)

    # root = sqrt(v / (1 - b2^t)) + eps
    root = torch._foreach_div(v, 1 - b2 ** t)
    torch._foreach_sqrt_(root)
    torch._foreach_add_(root, group["eps"])

    # u = (m / (1 - b1^t)) / root + decay w
    u = torch._foreach_div(m, 1 - b1 ** t)
    torch._foreach_div_(u, root)
    torch._foreach_add_(u, w, alpha=group["weight_decay"])
    return u


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2): w = w - lr u. The decay is
    multiplied by lr, as in torch."""

    def _update(self, group, w, g, m, v):
        """Applies one update to lists of parameters: w, m and v change in place."""
        u = adam_update(group, w, g, m, v)
        torch._foreach_sub_(w, u, alpha=group["lr"])


LARGEST_RATIO = 0.3          # the most that LAMB takes for ||w|| / ||u||


class LAMB(Optimizer):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2), with u of `adam_update`:

        w = w - lr ratio u
        ratio = min(||w|| / ||u||, 0.3)        for matrices; 0.3 if w or u is 0
        ratio = 1                              for vectors: biases and LayerNorm

    So a matrix moves by the part lr of its own norm, however large its gradient is; by less where
    the bound of 0.3 holds. That lets training take large batches, which need a large lr.

    The bound is that of 1-bit LAMB (arXiv 2104.06069); LAMB's paper bounds ||w|| instead. Unbounded
    the weights grow, and the steps with them: after 5,000 steps of `tiny` the loss was 0.45 nats
    higher. The paper's authors and NVIDIA do not scale vectors either, in their code. Q, K and V
    are one matrix here (bert.Block), so they share a ratio; NVIDIA's are three.
    """

    def _update(self, group, w, g, m, v):
        """Applies one update to lists of parameters, all matrices or all vectors: w, m and v change
        in place."""
        u = adam_update(group, w, g, m, v)
        if w[0].dim() > 1:
            # Norms and ratios are tensors (n,), of n matrices: for Python numbers the CPU would
            # wait for the GPU. (Where u is 0 the quotient is inf, and the clamp makes it 0.3.)
            w_norm = torch.stack(torch._foreach_norm(w))
            u_norm = torch.stack(torch._foreach_norm(u))
            ratio = torch.where(w_norm > 0, w_norm / u_norm, LARGEST_RATIO)
            ratio = ratio.clamp(max=LARGEST_RATIO)
            # Each by its own ratio. (Tensors as factors: one call of the GPU for each matrix.)
            torch._foreach_mul_(u, ratio.unbind())
        torch._foreach_sub_(w, u, alpha=group["lr"])


OPTIMIZERS = {"lamb": LAMB, "adamw": AdamW}


def make_optimizer(name, masters, betas):
    """Returns the optimizer of this name for master weights, {name: tensor}. Matrices decay;
    vectors, which are all biases and the weights of LayerNorm, do not. What stands here overrides
    the class's DEFAULTS, and what a checkpoint holds overrides both; `lr` is set in every step."""
    matrices = [w for w in masters.values() if w.dim() > 1]
    vectors = [w for w in masters.values() if w.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.01},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return OPTIMIZERS[name](groups, betas=betas)
