"""Three hints for each exercise, from a first step to nearly the whole solution. `exercises.py hint
NAME` shows one more each time; if you read on here, you see them all."""

# Blank lines separate the hints of an exercise.
HINTS = {
    "masking": """
`uniform(counters, self.mask_key)` gives a number for each row. Which rows are text and have a
number below mask_fraction? np.flatnonzero returns their row numbers, in order.

Keep the original tokens before you overwrite them: tokens[rows] is a copy. Then a second draw for
these rows, with self.fate_key, decides: below 0.8, below 0.9, or neither.

The random tokens need a draw of their own, `uniform(counters[rows], self.token_key)`. Write to
`tokens[rows]` once, with np.select or with one np.where inside another.
""",
    "pairs": """
Example i is example k = i // S of shard i modulo S, where S is the number of shards. Its place is
at the fraction (k * GOLDEN + walk_start) modulo 1 of the shard's tokens.

`text` returns where the text around a place begins, where it is cut in two and where it ends. You
need no more for a true pair, or for an example without pairs.

For another B, choose among the places outside of A's document: count them from its end on, modulo
the size, and call `text` again. B begins where the second part of that text begins, and ends when
A and B together have `length` tokens, or with its document.
""",
    "attention": """
`plain_attention`: move the heads before the tokens, (H, T, D/H), and back at the end.

`attention_by_length`: at first, loop over the examples; `qkv.split(lengths.tolist())` gives their
rows. F.scaled_dot_product_attention scales by itself, and takes dropout_p.

Then make it fast: neighbours of the same length are one call on (b, H, T, D/H). Not required: on
a CPU, inputs of 16 bits are faster, and closer to the exact result, if you compute in fp32 and
cast back at the end.
""",
    "schedule": """
Draw the rates of the recipe nvidia-64k by hand: at the start of the phase, near the end of the
warm-up, and at the end of the phase.

When a fraction x of the phase is over and the warm-up is w, the rate in the decay is lr times ((1
- x) / (1 - w))^power. This factor is 1 at the end of the warm-up, and 0 at the end of the phase.

`progress`: subtract the tokens of each phase that is over from `finished_tokens`. The next step
is in the first phase that has more tokens than the remainder. By the clock, x is the remainder
divided by the tokens of this phase; otherwise the remainder divided by `phase.step_tokens` is k.
""",
    "precision": """
`update`: an overflow resets the count of good steps; every growth_interval good steps in a row
double the scale. Check the floor after you have halved the scale.

`unscale_and_clip_`: the unscaled norm is norm / scale. Both divisions are one factor.

Take the masters first, `p.detach()`, which shares the memory, then `model.to(dtype)`: in fp32,
masters and parameters remain one memory. Frozen parameters have no master.
""",
    "lamb": """
`adam_update`: first update m and v, in place, then make u, as new tensors. The correction is in u
only: m and v stay uncorrected. w, g, m and v are lists: begin with a loop over zip(w, g, m, v),
and replace it by torch._foreach_ functions once it is right.

The ratio uses the norms of w and of the whole u, including the decay. Vectors have no ratio.

Add eps after the root of the corrected v. `torch.where` chooses without an `if`, which would make
the CPU wait for the GPU. Change each w itself, in place.
""",
    "dealing": """
Nothing has to divide evenly: a rank may have one example more, and a micro-batch may be short.
Make as few micro-batches as micro_size allows, and deal a rank's examples out to them in turn.

`loader`: submit a step to a thread. When its result is there, submit the next step before you
yield the result. job.result() raises the thread's errors.

`count_labels`: count on this rank, and let `world.sum` add up the counts. data.Batch says which
labels do not count.
""",
    "buckets": """
`fill_buckets`: a new bucket begins when the bucket before has its bucket_mb, and where the
embeddings begin or end. Bucket takes {name: shape}.

`Dense.average`: divide first, because the sum may not fit into fp16. Sum in the format of the
wire.

`Bucket.average`: `within_node` has the ranks of this node, or this rank alone; `across_nodes` has
the ranks that exchange. Only the node's leader sends, with `wire.average`, in place. Divide
before you sum within the node.
""",
    "overlap": """
`_ready`: autograd has added the gradient to p.grad, whose memory is that of self.views[name];
raise DistError if it is not. `self.last_micro_batch` says whether this is the last micro-batch.
Without a thread, nothing is launched.

`_launch`: bucket k starts when its own gradients and those of all buckets before it are ready,
whatever came first. len(self.jobs) buckets have started. One gradient can release several
buckets: go on until a bucket has a name in `self.missing`.

`finish` first looks for missing gradients, or it would wait for ever. job.result() waits, and
raises the thread's errors; then each bucket has its bytes_sent. wait_seconds is the time that
these waits take. With a stream, first wait for the current stream, then for all ranks. Without a
thread, on one rank, `finish` averages all buckets itself.
""",
    "powersgd": """
`split` cuts `value` and `mean` into views with the shapes in state["shapes"]. `mean_of_each`
averages a list of tensors with one all-reduce: one for P, and one for Q and everything that goes
dense.

All ranks have P and Q, so all have P Q^T: write it to `mean`. The residual is value - mean, and
zeros where it went dense.

Return a new state with a new list, and never change tensors of the old state, which counts again
after a skipped step. The first Q, the same on all ranks, is torch.randn of a generator with seed
0, (rank, b) for a matrix (a, b).
""",
    "feedback": """
Residuals are unscaled, gradients are not, because the next step may have another scale. `value`
can be longer than `flat`: its length is a multiple of BLOCK * world.size. The padding is zero at
first; later it may have a residual, like the rest.

`average` calls self.exchange(world, value, state), which returns mean, residual, next state, bytes.
The mean, times the loss scale, goes to `flat`.

`next` is (residual, next state), which waits for `commit`. `kept` is what the next step begins
with; None in it means a residual of zeros. `commit` sets `kept` to `next` if the step is taken.
In any case both are the same afterwards.
""",
    "resume": """
`save`: first `check_weights` on all ranks, then `forget`. Only rank 0 writes: args.settings as
"settings", args.code as "code", `tensors_of`, `numbers_of`. If this raises OSError, or torch's
RuntimeError, remove the half-written file and say so.

At the end, `save` removes all checkpoints but the new one and the latest before it. `restore`:
first let each rank compare the latest step in its folder with rank 0's.

`restore`: rank 0 reads, and copies into `tensors_of(state)` in place. The numbers go to the other
ranks with `all_gather_object`, each tensor with `broadcast`. Then the model gets the masters, the
State its Counters and a LossScaler, and each group of the optimizer its options.
""",
    "sharding": """
`scatter_mean`: flat.view(W, -1) has a row for each rank. After all_to_all, row k is what rank k
had of this rank's part. Then take the mean over the rows.

`weights.chunk(W)[rank]` is a view: when optim.AdamW changes it, the bucket changes. AdamW takes a
list of tensors and the options, and makes moments of the same sizes.

`step`: set the part's .grad to the scatter_mean, and step self.adam. Then all_gather returns the
parts of all ranks, (W, n / W); flattened, they are the new weights.
""",
    "plan": """
`wire_bytes`: n / W elements go out 2 (W - 1) times, or the blocks that they fill, with the last
block in full. math.ceil counts blocks.

`flops_per_example` is the four lines of its docstring, with config.layers, width, feed_forward
and vocab_size.

`step_seconds`: a rank's share is ceil(batch / ranks) examples, in ceil(share / micro_size)
micro-batches. The last has share // their number examples, which can be fewer than micro_size.
With several nodes the ring has all ranks if the compression is in ELEMENT_BYTES, else one rank of
each node. On one node, buckets cost no latency. late is the part of exchange for vocab_size *
width numbers.
""",
    "profile": """
with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as found: step(). After the block,
found.key_averages() is a list with one event for each name.

An averaged event has key, count and self_cpu_time_total, which is in microseconds.

`starts`: found.events() has every call; its cpu_parent is the call that made it, or None. An
optimizer's step is a parent, too, but its name does not begin with aten::.
""",
}
