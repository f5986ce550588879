"""Recipes and learning rates, master weights, loss scaling, clipping, AdamW and LAMB."""
import dataclasses

import torch


class TrainingStopped(ArithmeticError):
    """Training cannot continue; the message says why and what to do."""


# ----- Recipes: batches and learning rates over the training -----

@dataclasses.dataclass
class Phase:
    """A part of pre-training with one sequence length and one schedule.

    Most recipes have two: most steps use short texts, which are cheap, and the last ones use long
    texts, because only these train the embeddings of later positions.
    """
    seq_len: int             # tokens of a full example, including special tokens
    global_batch: int        # examples per step, over all ranks and micro-batches
    steps: int               # with --hours, only sets the phase's share of the time
    lr: float                # the peak learning rate
    warmup: float            # the fraction of the phase in which the rate grows to lr
    power: float = 0.5       # of the decay, see learning_rate; 0: no decay

    @property
    def step_tokens(self):
        """The tokens of a step, counting seq_len for every example."""
        return self.global_batch * self.seq_len

    @property
    def tokens(self):
        """The tokens of all steps."""
        return self.steps * self.step_tokens


# A recipe holds the phases, the optimizer's two betas, and the defaults of four flags of train.py:
# --optimizer, --dropout, --mask-fraction and --pairs. All six keys are required.
RECIPES = {
    # A model of 2 layers, trained on 5 MB of text in minutes. It learned faster with 30 % of the
    # tokens masked than with 20 %; BERT masks 15 %. For large models see arXiv 2202.08005.
    "demo": {
        "optimizer": "lamb",
        "betas": (0.9, 0.98),        # not 0.999, because there are few steps
        "dropout": 0.0,              # each text comes only a few times, too few to memorise
        "mask_fraction": 0.3,
        "pairs": "nsp",
        "phases": [
            Phase(seq_len=64, global_batch=32, steps=2300, lr=8e-3, warmup=0.05),
            Phase(seq_len=128, global_batch=32, steps=400, lr=4.8e-3, warmup=0.1),
        ]},
    # BERT-base in about a day on an RTX 4090, by estimate: it has not been run yet. Optimizer,
    # masks, batch and rate are MosaicBERT's (arXiv 2312.17482; mosaicml/examples,
    # mosaic-bert-base-uncased.yaml). MosaicBERT's encoder, steps (70,000), final rate (2 %), weight
    # decay and dropout of attention weights differ. Only the first 128 positions are trained here.
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
    # pretrain_config.sh). NVIDIA's warm-up ends at 6e-3, in phase 2 at 4e-3, and the rate then
    # drops to sqrt(1 - warmup) of that. Ours ends at this lower rate; the decay is the same. Other
    # differences: t of `adam_update` continues in phase 2; see `LAMB`, and in train.py
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
    r"""Returns the learning rate when a fraction `done` of the phase, from 0 to 1, is over.

    The rate grows from 0 to lr, then decays to 0; with power 0 it stays at lr:

        lr |     /\
           |   /     \
         0 | /_________\    done
            0  warmup   1

    In the decay the rate is lr * left^power, where `left` falls from 1 to 0. The picture has power
    1, as in BERT (arXiv 1810.04805, appendix A.2); with NVIDIA's 0.5 the decay is slow at first.
    """
    if done < phase.warmup:
        return phase.lr * done / phase.warmup
    left = (1 - done) / (1 - phase.warmup)
    return phase.lr * left ** phase.power


# ----- Precision: 16-bit models and their fp32 master weights -----

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(name, device):
    """Returns the name of the precision to train in.

    "auto" selects 16 bits where the device computes faster with them, preferably bf16. Any other
    name is returned unchanged.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        # Old GPUs (T4, V100) can only emulate bf16, which is slow. Older ones have no tensor cores:
        # most of them compute more slowly in fp16 than in fp32.
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        return "fp16" if torch.cuda.get_device_capability(device) >= (7, 0) else "fp32"
    # Without bf16 instructions, a CPU takes up to 200 times as long in bf16 as in fp32.
    features = torch.cpu.get_capabilities()
    return "bf16" if features.get("avx512_bf16") else "fp32"


def cast_with_masters(model, dtype):
    """Casts a model to a format, in place, and returns its master weights {name: fp32 tensor}.

    The optimizer steps the masters. Every parameter has one, unless it is frozen
    (requires_grad=False). In 16 bits a parameter has three pieces of memory:

        p              16 bits, for forward and backward
        master         fp32, stepped by the optimizer; `copy_to_model` copies it to p
        p.grad and     fp32, one memory, a view of a bucket (dist.Reducer): autograd adds up the
        master.grad    16-bit gradients of all micro-batches there, then the Reducer averages the
                       sums over the ranks, and the optimizer reads them

    A step changes a weight by a small part of it. Neighbouring bf16 numbers differ by 0.4 to 0.8 %,
    so without masters a change of less than half of that would be rounded away (arXiv 1710.03740,
    section 3.1).

    No weight is copied in fp32. `detach` makes a second tensor on p's memory, the master, and
    `model.to` then gives p new memory:

        before        p -> [0.1234567]                                   fp32
        detach        p -> [0.1234567] <- master
        model.to      p -> [0.1235]       [0.1234567] <- master          16 bits, and fp32

    If dtype is fp32, `model.to` does nothing: p and its master stay one memory.
    """
    masters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    model.to(dtype)
    return masters


@torch.no_grad()
def copy_to_model(masters, model):
    """Copies master weights, {name: tensor}, to the model's parameters, rounded to their type.

    There must be at least one. In fp32 both are one memory: this function does nothing, and copying
    other weights into the model, such as an average, overwrites the masters.
    """
    parameters = dict(model.named_parameters())
    torch._foreach_copy_([parameters[name] for name in masters], list(masters.values()))


# ----- Loss scaling and clipping -----

@dataclasses.dataclass
class LossScaler:
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2).

        gradients = backward(scale * loss)      so that small fp16 gradients do not become 0
        overflow:   a gradient is inf or NaN: skip the step, scale = scale / 2
        otherwise:  take the step; after growth_interval of them in a row, scale = 2 * scale

    bf16 and fp32 have enough range and need no scale. With LossScaler(scale=1, largest=1,
    growth_interval=100) an overflow is skipped and halves the scale, too, but only to count: 100
    good steps in a row double it again, up to 1, and after 15 halvings it is below `smallest`. So
    training stops if many steps are bad, and an occasional one is forgiven. The scale is a power of
    two, so gradients lose no bits by it.
    """
    scale: float = 2.0 ** 16           # a power of two, so multiplying by it rounds nothing
    growth_interval: int = 1000
    smallest: float = 2.0 ** -14       # training stops below this scale
    largest: float = 2.0 ** 24
    good_steps: int = 0                # in a row
    skipped: int = 0                   # in the whole run

    def update(self, overflow, step):
        """Returns whether to take step number `step`, and adjusts the scale and the counts.

        overflow: whether a gradient on any rank is not finite, since all ranks must do the same.
        Raises TrainingStopped, naming the step, when overflows have halved the scale below
        `smallest`.
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
                                  "were not finite; start over with a lower --lr-scale and a new "
                                  "--out")
        return False


def unscale_and_clip_(tensors, norm, scale, max_norm):
    """Divides gradients by `scale` and clips them to a global norm of at most max_norm, in place.

    norm: their global norm before the call, still multiplied by `scale`, the loss scale. This one
    norm clips the gradients of all losses together. After the call p.grad is clipped.
    """
    factor = 1 / scale
    if norm * factor > max_norm:
        factor = max_norm / norm                   # unscales as well: the norm has `scale` in it
    torch._foreach_mul_(tensors, factor)


# ----- Optimizers -----
#
# w is a parameter, an fp32 tensor; g is its gradient. The moments m and v are running means of g
# and of g^2; b1 and b2 ("betas") set how slowly they forget. t = 1, 2, ... counts the updates. lr
# is the learning rate; eps keeps a divisor from being 0; decay (weight decay) pulls w towards 0.
#
# In `_update`, w, g, m and v are lists: some parameters, and the gradient and moments of each, in
# the same order. A GPU computes a small tensor faster than Python can ask for it, so torch has
# functions for whole lists: torch._foreach_mul_(v, b2) multiplies each tensor of v by b2. As
# everywhere in torch, a trailing underscore means "in place".

class Optimizer(torch.optim.Optimizer):
    """The base class of our optimizers; each of them only adds `_update`.

    `_update` changes the tensors of the lists w, m and v in place. An optimizer with other moments
    names them in MOMENTS. `_update` may loop over the tensors, which is slower on a GPU:

        def _update(self, group, w_list, g_list, m_list, v_list):
            for w, g, m, v in zip(w_list, g_list, m_list, v_list):
                w.sub_(g, alpha=group["lr"])

    Parameters are fp32, and all have a gradient. The moments are created before the first step, so
    that a checkpoint can be copied into them.
    """
    MOMENTS = "exp_avg", "exp_avg_sq"  # m and v
    DEFAULTS = {
        "lr": 1e-3,                    # train.py sets it in every step
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "step": 0,                     # t; here, so that a checkpoint includes it
    }

    def __init__(self, params, **options):
        # Makes `param_groups`, a list of dicts {"params": [p, ...], "lr": 0.001, ...}, each with
        # some parameters and their options; and an empty `state`, {p: what is kept for p}.
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
    """Returns tensors in lists of at most 64 MB, on a CPU 8 MB, or of a single larger tensor.

    An update makes new tensors of a list's size, so one list of all tensors would take too much
    memory. A CPU is fastest with lists that fit into its cache.
    """
    lists = []
    space = -1.0                                   # MB that still fit into the last list
    for tensor in tensors:
        size = 1e-6 * tensor.nbytes
        if size > space:
            lists.append([])
            space = 8.0 if tensor.is_cpu else 64.0
        lists[-1].append(tensor)
        space -= size
    return lists


def adam_update(group, w, g, m, v):
    """Returns u, a list of new tensors of w's shapes, and updates m and v in place.

    For each parameter:

        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w

    m and v start at 0, so they are too small at first; the divisors correct this.
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
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2): w = w - lr u.

    The decay is multiplied by lr, as in torch.
    """

    def _update(self, group, w, g, m, v):
        """Applies one update to lists of parameters: w, m and v change in place."""
        u = adam_update(group, w, g, m, v)
        torch._foreach_sub_(w, u, alpha=group["lr"])


LARGEST_RATIO = 0.3          # LAMB's bound on ||w|| / ||u||


class LAMB(Optimizer):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2), with u from `adam_update`:

        w = w - lr ratio u
        ratio = min(||w|| / ||u||, 0.3)        for matrices; 0.3 if w or u is 0
        ratio = 1                              for vectors: biases and LayerNorm

    However large its gradient, a matrix that is not 0 moves by lr times its own norm, or by less
    where the bound of 0.3 applies. This lets training use large batches, which need a large lr.

    The bound is that of 1-bit LAMB (arXiv 2104.06069); LAMB's paper bounds ||w|| instead. `tiny`
    does not need it: after 5,000 steps (seed 0) its loss is 3.852 with the bound, 3.860 without. In
    their code, the paper's authors and NVIDIA do not scale vectors either. Q, K and V are one
    matrix here (bert.Block) and share a ratio; NVIDIA's are three matrices.
    """

    def _update(self, group, w, g, m, v):
        """Applies one update to lists of parameters: w, m and v change in place.

        The parameters of a list are all matrices or all vectors.
        """
        u = adam_update(group, w, g, m, v)
        if w[0].dim() > 1:
            # Norms and ratios are tensors (n,), for n matrices: with Python numbers the CPU would
            # wait for the GPU. Where u is 0, the quotient is inf, and clamp makes it 0.3.
            w_norm = torch.stack(torch._foreach_norm(w))
            u_norm = torch.stack(torch._foreach_norm(u))
            ratio = torch.where(w_norm > 0, w_norm / u_norm, LARGEST_RATIO)
            ratio = ratio.clamp(max=LARGEST_RATIO)
            # Scale each u by its own ratio. Torch makes one GPU call for each matrix here.
            torch._foreach_mul_(u, ratio.unbind())
        torch._foreach_sub_(w, u, alpha=group["lr"])


OPTIMIZERS = {"lamb": LAMB, "adamw": AdamW}


def make_optimizer(name, masters, betas):
    """Returns the optimizer of this name for master weights, {name: tensor}.

    Matrices decay; vectors, which are all biases and the weights of LayerNorm, do not. Options set
    here override the class's DEFAULTS, and a checkpoint overrides both; `lr` is set in every step.
    """
    matrices = [w for w in masters.values() if w.dim() > 1]
    vectors = [w for w in masters.values() if w.dim() <= 1]
    groups = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return OPTIMIZERS[name](groups, betas=betas)
