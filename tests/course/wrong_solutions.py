"""Typical wrong solutions of the exercises, which their checks must catch; see exercises.verify.

    WRONG[exercise][what is wrong] = function, (old text, new text), ...

Each old text stands once in the function as it is in the repository.
"""

WRONG = {
    "masking": {
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
            ("min(1.0, (1 - done) / (1 - phase.decay_from))", "(1 - done) / (1 - phase.decay_from)")),
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
            ("masked, rows, _ = table", "_, rows, _ = table"),
            ("StepTotals(masked,", "StepTotals(masked * world.size,")),
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
            ("self.jobs.append(job)", "self.jobs.append(job)\n            bucket.begun = self.jobs")),
        "the last micro-batch alone": (
            "dist.Reducer._ready",
            ("view.add_(p.grad)", "view.copy_(p.grad)")),
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
