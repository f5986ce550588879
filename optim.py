"""LAMB and its relatives, loss scaling, clipping, master weights, recipes, checkpoint files.

Read `LAMB` first: its equations, then `_update`, the same in code. What surrounds an update in a
training step follows, down to `learning_rate`; LANS and the 1-bit optimizers can wait. In an update
w are weights, g gradients, m and v moments: lists of fp32 tensors, one for each parameter.
`torch._foreach_*` computes on a whole list, on a GPU in a few kernels.
"""
import dataclasses
import functools
import hashlib
import io
import os
import pickle
import sys
from typing import NamedTuple

import torch


class Optimizer(torch.optim.Optimizer):
    """What the optimizers share, and what train.py asks of each. Parameters are fp32 (in tests
    fp64), all with a gradient in every step; `state` has their moments."""
    DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "step": 0}
    bytes_sent = 0                     # by this rank since the last local_gradients()

    def __init__(self, params, **options):
        super().__init__(params, self.DEFAULTS | options)

    def add_param_group(self, group, most=1 << 21):
        """Adds parameters, in tensor groups of about `most` elements or of one larger tensor: an
        update takes one at a time, so its temporaries are a fraction of the weights' memory."""
        tensor_groups, elements = {}, 0
        for p in group["params"]:
            elements += p.numel()
            tensor_groups.setdefault(elements // most, []).append(p)
            self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for params in tensor_groups.values():
            super().add_param_group(group | {"params": params})

    def local_gradients(self, frozen):
        """Returns True if gradients must not be averaged over the ranks in this step; call it
        before backward. frozen: whether the phase has come to its second stage (see OneBitAdam)."""
        return False

    def synchronise(self):
        """Makes the weights of all ranks equal; they differ only in 0/1 Adam. Collective there."""

    @torch.no_grad()
    def step(self):
        """Applies one update, in place; the class has the equations."""
        self._share()
        for group in self.param_groups:
            w = group["params"]
            self._update(group, w, [p.grad for p in w], *self._state(w, "exp_avg", "exp_avg_sq"))
            group["step"] += 1

    def _share(self):
        """Averages over the ranks what `local_gradients` kept apart, where this step needs it."""

    def _state(self, params, *names):
        return [[self.state[p][name] for p in params] for name in names]


class LAMB(Optimizer):
    """Layer-wise adaptive moments for large batches (You et al., arXiv 1904.00962, algorithm 2).
    For each tensor w with gradient g, at step t = 1, 2, ...:

        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
        w = w - lr (||w|| / ||u||) u            the ratio is 1 where a norm is 0

    adapt_all=False, the paper's code: tensors without decay (biases, LayerNorm) have ratio 1. True,
    NVIDIA's "NVLAMB" (use_nvlamb of fused_lamb.py): all are adapted. NVLAMB also divides gradients
    by max(1, their global norm): train.py clips to a norm of 1 before any optimizer, which is the
    same. Q, K and V are one tensor in our model, three in theirs.
    """
    DEFAULTS = Optimizer.DEFAULTS | {"adapt_all": False}

    def _update(self, group, w, g, m, v):
        """Applies the equations to tensors of one group, in place; group["step"] is t - 1."""
        (b1, b2), decay, t = group["betas"], group["weight_decay"], group["step"] + 1
        # m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        move_moments(m, v, g, b1, b2)
        # u. To correct m and v first would take two more passes over memory, and two temporaries.
        # With c = sqrt(1 - b2^t) and k = c / (1 - b1^t) the same is u = k u', and u' takes neither:
        #     u' = m / (sqrt(v) + c eps) + (decay / k) w
        c = (1 - b2 ** t) ** 0.5
        k = c / (1 - b1 ** t)
        u = torch._foreach_div(m, denominator(v, c * group["eps"]))
        torch._foreach_add_(u, w, alpha=decay / k)
        # w = w - lr (||w|| / ||u||) u, where k cancels; it is left where the ratio is 1
        ratios = torch.full((len(w),), k, dtype=torch.float64)
        if decay or group["adapt_all"]:
            ratios = safe_ratios(norms(w), norms(u), otherwise=k).double()
        # Factors are tensors of shape (), since numbers would wait for a GPU; fp64 rounds once
        torch._foreach_mul_(u, (-group["lr"] * ratios).unbind())
        torch._foreach_add_(w, u)


def move_moments(m, v, g, b1, b2, k=1):
    """Moves moments, in place, towards the gradients and their squares; v=None: only m. k: how many
    steps the move of v stands for."""
    torch._foreach_lerp_(m, g, 1 - b1)                   # lerp(a, b, x) = a + x (b - a)
    if v is not None:
        torch._foreach_mul_(v, b2 ** k)
        torch._foreach_addcmul_(v, g, g, value=1 - b2 ** k)


def denominator(v, eps):
    """Returns sqrt(v) + eps as new tensors."""
    torch._foreach_add_(d := torch._foreach_sqrt(v), eps)
    return d


def norms(tensors):
    """Returns the 2-norms of n tensors, (n,)."""
    return torch.stack(torch._foreach_norm(tensors))


def safe_ratios(a, b, otherwise=1.0):
    """Returns a / b, elementwise, with `otherwise` where one of them is 0."""
    return torch.where((a > 0) & (b > 0), a / b, otherwise)


# ----- Around the update: loss scaling, clipping, precision, master weights -----

class TrainingStopped(ArithmeticError):
    """Training cannot continue; the message names the step and what is not finite."""


@dataclasses.dataclass
class LossScaler:
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2).

        gradients = backward(scale loss)        so that small fp16 gradients do not become 0
        overflow:   skip the step, scale = scale / 2
        otherwise:  take the step; after growth_interval of them in a row, scale = 2 scale

    Formats that need none take scale = largest = 1, and still skip what is not finite: 15 such
    steps, without growth_interval good ones in a row between two, end the training.
    """
    scale: float = 2.0 ** 16           # a power of two changes no bit of a gradient in range
    growth_interval: int = 1000
    smallest: float = 2.0 ** -14       # below this floor training stops
    largest: float = 2.0 ** 24
    good_steps: int = 0                # in a row
    skipped: int = 0                   # in the whole run

    def update(self, overflow, step, gradients):
        """Returns True if the step is to be taken, and adjusts the scale. overflow: whether any
        rank has a gradient that is not finite, so that all skip the step. gradients, {name:
        tensor}, only name the culprit in TrainingStopped, which is raised below the floor."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        self.skipped += overflow
        if overflow:
            self.scale /= 2
        elif self.good_steps % self.growth_interval == 0:
            self.scale = min(2 * self.scale, self.largest)
        if self.scale < self.smallest:
            broken = next((n for n, g in gradients.items() if not g.isfinite().all()), "a rank")
            raise TrainingStopped(f"step {step}: gradient of {broken} is not finite at the scale's "
                                  f"floor of {self.smallest:g}; start anew at a lower --lr-scale")
        return not overflow


# Returns the 2-norm () of all elements of a list of tensors; NaN or inf if one of them is
global_norm = torch.nn.utils.get_total_norm


def unscale_and_clip_(tensors, norm, scale, max_norm):
    """Divides gradients in place by the loss scale and shrinks them to a global norm of max_norm.
    norm: their global norm as they are, scaled; a max_norm of inf does not clip."""
    shrink = min(1.0, max_norm * scale / max(norm, 1e-30))
    if shrink != scale:                # both in one pass over memory, or in none
        torch._foreach_mul_(tensors, shrink / scale)


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(name, device):
    """Returns the precision's name; for "auto" bf16 where the hardware multiplies it, else fp16 on
    a GPU and fp32 on a CPU, where bf16 without such instructions is 10 to 200 times slower."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any(map(capabilities.get, ("avx512_bf16", "amx_bf16", "bf16"))) else "fp32"


def master_weights(model):
    """Returns what the optimizer shall update, {name: fp32 tensor}: copies of parameters in fp16 or
    bf16, the parameters themselves where they are fp32 (arXiv 1710.03740, section 3.1)."""
    # An update of 1e-3 of a weight is lost in bf16, whose neighbours lie 4e-3 apart
    return {name: p if p.dtype.itemsize >= 4 else p.detach().float()
            for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def copy_to_model(masters, model):
    """Copies master weights, {name: tensor}, to the model's parameters, rounded to their type."""
    pairs = [(p, m) for name, m in masters.items() if (p := model.get_parameter(name)) is not m]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs)))


# ----- Recipes: batches and learning rates over the steps -----

@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of pre-training with one sequence length and one schedule."""
    seq_len: int             # tokens, the special ones included
    global_batch: int        # examples a step, over all ranks and micro-batches
    steps: int
    lr: float                # at its peak
    warmup: float            # fraction of the steps
    decay_from: float        # fraction of the steps after which the rate decays
    power: float = 1.0       # of the polynomial decay
    # `train.plan_phase` sets these
    freeze: int = sys.maxsize    # steps before a 1-bit optimizer freezes its variance
    micro_batch: int = 0     # examples that a rank takes at a time


class Recipe(NamedTuple):
    """How a model is pre-trained: what the phases have in common, and the phases."""
    optimizer: str
    betas: tuple             # of the moments; with few steps the second one must forget sooner
    dropout: float           # off where every text is seen a few times only
    mask_fraction: float     # of the tokens; more teach a small model faster (arXiv 2202.08005)
    phases: list


RECIPES = {
    # A 2x128 model on 5 MB of text, in minutes.
    "demo": Recipe("lamb", (0.9, 0.98), 0.0, 0.3, [
        Phase(seq_len=64, global_batch=32, steps=2300, lr=1e-2, warmup=0.05, decay_from=0.05),
        Phase(seq_len=128, global_batch=32, steps=400, lr=6e-3, warmup=0.1, decay_from=0.1)]),
    # BERT-large as NVIDIA trains it: DeepLearningExamples, PyTorch, pretrain_config.sh; its code
    # leaves use_nvlamb False.
    "nvlamb-64k": Recipe("lamb", (0.9, 0.999), 0.1, 0.15, [
        Phase(128, 65536, 7038, lr=6e-3, warmup=0.2843, decay_from=0, power=0.5),
        Phase(512, 32768, 1563, lr=4e-3, warmup=0.128, decay_from=0, power=0.5)]),
    # "54 minutes" (arXiv 2006.13484). The batches and the shape of the schedule are the paper's;
    # steps, rates and fractions are from memory, not checked.
    "lans-96k": Recipe("lans", (0.9, 0.999), 0.1, 0.15, [
        Phase(128, 98304, 3519, lr=6.75e-3, warmup=0.4265, decay_from=0.7),
        Phase(512, 33792, 782, lr=5e-3, warmup=0.192, decay_from=0.3)])}


def learning_rate(phase_step, phase):
    """Returns the learning rate of step 0, 1, ... of a phase of n steps. x is the fraction of the
    phase that is done, from 1 / (n + 1) to n / (n + 1), so that neither the first rate nor the last
    one is 0; w = phase.warmup and d = phase.decay_from are fractions too:

        lr x / w                                for x < w
        lr min(1, (1 - x) / (1 - d))^power      from there on

    d = w + hold: warm-up, hold, decay to 0 (LANS, arXiv 2006.13484, section 3.3, with power 1).
    d = 0: NVIDIA's PolyWarmUp, where the rate drops from lr to lr (1 - w)^power after the warm-up.
    """
    x = (phase_step + 1) / (phase.steps + 1)
    if x < phase.warmup:
        return phase.lr * x / phase.warmup
    return phase.lr * min(1.0, (1 - x) / (1 - phase.decay_from)) ** phase.power


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with what train.py asks of every optimizer; see `Optimizer`."""
    bytes_sent, local_gradients, synchronise = 0, Optimizer.local_gradients, Optimizer.synchronise


class LANS(Optimizer):
    """LAMB with a Nesterov term and normalised gradients, for batches of 96K in 54 minutes (Zheng
    et al., arXiv 2006.13484, algorithm 2; its kernel in dmlc/gluon-nlp). Ratios, and 1 / ||g||, are
    1 where a norm is 0.

        g = g / ||g||                           so that their scale does not matter
        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        d = sqrt(v / (1 - b2^t)) + eps
        r = (m / (1 - b1^t)) / d + decay w      c = g / d + decay w
        w = w - lr (b1 (||w|| / ||r||) r + (1 - b1) (||w|| / ||c||) c)
    """

    def _update(self, group, w, g, m, v):
        (b1, b2), decay, t = group["betas"], group["weight_decay"], group["step"] + 1
        # g / ||g||, in new tensors that become c below
        c = torch._foreach_mul(g, safe_ratios(torch.tensor(1.0), norms(g)).unbind())
        move_moments(m, v, c, b1, b2)
        d = denominator(torch._foreach_div(v, 1 - b2 ** t), group["eps"])
        # r from the momentum, c from the gradient alone
        r = torch._foreach_div(m, d)
        torch._foreach_div_(r, 1 - b1 ** t)
        torch._foreach_div_(c, d)
        torch._foreach_add_(r, w, alpha=decay)
        torch._foreach_add_(c, w, alpha=decay)
        # Both ratios are of the old w
        w_norms = norms(w)
        for u, part in (r, b1), (c, 1 - b1):
            torch._foreach_mul_(u, (-group["lr"] * part * safe_ratios(w_norms, norms(u))).unbind())
            torch._foreach_add_(w, u)


# ----- 1-bit optimizers: ranks average momentum, or more rarely, in place of gradients -----

class OneBitAdam(Optimizer):
    """Adam whose momentum is averaged in one bit an element (Tang et al., arXiv 2102.02888,
    algorithm 1; microsoft/DeepSpeed, onebit/adam.py). A phase has two stages. In the first, v is
    learned from gradients that are averaged as ever. In the second, v is frozen, rank i keeps its
    own gradient g_i, and the ranks average momentum. From its mean M follows the gradient g that M
    implies: the ordinary update on g gives m = M, on all ranks.

        M = average(b1 m + (1 - b1) g_i)        g = (M - b1 m) / (1 - b1)
        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2, only in the first stage
        p = m / (sqrt(v) + eps)                 in the second within [-1, 1], see `bound`
        w = w - lr (p + decay w)

    As published, without bias correction: begin with a warm-up. v of n steps is frozen at 1 - b2^n
    of the mean square, so the steps stay longer than Adam's, by (1 - b2^n)^-0.5: 1.6 after 500. Not
    as published: the bound, and tensors share scales (`_set_magnitudes`). Overwrites gradients.
    compressed_mean: a dist.CompressedMean of all parameters, in the order of their groups.
    """
    DEFAULTS = Optimizer.DEFAULTS | {"frozen": False}    # "step" counts from the stage's beginning
    BOUNDED, k = True, 1               # k: see move_moments

    def __init__(self, params, compressed_mean, **options):
        super().__init__(params, **options)
        self.compressed_mean = compressed_mean
        self.params = [p for group in self.param_groups for p in group["params"]]

    def local_gradients(self, frozen):
        """See Optimizer; begins the stage as well. Collective where weights have to agree."""
        self.bytes_sent, self.learns = 0, not frozen     # whether v is learned in this step
        if frozen != self.param_groups[0]["frozen"]:
            self._change_stage(frozen)
        return frozen

    def _change_stage(self, frozen):
        for group in self.param_groups:
            group.update(frozen=frozen, step=0)
        self._set_magnitudes()

    def _share(self):
        if not self.learns:
            b1, g = self.param_groups[0]["betas"][0], [p.grad for p in self.params]
            m, = self._state(self.params, "exp_avg")
            torch._foreach_lerp_(g, m, b1)               # b1 m + (1 - b1) g_i
            self._average(g)                             # M
            torch._foreach_lerp_(g, m, -b1 / (1 - b1))   # (M - b1 m) / (1 - b1)

    def _update(self, group, w, g, m, v):
        move_moments(m, v if self.learns else None, g, *group["betas"], self.k)
        # p, as m times 1 / d in the memory of d: on a CPU new memory costs more than a pass over it
        u = denominator(v, group["eps"])
        torch._foreach_reciprocal_(u)
        torch._foreach_mul_(u, m)
        if group["frozen"] and self.BOUNDED:
            bound(u)
        torch._foreach_add_(u, w, alpha=group["weight_decay"])
        torch._foreach_add_(w, u, alpha=-group["lr"])

    def _set_magnitudes(self):
        """Sets for each tensor the factor that brings its momentum to a root mean square of 1: all
        travel as one, and elements of several share a scale (1-bit LAMB, section 4.2)."""
        for p, norm in zip(self.params, norms(*self._state(self.params, "exp_avg")).tolist()):
            self.state[p]["magnitude"] = p.numel() ** 0.5 / norm if norm > 0 else 1.0
        self.compressed_mean.load_state_dict(None)       # its errors are in the former units

    def _average(self, tensors):
        """Replaces tensors, one for each parameter, in place by compressed means over the ranks."""
        magnitudes, variances = self._state(self.params, "magnitude", "exp_avg_sq")
        torch._foreach_mul_(tensors, magnitudes)
        self.bytes_sent += self.compressed_mean(tensors)
        torch._foreach_div_(tensors, magnitudes)
        # A sign cannot say 0. Elements whose v is 0 never had a gradient, such as rows of positions
        # that a phase of short sequences does not reach: they are masked, one tensor at a time,
        # since the masks of all would take the memory of the weights.
        for tensor, v in zip(tensors, variances):
            tensor.mul_(v.sign())

    def state_dict(self):
        """Returns the state, with the errors of compression. Collective."""
        return super().state_dict() | {"errors": self.compressed_mean.state_dict()}

    def load_state_dict(self, state):
        """Continues from a checkpoint, on any number of ranks."""
        super().load_state_dict(state)
        self.compressed_mean.load_state_dict(state["errors"])


def bound(u):
    """Clips updates m / (sqrt(v) + eps) to [-1, 1] in place. A v that learns keeps them near that
    (a constant gradient gives 1), a frozen one does not: the row of a token first seen after the
    freeze would move a hundredfold. Batches of 64K have seen all by then, small ones have not."""
    torch._foreach_clamp_min_(u, -1.0)
    torch._foreach_clamp_max_(u, 1.0)


class OneBitLAMB(OneBitAdam):
    """LAMB whose momentum is averaged in one bit an element (Li et al., arXiv 2104.06069, algorithm
    1; constants of microsoft/DeepSpeed, onebit/lamb.py). First stage: LAMB without bias correction,
    its ratio c within [0.01, 10], and C = 0.9 C + 0.1 c, a mean of each tensor's ratios, from 1 on.
    (DeepSpeed begins with C = 0, and adapts tensors without decay as well.) Second stage, with g
    and p of OneBitAdam and a fresh variance V, a copy of v that keeps moving:

        V = b2 V + (1 - b2) g^2                 u = p + decay w
        f = max((sqrt(v) + eps) / (sqrt(V) + eps))
        f = r f + (1 - r)                       r = min(1, ||p|| / ||u||)
        f = f within [0.5, 4], and within 10 % of the former f, which is 1 at first
        w = w - lr C f u
    """
    DEFAULTS = OneBitAdam.DEFAULTS | {"C": 1.0, "f": 1.0}          # then a list, one a tensor

    def _change_stage(self, frozen):
        super()._change_stage(frozen)
        for state in self.state.values():
            state["fresh"] = state["exp_avg_sq"].clone()

    def _update(self, group, w, g, m, v):
        decay, eps = group["weight_decay"], group["eps"]
        V = v if self.learns else self._state(w, "fresh")[0]
        move_moments(m, V, g, *group["betas"])           # V moves as v does
        d = denominator(v, eps)
        u = torch._foreach_div(m, d)                     # p, then u
        if not self.learns:
            bound(u)
        p_norms = norms(u)
        torch._foreach_add_(u, w, alpha=decay)
        u_norms = norms(u)
        ratios = C = u_norms.new_tensor(group["C"])      # 1 without decay
        if not self.learns:
            torch._foreach_div_(d, denominator(V, eps))
            f = torch.stack(torch._foreach_max(d))
            r = safe_ratios(p_norms, u_norms).clamp(max=1.0)
            former = C.new_tensor(group["f"] if group["step"] else 1.0)
            f = (r * f + 1 - r).clamp(0.5, 4.0).clamp(0.9 * former, 1.1 * former)
            group["f"], ratios = f.tolist(), C * f
        elif decay:
            ratios = safe_ratios(norms(w), u_norms).clamp(0.01, 10.0)          # c
            group["C"] = (0.9 * C + 0.1 * ratios).tolist()
        torch._foreach_mul_(u, (-group["lr"] * ratios).tolist())
        torch._foreach_add_(w, u)


class ZeroOneAdam(OneBitAdam):
    """0/1 Adam: the variance moves rarely and the ranks agree rarely (Lu et al., arXiv 2202.06009,
    algorithm 1; microsoft/DeepSpeed, onebit/zoadam.py). First stage: on every k-th step
    (`variance_interval`) gradients are averaged exactly and v moves, with b2^k in place of b2; on
    the others only m does, with g = average(g_i) in one bit. Second stage: rank i steps alone, on
    g_i and without a bound. On every j-th step (`agreement_interval`) all agree. With W the weights
    that they last agreed on and L the sum of the learning rates since then:

        K = (1 - L decay) W                     m = average((K - w) (sqrt(v) + eps) / L)
                                                w = K - L m / (sqrt(v) + eps)

    The published algorithm differs in three things. There v moves with b2 on a k-th step, too:
    frozen, it has moved some 16 log2(n / 16) times, and updates are up to 3 times as long. There
    the ranks average -L m: an agreement soon after another, as before an evaluation, divides what
    the one before has left over by its own short L. And that holds the decay (W in place of K),
    which so becomes a part of m and acts up to 1 / (1 - b1) times as strongly.
    """
    DEFAULTS = OneBitAdam.DEFAULTS | {"L": 0.0, "variance_updates": 16, "interval_steps": 32678}
    BOUNDED = False                                      # or m would not be a mean of momenta

    def local_gradients(self, frozen):
        """See OneBitAdam."""
        super().local_gradients(frozen)
        t, updates = self.param_groups[0]["step"] + 1, self.param_groups[0]["variance_updates"]
        self.k = variance_interval(t, updates)
        self.learns = not frozen and t % self.k == 0
        return not self.learns

    def _change_stage(self, frozen):
        self.synchronise()
        super()._change_stage(frozen)
        for p in self.params:
            self.state[p]["agreed"] = p.detach().clone()           # W

    def _share(self):
        if not self.learns and not self.param_groups[0]["frozen"]:
            if "magnitude" not in self.state[self.params[0]]:      # in the first phase
                self._set_magnitudes()
            self._average([p.grad for p in self.params])

    def step(self):
        """Applies one update, in place; the class has the equations. Collective where all agree."""
        super().step()
        for group in self.param_groups:
            group["L"] += group["lr"] if group["frozen"] else 0.0
        if group["step"] % agreement_interval(group["step"], group["interval_steps"]) == 0:
            self.synchronise()

    @torch.no_grad()
    def synchronise(self):
        """Makes the weights of all ranks equal, where they stepped alone. Collective."""
        if not self.param_groups[0]["L"]:
            return
        parts = [(group, w := group["params"], *self._state(w, "exp_avg", "exp_avg_sq", "agreed"))
                 for group in self.param_groups]
        for group, w, _, v, K in parts:
            torch._foreach_mul_(K, 1 - group["L"] * group["weight_decay"])   # in place of W
            torch._foreach_sub_(w, K)
            torch._foreach_mul_(w, denominator(v, group["eps"]))
            torch._foreach_div_(w, -group["L"])
        self._average(self.params)                       # m, in place of w
        for group, w, m, v, K in parts:
            torch._foreach_copy_(m, w)
            torch._foreach_addcdiv_(K, w, denominator(v, group["eps"]), value=-group["L"])   # W
            torch._foreach_copy_(w, K)
            group["L"] = 0.0


def variance_interval(t, updates):
    """Returns k at step t = 1, 2, ... of a stage: 1 for `updates` updates, 2 for as many, 4, ..."""
    return 1 << (((t - 1) // updates + 1).bit_length() - 1)


def agreement_interval(t, steps):
    """Returns j at step t = 1, 2, ... of a stage: 1 for `steps` steps, 2 for as many, up to 16."""
    return 1 << min(4, (t - 1) // steps)


# Each from parameter groups and betas; those of ONE_BIT need a dist.CompressedMean, too
ONE_BIT = {"onebit-adam": OneBitAdam, "onebit-lamb": OneBitLAMB, "zeroone-adam": ZeroOneAdam}
OPTIMIZERS = {"lamb": LAMB, "nvlamb": functools.partial(LAMB, adapt_all=True), "lans": LANS,
              "adamw": functools.partial(AdamW, eps=1e-6, fused=True), **ONE_BIT}


def make_optimizer(name, masters, betas, steps, compressed_mean):
    """Returns the optimizer of this name for master weights, {name: tensor}. Tensors of one
    dimension, biases and all of LayerNorm, have no weight decay.

    steps: of the whole run; compressed_mean: makes what the 1-bit optimizers need, of a list of
    (name, tensor).
    """
    groups = [{"params": [p for p in masters.values() if p.dim() > 1], "weight_decay": 0.01},
              {"params": [p for p in masters.values() if p.dim() <= 1], "weight_decay": 0.0}]
    named = sorted(masters.items(), key=lambda pair: pair[1].dim() <= 1)     # as in the groups
    options = {"compressed_mean": compressed_mean(named)} if name in ONE_BIT else {}
    if name == "zeroone-adam":                     # the published 32,678 steps of 125,000
        options["interval_steps"] = max(1, steps * 32678 // 125000)
    return OPTIMIZERS[name](groups, betas=betas, **options)


# ----- Checkpoint files: one a step, its digest at the end -----

class CheckpointError(ValueError):
    """A file that is not the checkpoint that its name says; the message says which."""


def write_checkpoint(folder, state, keep):
    """Writes `state` (tensors, numbers, strings, plain containers) to the folder, whole or not at
    all; then removes the others, but for the one before and those of the steps in `keep`.

    The file is what torch.save writes and the 64 hexadecimal digits of its SHA-256. It is built in
    memory, which holds the state twice meanwhile. Raises OSError on a full disk.
    """
    path, content = folder / f"step-{state['step']:08d}.pt", io.BytesIO()
    torch.save(state, content)
    # One name for all: what a killed run has left of its own is overwritten here
    temporary, digest = folder / "unfinished", hashlib.sha256(content.getbuffer()).hexdigest()
    try:
        with open(temporary, "wb") as file:
            file.writelines([content.getbuffer(), digest.encode()])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # Later ones are damaged or were not to be read: kept, one would be "the one before" some day
    found = checkpoints_in(folder)
    older = [step for step in found if step < state["step"]]
    for step in found.keys() - {state["step"], max(older, default=0)} - keep:
        found[step].unlink()


def checkpoints_in(folder):
    """Returns {step: path} of a folder's checkpoints; a file of any other name is not ours."""
    return {int(path.stem[5:]): path for path in folder.glob(f"step-{'[0-9]' * 8}.pt")}


def read_checkpoint(path, step=None):
    """Returns what write_checkpoint wrote, on the CPU; raises CheckpointError if the file is
    damaged, or not of the given step."""
    try:
        content = memoryview(path.read_bytes())
        if hashlib.sha256(content[:-64]).hexdigest().encode() != bytes(content[-64:]):
            raise CheckpointError(f"{path} is cut or damaged: its digest does not match")
        # weights_only: a pickle could run any code
        state = torch.load(io.BytesIO(content[:-64]), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        raise CheckpointError(f"{path} is no checkpoint of ours; nothing in it was run") from None
    if step not in (None, state["step"]):
        raise CheckpointError(f"{path} is of step {state['step']}: it was renamed")
    return state
