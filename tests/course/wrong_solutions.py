"""Typical wrong solutions of the exercises, which their checks must catch, and right ones unlike
ours, which they must not; and `verify`, which tries them all.

    WRONG[exercise][what is wrong] = function, (old text, new text), ...
    RIGHT[exercise][what is other] = function, (old text, new text), ...

Each old text stands once in the function as it is in the repository.
"""
import time

from tests.course import exercises

WRONG = {
    "masking": {
        "in a copy": (
            "data.PretrainingData.mask",
            ("labels = np.where(chosen, tokens, IGNORED)",
             "labels, tokens = np.where(chosen, tokens, IGNORED), tokens.copy()")),
        "one stream for fate and token": (
            "data.PretrainingData.mask",
            ("self.token_key", "self.fate_key")),
        "counts rounded": (
            "data.PretrainingData.choose",
            ("draws[:, 0] < wanted % 1", "wanted % 1 >= 0.5")),
        "always [MASK]": (
            "data.PretrainingData.mask",
            ("np.where(fates < 0.8, MASK, not_masked)", "MASK")),
        "[CLS] and [SEP] are text": (
            "data.PretrainingData.choose",
            ("(tokens != PAD) & (tokens != CLS) & (tokens != SEP)", "tokens != PAD")),
        "by the place in the batch": (
            "data.PretrainingData.mask",
            ("indices[:, None]", "np.arange(len(indices))[:, None]")),
        "padding counts": (
            "data.PretrainingData.choose",
            ("self.mask_fraction * is_text.sum(axis=1)",
             "self.mask_fraction * np.full(len(tokens), tokens.shape[1])")),
        "no token at all of short texts": (
            "data.PretrainingData.choose",
            ("        count = np.maximum(count, 1)\n", ""),
            ("last = count[:, None] - 1", "last = np.maximum(count[:, None] - 1, 0)"),
            ("return draws <= bound", "return (draws <= bound) & (count[:, None] > 0)")),
    },
    "pairs": {
        "53 % true": (
            "data.PretrainingData.pair",
            ("truth_draw >= 0.5", "truth_draw >= 0.47")),
        "B cut as in epoch 0": (
            "data.PretrainingData.pair",
            ("self.text(shard, epoch, other_window", "self.text(shard, 0, other_window")),
        "B of the same document": (
            "data.PretrainingData.pair",
            ("windows - (after - own)", "windows")),
        "labels the wrong way round": (
            "data.PretrainingData.pair",
            ("middle, middle, end, 0)", "middle, middle, end, 1)"),
            ("b_end, 1)", "b_end, 0)")),
        "B from where its text begins": (
            "data.PretrainingData.pair",
            ("other.middle, b_end", "other.start, b_end"),
            ("min(other.middle + b_length", "min(other.start + b_length")),
        "B as long as its document": (
            "data.PretrainingData.pair",
            ("min(other.middle + b_length, other.document_end)",
             "other.document_end")),
    },
    "attention": {
        "over the queries": (
            "bert.plain_attention",
            ("softmax(-1)", "softmax(-2)")),
        "no scale in the plain one": (
            "bert.plain_attention",
            (" / math.sqrt(q.shape[2])", "")),
        "to all examples": (
            "bert.attention",
            ("torch.unique_consecutive(lengths, return_counts=True)",
             "lengths.sum()[None], torch.ones(1, dtype=torch.int64)")),
        "over heads": (
            "bert.attention",
            (".permute(2, 0, 3, 1, 4)", ".permute(2, 0, 1, 3, 4)"),
            ("output.transpose(1, 2).flatten(0, 1)", "output.flatten(0, 1)")),
        "no dropout": (
            "bert.attention",
            (", dropout_p=dropout", "")),
        "no scale": (
            "bert.attention",
            ("dropout_p=dropout", "dropout_p=dropout, scale=1.0")),
        "heads not brought back": (
            "bert.attention",
            ("output.transpose(1, 2).flatten(0, 1)",
             "output.flatten(0, 2).view(-1, *output.shape[1:3:2], output.shape[3])")),
    },
    "schedule": {
        "the power on the numerator alone": (
            "optim.learning_rate",
            ("(1 - done) / (1 - phase.decay_from)",
             "(1 - done) ** phase.power / (1 - phase.decay_from)"),
            ("left ** phase.power", "left")),
        "begins at 0": (
            "optim.learning_rate",
            ("(phase_step + 1) / (phase.steps + 1)", "phase_step / phase.steps")),
        "no hold": (
            "optim.learning_rate",
            ("(1 - phase.decay_from)", "(1 - phase.warmup)")),
        "above the peak": (
            "optim.learning_rate",
            ("min(1.0, (1 - done) / (1 - phase.decay_from))",
             "(1 - done) / (1 - phase.decay_from)")),
    },
    "precision": {
        "takes an overflowed step": (
            "optim.LossScaler.update",
            ("return False", "return True")),
        "good steps not in a row": (
            "optim.LossScaler.update",
            ("        self.good_steps = 0\n", "")),
        "clips scaled gradients": (
            "optim.unscale_and_clip_",
            ("norm / scale > max_norm", "norm > max_norm")),
        "masters of 16 bits": (
            "optim.master_weights",
            ("p.detach().clone()", "p.detach().to(dtype)")),
    },
    "lamb": {
        "no bias correction": (
            "optim.LAMB._update",
            ("corrected_roots(v, t, b2, group", "corrected_roots(v, 10**6, b2, group"),
            ("value=1 / (1 - b1 ** t)", "value=1.0")),
        "decay after the ratio": (
            "optim.LAMB._update",
            ("torch._foreach_mul(w, decay)", "torch._foreach_mul(w, 0.0)"),
            ("torch._foreach_add_(w, u)",
             'torch._foreach_add_(w, u)\n'
             '        torch._foreach_mul_(w, 1 - group["lr"] * decay)')),
        "ratio without decay": (
            "optim.LAMB._update",
            ('decay or group["adapt_all"]', "True")),
        "not in place": (
            "optim.LAMB._update",
            ("torch._foreach_add_(w, u)", "w = torch._foreach_add(w, u)")),
        "zero weights stay zero": (
            "optim.LAMB._update",
            ("safe_ratios(norms(w), norms(u))",
             "torch.nan_to_num(norms(w) / norms(u), posinf=0.0)")),
    },
    "dealing": {
        "in blocks": (
            "data.micro_batches",
            ("owner = indices % size", "owner = (indices - first) * size // global_batch")),
        "the rest is dropped": (
            "data.micro_batches",
            ("len(mine), micro_batch)", "len(mine) - micro_batch + 1, micro_batch)")),
        "no snake": (
            "data.micro_batches",
            ("np.where(round_number % 2 == 1, size - 1 - place, place)", "place")),
        "each rank's own divisor": (
            "train.step_totals",
            ("StepTotals(masked,", "StepTotals(own_masked * world.size,")),
    },
    "buckets": {
        "divides after the sum": (
            "dist.dense",
            ("value.div_(world.size)", "pass"),
            ("value.copy_(wire)", "value.copy_(wire.div_(world.size))")),
        "casts before it divides": (
            "dist.dense",
            ("value.div_(world.size)", "pass"),
            ("value.to(dtype)", "value.to(dtype).div_(world.size)")),
        "one leader for all buckets": (
            "dist.fill_buckets",
            ("world, compression, k)", "world, compression)")),
        "a sum, no mean": (
            "dist.dense",
            ("value.div_(world.size)", "pass")),
        "a bucket for each tensor": (
            "dist.fill_buckets",
            ("if room <= 0:", "if True:")),
        "embeddings share a bucket": (
            "dist.fill_buckets",
            ("contents = []", "contents, room = [], 0.0"),
            ("        room = 0.0 ", "        #")),
        "a sum inside the node": (
            "dist.Bucket.average",
            ("self.flat.div_(self.inner.size)", "self.flat")),
    },
    "overlap": {
        "all at the end": (
            "dist.Reducer._ready",
            ("        self._launch()\n",
             '        self.count = vars(self).get("count", 0) + 1\n'
             "        if self.count % len(self.gradients) == 0:\n"
             "            self._launch()\n")),
        "in any order": (
            "dist.Reducer._launch",
            ("while len(self.jobs) < len(self.buckets):\n"
             "            bucket = self.buckets[len(self.jobs)]\n",
             "for bucket in self.buckets:\n"
             '            if vars(bucket).get("begun") is self.jobs:\n'
             "                continue\n"),
            ("                return\n", "                continue\n"),
            ("self.jobs.append(job)",
             "self.jobs.append(job)\n            bucket.begun = self.jobs")),
        "the last micro-batch alone": (
            "dist.Reducer._ready",
            ("view.add_(p.grad)", "view.copy_(p.grad)")),
        "the view is not put back": (
            "dist.Reducer._ready",
            ("p.grad = view if p.dtype == torch.float32 else None", "p.grad = None")),
        "16 bits are not dropped": (
            "dist.Reducer._ready",
            ("p.grad = view if p.dtype == torch.float32 else None",
             "p.grad = view if p.dtype == torch.float32 else p.grad")),
        "no error of unused ones": (
            "dist.Reducer.finish",
            ("if self.missing:", "if False:")),
        "no error of two backwards": (
            "dist.Reducer._ready",
            ("if name not in self.missing:", "if False:"),
            ("self.missing.remove(name)", "self.missing.discard(name)")),
        "no seconds": (
            "dist.Reducer.finish",
            ("self.bucket_seconds.append(seconds)", "self.bucket_seconds.append(0.0)")),
        "in every micro-batch": (
            "dist.Reducer._ready",
            ("if not self.sends:", "if False:")),
    },
    "powersgd": {
        "not orthonormal": (
            "tests/variants/powersgd.powersgd",
            ("torch.linalg.qr(p.T).Q.T.contiguous()", "(p / p.norm(dim=1, keepdim=True))")),
        "another Q on each rank": (
            "tests/variants/powersgd.first_factors",
            ("manual_seed(0)", "manual_seed(torch.distributed.get_rank())")),
        "a new Q in each step": (
            "tests/variants/powersgd.powersgd",
            ('state.get("factors") or ', "")),
        "forgets the rest": (
            "tests/variants/powersgd.powersgd",
            ("value.sub_(mean)", "value.zero_()")),
    },
    "feedback": {
        "forgets the loss scale": (
            "dist.Bucket._send",
            ("alpha=1 / scale, out", "out"),
            ("self.flat.mul_(scale)", "pass")),
        "no residual": (
            "dist.Bucket._send",
            ("torch.add(self.residual[:n],", "torch.add(0 * self.residual[:n],")),
        "a skipped step counts": (
            "dist.Bucket.commit",
            ("self.next_state and step_taken", "self.next_state")),
    },
    "resume": {
        "writes in place": (
            "train.write_checkpoint",
            ('folder / "unfinished"', "folder / f\"step-{checkpoint['step']:08d}.pt\""),
            ("        os.replace(temporary, folder / f\"step-{checkpoint['step']:08d}.pt\")\n", ""),
            ("    finally:\n        temporary.unlink(missing_ok=True)\n",
             "    finally:\n        pass\n")),
        "weights in 16 bits": (
            "train.save",
            ('"weights": state.masters,', '"weights": dict(state.model.named_parameters()),')),
        "forgets the residuals": (
            "train.restore",
            ('        state.reducer.load_state_dict(checkpoint["residuals"])\n', "")),
        "forgets the moments": (
            "train.restore",
            ('        state.optimizer.load_state_dict(checkpoint["optimizer"])\n', "")),
        "forgets the loss scale": (
            "train.restore",
            ('        state.scaler = optim.LossScaler(**checkpoint["scaler"])\n', "")),
    },
}

RIGHT = {
    "masking": {
        "another draw decides about rounding": (
            "data.PretrainingData.choose",
            ("draws[:, 0] < wanted % 1", "uniform(counters[:, 0], self.fate_key) < wanted % 1")),
        "random tokens by integers": (
            "data.PretrainingData.mask",
            ("(draws * words).astype(np.int64)", "(draws * 2 ** 53).astype(np.int64) % words")),
    },
    "pairs": {
        "the other half is true": (
            "data.PretrainingData.pair",
            ("truth_draw >= 0.5", "truth_draw < 0.5")),
        "draws in another order": (
            "data.PretrainingData.pair",
            ("short_draw, length_draw, cut_draw, truth_draw, window_draw",
             "window_draw, truth_draw, cut_draw, length_draw, short_draw")),
        "other windows counted from the first": (
            "data.PretrainingData.pair",
            ("(after + int(window_draw * others)) % windows",
             "int(window_draw * others)\n"
             "        if other_window >= own:\n"
             "            other_window += after - own")),
    },
    "attention": {
        "one example at a time": (
            "bert.attention",
            ("torch.unique_consecutive(lengths, return_counts=True)",
             "lengths, torch.ones_like(lengths)")),
        "one example at a time, by the plain one": (
            "bert.attention",
            ("torch.unique_consecutive(lengths, return_counts=True)",
             "lengths, torch.ones_like(lengths)"),
            ("        outputs.append(",
             "        if dropout == 0:\n"
             "            outputs.append(plain_attention(run))\n"
             "            continue\n"
             "        outputs.append(")),
    },
    "schedule": {
        "the larger divisor": (
            "optim.learning_rate",
            ("min(1.0, (1 - done) / (1 - phase.decay_from))",
             "(1 - done) / max(1 - done, 1 - phase.decay_from)")),
        "the power of each": (
            "optim.learning_rate",
            ("left ** phase.power", "min(1.0, (1 - done) ** phase.power\n"
             "                          / (1 - phase.decay_from) ** phase.power)")),
    },
    "precision": {
        "own words": (
            "optim.LossScaler.update",
            ("gradient of {broken} is not finite at the scale's \"\n"
             '                                  '
             'f"floor of {self.smallest:g}; start anew at a lower '
             "--lr-scale", "{broken}: NaN or inf")),
        "the name first": (
            "optim.LossScaler.update",
            ('f"step {step}: gradient of {broken} is not finite at the scale\'s "\n'
             '                                  '
             'f"floor of {self.smallest:g}; start anew at a lower '
             '--lr-scale"', 'f"{broken} overflows in step {step}"')),
        "as torch clips": (
            "optim.unscale_and_clip_",
            ("    if norm / scale > max_norm:\n"
             "        factor = max_norm / norm ",
             "    if True:\n"
             "        factor *= min(1.0, max_norm / (norm / scale + 1e-6))")),
        "frozen ones left out at the end": (
            "optim.master_weights",
            ("if p.requires_grad}", "}"),
            ("    return masters",
             "    trained = [name for name, p in model.named_parameters() if p.requires_grad]\n"
             "    return {name: masters[name] for name in trained}")),
    },
    "lamb": {
        "a ratio of its own": (
            "optim.LAMB._update",
            ("ratios = safe_ratios(norms(w), norms(u))",
             "for k, (a, b) in enumerate(zip(w, u)):\n"
             "                if a.norm() > 0 and b.norm() > 0:\n"
             "                    ratios[k] = a.norm() / b.norm()")),
        "arguments by their names": (
            "optim.LAMB._update",
            ("safe_ratios(norms(w), norms(u))", "safe_ratios(b=norms(u), a=norms(w))"),
            ("move_moments(m, v, g, b1, b2)", "move_moments(g=g, m=m, v=v, b2=b2, b1=b1)"),
            ('corrected_roots(v, t, b2, group["eps"])',
             'corrected_roots(v=v, t=t, b2=b2, eps=group["eps"])')),
        "one tensor at a time": (
            "optim.LAMB._update",
            ("torch._foreach_add_(w, u)",
             "for a, b in zip(w, u):\n"
             "            a += b")),
        "nothing of the helpers": (
            "optim.LAMB._update",
            ("move_moments(m, v, g, b1, b2)",
             "for a, b, c in zip(m, v, g):\n"
             "            a.mul_(b1).add_(c, alpha=1 - b1)\n"
             "            b.mul_(b2).add_(c * c, alpha=1 - b2)"),
            ('corrected_roots(v, t, b2, group["eps"])',
             '[(b / (1 - b2 ** t)).sqrt() + group["eps"] for b in v]')),
    },
    "dealing": {
        "equal lengths the other way round": (
            "data.micro_batches",
            ('np.argsort(lengths(indices), kind="stable")',
             "np.lexsort((-indices, lengths(indices)))")),
        "in a loop": (
            "data.micro_batches",
            ("        owner = np.where(round_number % 2 == 1, size - 1 - place, place)",
             "        owner = []\n"
             "        for turn, k in zip(round_number, place):\n"
             "            owner.append(size - 1 - k if turn % 2 else k)\n"
             "        owner = np.array(owner)")),
        "sums and objects": (
            "train.step_totals",
            ("table = world.all_gather(torch.tensor([own_masked, own_rows, own_tokens]))",
             "masked, rows = map(int, world.sum([own_masked, own_rows]))"),
            ("    masked, rows, _ = table.sum(0).tolist()\n", ""),
            ("table[:, 2].tolist()", "world.all_gather_object(own_tokens)")),
    },
    "buckets": {
        "divides into a new tensor": (
            "dist.dense",
            ("    value.div_(world.size) ", "    #"),
            ("value.to(dtype)", "(value / world.size).to(dtype)")),
        "counts elements": (
            "dist.fill_buckets",
            ("room = bucket_mb", "room = bucket_mb * 250_000"),
            ("4e-6 * tensor.numel()", "tensor.numel()")),
    },
    "overlap": {
        "own words": (
            "dist.Reducer.finish",
            ('f"no gradient for {unused} in the step\'s last backward: each must take "\n'
             '                            "part in that loss, or have requires_grad=False"',
             'f"unused: {unused}"')),
        "other words for twice": (
            "dist.Reducer._ready",
            ("gradient of {name} ready twice; see Reducer.sends and zero_grad()",
             "{name}: one backward too much")),
        "looks at sets": (
            "dist.Reducer._launch",
            ("any(name in self.missing for name in bucket.shapes)",
             "not self.missing.isdisjoint(bucket.shapes)")),
    },
    "powersgd": {
        "another basis": (
            "tests/variants/powersgd.powersgd",
            ("torch.linalg.qr(p.T).Q.T.contiguous()",
             "torch.linalg.svd(p, full_matrices=False).Vh.contiguous()")),
    },
    "feedback": {
        "without alpha": (
            "dist.Bucket._send",
            ("torch.add(self.residual[:n], self.flat, alpha=1 / scale, out=value[:n])",
             "value[:n] = self.residual[:n] + self.flat / scale")),
        "copies the rest": (
            "dist.Bucket.commit",
            ("self.residual, self.next_residual = self.next_residual, self.residual",
             "self.residual.copy_(self.next_residual)")),
    },
    "resume": {
        "another name meanwhile": (
            "train.write_checkpoint",
            ('folder / "unfinished"', 'folder / "half-written"')),
        "in another order": (
            "train.restore",
            ('        state.optimizer.load_state_dict(checkpoint["optimizer"])\n', ""),
            ('        state.step = checkpoint["step"]\n',
             '        state.optimizer.load_state_dict(checkpoint["optimizer"])\n'
             '        state.step = checkpoint["step"]\n')),
    },
}


def spoil(source, function, changes):
    """Returns the source with a function done otherwise: changes are pairs (old text, new)."""
    text = exercises.text_of(source, function)
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{function} has not once, but {text.count(old)} times: {old}")
        text = text.replace(old, new)
    return exercises.with_function(source, function, text)


def verify(names, limit, seed):
    """Tries each exercise with all others solved. Blanked and done wrong it must be red, solved and
    done right in another way green. Returns the status."""
    status = 0
    for name in names:
        functions = exercises.functions_of(name)
        texts = {path: exercises.load(exercises.ROOT, path) for path, _ in functions}
        blanked = dict(texts)
        for path, function in functions:
            blanked[path] = exercises.blank(blanked[path], function)
        cases = [("blanked", blanked, False), ("solved", texts, True)]
        for table, is_right in (WRONG, False), (RIGHT, True):
            for what, (function, *changes) in table[name].items():
                path, function = exercises.place_of(function)
                cases.append((what, {path: spoil(texts[path], function, changes)}, is_right))
        for what, changed, is_right in cases:
            began = time.monotonic()
            marks = exercises.try_out(name, changed, limit, "-x", seed=seed)
            _, wrong = exercises.points_in(name, marks)
            good = is_right == (not wrong)
            status |= not good
            print(f"{'ok ' if good else 'BAD'} {time.monotonic() - began:>4.0f} s  {name}, {what}: "
                  f"{wrong or 'green'}", flush=True)
    return status
