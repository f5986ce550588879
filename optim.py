"""LAMB, master weights, fp16 loss scaling, gradient clipping and learning-rate schedules.

An optimizer here is a `torch.optim.Optimizer` over fp32 (in tests, fp64) parameters, written with
`torch._foreach_*`, so that a step is a few kernels over all tensors, not a loop of small ones.
"""
import torch
from torch import nn


class TrainingStopped(ArithmeticError):
    """Training cannot go on; the message names the step, the scale and what is not finite."""


def parameter_groups(model, weight_decay):
    """Returns the names of the trainable parameters, [(names, weight_decay), (names, 0)].

    Without decay are biases and the parameters of LayerNorm, known by what they are: a parameter
    of a LayerNorm module, or one with a single dimension.
    """
    of_norms = {id(parameter) for module in model.modules() if isinstance(module, nn.LayerNorm)
                for parameter in module.parameters()}
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (free if id(parameter) in of_norms or parameter.dim() <= 1 else decayed).append(name)
    return [(decayed, weight_decay), (free, 0.0)]


class LAMB(torch.optim.Optimizer):
    """Layer-wise adaptive moments for large batches (You et al., arXiv 1904.00962, algorithm 2).

    For each tensor w with gradient g, at its step t = 1, 2, ...:

        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
        w = w - lr (||w|| / ||u||) u            the ratio is 1 where a norm is 0

    Two published variants differ in what else happens:

    - The paper's reference code: tensors without decay (biases, LayerNorm) take ratio 1.
      `adapt_all=False, max_grad_norm=None`, the default.
    - NVIDIA's "NVLAMB" (DeepLearningExamples, fused_lamb.py): all gradients are first divided by
      max(1, ||all gradients|| / max_grad_norm), and `adapt_all=True` gives every tensor its ratio.

    `step()` changes the parameters and `state[p]` = {"step", "exp_avg", "exp_avg_sq"} in place and
    returns None; gradients keep their values. Parameters without a gradient are left alone.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
                 adapt_all=False, max_grad_norm=None):
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas must lie in [0, 1), not {betas}")
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                                      adapt_all=adapt_all, max_grad_norm=max_grad_norm))

    @torch.no_grad()
    def step(self):
        """Applies one update; see the class."""
        everything = [p.grad for group in self.param_groups for p in group["params"]
                      if p.grad is not None]
        max_grad_norm = self.defaults["max_grad_norm"]
        shrink = 1.0 if max_grad_norm is None else \
            min(1.0, max_grad_norm / max(float(global_norm(everything)), 1e-30))
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group, shrink)

    def _update(self, params, group, shrink):
        (b1, b2), decay = group["betas"], group["weight_decay"]
        for p in params:
            if not self.state[p]:
                self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p),
                                 "exp_avg_sq": torch.zeros_like(p)}
            self.state[p]["step"] += 1
        states = [self.state[p] for p in params]
        grads = [p.grad for p in params]
        m, v = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        torch._foreach_mul_(m, b1)
        torch._foreach_add_(m, grads, alpha=(1 - b1) * shrink)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, grads, grads, value=(1 - b2) * shrink ** 2)

        # The update u takes one temporary copy of the parameters, worked on in place.
        u = torch._foreach_sqrt(v)
        torch._foreach_mul_(u, [(1 - b2 ** s["step"]) ** -0.5 for s in states])
        torch._foreach_add_(u, group["eps"])
        torch._foreach_reciprocal_(u)
        torch._foreach_mul_(u, m)
        torch._foreach_mul_(u, [1 / (1 - b1 ** s["step"]) for s in states])
        if decay:
            torch._foreach_add_(u, params, alpha=decay)

        ratios = [1.0] * len(params)
        if decay or group["adapt_all"]:
            # One transfer to the host: a list of numbers then scales all tensors in one kernel.
            norms = torch.stack([*torch._foreach_norm(params), *torch._foreach_norm(u)]).tolist()
            ratios = [w / d if w > 0 and d > 0 else 1.0
                      for w, d in zip(norms[:len(params)], norms[len(params):])]
        torch._foreach_mul_(u, [-group["lr"] * ratio for ratio in ratios])
        torch._foreach_add_(params, u)


def master_weights(model):
    """Returns the trainable parameters as the optimizer shall see them, by name: fp32 copies (leaf
    tensors) for parameters in fp16 or bf16, the parameters themselves for fp32.

    An update of 1e-3 of a weight is lost in bf16, whose neighbours lie 4e-3 apart (Micikevicius et
    al., arXiv 1710.03740, section 3.1).
    """
    low = (torch.float16, torch.bfloat16)
    return {name: p.detach().float().requires_grad_() if p.dtype in low else p
            for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def copy_to_model(masters, model):
    """Copies master weights (by name) to the model's parameters, rounding to their type."""
    pairs = [(p, masters[name]) for name, p in model.named_parameters()
             if name in masters and p is not masters[name]]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs)))


@torch.no_grad()
def global_norm(tensors):
    """Returns the 2-norm () of all elements of a list of tensors; NaN or inf if one of them is."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


@torch.no_grad()
def unscale_and_clip_(tensors, norm, scale, max_norm):
    """Divides gradients in place by the loss scale and shrinks them to a global norm of max_norm.

    norm: their global norm as they are, scaled; max_norm: None does not clip.
    """
    shrink = 1.0 if max_norm is None else min(1.0, max_norm * scale / max(norm, 1e-30))
    if shrink != scale:
        torch._foreach_mul_(tensors, shrink / scale)


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2).

    The loss is multiplied by `scale` so that small fp16 gradients do not vanish. A step with an inf
    or NaN in its gradients is skipped and halves the scale; `growth_interval` good steps in a row
    double it, up to `largest`. Under `smallest` training stops. Scales are powers of two, so that
    scaling changes no bit of a gradient that stays in range; formats that need none take
    initial = largest = 1 and still skip a step that is not finite.
    """

    def __init__(self, initial=2.0 ** 16, growth_interval=1000, smallest=2.0 ** -14,
                 largest=2.0 ** 24):
        self.scale, self.good_steps, self.skipped = float(initial), 0, 0
        self.growth_interval, self.smallest, self.largest = growth_interval, smallest, largest

    def update(self, overflow, step, gradients):
        """Returns True if the step counts, and adjusts the scale; changes nothing else.

        overflow: the same on every rank: whether any rank found its gradients not finite.
        gradients: by name, to name the first that is not finite in the message of TrainingStopped,
        which is raised once the scale falls below the floor.
        """
        if overflow:
            self.scale, self.good_steps, self.skipped = self.scale / 2, 0, self.skipped + 1
            if self.scale < self.smallest:
                broken = [name for name, g in gradients.items() if not bool(g.isfinite().all())]
                raise TrainingStopped(
                    f"step {step}: the gradient of {(broken or ['no parameter'])[0]} is not finite "
                    f"and the loss scale is at its floor of {2 * self.scale:g}; training stops. Go "
                    "on from an earlier checkpoint, perhaps with a lower --lr-scale")
            return False
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale, self.good_steps = min(self.scale * 2, self.largest), 0
        return True

    def state_dict(self):
        """Returns what a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state):
        """Continues from a checkpoint."""
        self.scale, self.good_steps, self.skipped = (
            state[key] for key in ("scale", "good_steps", "skipped"))


# ----- Learning rates: functions of the step within a phase (0, 1, ...) and the phase -----

def warmup_polynomial(step, phase):
    """Returns the learning rate: linear warm-up over the share `phase.warmup` of its steps, then
    lr (1 - x)^power with x the share of all steps done, as NVIDIA's PolyWarmUp has it: at the end
    of the warm-up the rate drops from lr to lr (1 - warmup)^power."""
    x = (step + 1) / (phase.steps + 1)
    return phase.lr * (x / phase.warmup if x < phase.warmup else (1 - x) ** phase.power)


def warmup_hold_decay(step, phase):
    """Returns the learning rate: linear warm-up over the share `phase.warmup` of steps, constant
    over the share `phase.hold`, then polynomial decay to zero over what is left (LANS, arXiv
    2006.13484, section 3.3, where power is 1)."""
    x = (step + 1) / (phase.steps + 1)
    if x < phase.warmup:
        return phase.lr * x / phase.warmup
    decay = max(0.0, x - phase.warmup - phase.hold) / (1 - phase.warmup - phase.hold)
    return phase.lr * (1 - decay) ** phase.power
