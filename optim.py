"""LAMB and its relatives, master weights, fp16 loss scaling, clipping, learning-rate schedules.

An optimizer here is a `torch.optim.Optimizer` over fp32 (in tests, fp64) parameters, written with
`torch._foreach_*`, so that a step is a few kernels for each batch of some million numbers, however
many tensors they are, not a loop over tensors.
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


def batches(params, most=1 << 22):
    """Returns lists of tensors, in order, with at most `most` numbers in a list or a single tensor:
    temporaries of an update then take a part of the parameters' memory, not a multiple of it."""
    found, room = [], 0
    for p in params:
        if p.numel() > room:
            found.append([])
            room = most
        found[-1].append(p)
        room -= p.numel()
    return found


class Optimizer(torch.optim.Optimizer):
    """What the optimizers here have in common: two moments for each parameter, kept in `state[p]`
    as "exp_avg" and "exp_avg_sq" beside the count "step", and updates in batches of tensors.

    `step()` changes parameters and state in place and returns None; gradients keep their values
    unless a class says otherwise. Parameters without a gradient are left alone.
    """

    def __init__(self, params, **defaults):
        if not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ValueError(f"betas must lie in [0, 1), not {defaults['betas']}")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self):
        """Applies one update; see the class."""
        for group in self.param_groups:
            for params in batches([p for p in group["params"] if p.grad is not None]):
                self._update(params, group)

    def _everything(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _of(self, params, *names):
        """Returns the named parts of the parameters' state, a list each; zeros at first."""
        for p in params:
            if "step" not in self.state[p]:
                self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p),
                                 "exp_avg_sq": torch.zeros_like(p)}
        return [[self.state[p][name] for p in params] for name in names]

    def _count(self, params):
        """Adds one to the parameters' steps and returns them."""
        self._of(params)
        for p in params:
            self.state[p]["step"] += 1
        return self._of(params, "step")[0]


def learn(m, v, grads, b1, b2, shrink=1.0):
    """Moves both moments towards the gradients, times `shrink`, and their squares, in place."""
    if m is not None:
        if shrink == 1:
            torch._foreach_lerp_(m, grads, 1 - b1)
        else:
            torch._foreach_mul_(m, b1)
            torch._foreach_add_(m, grads, alpha=(1 - b1) * shrink)
    if v is not None:
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, grads, grads, value=(1 - b2) * shrink ** 2)


def denominator(v, eps):
    """Returns sqrt(v) + eps as new tensors."""
    d = torch._foreach_sqrt(v)
    torch._foreach_add_(d, eps)
    return d


def bound(u):
    """Clips updates m / (sqrt(v) + eps) to [-1, 1] in place.

    A live variance keeps them near that (a constant gradient gives 1), a frozen one does not: the
    row of a token that is seen for the first time after the freeze would move a hundredfold.
    Batches of 64K have seen every token by then, small ones have not (see the README).
    """
    torch._foreach_clamp_min_(u, -1.0)
    torch._foreach_clamp_max_(u, 1.0)


def norms(*lists):
    """Returns the 2-norms of the tensors of each list as lists of numbers, in one transfer."""
    flat = torch.stack([norm for tensors in lists for norm in torch._foreach_norm(tensors)])
    return flat.view(len(lists), -1).tolist()


class LAMB(Optimizer):
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
    """
    bias_correction = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
                 adapt_all=False, max_grad_norm=None):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                         adapt_all=adapt_all, max_grad_norm=max_grad_norm)

    @torch.no_grad()
    def step(self):
        """Applies one update; see the class."""
        max_grad_norm = self.defaults["max_grad_norm"]
        self.shrink = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / max(float(
            global_norm([p.grad for p in self._everything()])), 1e-30))
        super().step()

    def _update(self, params, group):
        (b1, b2), decay, steps = group["betas"], group["weight_decay"], self._count(params)
        m, v = self._of(params, "exp_avg", "exp_avg_sq")
        learn(m, v, [p.grad for p in params], b1, b2, self.shrink)
        # u = k (m / (sqrt(v) + eps c) + (decay / k) w), with both corrections in c and k
        c = [(1 - b2 ** t) ** 0.5 if self.bias_correction else 1.0 for t in steps]
        k = [c_t / (1 - b1 ** t) if self.bias_correction else 1.0 for c_t, t in zip(c, steps)]
        u = torch._foreach_div(m, denominator(v, [group["eps"] * c_t for c_t in c]))
        if decay:
            self._add_decay(u, params, [decay / k_t for k_t in k])
        ratios = [1.0] * len(params)
        if decay or group["adapt_all"]:
            ratios = [self._ratio(p, w / (d * k_t) if w > 0 and d > 0 else 1.0)
                      for p, w, d, k_t in zip(params, *norms(params, u), k)]
        torch._foreach_mul_(u, [-group["lr"] * ratio * k_t for ratio, k_t in zip(ratios, k)])
        torch._foreach_add_(params, u)

    @staticmethod
    def _add_decay(u, params, decays):
        if len(set(decays)) == 1:
            torch._foreach_add_(u, params, alpha=decays[0])
        else:                                          # parameters that have not seen equal steps
            torch._foreach_add_(u, torch._foreach_mul(params, decays))

    def _ratio(self, p, ratio):
        return ratio


class LANS(Optimizer):
    """LAMB with a Nesterov term and normalised gradients, for batches of 96K in 54 minutes (Zheng
    et al., arXiv 2006.13484, algorithm 2; its kernel, dmlc/gluon-nlp, multi_tensor_lans.cu).

    For each tensor w with gradient g, at its step t = 1, 2, ...:

        g = g / ||g||                           as it is where the norm is 0
        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2
        d = sqrt(v / (1 - b2^t)) + eps
        r = (m / (1 - b1^t)) / d + decay w      c = g / d + decay w
        w = w - lr (b1 (||w|| / ||r||) r + (1 - b1) (||w|| / ||c||) c)

    Ratios are taken on all tensors and are 1 where a norm is 0. No clipping is needed: the scale of
    the gradients does not matter.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _update(self, params, group):
        (b1, b2), decay, steps = group["betas"], group["weight_decay"], self._count(params)
        m, v = self._of(params, "exp_avg", "exp_avg_sq")
        grads = [p.grad for p in params]
        c = torch._foreach_mul(grads, [1 / n if n > 0 else 1.0 for n in norms(grads)[0]])
        learn(m, v, c, b1, b2)
        d = torch._foreach_mul(v, [1 / (1 - b2 ** t) for t in steps])
        torch._foreach_sqrt_(d)
        torch._foreach_add_(d, group["eps"])
        torch._foreach_div_(c, d)
        r = torch._foreach_div(m, d)
        torch._foreach_mul_(r, [1 / (1 - b1 ** t) for t in steps])
        if decay:
            torch._foreach_add_(r, params, alpha=decay)
            torch._foreach_add_(c, params, alpha=decay)
        of_w, of_r, of_c = norms(params, r, c)
        for part, lengths, share in (r, of_r, b1), (c, of_c, 1 - b1):
            torch._foreach_mul_(part, [-group["lr"] * share * (w / n if w > 0 and n > 0 else 1.0)
                                       for w, n in zip(of_w, lengths)])
            torch._foreach_add_(params, part)


# ----- Optimizers that exchange momentum, or less, in place of gradients -----

class Exchanging(Optimizer):
    """What 1-bit Adam, 1-bit LAMB and 0/1 Adam have in common.

    Each phase of training begins with learning the variance: gradients are averaged over the ranks
    as for any optimizer (0/1 Adam: in some steps). Then the variance is frozen, each rank keeps its
    own gradients, and what the ranks need to agree on goes through `exchange(tensors)`, which
    replaces a list of tensors by its compressed mean over the ranks, keeping the error for the next
    time; `exchange.reset()` forgets the errors. Before backward, `local_gradients(frozen)` is told
    whether the phase has come that far, and tells whether the step shall keep gradients local.

    All tensors travel as one, and numbers of several may share a scale. So they are first brought
    to one magnitude (1-bit LAMB, section 4.2; 1-bit Adam and 0/1 Adam as published compress each
    tensor alone), by factors that stay until the next freeze. A sign cannot say 0: numbers whose
    variance is 0, such as the rows of positions that a phase of short sequences never sees, are
    masked.
    """

    def __init__(self, params, exchange, **defaults):
        Optimizer.__init__(self, params, frozen=False, **defaults)
        self.exchange, self.freeze = exchange, False

    def local_gradients(self, frozen):
        """Returns whether the next step takes each rank's own gradients; to be called before it."""
        self.freeze = frozen
        return frozen

    def synchronise(self):
        """Makes the weights of all ranks equal, where they are not: only in 0/1 Adam."""

    def _frozen(self, params):
        """Enters or leaves the second stage as `local_gradients` was told; returns whether the
        variance is frozen."""
        was = self.param_groups[0]["frozen"]
        if self.freeze and not was:
            self._set_magnitudes(params)
        for group in self.param_groups:
            group["frozen"] = self.freeze
        return self.freeze

    @staticmethod
    def _move(params, m, v, group, bounded=False):
        """One step of Adam, without bias correction."""
        u = torch._foreach_div(m, denominator(v, group["eps"]))
        if bounded:
            bound(u)
        if group["weight_decay"]:
            torch._foreach_add_(u, params, alpha=group["weight_decay"])
        torch._foreach_add_(params, u, alpha=-group["lr"])

    def _set_magnitudes(self, params):
        """Chooses the factors that make the momenta's root mean squares equal, and forgets the
        errors, which are in the former units."""
        lengths = norms(self._of(params, "exp_avg")[0])[0]
        scales = [length / p.numel() ** 0.5 for p, length in zip(params, lengths)]
        united = sum(scales) / len(scales)
        for p, scale in zip(params, scales):
            self.state[p]["magnitude"] = united / scale if scale > 0 else 1.0
        self.exchange.reset()

    def _average(self, params, tensors):
        """Replaces tensors, one a parameter, by their compressed mean over the ranks, masked."""
        magnitudes, = self._of(params, "magnitude")
        torch._foreach_mul_(tensors, magnitudes)
        self.exchange(tensors)
        torch._foreach_div_(tensors, magnitudes)
        place = {p: tensor for p, tensor in zip(params, tensors)}
        for some in batches(params):
            mask = torch._foreach_sign(self._of(some, "exp_avg_sq")[0])
            torch._foreach_mul_([place[p] for p in some], mask)


class OneBitAdam(Exchanging):
    """Adam whose momentum is exchanged in one bit a number (Tang et al., arXiv 2102.02888,
    algorithm 1; microsoft/DeepSpeed, runtime/fp16/onebit/adam.py).

        m = b1 m + (1 - b1) g                   v = b2 v + (1 - b2) g^2        in the first stage
        m = average(b1 m + (1 - b1) g_i)        v stays                        in the second
        w = w - lr (p + decay w)  with  p = m / (sqrt(v) + eps), in the second within [-1, 1]

    Without bias correction, as published: begin with a warm-up of the rate. Published without the
    bounds of p; see `bound`.
    """

    def __init__(self, params, exchange, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, exchange, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self):
        """Applies one update; see the class. Collective in the second stage."""
        params = self._everything()
        self._count(params)
        frozen = self._frozen(params)
        if frozen:
            m, = self._of(params, "exp_avg")
            learn(m, None, [p.grad for p in params], self.defaults["betas"][0], None)
            self._average(params, m)
        super().step()

    def _update(self, params, group):
        m, v = self._of(params, "exp_avg", "exp_avg_sq")
        if not group["frozen"]:
            learn(m, v, [p.grad for p in params], *group["betas"])
        self._move(params, m, v, group, bounded=group["frozen"])


class OneBitLAMB(Exchanging, LAMB):
    """LAMB whose momentum is exchanged in one bit a number (Li et al., arXiv 2104.06069, algorithm
    1; constants of microsoft/DeepSpeed, runtime/fp16/onebit/lamb.py).

    First stage: LAMB without bias correction, its ratio c within [0.01, 10]; of each tensor's
    ratios a mean is kept, C = 0.9 C + 0.1 c. Tensors that take ratio 1 in LAMB take it here too;
    DeepSpeed adapts all. Second stage, with v frozen, V a copy of it that goes on and M the former
    momentum:

        m = average(b1 m + (1 - b1) g_i)        g = (m - b1 M) / (1 - b1)
        V = b2 V + (1 - b2) g^2                 p = m / (sqrt(v) + eps) within [-1, 1]
        u = p + decay w                         f = max((sqrt(v) + eps) / (sqrt(V) + eps))
        f = r f + (1 - r)  with  r = min(1, ||p|| / ||u||)                     where there is decay
        f = f within [0.5, 4], and within 10 % of the former f, which is 1 at first
        w = w - lr C f u

    Published without the bounds of p; see `bound`. The second stage overwrites gradients.
    """
    bias_correction = False
    RATIOS = 0.01, 10.0
    FACTORS, CHANGE = (0.5, 4.0), 0.1

    def __init__(self, params, exchange, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        Exchanging.__init__(self, params, exchange, lr=lr, betas=betas, eps=eps,
                            weight_decay=weight_decay, adapt_all=False, max_grad_norm=None)

    @torch.no_grad()
    def step(self):
        """Applies one update; see the class. Collective in the second stage."""
        params = self._everything()
        self._of(params)
        if not self.param_groups[0]["frozen"] and self.freeze:
            for p in params:
                self.state[p] |= {"fresh": self.state[p]["exp_avg_sq"].clone(), "factor": 1.0}
        if not self._frozen(params):
            return LAMB.step(self)
        self._count(params)
        m, b1 = self._of(params, "exp_avg")[0], self.defaults["betas"][0]
        # What goes out takes the gradients' memory, and the new m that comes back does: M needs no
        # copy. Only numbers that all ranks share may reach V and the weights.
        grads = [p.grad for p in params]
        torch._foreach_mul_(grads, 1 - b1)
        torch._foreach_add_(grads, m, alpha=b1)
        self._average(params, grads)
        torch._foreach_mul_(m, b1)
        torch._foreach_sub_(m, grads)                  # -(1 - b1) g
        Optimizer.step(self)

    def _update(self, params, group):
        if not group["frozen"]:
            return LAMB._update(self, params, group)
        (b1, b2), decay = group["betas"], group["weight_decay"]
        m, v, fresh = self._of(params, "exp_avg", "exp_avg_sq", "fresh")
        torch._foreach_mul_(fresh, b2)
        torch._foreach_addcmul_(fresh, m, m, value=(1 - b2) / (1 - b1) ** 2)
        torch._foreach_copy_(m, [p.grad for p in params])
        d = denominator(v, group["eps"])
        u = torch._foreach_div(m, d)
        bound(u)
        torch._foreach_div_(d, denominator(fresh, group["eps"]))
        factors = torch.stack(torch._foreach_max(d)).tolist()
        if decay:
            before, = norms(u)
            torch._foreach_add_(u, params, alpha=decay)
            shares = [min(1.0, p / n) if n > 0 else 1.0 for p, n in zip(before, *norms(u))]
            factors = [r * f + 1 - r for r, f in zip(shares, factors)]
        for p, factor in zip(params, factors):
            state = self.state[p]
            factor = min(max(factor, self.FACTORS[0]), self.FACTORS[1])
            state["factor"] = min(max(factor, state["factor"] * (1 - self.CHANGE)),
                                  state["factor"] * (1 + self.CHANGE))
        torch._foreach_mul_(u, [-group["lr"] * self.state[p].get("ratio", 1.0)
                                * self.state[p]["factor"] for p in params])
        torch._foreach_add_(params, u)

    def _ratio(self, p, ratio):
        if ratio != 1.0:
            ratio = min(max(ratio, self.RATIOS[0]), self.RATIOS[1])
            self.state[p]["ratio"] = 0.9 * self.state[p].get("ratio", 0.0) + 0.1 * ratio
        return ratio


class ZeroOneAdam(Exchanging):
    """0/1 Adam: the variance is updated rarely and the ranks exchange rarely (Lu et al., arXiv
    2202.06009, algorithm 1; microsoft/DeepSpeed, runtime/fp16/onebit/zoadam.py).

    First stage: on every k-th step, k = 1 at first and doubled after every `variance_updates` such
    steps, v = b2 v + (1 - b2) g^2 with the exact mean g of the gradients; on the others only m
    moves, with g = average(g_i), 0 where v is. Second stage: v is frozen and rank i steps alone,

        m = b1 m + (1 - b1) g_i       w = w - lr (m / (sqrt(v) + eps) + decay w)

    and on every j-th step, j = 1 at first and doubled after every `interval_steps` steps up to 16,
    all agree again. With W the weights they last agreed on and L the sum of the rates since then:

        K = (1 - L decay) W
        U = average((w - K) (sqrt(v) + eps))        m = -U / L        w = K + U / (sqrt(v) + eps)

    As published U also holds the decay (W in place of K), which so becomes a part of m and acts up
    to 1 / (1 - b1) times as strongly.

    In between, ranks have unequal weights: `synchronise` makes them agree at once. Gradients are
    overwritten by their mean where that is exchanged.
    """
    LONGEST = 16
    START = {"step": 0, "variance_every": 1, "variance_count": 0, "agree_every": 1,
             "agree_count": 0, "rates": 0.0}

    def __init__(self, params, exchange, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01,
                 variance_updates=16, interval_steps=32678):
        super().__init__(params, exchange, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.param_groups[0]["clock"] = dict(self.START)
        self.variance_updates, self.interval_steps = variance_updates, interval_steps

    def local_gradients(self, frozen):
        """Returns whether the next step takes each rank's own gradients; to be called before it."""
        self.freeze, first = frozen, self.param_groups[0]
        if first["frozen"] and not frozen:             # a new phase begins
            first.update(frozen=False, clock=dict(self.START))
            self.exchange.reset()                      # errors of U are none of gradients
        clock = first["clock"]
        return frozen or (clock["step"] + 1) % clock["variance_every"] != 0

    @torch.no_grad()
    def step(self):
        """Applies one update; see the class. Collective where ranks exchange."""
        params, clock = self._everything(), self.param_groups[0]["clock"]
        self._count(params)
        grads = [p.grad for p in params]
        if self.freeze and not self.param_groups[0]["frozen"]:
            for p in params:
                self.state[p]["agreed"] = p.detach().clone()
        frozen = self._frozen(params)
        clock["step"] += 1
        self.learns = not frozen and clock["step"] % clock["variance_every"] == 0
        if not frozen and not self.learns:
            if "magnitude" not in self.state[params[0]]:
                self._set_magnitudes(params)
            self._average(params, grads)
        super().step()
        if self.learns:
            clock["variance_count"] += 1
            if clock["variance_count"] == self.variance_updates:
                clock["variance_count"], clock["variance_every"] = 0, 2 * clock["variance_every"]
        if frozen:
            clock["rates"] += self.param_groups[0]["lr"]
            if clock["step"] % clock["agree_every"] == 0:
                self.synchronise()
            clock["agree_count"] += 1
            if clock["agree_count"] == self.interval_steps:
                clock["agree_count"] = 0
                clock["agree_every"] = min(self.LONGEST, 2 * clock["agree_every"])

    def _update(self, params, group):
        m, v = self._of(params, "exp_avg", "exp_avg_sq")
        learn(m, v if self.learns else None, [p.grad for p in params], *group["betas"])
        self._move(params, m, v, group)

    @torch.no_grad()
    def synchronise(self):
        """Makes all ranks agree on the weights, where they stepped alone since the last time."""
        clock, eps = self.param_groups[0]["clock"], self.defaults["eps"]
        if not clock["rates"]:
            return
        parts = [(some, 1 - clock["rates"] * group["weight_decay"]) for group in self.param_groups
                 for some in batches([p for p in group["params"] if self.state[p]])]
        for some, kept in parts:           # U, from here on in place of the weights
            agreed, v = self._of(some, "agreed", "exp_avg_sq")
            torch._foreach_sub_(some, agreed, alpha=kept)
            torch._foreach_mul_(some, denominator(v, eps))
        params = [p for some, _ in parts for p in some]
        self._average(params, params)
        for some, kept in parts:
            m, v, agreed = self._of(some, "exp_avg", "exp_avg_sq", "agreed")
            torch._foreach_copy_(m, some)
            torch._foreach_mul_(m, -1 / clock["rates"])
            torch._foreach_div_(some, denominator(v, eps))
            torch._foreach_add_(some, agreed, alpha=kept)
            torch._foreach_copy_(agreed, some)
        clock["rates"] = 0.0


# ----- Precision: master weights, loss scaling, clipping -----

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
                where = (broken or ["a parameter on another rank"])[0]
                raise TrainingStopped(
                    f"step {step}: the gradient of {where} is not finite "
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
