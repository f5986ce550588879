"""Tests of train.py's loop: equal training on any number of ranks, effects of the flags, steps that
are skipped or end the run, logged figures, evaluation."""
import functools
import itertools
import math
import shutil
import time
from types import SimpleNamespace
from unittest.mock import ANY, Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bert
import data
import dist
import optim
import train
from tests.conftest import make_documents
from tests.training import (SHORT, assert_same, built, column, last_state, losses_of, metrics,
                            random_batch, run, spoil, steps_kept)
from tests.variants import compiled

# ----- The same training on any number of ranks -----

EQUAL = "--steps 4 4 --batch 33 32 --dropout 0 --precision fp32 --lr-scale 0.1".split()
# The starts of one run: (ranks, --micro-tokens, --max-steps)
STARTS = [(1, 150, 2), (2, 1, 4), (3, 320, 6), (4, 8192, 8)]


def keep_own_shards(world, shards, folder):
    """Gives this rank its own disk, as on a node of its own, with only the shards that it reads."""
    own = shutil.copytree(shards, folder / f"rank-{world.rank}-of-{world.size}")
    for number in range(4):
        if (number - world.rank) % math.gcd(4, world.size):
            for path in own.glob(f"train-{number:05}.*"):
                path.unlink()
    parse = train.parse_arguments
    train.parse_arguments = lambda argv: parse([*argv, "--data", str(own)])


def test_losses_do_not_depend_on_ranks_micro_batches_or_resumes(shards, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    run(shards, one, *EQUAL)
    starts = {}                                          # {step: its start, as text}
    for size, micro_tokens, last in STARTS:
        run(shards, many, *EQUAL, "--micro-tokens", micro_tokens, "--max-steps", last, size=size,
            sabotage=(keep_own_shards, shards, tmp_path))
        starts[last - 1] = starts[last] = f"on {size} ranks with --micro-tokens {micro_tokens}"
    assert len(set(column(many, "mlm_loss"))) == 8, (
        "some steps have equal losses: do they read the same examples?")
    lines = [*zip(metrics(one), metrics(many), strict=True)]
    lines.append((metrics(one, "eval")[-1], metrics(many, "eval")[-1]))
    for exact, found in lines:
        for name in exact:
            if name.endswith(("_loss", "_norm")):
                ratio = found[name] / exact[name]
                assert ratio == pytest.approx(1, rel=1e-6), (
                    f"{name} ({exact['kind']}) of step {exact['step']}, {starts[exact['step']]}, "
                    f"is {ratio:.6f} times its value on one rank: does every label of the step "
                    "have the same weight, and does the Reducer take the mean over the ranks? Or, "
                    "if this is the first step of a start (1, 3, 5 or 7): are the weights and the "
                    "position in the data restored?")


def make_the_demo(world, folder):
    train.DEMO_SHARDS = folder
    train.EVAL_EXAMPLES = 1                      # fewer than ranks
    data.machine_documentation = make_documents


def test_all_ranks_wait_for_the_demos_shards_and_take_part_in_the_evaluation(tmp_path):
    run(tmp_path / "demo", tmp_path / "out", "--steps", 0, size=2,
        sabotage=(make_the_demo, tmp_path / "demo"))


# ----- What the flags change -----

def facts_of(shards, *flags):
    """Returns {name: value}: what the flags determine in the State before the first step and in the
    micro-batches of the last phase's first step."""
    args, state = built(shards, *flags)
    weights = dict(state.model.named_parameters())
    batches = next(train.begin_phase(args, dist.World(), state, len(args.phases) - 1))
    labels = batches[0].labels
    rows = sum(batches[0].lengths[:-1])
    text = rows - np.isin(batches[0].tokens[:rows], [data.CLS, data.SEP]).sum()
    return {
        "dropout": state.model.config.dropout,
        "weights": weights["embeddings.tokens.weight"].sum().item(),
        "untrained": {name.split(".")[0] for name in weights.keys() - state.masters.keys()},
        "optimizer": type(state.optimizer),
        "betas": state.optimizer.param_groups[0]["betas"],
        "scale": state.scaler.scale,
        "tasks": [*labels],
        "micro-batches": len(batches),
        "texts": batches[0].bounds.tolist(),
        "masked": round((labels["mlm"] != data.IGNORED).sum() / text, 1)}


@pytest.mark.parametrize("flags, changes", [
    ("--dropout 0.25", {"dropout": 0.25}),
    ("--precision fp16", {"weights": ANY, "scale": 65536}),
    ("--compression fp16", {"scale": 65536}),
    ("--optimizer adamw", {"optimizer": optim.AdamW}),
    ("--recipe other", {"betas": (0.7, 0.8), "texts": ANY}),       # whose last phase is as long
    ("--pairs none",
     {"tasks": ["mlm"], "untrained": {"pooler", "nsp", "embeddings"}, "texts": ANY}),
    ("--mask-fraction 0.6", {"masked": 0.6}),
    ("--seed 1", {"weights": ANY, "texts": ANY}),
    ("--micro-tokens 512", {"micro-batches": 2, "texts": ANY})])
def test_a_flag_changes(shards, train_here, monkeypatch, flags, changes):
    demo = optim.RECIPES["demo"]
    short = demo["phases"][:1]
    monkeypatch.setattr(optim, "RECIPES", {
        "demo": demo | {"phases": short},
        "other": demo | {"phases": 2 * short, "betas": (0.7, 0.8)}})
    before, after = facts_of(shards), facts_of(shards, *flags.split())
    assert {name: fact for name, fact in after.items() if fact != before[name]} == changes


def test_without_pairs_nothing_is_said_of_them(train_here, tmp_path, capsys):
    train_here(tmp_path, "--steps", 2, 0, "--pairs", "none")
    assert "nsp" not in capsys.readouterr().out + (tmp_path / "metrics.jsonl").read_text()
    # No text had a segment B: the folder has A's embedding in its place, not a random one.
    a, b = bert.load_huggingface(tmp_path / "model").embeddings.segments.weight
    assert torch.equal(a, b)
    trained = last_state(tmp_path)["tensors"]
    assert not {"embeddings.segments.weight", "pooler.weight", "nsp.weight"} & trained.keys()


@pytest.mark.parametrize("before, trained, longest, init", [
    ((512, 0), 32, 64, None), ((512, 0), 128, 512, None),
    ((512, 0), 128, 512, "a model that may know all positions"), ((64, 9), 16, 64, None)])
def test_new_positions_begin_as_copies(shards, before, trained, longest, init):
    args, state = built(shards, "--precision", "bf16")
    args.init = init
    args.phases = [optim.Phase(length, 1, steps, lr=1, warmup=0)
                   for length, steps in [before, (trained, 9), (longest, 9)]]
    positions = state.masters["embeddings.positions.weight"]
    expected = positions.clone()
    known = longest if init or before[1] else trained
    for position in range(known, longest):
        expected[position] = expected[position % trained]
    state.counters = train.Counters(step=9, phase_step=9)
    train.begin_phase(args, dist.World(), state, 2)
    wrong = (positions != expected).any(1).nonzero().flatten().tolist()
    assert not wrong, f"after a phase of {trained} tokens, positions {wrong} have wrong embeddings"
    copies = state.model.embeddings.positions.weight
    assert torch.equal(copies, expected.bfloat16()), "the masters are not copied to the model"


def test_a_model_begins_at_the_frequencies_with_a_bias_around_0(shards):
    """The variant LANS steps in proportion to the norm, which a mean far from 0 would dominate."""
    args, _ = built(shards)
    args.vocab_size = 321
    model = train.build_model(args, dist.World())
    pieces, padding = model.mlm_bias.detach().tensor_split([320])
    torch.testing.assert_close(
        pieces.log_softmax(0), -data.unigram_losses(shards).float(), atol=1e-5, rtol=0)
    assert (padding == pieces.min()).all(), (
        "the bias of the vocabulary's padding is not that of the rarest piece")
    assert abs(pieces.mean()) < 1e-5, "the mean of the bias is not 0"


def test_training_in_16_bits_follows_fp32(train_here, tmp_path):
    """The runs accumulate and have two phases; fp16 has a loss scale."""
    argv = "--steps 4 2 --batch 4 --micro-tokens 64 --precision".split()
    for precision in "fp32", "bf16", "fp16":
        train_here(tmp_path / precision, *argv, precision)
    for precision, rel, scale in ("bf16", 2e-3, 1), ("fp16", 5e-4, 65536):
        skipped = column(tmp_path / precision, "skipped", "loss_scale")
        assert skipped == [0, scale] * 6, (
            f"in {precision}, `skipped` and `loss_scale`, step by step, are {skipped}; no step "
            "overflows if the loss is computed in fp32")
        for field, most in ("mlm_loss", rel), ("grad_norm", 0.1):
            found, exact = (column(tmp_path / name, field) for name in (precision, "fp32"))
            assert found == pytest.approx(exact, rel=most), (
                f"{field} in {precision} is not within {most:.2%} of that in fp32")
            assert found != exact, f"{precision} computes in fp32"


def test_compiled_layers_have_equal_gradients_complete_layer_by_layer(
        shards, monkeypatch, train_here):
    """Uses a backend that calls no C++ compiler, which would take half a minute."""
    quick = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(nn.Module, "compile", quick)
    monkeypatch.setattr(bert, "attention", torch.compiler.disable(bert.attention))
    batch = random_batch(320, 2, 32)

    def step(prepare):
        _, state = built(shards, "--dropout", 0.1)
        prepare(None, None, state)
        layers = []                                  # each parameter's layer, as it is completed
        for name, p in state.model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda _, layer=name.split(".")[:2]: layers.append(layer))
        loss = sum(losses_of(state.model(batch), batch).values())
        loss.backward()
        # A layer is one uninterrupted stretch of `layers`, unless it is mixed with other layers.
        stretches = [layer for layer, _ in itertools.groupby(layers)]
        return [loss, *state.reducer.flats], stretches

    plain, in_order = step(lambda *nothing: None)
    fused, found = step(compiled.compile_blocks)
    assert found == in_order, (
        "compiled layers are not completed one after another, in the order of plain layers")
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-6)


def test_in_16_bits_attention_alone_is_not_compiled(shards, monkeypatch):
    """Uses a backend that compiles nothing, to see what the compiler is given."""
    monkeypatch.setattr(nn.Module, "compile",
                        functools.partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.setattr(bert, "attention", torch.compiler.disable(bert.attention))
    _, state = built(shards, "--precision", "bf16")
    compiled.compile_blocks(None, None, state)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    state.model(random_batch(320, 2, 32))
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert len(breaks) == 1 and "attention" in str(breaks), (
        "not compiled, where it should be attention alone: " + "\n".join(breaks))


def note_seeds(world, path):
    """Appends the seed of each training forward pass to a file."""
    forward = bert.BertForPreTraining.forward

    def noted_forward(self, batch):
        if self.training:
            with open(path, "a") as file:
                file.write(f"{torch.initial_seed()}\n")
        return forward(self, batch)

    bert.BertForPreTraining.forward = noted_forward


def test_runs_steps_micro_batches_and_ranks_have_dropout_of_their_own(shards, tmp_path):
    argv = "--steps 1 2 --batch 16 8 --micro-tokens 128 --dropout 0.1 --seed".split()
    for seed in 0, 1:
        run(shards, tmp_path / f"{seed}", *argv, seed, size=2,
            sabotage=(note_seeds, tmp_path / "seeds"))
    seeds = (tmp_path / "seeds").read_text().split()
    assert len(set(seeds)) == 2 * 3 * 2 * 2, f"some dropout seeds are equal: {sorted(seeds)}"


def test_the_optimizer_gets_the_rate_and_clipped_gradients(train_here, tmp_path, monkeypatch):
    seen = []
    scales = set()
    step = optim.LAMB.step
    average = dist.Bucket.average

    def noted_average(self, loss_scale):
        scales.add(loss_scale)
        return average(self, loss_scale)

    def noted_step(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        rates = [group["lr"] for group in self.param_groups]
        seen.append((nn.utils.get_total_norm(gradients).item(), rates))
        step(self)

    monkeypatch.setattr(optim.LAMB, "step", noted_step)
    monkeypatch.setattr(dist.Bucket, "average", noted_average)
    args = train_here(tmp_path, *SHORT, "--precision", "fp16")           # loss scale: 65536
    assert scales == {65536}, f"int8 would unscale by {scales}, not by 65536"
    expected = [optim.learning_rate(step / (phase.steps + 1), phase)
                for phase in args.phases for step in range(1, phase.steps + 1)]
    assert column(tmp_path, "lr") == pytest.approx(expected)
    assert max(column(tmp_path, "grad_norm")) > 1, (
        "no gradient norm is above the bound of 1, so this test clips nothing")
    for line, (clipped, rates) in zip(metrics(tmp_path), seen, strict=True):
        norm, lr = line["grad_norm"], line["lr"]
        assert clipped == pytest.approx(min(1, norm), rel=1e-3), (
            f"the optimizer gets gradients of norm {clipped:.4g}; the unclipped norm, without the "
            f"loss scale of 65536, is {norm:.4g}, and the bound is 1")
        assert rates == pytest.approx([lr, lr]), "matrices or vectors do not get the logged rate"


# ----- Steps that are not taken, and what ends a run -----

def spoil_loss(world, calls, infinite=(), patch=setattr):
    """Makes the loss inf in the micro-batches `calls`. In the micro-batches `infinite`, makes a
    gradient inf, but not the loss. A micro-batch is a (rank, number); numbers start at 1."""
    forward = bert.BertForPreTraining.forward
    count = itertools.count(1)

    def patched(self, batch):
        logits = forward(self, batch)
        number = next(count) if self.training else 0
        if (world.rank, number) in calls:
            logits["mlm"] = logits["mlm"] * math.inf
        if (world.rank, number) in infinite:
            bias = self.mlm_bias.clone()
            bias.register_hook(lambda gradient: gradient + math.inf)
            logits["mlm"] = logits["mlm"] + (bias - bias.detach())
        return logits

    patch(bert.BertForPreTraining, "forward", patched)


def test_fp16_doubles_its_scale_after_a_thousand_steps(shards):
    for flags, expected in (("--precision", "fp16"), (2 ** 16, 1000)), ((), (1, 100)):
        scaler = built(shards, *flags)[1].scaler
        assert (scaler.scale, scaler.growth_interval) == expected


def test_an_overflow_on_one_rank_skips_the_step_on_all(shards, tmp_path):
    # A rank has two micro-batches a step: number 8 is the last of step 4, 11 the first of step 6.
    run(shards, tmp_path / "out", *"--steps 20 0 --max-steps 7 --batch 4 --micro-tokens 32 "
        "--precision fp16 --compression int8".split(), size=2,
        sabotage=(spoil_loss, {(0, 11)}, {(1, 8)}))
    found = column(tmp_path / "out", "skipped")
    assert found == [0, 0, 0, 1, 1, 2, 2], (
        f"steps 4 and 6 overflow, but `skipped` is {found}; if one more step is skipped, the "
        "residuals of a skipped step were kept: does the loop call commit(step_taken)?")
    assert column(tmp_path / "out", "loss_scale") == [65536] * 4 + [32768] * 2 + [16384]
    sixth = metrics(tmp_path / "out")[5]
    assert sixth["mlm_loss"] is sixth["grad_norm"] is None, (
        "step 6 does not log null for its loss and norm: JSON has no NaN")
    updates = last_state(tmp_path / "out")["groups"][0]["step"]
    assert updates == 5, f"5 of the 7 steps are taken, but the optimizer has made {updates} updates"


def test_training_stops_at_the_floor_and_says_where(train_here, tmp_path, monkeypatch):
    spoil_loss(dist.World(), {(0, call) for call in range(9, 91)}, patch=monkeypatch.setattr)
    message = "step 19: the gradients of 15 of 19 steps were not finite.*--lr-scale"
    with pytest.raises(optim.TrainingStopped, match=message):
        train_here(tmp_path, *SHORT, "--steps", 1, 90, "--batch", 4, "--precision", "fp32")


@pytest.mark.parametrize("classes, bad", [(320, math.nan), (320, math.inf), (2, math.nan)])
def test_a_held_out_loss_that_is_not_finite_ends_the_run(
        train_here, tmp_path, monkeypatch, classes, bad):
    """It is that of one of the two tasks, in the second of two phases."""
    own = train.loss_sum
    losses = iter([0, bad])

    def patched(logits, labels):
        evaluates = logits.shape[1] == classes and not torch.is_grad_enabled()
        return own(logits, labels) + (next(losses) if evaluates else 0)

    monkeypatch.setattr(train, "loss_sum", patched)
    message = "step 2: the held-out loss is not finite.*--lr-scale"
    with pytest.raises(optim.TrainingStopped, match=message):
        train_here(tmp_path, "--steps", 1, 1, "--batch", 2)


def test_a_bad_step_now_and_then_is_forgiven(shards):
    scaler = built(shards)[1].scaler
    for step in range(1, 10200):
        taken = scaler.update(step % 500 == 0, step)     # raises if there are too many bad steps
        assert taken == (step % 500 > 0), f"step {step}: `update` returns {taken}"
    assert scaler.scale == 1, (
        f"with one bad step in every 500, the scale ends at {scaler.scale}, not at 1")


@pytest.mark.parametrize("part, value, kind, message", [
    ("weight", 1e-3, dist.DistError, "rank 1 has other weights after step 1"),
    ("exp_avg", math.nan, optim.TrainingStopped, "step 1: weights or moments are not finite"),
    ("exp_avg_sq", math.inf, optim.TrainingStopped, "step 1: weights or moments are not finite")])
def test_weights_that_are_wrong_on_one_rank_are_not_saved(
        shards, tmp_path, part, value, kind, message):
    first, second = run(shards, tmp_path / "out", *SHORT, size=2, sabotage=(spoil, 1, part, value),
                        check=False)
    assert type(second) is kind and message in str(second), second
    assert isinstance(first, dist.DistError), first
    assert not steps_kept(tmp_path / "out"), "the wrong weights were saved"


# ----- Figures, evaluation, GPUs -----

def test_figures_of_a_step_are_of_its_own_examples(shards, train_here, tmp_path, monkeypatch):
    """Each look at the clock takes a second: a step lasts two, one of them for its examples."""
    seconds = itertools.count()
    monkeypatch.setattr(train, "time", SimpleNamespace(
        monotonic=time.monotonic, sleep=time.sleep, perf_counter=lambda: next(seconds)))
    args = train_here(tmp_path, *SHORT)
    for line in metrics(tmp_path):
        phase = args.phases[line["phase"] - 1]
        step = line["step"] - (1 if line["phase"] == 1 else 1 + args.phases[0].steps)
        examples = data.PretrainingData(shards, phase.seq_len, line["phase"] - 1,
                                        mask_fraction=args.mask_fraction)
        size = phase.global_batch
        batch = examples.batch(range(step * size, (step + 1) * size))
        tokens = batch.lengths[:-1].sum()
        masked = (batch.labels["mlm"] != data.IGNORED).sum()
        expected = {"examples_per_second": size / 2, "tokens_per_second": tokens / 2,
                    "masked_fraction": masked / tokens, "data_share": 0.5}
        assert {name: line[name] for name in expected} == pytest.approx(expected), line


def test_an_evaluation_is_that_of_all_examples_at_once(shards, train_here):
    flags = "--micro-tokens 200 --mask-fraction 0.6 --dropout 0.1 --seed 7"
    args, state = built(shards, *flags.split())
    args.phases, state.counters.phase = args.phases[::-1], 1         # now phase 2 has 32 tokens
    sizes = []
    state.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0].tokens)))
    log = Mock()
    found = train.evaluate(args, dist.World(), log, state)
    assert max(sizes) <= 192, "a micro-batch exceeds 192 tokens, 6 x 32, at --micro-tokens 200"
    assert state.model.training, "after the evaluation the model is still in eval mode"
    assert not state.counters.longest, "held-out texts count for the folder's model_max_length"
    state.model.eval()
    # 15 % are masked, whatever --mask-fraction is, and the same tokens with any --seed.
    examples = data.PretrainingData(shards, 32, held_out=True, mask_fraction=0.15)
    batch = examples.batch(range(16)).to("cpu")
    labels = batch.labels["mlm"]
    unigram_losses = data.unigram_losses(shards)[labels[labels != data.IGNORED]]
    expected = {"step": 0, "phase": 2, "unigram_loss": unigram_losses.mean().item()}
    part = len(unigram_losses) / batch.lengths[:-1].sum()
    said = log.say.call_args.args[0]
    assert f"held out, {part:.0%} masked:" in said, f"{part:.1%} are masked, not as in: {said}"
    for task, logits in state.model(batch).items():
        counted = batch.labels[task] != data.IGNORED
        logits, labels = logits[counted], batch.labels[task][counted]
        expected[f"{task}_loss"] = F.cross_entropy(logits, labels).item()
        expected[f"{task}_accuracy"] = (logits.argmax(1) == labels).double().mean().item()
    assert found == pytest.approx(expected, rel=1e-5), (
        "the evaluation differs from that of the 16 held-out examples in one batch, 15 % masked, "
        "without dropout (is the model in eval mode?)")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_trains_and_resumes_with_the_same_bits(shards, tmp_path, precision):
    size = min(2, torch.cuda.device_count())                   # two GPUs: over NCCL
    for out, *more in ("whole",), ("parts", "--max-steps", 7), ("parts",):
        run(shards, tmp_path / out, *SHORT, "--precision", precision, "--dropout", 0.1, *more,
            size=size, gpu=True)
    assert_same(last_state(tmp_path / "whole"), last_state(tmp_path / "parts"))


def test_a_run_ends_well_and_is_evaluated(train_here, tmp_path, monkeypatch):
    """A signal in the last step changes nothing. The same command evaluates again, because the run
    may have died in its last evaluation."""
    monkeypatch.setattr(dist, "stop_requests", ["SIGTERM"])
    for _ in range(2):
        train_here(tmp_path, "--steps", 1, 0)
        assert metrics(tmp_path, "eval"), "the run does not evaluate at its end"
        (tmp_path / "metrics.jsonl").unlink()
    train_here(tmp_path / "other", "--steps", 0)
    assert metrics(tmp_path / "other", "eval"), "a run without steps does not evaluate"
    described = (tmp_path / "other/model/tokenizer_config.json").read_text()
    assert '"model_max_length": 32' in described, (
        "without steps, model_max_length is not the length of the first phase, 32")


def test_a_step_without_masked_tokens_is_taken(train_here, tmp_path):
    train_here(tmp_path, "--steps", 2, 0, "--mask-fraction", 0)
    assert column(tmp_path, "mlm_loss", "skipped") == [None, 0] * 2, "a loss of no tokens is none"


def stop_rank_1(world):
    dist.stop_requests[:] = ["SIGTERM"] * world.rank


@pytest.mark.parametrize("steps", [(3, 0), (1, 2)])
def test_a_stop_of_one_rank_at_a_resume_waits_for_no_evaluation(
        shards, train_here, tmp_path, steps):
    argv = "--steps", *steps, "--precision", "fp32"
    train_here(tmp_path, *argv, "--max-steps", 1)
    (tmp_path / "metrics.jsonl").unlink()
    for error in run(shards, tmp_path, *argv, size=2, sabotage=(stop_rank_1,), check=False):
        assert "stopped after step 2" in str(error)
    assert not metrics(tmp_path, "eval")


def test_an_evaluation_of_pairs_without_labels_is_no_error(train_here, tmp_path, monkeypatch):
    own = data.PretrainingData.pair
    monkeypatch.setattr(data.PretrainingData, "pair", lambda self, i, draws: (
        own(self, i, draws)._replace(pair_label=data.IGNORED)))
    train_here(tmp_path, "--steps", 1, 0, "--batch", 2)
    last = metrics(tmp_path, "eval")[-1]
    assert last["nsp_loss"] is last["nsp_accuracy"] is None


def test_an_evaluation_that_was_cut_off_is_made_up(train_here, tmp_path, monkeypatch):
    """Phase 1 ends with a checkpoint and then an evaluation, which the resume must make up."""
    flags = "--steps", 2, 2, "--batch", 4
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_here(tmp_path, *flags)
    train_here(tmp_path, *flags)
    found = [(line["step"], line["phase"]) for line in metrics(tmp_path, "eval")]
    assert found == [(2, 1), (4, 2)], f"the evaluations are of these (step, phase): {found}"
