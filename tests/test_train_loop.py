"""The loop of train.py: the same training on any number of ranks, what the flags change, steps that
are skipped or stop the run, evaluation."""
import functools
import itertools
import math
import re
import shutil
import time
from types import SimpleNamespace
from unittest.mock import ANY, Mock

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
from tests.ranks import together
from tests.training import (SHORT, args_of, assert_same, column, last_state, losses_of, metrics,
                            random_batch, run, spoil, steps_kept)
from tests.variants import compiled

# ----- The same training on any number of ranks -----

EQUAL = "--batch 33 32 --dropout 0 --precision fp32".split()
PHASES = {1: ["--steps", 4, 0], 2: ["--steps", 0, 4]}


@pytest.fixture(scope="module")
def one_rank(shards, tmp_path_factory):
    """Returns {phase: the losses and norms of its four steps on one rank}."""
    folder = tmp_path_factory.mktemp("one")
    together(*(functools.partial(run, shards, folder / f"phase{phase}", *EQUAL, *PHASES[phase])
               for phase in PHASES))
    return {phase: losses_and_norms(folder / f"phase{phase}") for phase in PHASES}


def losses_and_norms(out):
    return column(out, "mlm_loss", "nsp_loss", "grad_norm")


@pytest.mark.parametrize("phase, size, micro_tokens", [
    (1, 1, 150), (1, 3, 320), (2, 2, 1), (2, 4, 8192)])
def test_losses_do_not_depend_on_ranks_or_micro_batches(
        shards, tmp_path, one_rank, phase, size, micro_tokens):
    sums = run(shards, tmp_path / "out", *EQUAL, *PHASES[phase], "--micro-tokens", micro_tokens,
               size=size)
    found = losses_and_norms(tmp_path / "out")
    assert len(set(found)) == 12, f"four steps have equal losses: {found}"
    assert len(set(sums)) == 1, "ranks have other weights"
    exact = one_rank[phase]
    fields = [f"{name} of step {step}" for step in range(1, 5)
              for name in ("mlm_loss", "nsp_loss", "grad_norm")]
    for number, field in enumerate(fields):
        ratio = found[number] / exact[number]
        assert ratio == pytest.approx(1, rel=1e-6 if number < 3 else 1e-4), (
            f"{field} on {size} ranks, by {micro_tokens} tokens at a time, is {ratio:.6f} times "
            "that of one rank: does every label of the step weigh the same, and the Reducer take "
            "the mean over ranks?")


def take_share(world, folder):
    """Makes this rank a node that holds only its share of the shards."""
    parse = train.parse_arguments
    train.parse_arguments = lambda argv: parse([*argv, "--data", f"{folder}-{world.rank}"])


def test_a_rank_reads_only_its_shards(shards, tmp_path, one_rank):
    for node in 0, 1:
        folder = shutil.copytree(shards, tmp_path / f"wiki-{node}")
        for number in 1 - node, 3 - node:
            for path in folder.glob(f"train-{number:05}.*"):
                path.unlink()
    run(shards, tmp_path / "out", *EQUAL, *PHASES[1], size=2,
        sabotage=(take_share, tmp_path / "wiki"))
    assert losses_and_norms(tmp_path / "out") == pytest.approx(one_rank[1], rel=1e-4)


def make_the_demo(world, folder):
    """Takes a second for the demo's text."""
    train.DEMO_SHARDS = folder
    data.machine_documentation = lambda: time.sleep(1) or make_documents()


def test_all_ranks_wait_for_the_demos_shards(tmp_path):
    run(tmp_path / "demo", tmp_path / "out", "--steps", 0, size=2,
        sabotage=(make_the_demo, tmp_path / "demo"))


# ----- What the flags change -----

def facts_of(shards, *flags):
    """Returns what the State before the first step, and the first micro-batch of the last phase,
    tell of the flags."""
    args = args_of("--data", shards, "--precision", "fp32", *flags)
    args.vocab_size, args.micro_tokens = 320, args.micro_tokens or 8192
    state = train.build(args, dist.World())
    weights = dict(state.model.named_parameters())
    batches = next(train.begin_phase(args, dist.World(), state, len(args.phases) - 1))
    labels = batches[0].labels
    return {
        "dropout": state.model.config.dropout,
        "dtype": weights["mlm_bias"].dtype,
        "weights": weights["embeddings.tokens.weight"].sum().item(),
        "untrained": {name.split(".")[0] for name in weights.keys() - state.masters.keys()},
        "optimizer": type(state.optimizer),
        "betas": state.optimizer.param_groups[0]["betas"],
        "scale": state.scaler.scale,
        "tasks": [*labels],
        "micro-batches": len(batches),
        "texts": batches[0].bounds.tolist(),
        "masked": round((labels["mlm"] != data.IGNORED).sum() / sum(batches[0].lengths[:-1]), 1)}


@pytest.mark.parametrize("flags, changes", [
    ("--dropout 0.25", {"dropout": 0.25}),
    ("--precision fp16", {"dtype": torch.float16, "weights": ANY, "scale": 65536}),
    ("--compression fp16", {"scale": 65536}),
    ("--optimizer adamw", {"optimizer": optim.AdamW}),
    ("--recipe other", {"betas": (0.7, 0.8), "texts": ANY}),       # in a phase of the same length
    ("--pairs none", {"tasks": ["mlm"], "untrained": {"pooler", "nsp"}, "texts": ANY}),
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
    assert "nsp" not in capsys.readouterr().out + (tmp_path / "metrics.jsonl").read_text().replace(
        '"pairs": "none"', "")
    # No text had a segment B: in the folder its embedding is that of A, not what it began with.
    a, b = bert.load_huggingface(tmp_path / "model").embeddings.segments.weight
    assert torch.equal(a, b)


@pytest.mark.parametrize("trained, longest, init", [
    (32, 64, None), (128, 512, None), (128, 512, "a model that may know all positions")])
def test_new_positions_begin_as_copies(shards, trained, longest, init):
    args = args_of("--data", shards, "--micro-tokens", 512)
    args.init = init
    args.phases = [optim.Phase(length, 1, steps, lr=1, warmup=0)
                   for length, steps in [(trained, 9), (512, 0), (longest, 9)]]
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 64))
    masters = optim.cast_with_masters(model, torch.bfloat16)
    positions = masters["embeddings.positions.weight"]
    expected = positions.clone()
    for position in range(trained, trained if init else longest):
        expected[position] = expected[position % trained]
    counters = train.Counters(step=9, phase_step=9)
    state = SimpleNamespace(model=model, masters=masters, counters=counters)
    train.begin_phase(args, dist.World(), state, 2)
    wrong = (positions != expected).any(1).nonzero().flatten().tolist()
    assert not wrong, f"after a phase of {trained} the positions {wrong} have other embeddings"
    copies = model.embeddings.positions.weight
    assert torch.equal(copies, expected.bfloat16()), "the masters are not copied to the model"


def test_a_model_begins_at_the_frequencies_with_a_bias_around_0(documents, tmp_path, train_here):
    """The variant LANS steps in proportion to a tensor's norm, most of which would be the mean."""
    data.prepare(documents, tmp_path, vocab_size=319, shards=4)
    model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 319))
    train.set_bias_to_frequencies(model, tmp_path)
    pieces, padding = model.mlm_bias.detach().tensor_split([319])
    torch.testing.assert_close(
        pieces.log_softmax(0), -data.unigram_losses(tmp_path).float(), atol=1e-5, rtol=0)
    assert padding.tolist() == [pieces.min()], "what pads the vocabulary is no rarest piece"
    assert abs(pieces.mean()) < 1e-5, "the mean is not 0"


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_each_optimizer_in_16_bits_follows_fp32(shards, tmp_path, optimizer):
    """With accumulation, through two phases; fp16 with its loss scale."""
    argv = f"--steps 4 2 --batch 4 --micro-tokens 64 --lr-scale 0.03 --optimizer {optimizer}"
    precisions = "fp32", "bf16", "fp16"
    together(*(functools.partial(run, shards, tmp_path / precision, *argv.split(), "--precision",
                                 precision) for precision in precisions))
    for precision, rel, scale in ("bf16", 1e-2, 1), ("fp16", 3e-3, 65536):
        skipped = column(tmp_path / precision, "skipped", "loss_scale")
        assert skipped == [0, scale] * 6, (
            f"in {precision}, skipped steps and loss scale of each step: {skipped}; no step "
            "overflows, where the loss is computed in fp32")
        for field, most in ("mlm_loss", rel), ("grad_norm", 0.1):
            found, exact = (column(tmp_path / name, field) for name in (precision, "fp32"))
            assert found == pytest.approx(exact, rel=most), f"{field} in {precision}"
            assert found != exact, f"{precision} computes in fp32"


def test_compiled_layers_have_equal_gradients_complete_layer_by_layer(
        shards, monkeypatch, train_here):
    """By a backend that calls no C++ compiler, which would take half a minute."""
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compile(
        module, backend="aot_eager", **options))
    monkeypatch.setattr(bert, "attention", torch.compiler.disable(bert.attention))
    batch = random_batch(320, 2, 32)

    def step(prepare):
        torch.manual_seed(0)
        model = bert.BertForPreTraining(bert.BertConfig.preset("tiny", 320))
        prepare(None, None, SimpleNamespace(model=model))
        layers = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda _, layer=name.split(".")[:2]: layers.append(layer))
        loss = sum(losses_of(model(batch), batch).values())
        loss.backward()
        # What a layer is to the reducer: one stretch, with none of another layer in it
        stretches = [layer for layer, _ in itertools.groupby(layers)]
        return [loss, *(p.grad for p in model.parameters())], stretches

    plain, in_order = step(lambda *nothing: None)
    fused, found = step(compiled.compile_blocks)
    assert found == in_order
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-6)


def note_seeds(world, folder):
    """Appends the seed of each training forward pass to a file of this rank."""
    forward = bert.BertForPreTraining.forward

    def noted_forward(self, batch):
        with open(folder / f"seeds-{world.rank}", "a") as file:
            file.write(f"{torch.initial_seed()}\n" if self.training else "")
        return forward(self, batch)

    bert.BertForPreTraining.forward = noted_forward


def test_runs_steps_micro_batches_and_ranks_have_dropout_of_their_own(shards, tmp_path):
    for seed in 0, 1:
        run(shards, tmp_path / f"{seed}", "--seed", seed, *"--steps 2 0 --batch 8 --micro-tokens "
            "64 --dropout 0.1".split(), size=2, sabotage=(note_seeds, tmp_path))
    seeds = [path.read_text().split() for path in tmp_path.glob("seeds-*")]
    assert len({*seeds[0], *seeds[1]}) == 2 * 2 * 2 * 2, f"some of these are the same: {seeds}"


def test_the_optimizer_gets_the_rate_and_clipped_gradients(train_here, tmp_path, monkeypatch):
    seen = []
    step = optim.LAMB.step

    def noted_step(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = float(nn.utils.get_total_norm(gradients))
        seen.append((norm, [group["lr"] for group in self.param_groups]))
        step(self)

    monkeypatch.setattr(optim.LAMB, "step", noted_step)
    args = train_here(tmp_path, *SHORT, "--precision", "fp16")           # at a loss scale of 65536
    expected = [optim.learning_rate(step / (phase.steps + 1), phase)
                for phase in args.phases for step in range(1, phase.steps + 1)]
    assert column(tmp_path, "lr") == pytest.approx(expected)
    norms = column(tmp_path, "grad_norm")
    assert max(norms) > 1, "nothing is clipped here"
    for lr, norm, (clipped, rates) in zip(expected, norms, seen, strict=True):
        assert clipped == pytest.approx(min(1, norm), rel=1e-3), (
            f"the optimizer gets gradients of norm {clipped:.4g}; before clipping, without the loss "
            f"scale of 65536, it is {norm:.4g}")
        assert rates == pytest.approx([lr, lr]), "the rates of matrices and of vectors"


# ----- Steps that are not taken, and what ends a run -----

def spoil_loss(world, rank, calls):
    """The loss of one rank is inf in some of its micro-batches (counted from 1)."""
    forward = bert.BertForPreTraining.forward
    count = itertools.count(1)

    def patched(self, batch):
        logits = forward(self, batch)
        if self.training and world.rank == rank and next(count) in calls:
            logits["mlm"] = logits["mlm"] * math.inf
        return logits

    bert.BertForPreTraining.forward = patched


def test_an_overflow_on_one_rank_skips_the_step_on_all(shards, tmp_path):
    argv = ("--steps 20 0 --batch 4 --micro-tokens 32 --precision fp16 --compression onebit "
            "--max-steps").split()
    out = tmp_path / "out"
    run(shards, out, *argv, 3, size=2)
    before = last_state(out)
    # Two micro-batches a step and a rank: the last one of step 4, and then the first one of step 6
    sums = run(shards, out, *argv, 4, size=2, sabotage=(spoil_loss, 1, {2}))
    skipped = last_state(out)
    assert sums[0] == sums[1], "after a skipped step ranks have other weights"
    assert_same(before["tensors"], skipped["tensors"], "after a skipped step")
    run(shards, out, *argv, 7, size=2, sabotage=(spoil_loss, 0, {3}))
    found = column(out, "skipped")
    assert found == [0, 0, 0, 1, 1, 2, 2], (
        f"steps 4 and 6 overflow, and skipped is {found} (if one more is skipped, residuals of a "
        "skipped step are kept: does the loop call commit(step_taken)?)")
    assert column(out, "loss_scale") == [65536] * 4 + [32768] * 2 + [16384]
    assert column(out, "mlm_loss", "grad_norm")[10:12] == [None, None], "JSON has no NaN"
    assert last_state(out)["groups"][0]["step"] == 5, "t counts the steps that are taken"


def test_training_stops_at_the_floor_and_says_where(shards, tmp_path):
    outcome, = run(shards, tmp_path / "out", *SHORT, "--steps", 90, "--batch", 4, "--precision",
                   "fp32", sabotage=(spoil_loss, 0, range(9, 10000)), check=False)
    assert isinstance(outcome, optim.TrainingStopped), (
        f"from step 9 on each training loss is inf, and the run does not stop, but returns {outcome}")
    assert re.match(r"step 23: the gradients of 15 of 23 steps were not finite.*--lr-scale",
                    str(outcome))


def test_a_bad_step_now_and_then_is_forgiven(shards):
    args = args_of("--data", shards, "--precision", "fp32")
    args.vocab_size = 320
    scaler = train.build(args, dist.World()).scaler
    for step in range(1, 10001):
        taken = scaler.update(step % 500 == 0, step)     # raises when bad steps are too many
        assert taken == (step % 500 > 0), f"step {step}: taken is {taken}"
    assert scaler.scale >= 0.5, f"after one bad step in 500 the scale has sunk to {scaler.scale}"


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
    assert not steps_kept(tmp_path / "out"), "wrong weights are saved"


# ----- Evaluation, GPUs -----

def test_an_evaluation_is_that_of_all_examples_at_once(shards, train_here):
    args = args_of("--data", shards, "--micro-tokens", 200, "--mask-fraction", 0.6)
    args.settings = train.run_settings(args, data.load_manifest(shards))
    torch.manual_seed(0)
    config = bert.BertConfig.preset("tiny", 320, dropout=0.1)
    model = bert.BertForPreTraining(config)
    state = SimpleNamespace(model=model, counters=train.Counters())
    found = train.evaluate(args, dist.World(), Mock(), state)
    assert model.training, "after an evaluation dropout is off"
    model.eval()
    # 15 % are masked, however many training masks.
    examples = data.PretrainingData(shards, 32, held_out=True, mask_fraction=0.15)
    batch = examples.batch(range(32)).to("cpu")
    for task, logits in model(batch).items():
        counted = batch.labels[task] != data.IGNORED
        logits, labels = logits[counted], batch.labels[task][counted]
        right = (logits.argmax(1) == labels).double().mean()
        for name, value in ("loss", F.cross_entropy(logits, labels)), ("accuracy", right):
            assert found[f"{task}_{name}"] == pytest.approx(value.item(), rel=1e-5), (
                f"evaluate's {task}_{name} is not that of the 32 held-out examples, 15 % masked, "
                "without dropout (eval mode?)")
    labels = batch.labels["mlm"]
    unigram_losses = data.unigram_losses(shards)[labels[labels != data.IGNORED]]
    assert found["unigram_loss"] == pytest.approx(unigram_losses.mean().item(), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_trains_and_resumes_with_the_same_bits(shards, tmp_path, precision):
    size = min(2, torch.cuda.device_count())                   # over NCCL if there are two
    for out, *more in ("whole",), ("parts", "--max-steps", 7), ("parts",):
        run(shards, tmp_path / out, *SHORT, "--precision", precision, "--dropout", 0.1, *more,
            size=size, gpu=True)
    assert_same(last_state(tmp_path / "whole"), last_state(tmp_path / "parts"))


def test_a_run_ends_well_and_is_evaluated(train_here, tmp_path, monkeypatch):
    """Also if a signal comes in the last step. The same command evaluates again: the run may have
    died in its last evaluation."""
    monkeypatch.setattr(dist, "stop_requests", ["SIGTERM"])
    for _ in range(2):
        train_here(tmp_path, "--steps", 1, 0)
        assert metrics(tmp_path, "eval"), "the last step is not evaluated"
        (tmp_path / "metrics.jsonl").unlink()
