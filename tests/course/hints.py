"""Three hints for each exercise, from a first step to nearly all of it. `exercises.py hint NAME`
shows one more each time; whoever reads on here has them all."""

HINTS = {
    "masking": [
        "`uniform(counters, self.mask_key)` gives one number a row. Which rows are text, and which "
        "of these have a number below mask_fraction? np.flatnonzero makes rows of that, in order.",
        "Keep what stood there before you overwrite it: tokens[rows] is a copy. Then another draw "
        "of these rows decides, by self.fate_key: below 0.8, below 0.9, or neither.",
        "The random tokens need a draw of their own, `uniform(counters[rows], self.token_key)`. "
        "Write into `tokens[rows]`, once, by np.select, or by one np.where in another.",
    ],
    "pairs": [
        "Example i is of shard i modulo their number, and is the i // number-th of that shard. Its "
        "place: (k * GOLDEN + walk_start) modulo 1 is the fraction of the shard's tokens.",
        "`text` says where the text around a place begins, is cut in two and ends: that is all for "
        "a true pair, and without pairs.",
        "Another B: count the places outside of A's document from its end on, modulo the size, and "
        "ask `text` again. B begins where its second part does, and goes on until A and B have "
        "`length` tokens together, or its document ends.",
    ],
    "attention": [
        "`plain_attention`: bring the heads before the tokens, (H, T, D/H), and back at the end.",
        "`attention_by_length`, at first: loop over the examples; `qkv.split(lengths.tolist())` "
        "are their rows. F.scaled_dot_product_attention scales by itself, and knows dropout_p.",
        "Then make it fast: neighbours of one length are one call on (b, H, T, D/H). Not needed: "
        "on a CPU 16 bits are faster, and nearer to the exact result, when computed in fp32 and "
        "cast back at the end.",
    ],
    "schedule": [
        "Draw the rates of the recipe nvidia-64k by hand: as the phase begins, near the end of "
        "the warm-up, as the phase ends.",
        "With x of the phase done and a warm-up of w, the decay is lr times "
        "((1 - x) / (1 - w))^power: 1 where the warm-up ends, 0 where the phase does.",
        "`progress`: subtract the tokens of each phase that is over from `finished_tokens`. The "
        "next step is in the first phase that has more than what is left. By the clock x is the "
        "quotient of both; else divide what is left by `phase.step_tokens`, which gives k.",
    ],
    "precision": [
        "`update`: an overflow resets the count of good steps; each growth_interval of them in a "
        "row doubles the scale. Look at the floor after the scale was halved.",
        "`unscale_and_clip_`: the unscaled norm is norm / scale. Both divisions are one factor.",
        "Take the masters first, `p.detach()`, which shares the memory, then `model.to(dtype)`: in "
        "fp32 they stay the parameters themselves. Frozen parameters have none.",
    ],
    "lamb": [
        "`adam_update`: first m and v, in place; then u, as new tensors. m and v keep what is not "
        "corrected. w, g, m and v are lists: begin with a loop over zip(w, g, m, v), and let "
        "torch._foreach_ functions take its place when it is right.",
        "The ratio is of the norms of w and of all of u, decay included. Vectors have "
        "none.",
        "eps is added after the root of the corrected v. `torch.where` chooses without an `if`, "
        "which would make the CPU wait for the GPU. What changes is each w itself, in place.",
    ],
    "dealing": [
        "Nothing has to divide: a rank may have one example more, a micro-batch may be short. With "
        "as few micro-batches as micro_size allows, deal a rank's examples out to them in turn.",
        "`loader`: submit a step to a thread; when its result is there, submit the next one before "
        "you yield it. job.result() raises what the thread raised.",
        "`count_labels`: count on this rank, and let `world.sum` add up. data.Batch says which "
        "labels do not count.",
    ],
    "buckets": [
        "`fill_buckets`: a new bucket begins where the one before has its bucket_mb, and where the "
        "embeddings begin or end. What goes to Bucket is {name: shape}.",
        "`Dense.average`: divide first, since the sum may not fit into fp16; sum in the wire's "
        "format.",
        "`average`: `within_node` are the ranks of this node, or this one alone; `across_nodes` "
        "those that exchange. The leader of the node alone sends: `wire.average`, in place. What "
        "is summed within the node is divided before.",
    ],
    "overlap": [
        "`_ready`: autograd has added the gradient to p.grad, whose memory is that of "
        "self.views[name]; if it is not, say so. `self.last_micro_batch` says that this "
        "micro-batch is the last one. Where there is no thread nothing is launched.",
        "`_launch`: bucket k starts when its own gradients and those of all buckets before it are "
        "ready, whatever came first. len(self.jobs) of them have started. One gradient can "
        "release several: go on until a bucket has a name in `self.missing`.",
        "`finish` looks for what is missing first, or it would wait for ever. job.result() waits, "
        "raises what the thread raised; each bucket then has its bytes_sent. wait_seconds is the "
        "time that these waits took. With a stream it first waits for the current stream, then "
        "for all ranks. "
        "Without a thread, on one rank, it averages all buckets itself.",
    ],
    "powersgd": [
        "`split` cuts `value` and `mean` into views of state[\"shapes\"]. `mean_of_each` averages "
        "a list of tensors by one all-reduce: one for P, one for Q and all that goes dense.",
        "All ranks have P and Q, so all have P Q^T: write it to `mean`. What is left of `value` is "
        "value - mean, and zeros where it went dense.",
        "Return a new state with a new list, never change tensors that are there: after a skipped "
        "step the old state counts. The first Q, the same on all ranks, is torch.randn of a "
        "generator with the seed 0, (rank, b) for a matrix (a, b).",
    ],
    "feedback": [
        "Residuals are unscaled, gradients are not: the scale may be another one in the next step. "
        "`value` is longer than `flat`, a multiple of BLOCK * world.size: zeros at first, then its "
        "padding has a residual like all else.",
        "`average` calls self.mean(world, value, state), which leaves the rest in `value` and "
        "returns mean, next state, bytes. The mean, times the loss scale, goes to `flat`.",
        "What waits for `commit` is (value, next state), in `next`; what the next step begins with "
        "is in `kept`, and None stands there for a residual of zeros. `commit` lets `next` be "
        "`kept` if the step is taken; in any case both are the same afterwards.",
    ],
    "resume": [
        "`save`: first `check_weights`, on all ranks, then `forget`. Rank 0 alone writes: "
        "args.settings as \"settings\", `tensors_of`, `numbers_of`. If that fails by an "
        "OSError, or torch's RuntimeError, remove what is half written and say so.",
        "`save` at last removes all checkpoints but the new one and the latest before it. "
        "`restore`: first let each rank compare the latest step in its folder with rank 0's.",
        "`restore`: rank 0 reads, and copies into `tensors_of(state)` in place; the numbers go by "
        "`all_gather_object`, each tensor by `broadcast`. Then the model gets the masters, State "
        "its Counters and a LossScaler, each group of the optimizer its options.",
    ],
    "sharding": [
        "`scatter_mean`: flat.view(W, -1) has a row for each rank. After all_to_all row k is what "
        "rank k had of this rank's part. Then a mean over the rows.",
        "`weights.chunk(W)[rank]` is a view: what optim.AdamW changes in it has changed in the "
        "bucket. It takes a list of tensors and the options, and makes moments of their sizes.",
        "`step`: the part's .grad is the scatter_mean; then a step of self.adam; then all_gather "
        "returns the parts of all ranks, (W, n / W): flat, they are the new weights.",
    ],
    "plan": [
        "`wire_bytes`: each of n / W elements, or of the blocks that they fill, the last one too, "
        "goes 2 (W - 1) times. math.ceil counts blocks.",
        "`flops_per_example` is the four lines of its docstring, with config.layers, width, "
        "feed_forward and vocab_size.",
        "`step_seconds`: a rank has ceil(batch / ranks) examples, in ceil(share / micro_size) "
        "micro-batches; the last has so many less than one would think: share // their number. The "
        "ring has all ranks if the compression is in ELEMENT_BYTES, else one of each node. On one "
        "node no bucket costs latency. late is the part of exchange of vocab_size * width numbers.",
    ],
    "profile": [
        "with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as found: step(). "
        "After the block found.key_averages() is a list with one event for each name.",
        "An averaged event has key, count and self_cpu_time_total, in microseconds.",
        "`starts`: found.events() has each call; its cpu_parent is the call that it was made in, "
        "or None. An optimizer's step is a parent, too, but its name does not begin with aten::.",
    ],
}
