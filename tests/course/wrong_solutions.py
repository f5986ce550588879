"""Typical wrong solutions of the exercises, which their checks must catch; see exercises.verify.

    WRONG[exercise][what is wrong] = function, (old text, new text), ...

Each old text stands once in the function as it is in the repository.
"""

WRONG = {
    "masking": {
        "always [MASK]": (
            "data.PretrainingData.mask",
            ("np.where(fate < 0.8, MASK, np.where(fate < 0.9, other, labels))", "MASK")),
        "[CLS] and [SEP] are text": (
            "data.PretrainingData.mask",
            ("(tokens != PAD) & (tokens != CLS) & (tokens != SEP)", "tokens != PAD")),
        "by the place in the batch": (
            "data.PretrainingData.mask",
            ("indices[:, None]", "np.arange(len(indices))[:, None]")),
        "padding counts": (
            "data.PretrainingData.mask",
            ("self.mask_fraction * text.sum(1)",
             "self.mask_fraction * np.full(len(tokens), tokens.shape[1])")),
    },
    "pairs": {
        "B of the same document": (
            "data.PretrainingData.cut",
            ("(windows[-1] - after + own)", "windows[-1]")),
        "labels the wrong way round": (
            "data.PretrainingData.cut",
            ("middle, middle, end, 0", "middle, middle, end, 1"),
            ("last), 1", "last), 0")),
        "B from where its text begins": (
            "data.PretrainingData.cut",
            ("_, b, _, _, last", "b, _, _, _, last")),
        "B as long as its document": (
            "data.PretrainingData.cut",
            ("min(b + length - (middle - start), last)", "last")),
    },
    "attention": {
        "to all examples": (
            "bert.attention",
            ("[(len([*run]), T) for T, run in itertools.groupby(lengths.tolist()) if T]",
             "[(1, len(qkv))]")),
        "over heads": (
            "bert.attention",
            (".permute(2, 0, 3, 1, 4)", ".permute(2, 0, 1, 3, 4)"),
            ("out.transpose(1, 2).flatten(0, 1)", "out.flatten(0, 1)")),
        "no dropout": (
            "bert.attention",
            ("dropout_p=dropout", "")),
        "no scale": (
            "bert.attention",
            ("dropout_p=dropout", "dropout_p=dropout, scale=1.0")),
        "heads not brought back": (
            "bert.attention",
            ("out.transpose(1, 2).flatten(0, 1)",
             "out.flatten(0, 2).view(-1, *out.shape[1:3:2], out.shape[3])")),
    },
    "schedule": {
        "begins at 0": (
            "optim.learning_rate",
            ("(phase_step + 1) / (phase.steps + 1)", "phase_step / phase.steps")),
        "no hold": (
            "optim.learning_rate",
            ("(1 - phase.decay_from)", "(1 - phase.warmup)")),
        "above the peak": (
            "optim.learning_rate",
            ("min(1.0, (1 - x) / (1 - phase.decay_from))", "((1 - x) / (1 - phase.decay_from))")),
    },
    "precision": {
        "takes an overflowed step": (
            "optim.LossScaler.update",
            ("return not overflow", "return True")),
        "good steps not in a row": (
            "optim.LossScaler.update",
            ("0 if overflow else self.good_steps + 1", "self.good_steps + (not overflow)")),
        "clips scaled gradients": (
            "optim.unscale_and_clip_",
            ("max_norm * scale / max", "max_norm / max")),
        "masters of 16 bits": (
            "optim.master_weights",
            ("p.detach().float()", "p.detach().clone()")),
    },
    "lamb": {
        "no bias correction": (
            "optim.LAMB._update",
            ("c = (1 - b2 ** t) ** 0.5", "c = 1.0"),
            ("c / (1 - b1 ** t)", "1.0")),
        "decay after the ratio": (
            "optim.LAMB._update",
            ("torch._foreach_add_(u, w, alpha=decay / k)", "pass"),
            ("torch._foreach_add_(w, u)",
             'torch._foreach_add_(w, u, alpha=1.0)\n'
             '        torch._foreach_mul_(w, 1 - group["lr"] * decay)')),
        "ratio without decay": (
            "optim.LAMB._update",
            ('decay or group["adapt_all"]', "True")),
        "zero weights stay zero": (
            "optim.LAMB._update",
            ("safe_ratios(norms(w), norms(u), otherwise=k)",
             "torch.nan_to_num(norms(w) / norms(u), posinf=0.0)")),
    },
    "dealing": {
        "in blocks": (
            "data.micro_batches",
            ("owner = indices % size",
             "owner = (indices - indices[0]) * size // global_batch")),
        "the rest is dropped": (
            "data.micro_batches",
            ("len(mine), micro_batch)", "len(mine) - micro_batch + 1, micro_batch)")),
        "no snake": (
            "data.micro_batches",
            ("np.where(turn % 2, size - 1 - place, place)", "place")),
        "each rank's own divisor": (
            "train.step_totals",
            ("return world.sum([masked, rows, *wishes, *tokens])",
             "return [masked * world.size, *world.sum([rows, *wishes, *tokens])]")),
    },
    "buckets": {
        "divides after the sum": (
            "dist.dense",
            ("value.div_(world.size).to(dtype)", "value.to(dtype)"),
            ("value.copy_(wire)", "value.copy_(wire.div_(world.size))")),
        "a sum, no mean": (
            "dist.dense",
            ("value.div_(world.size).to(dtype)", "value.to(dtype)")),
        "a bucket for each tensor": (
            "dist.fill_buckets",
            ("if room <= 0:", "if True:")),
        "embeddings share a bucket": (
            "dist.fill_buckets",
            ("    parts = []\n", "    parts, room = [], 0.0\n"),
            ("        room = 0.0\n", "")),
        "a sum inside the node": (
            "dist.Bucket.average",
            ("self.flat.div_(self.inner.size)", "self.flat")),
    },
    "overlap": {
        "all at the end": (
            "dist.Reducer._ready",
            ("            self._launch()\n",
             '            self.count = vars(self).get("count", 0) + 1\n'
             "            if self.count % len(self.gradients) == 0:\n"
             "                self._launch()\n")),
        "in any order": (
            "dist.Reducer._launch",
            ("itertools.takewhile(", "filter("),
            ("self._buckets[len(self.jobs):]",
             '[b for b in self._buckets if vars(b).get("begun") is not self.jobs]'),
            ("event.record()", "event.record()\n            bucket.begun = self.jobs")),
        "the last micro-batch alone": (
            "dist.Reducer._ready",
            ("view.add_(p.grad)", "view.copy_(p.grad)")),
        "in every micro-batch": (
            "dist.Reducer._ready",
            ("if self.sends:", "if True:")),
    },
    "powersgd": {
        "not orthonormal": (
            "dist.powersgd",
            ("torch.linalg.qr(p.T).Q.T.contiguous()", "(p / p.norm(dim=1, keepdim=True))")),
        "another Q on each rank": (
            "dist.powersgd",
            ("manual_seed(0)", "manual_seed(world.rank)")),
        "a new Q in each step": (
            "dist.powersgd",
            ('state.get("factors") or', "")),
        "forgets the rest": (
            "dist.powersgd",
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
            ("self.pending_state and step_taken", "self.pending_state")),
    },
    "resume": {
        "writes in place": (
            "optim.write_checkpoint",
            ('temporary, digest = folder / "unfinished",', "temporary, digest = path,"),
            ("        os.replace(temporary, path)\n", ""),
            ("        temporary.unlink(missing_ok=True)\n", "        pass\n")),
        "weights in 16 bits": (
            "train.save",
            ('"weights": masters,', '"weights": dict(model.named_parameters()),')),
        "forgets the residuals": (
            "train.restore",
            ('    reducer.load_state_dict(state["residuals"])\n', "")),
        "forgets the moments": (
            "train.restore",
            ('    optimizer.load_state_dict(state["optimizer"])\n', "")),
        "forgets the loss scale": (
            "train.restore",
            ('    vars(scaler).update(state["scaler"])\n', "")),
    },
}
