r"""Estimates the memory, seconds and hours of a training by formulas alone. It starts nothing.

    python tests/tools/plan.py --nodes 32 --gpus-per-node 8 --gbps 10 --gpu v100 \
        --model large --recipe nvidia-64k --micro-tokens 4096

Flags of train.py that change time or memory count as they do there, except --pairs and --max-steps,
which have no effect; the plan adds its own. The speed of a GPU is required. --gpu takes a card's
published speed; better is --tflops, from a short run of your own: its `examples_per_second` per
GPU, times the GFLOP of an example, which the plan prints, divided by 1,000. The published speeds
are those of BERT-large; small models reach less of them. With --hours, it prints how many steps
fit.

The plan does not count the time to compress, the traffic inside a node, the optimizer, loading,
evaluation and saving. Every example counts at the phase's full length; some are shorter, which
makes a real run faster. The plan does not know the compressions of tests/variants.
tests/tools/test_plan.py compares the seconds with NVIDIA's published ones, and with steps measured
between two hosts.
"""
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import bert
import data
import optim
import train

# name: (TFLOP/s that one GPU reached in training BERT-large in 16 bits, GB of memory). The TFLOP/s
# are published examples per second times `flops_per_example`; none was measured with this program.
# Sources:
#   A   pre-training, 128 tokens: NVIDIA, DeepLearningExamples, PyTorch BERT, README.md
#   B   fine-tuning on SQuAD, 384 tokens, which is slightly slower, without the heads: Lambda,
#       deeplearning-benchmark, pytorch-train-throughput-fp16.csv
#   C   MLPerf Training v3.1, BERT without padding, 256 tokens on average, evaluation included
#   D   fine-tuning of ModernBERT-base on a T4, from a blog; an upper bound
GPUS = {
    "t4": (9, 16),               # D
    "v100": (38, 16),            # A, container 20.06: 164 examples a second
    "a100": (97, 40),            # A, container 20.06: 415
    "a100-80g": (136, 80),       # A, container 21.11: 580
    "h100": (229, 80),           # B: 310
    "a6000": (50, 48),           # B: 68
    "rtx2080ti": (17, 11),       # B: 23
    "rtx3090": (38, 24),         # B: 52
    "rtx4090": (69, 24),         # B: 93
    "l4": (25, 24),              # C, xFusion: 53
}
USABLE = 0.8                     # the usable fraction of a GPU's memory, as the formulas omit some

# What the compressions of dist.py send: bytes per element, or bytes per block of 512 elements, four
# of them for the block's scale.
ELEMENT_BYTES = {"none": 4, "fp16": 2, "bf16": 2}
BLOCK_BYTES = {"int8": 512 + 4}
BLOCK = 512

AMOUNT = data.number_in(float, 1e-6, 1e9)


# ----- Flags -----

def parse_arguments(argv=None):
    """Returns the Namespace of train.parse_arguments with the flags of a plan, and with `ranks`;
    `config`, a bert.BertConfig; `parameters`, the number of the model's weights; and `itemsize`,
    the bytes of a weight. Wrong flags end the program with one line and status 2."""
    parser = data.Parser(description="Print what a training would take.", allow_abbrev=False,
                         epilog="All flags of train.py can be given as well. It reads no --data: "
                                "give the --vocab-size that the shards have.")
    add = parser.add_argument
    add("--nodes", type=train.COUNT, default=1, help="(default: %(default)s)")
    add("--gpus-per-node", type=train.COUNT, default=8,
        help="the GPUs of a node, a rank each (default: %(default)s)")
    add("--gbps", type=AMOUNT, default=10.0,
        help="the Gb/s between two nodes (default: %(default)s)")
    add("--latency", type=data.number_in(float, 0), default=0.0,
        help="the ms that a bucket's exchange costs beside its bytes (default: %(default)s)")
    add("--gpu", choices=GPUS, help="take this GPU's memory and its published speed in 16 bits")
    add("--gpu-memory", type=AMOUNT, help="the GB of a GPU; without it what --gpu has, or 16")
    add("--tflops", type=AMOUNT,
        help="the TFLOP/s of a GPU in training: its examples a second times GFLOP / 1,000")
    add("--vocab-size", type=data.number_in(int, 16, 1 << 16), default=30522,
        help="the pieces of the tokenizer (default: %(default)s)")
    plan_flags, train_flags = parser.parse_known_args(argv)
    args = train.parse_arguments(["--bucket-mb=25", *train_flags])      # as train.py on a GPU
    vars(args).update(vars(plan_flags))

    published, memory = GPUS.get(args.gpu, (None, 16))
    args.gpu_memory = args.gpu_memory or memory
    precision = "fp32" if args.precision == "fp32" else "bf16"
    memory = 1e9 * args.gpu_memory
    args.micro_tokens = args.micro_tokens or train.micro_tokens_of(memory, precision)
    # The published speeds do not hold for fp32.
    if not args.tflops and args.precision != "fp32":
        args.tflops = published
    if not args.tflops:
        parser.error("give --tflops, what a GPU reaches in training (its examples a second times "
                     "the GFLOP of one / 1,000), or for 16 bits --gpu, one of " + ", ".join(GPUS))

    args.ranks = args.nodes * args.gpus_per_node
    for phase in args.phases:
        if phase.global_batch < args.ranks:
            parser.error(f"a batch of {phase.global_batch} is too small for {args.ranks} ranks; "
                         "raise --batch")

    args.itemsize = 2
    if args.precision == "fp32":
        args.itemsize = 4
    args.config = bert.BertConfig.preset(args.model, args.vocab_size, dropout=args.dropout)
    with torch.device("meta"):               # tensors without memory
        model = bert.BertForPreTraining(args.config)
    args.parameters = sum(parameter.numel() for parameter in model.parameters())
    return args


# ----- Memory -----

def state_gigabytes(args):
    """Returns {part: GB} of a rank's memory, without activations."""
    bytes_each = {"weights": args.itemsize, "gradients": 4,
                  "moments": 4 * len(optim.OPTIMIZERS[args.optimizer].MOMENTS)}
    if args.itemsize < 4:
        bytes_each["masters"] = 4
    if args.compression in BLOCK_BYTES:
        # Two residuals: the last one and the one being made. With several nodes, only the first
        # rank of each has them.
        bytes_each["residuals"] = 8
    return {part: 1e-9 * args.parameters * each for part, each in bytes_each.items()}


def token_gigabytes(args):
    """Returns about how many GB a forward pass keeps per token for backward.

    Counted as in Korthikanti et al., arXiv 2205.05198, section 4.1, but for our `Block`, whose
    attention keeps no (T, T) matrix. Per token, a layer keeps 8 D + 2 D_ff elements: its input (D),
    Q, K and V (3 D), the result of attention (D), two sums (2 D), the first norm (D; the second is
    the next layer's input), `up` and its GELU (2 D_ff).
    """
    config = args.config
    layer_bytes = args.itemsize * (8 * config.width + 2 * config.feed_forward)
    # Dropout masks take a byte per element: two masks of D in the block. The mask of the attention
    # weights, which a CPU keeps and a GPU draws again in backward, counts as a third D.
    if config.dropout > 0:
        layer_bytes += 3 * config.width

    logit_bytes = 4                          # The loss keeps them in fp32.
    if args.itemsize < 4:
        logit_bytes += args.itemsize         # Their 16-bit gradient is a separate array.
    head_bytes = args.mask_fraction * config.vocab_size * logit_bytes
    return 1e-9 * (config.layers * layer_bytes + head_bytes)


# ----- Time -----

def wire_bytes(compression, elements, ranks):
    """Returns the bytes that each of `ranks` ranks sends to average `elements` fp32 elements.

    Each rank owns one of `ranks` equal parts. It sends every other part once, to be summed by its
    owner, and then the sum of its own part to every other rank.
    """
    if compression in ELEMENT_BYTES:
        part = elements / ranks * ELEMENT_BYTES[compression]
    else:
        part = math.ceil(elements / ranks / BLOCK) * BLOCK_BYTES[compression]
    return 2 * (ranks - 1) * part


def flops_per_example(config, length, masked):
    """Returns the floating-point operations of one example, forward and backward.

    length: its tokens, T; masked: its masked tokens, M. A multiply-add counts as two operations,
    and backward as twice the forward pass. With L layers:

        attention   L T (6 D^2 + 4 T D)                       Q, K, V; Q K^T and weights V
        other       ((L - 1) T + M + 1) (2 D^2 + 4 D D_ff)    attention_out; up and down. The last
                                                              layer does this for M + 1 rows only.
        heads       M (2 D^2 + 2 D V) + 2 D^2                 MLM; pooler
        all         3 (attention + other + heads)
    """
    D = config.width
    attention_flops = config.layers * length * (6 * D**2 + 4 * length * D)
    other_rows = (config.layers - 1) * length + masked + 1
    other_flops = other_rows * (2 * D**2 + 4 * D * config.feed_forward)
    head_flops = masked * (2 * D**2 + 2 * D * config.vocab_size) + 2 * D**2
    return 3 * (attention_flops + other_flops + head_flops)


def step_seconds(args, phase):
    """Returns the seconds of compute, of exchange, and of a whole step, in which they overlap.

        step = compute + max(late, exchange - backward)

    compute: the examples of the rank that has most. exchange: all gradients between the nodes, by
    bytes and --gbps, plus --latency for each bucket of --bucket-mb; of a large model
    dist.fill_buckets makes fewer buckets, because it cuts no tensor, of a small one up to two more,
    because the embeddings and the MLM head's bias have their own. Dense sums go around a ring of
    all ranks, other compressions around one rank of each node, see dist.Bucket; a single node
    exchanges nothing. backward: that of the last micro-batch, which hides the exchange. late: the
    fraction of the exchange that the token embeddings are of all parameters. It cannot hide: their
    gradient is ready only when backward ends.
    """
    share = math.ceil(phase.global_batch / args.ranks)
    masked = args.mask_fraction * phase.seq_len
    flops = share * flops_per_example(args.config, phase.seq_len, masked)
    compute = 1e-12 * flops / args.tflops
    # Gradients are exchanged only during the last micro-batch. All micro-batches have about the
    # same size.
    micro_size = max(1, args.micro_tokens // phase.seq_len)
    last = share // math.ceil(share / micro_size)
    backward = 2 / 3 * compute * last / share

    ring = args.nodes
    if args.nodes > 1 and args.compression in ELEMENT_BYTES:
        ring = args.ranks
    exchange = 8e-9 * wire_bytes(args.compression, args.parameters, ring) / args.gbps
    if args.nodes > 1:
        exchange += 1e-3 * args.latency * math.ceil(4e-6 * args.parameters / args.bucket_mb)
    late = exchange * args.config.vocab_size * args.config.width / args.parameters
    return compute, exchange, compute + max(late, exchange - backward)


# ----- The program -----

def print_memory(args):
    """Prints the memory of a rank, and how many tokens it can compute at a time."""
    state = state_gigabytes(args)
    parts = [f"{part} {gigabytes:.2f}" for part, gigabytes in state.items()]
    # A micro-batch has whole examples, at most those of a rank in a step.
    tokens = 0
    for phase in [phase for phase in args.phases if phase.steps]:
        share = math.ceil(phase.global_batch / args.ranks)
        micro_size = max(1, args.micro_tokens // phase.seq_len)
        tokens = max(tokens, phase.seq_len * min(share, micro_size))
    activations = tokens * token_gigabytes(args)
    print(f"GB of a rank in {8 * args.itemsize} bits:", ", ".join(parts))
    print(f"    activations of {tokens:,} tokens, the most in a micro-batch: {activations:.2f}")
    free = USABLE * args.gpu_memory - sum(state.values())
    fit = max(0, int(free / token_gigabytes(args)))
    print(f"    {fit:,} tokens fit {args.gpu_memory:g} GB")
    if fit < tokens:
        print("    this is too little memory: lower --micro-tokens, or take a smaller model")


def main(argv=None):
    """Prints the memory, seconds and hours that a training with these flags takes."""
    args = parse_arguments(argv)
    print(f"{args.model}: {args.parameters:,} parameters; {args.nodes} node(s) of "
          f"{args.gpus_per_node} GPU(s) of {args.tflops:g} TFLOP/s")
    if args.recipe == "demo" and args.config.layers > 4:
        print("the recipe demo is for small models and a few minutes: take another --recipe")
    print_memory(args)
    all_tokens = sum(phase.tokens for phase in args.phases)
    for number, phase in enumerate(args.phases, 1):
        compute, exchange, step = step_seconds(args, phase)
        steps = phase.steps
        if args.hours and steps:
            # Phases share the hours in proportion to their tokens, as in train.py, which keeps a
            # hundredth for the end.
            steps = int(0.99 * 3600 * args.hours * phase.tokens / all_tokens / step)
        gigaflops = 1e3 * args.tflops * compute / math.ceil(phase.global_batch / args.ranks)
        print(f"phase {number}: {gigaflops:.3g} GFLOP an example; a step computes {compute:.3g} s")
        if args.nodes > 1:
            print(f"    at {args.gbps:g} Gb/s, compression {args.compression}, it exchanges "
                  f"{exchange:.3g} s, {step - compute:.3g} s of it not hidden, "
                  f"{(step - compute) / step:.0%} of the step")
        print(f"    {steps:,} steps take {steps * step / 3600:.4g} h")


if __name__ == "__main__":
    main()
