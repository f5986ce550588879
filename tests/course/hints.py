"""Three hints for each exercise, from a first step to nearly all of it. `exercises.py hint NAME`
shows one more each time; whoever reads on here has them all."""

HINTS = {
    "masking": [
        "`mask`: the counter of a position is index * seq_len + t, whatever B and T are. `choose` "
        "takes the counters. What becomes of the chosen tokens is drawn for their counters alone: "
        "`uniform(counters[chosen], self.fate_key)`.",
        "`choose`: draw `uniform(counters, self.choice_key)` for all of (B, T). With whole words, "
        "all tokens of a word take the draw of its first one: np.take_along_axis with "
        "`word_starts`. [CLS] is never chosen, so its draw is free to decide about rounding.",
        "A row with n tokens of text wants mask_fraction * n of them. Round up where the first "
        "draw is below the fractional part, else down. Sort the draws of a row: all tokens are "
        "chosen whose draw is at most that of the last one wanted. What is no text draws 2.",
    ],
    "pairs": [
        "Example i is of shard i modulo their number, and is the i // number-th of that shard. "
        "`order` says which window is its turn in an epoch. `text` says where a window's text "
        "begins, is cut in two and ends: that is all for a true pair, for \"sop\" and \"none\".",
        "`shard.windows` says how many windows stand before each document, and how many there are "
        "in all. Take one of those that are not of A's document, all with the same chance.",
        "Cut its text in two as well, in the same epoch. B begins where its second part does, and "
        "goes on until A and B have `length` tokens together, or its document ends.",
    ],
    "attention": [
        "`plain_attention`: bring the heads before the tokens, (H, T, D/H), and back at the end.",
        "`attention`, at first: loop over the examples; `qkv.split(lengths.tolist())` are their "
        "rows. F.scaled_dot_product_attention scales by itself, and knows dropout_p.",
        "Then make it fast: neighbours of one length are one call on (b, H, T, D/H). Not needed: "
        "on a CPU 16 bits are faster, and nearer to the exact result, when computed in fp32.",
    ],
    "schedule": [
        "Draw the rates of the recipe nvlamb-64k by hand: as the phase begins, near the end of "
        "the warm-up, as the phase ends.",
        "phase_step counts from 0, and no step has a rate of 0, neither the first nor the last.",
        "With x of the phase done and the decay from d on, the decay is lr times "
        "((1 - x) / (1 - d))^power. In the hold, before d, that would be above lr.",
    ],
    "precision": [
        "`update`: an overflow resets the count of good steps; each growth_interval of them in a "
        "row doubles the scale. Look at the floor after the scale was halved.",
        "`unscale_and_clip_`: the unscaled norm is norm / scale. Both divisions are one factor.",
        "The master of an fp32 parameter is the parameter itself: what the optimizer does to it is "
        "done to the model, and `copy_to_model` changes nothing. Frozen parameters have none.",
    ],
    "lamb": [
        "Write it for one tensor in a loop and see it pass, then for lists by torch._foreach_*. "
        "`move_moments` is the first line of the equations, `corrected_roots` the divisor in u.",
        "The ratio is of the norms (`norms`, `safe_ratios`) of w and of all of u, decay included. "
        "It is 1 for a group without decay, unless adapt_all.",
        "eps is added after v is corrected. m need not be corrected on its own: the correction is "
        "a number, the `value` of torch._foreach_addcdiv_.",
    ],
    "dealing": [
        "Nothing has to divide: a rank may have one example more, a micro-batch may be short.",
        "By length: sort the indices, and give them out from the longest on in rounds of `size`, "
        "every other round backwards. A rank's own stay in order of length, the longest last.",
        "`step_totals`: count on this rank, gather one row of three numbers from each rank, and "
        "add up the columns, but that of tokens. data.Batch says which rows only pad.",
    ],
    "buckets": [
        "`fill_buckets`: a new bucket begins where the one before has its bucket_mb, and with "
        "each list. Its number goes to Bucket, and decides who leads.",
        "`dense`: divide first, since the sum may not fit into fp16; sum in the wire's format.",
        "`average`: `inner` are the ranks of this node, or this one alone; `outer` are those that "
        "exchange. The leader of the node alone sends: by `_send` where lossy, else by `dense`.",
    ],
    "overlap": [
        "`_ready`: add, do not copy, since micro-batches add up. `self.sends` says that this "
        "micro-batch is the last one. Afterwards an fp32 p.grad is the view, a 16-bit one None.",
        "`_launch`: bucket k starts when its own gradients and those of all buckets before it are "
        "ready, whatever came first. len(self.jobs) of them have started. One gradient can "
        "release several: go on until a bucket has a name in `self.missing`.",
        "`finish` looks for what is missing first, or it would wait for ever. job.result() waits, "
        "raises what the thread raised, and else is (bytes, seconds). wait_seconds is the time "
        "that these waits took, and bucket_seconds the list of the seconds.",
    ],
    "powersgd": [
        "`split` cuts `value` and `mean` into views of state[\"shapes\"]. `dense_list` averages a "
        "list of tensors by one all-reduce: one for P, one for Q and all that goes dense.",
        "All ranks have P and Q, so all have P Q^T: write it to `mean`. What is left of `value` is "
        "value - mean, and zeros where it went dense.",
        "Put a new list into `state`, never change tensors that are there: after a skipped step "
        "the old state counts. The first Q, the same on all ranks, is torch.randn of a generator "
        "with the seed 0, (rank, b) for a matrix (a, b).",
    ],
    "feedback": [
        "Residuals are unscaled, gradients are not: the scale may be another one in the next step.",
        "`_send` calls self.compressor(self.outer, self.next_residual, self.padded, state, "
        "self.argument), where state is dict(self.state). Afterwards `flat` holds q.",
        "`commit` swaps `residual` and `next_residual` and takes `next_state`, if one waits and "
        "the step is taken. In any case none waits afterwards.",
    ],
    "resume": [
        "`write_checkpoint`: write content and digest under another name, flush, fsync, rename, "
        "and leave no unfinished file. `read_checkpoint` says what is expected.",
        "`save`: first `check_weights`. All ranks collect what the next step depends on, since "
        "parts of it are collective; the one with an active log writes. The weights are the "
        "masters, since a 16-bit model has lost bits. \"run\" is plan.run.",
        "`restore` gives back all that `save` kept, but the weights: the model has them already. "
        "All ranks get rank 0's checkpoint by `broadcast_checkpoint`. `log.cut_metrics` comes "
        "last, so that what cannot be loaded loses no line.",
    ],
}
