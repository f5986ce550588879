"""The loop of train.py: the same training on any number of ranks, steps that are skipped or stop
the run, evaluation, the figures of a step."""
import functools
import itertools
import math
import os
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import bert
import data
import dist
import optim
import train
from tests.ranks import run_ranks, together
from tests.training import (SHORT, assert_same, last_state, metrics, plan_of, run, shrink,
                            steps_kept)

# ----- The same training on any number of ranks -----

EQUAL = "--batch 33 32 --dropout 0 --precision fp32 --workers 0".split()
PHASES = {1: ["--steps", 10, 0], 2: ["--steps", 0, 10]}


@pytest.fixture(scope="module")
def one_rank(shards, tmp_path_factory):
    """`losses_and_norms` of 10 steps on one rank, for each phase alone."""
    folder = tmp_path_factory.mktemp("one")
    together(*(functools.partial(run, shards, folder / f"phase{phase}", *EQUAL, *PHASES[phase])
               for phase in PHASES))
    return {phase: losses_and_norms(folder / f"phase{phase}") for phase in PHASES}


def losses_and_norms(out):
    """Returns the loss, then the norm of the gradient, of each step."""
    return [line[key] for line in metrics(out) for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("phase,size,micro", [(1, 1, 4), (1, 3, 5), (2, 2, 3), (2, 4, 16)])
def test_losses_do_not_depend_on_ranks_or_micro_batches(
        shards, tmp_path, one_rank, phase, size, micro):
    sums = run(shards, tmp_path / "out", *EQUAL, *PHASES[phase], "--micro-batch", micro, size=size)
    found = losses_and_norms(tmp_path / "out")
    assert len(set(found)) == 20 and len(set(sums)) == 1
    assert found[:2] == pytest.approx(one_rank[phase][:2], rel=1e-6)
    assert found == pytest.approx(one_rank[phase], rel=1e-4)


def totals_of(world, shards):
    """Returns the totals of a step in which rank r has r + 1 micro-batches, and what this rank can
    count itself."""
    examples = data.PretrainingData(shards, 32)
    batches = [examples.batch([0, 1, 2]), examples.batch([3])][:world.rank + 1]
    labels = np.concatenate([batch.labels for batch in batches])
    own = {"masked": sum(label != data.IGNORED for label in labels),
           "rows": sum(len(batch.tokens) for batch in batches),
           "tokens": sum(int(batch.bounds[-2]) for batch in batches)}
    totals = train.step_totals(world, batches)
    return totals, own


def test_the_divisor_is_that_of_the_whole_step(shards, tmp_path):
    (totals, first), (other_totals, second) = run_ranks(totals_of, 2, tmp_path, shards)
    assert totals == other_totals, f"rank 0 has {totals}, rank 1 {other_totals}"
    for field in "masked", "rows":
        found, both = getattr(totals, field), (first[field], second[field])
        assert found == sum(both), f"`{field}` is {found}; the two ranks have {both}"
    expected = [first["tokens"], second["tokens"]]
    assert totals.tokens == expected, (
        f"`tokens` is {totals.tokens}; the ranks have {expected}, the rows that only pad left out")
    assert totals.rows > sum(expected)


def test_balance_evens_the_ranks_and_keeps_the_losses(shards, tmp_path, one_rank):
    argv = *EQUAL, *PHASES[2], "--micro-batch", 2
    together(lambda: run(shards, tmp_path / "out", *argv, "--balance", size=3),
             lambda: run(shards, tmp_path / "plain", *argv, "--max-steps", 5, size=3))
    lines, plain = metrics(tmp_path / "out"), metrics(tmp_path / "plain")
    assert losses_and_norms(tmp_path / "out") == pytest.approx(one_rank[2], rel=1e-5)
    balanced, dealt = (sum(line["imbalance"] for line in some[:5]) for some in (lines, plain))
    assert balanced < dealt - 0.1
    assert all(0 < line["padding"] < 0.2 for line in lines[:5])       # up to a multiple of 64


def take_share(world, folder, nodes):
    """Makes this rank a node that holds only its share of the shards."""
    make_plan = train.make_plan

    def with_share(flags, world):
        flags.data = f"{folder}-node-{world.rank % nodes}"
        return make_plan(flags, world)

    train.make_plan = with_share


def test_nodes_with_their_shares_train_as_with_all_shards(shards, tmp_path, one_rank):
    for node in 0, 1:
        folder = tmp_path / f"wiki-node-{node}"
        shutil.copytree(shards, folder)
        for s in range(4):
            if s % 2 != node:
                for path in folder.glob(f"train-{s:05}.*"):
                    path.unlink()
    share = take_share, tmp_path / "wiki", 2
    argv = *EQUAL, *PHASES[1]
    run(shards, tmp_path / "out", *argv, size=2, sabotage=share)
    assert losses_and_norms(tmp_path / "out") == pytest.approx(one_rank[1], rel=1e-5)
    outcomes = run(shards, tmp_path / "no", *argv, "--balance", size=2, sabotage=share, check=False)
    assert all(isinstance(outcome, data.DataError) for outcome in outcomes)
    assert re.search(r"wiki-node-\d/train-\S+ is missing or damaged on", str(outcomes[1]))


# ----- What the flags change -----

def test_other_masks_and_pairs(shards, tmp_path):
    for name, *argv in (("none", "--whole-words"), ("sop", "--mask-fraction", 0.4)):
        run(shards, tmp_path / name, *SHORT, "--steps", 3, 0, "--pairs", name, *argv)
    evals = {name: metrics(tmp_path / name, "eval")[-1] for name in ("none", "sop")}
    assert evals["none"]["nsp_accuracy"] is None and evals["none"]["nsp_loss"] == 0
    assert evals["sop"]["nsp_loss"] > 0.5 and 0 < evals["sop"]["nsp_accuracy"] < 1
    for name, trained in (("none", False), ("sop", True)):    # else decay would wear it away
        assert ("pooler.weight" in last_state(tmp_path / name)["weights"]) == trained


def first_batches(shards, *flags):
    """Returns the first batch of each phase."""
    plan = plan_of("--data", shards, "--workers", 0, *flags)
    batches = []
    for phase, begin in enumerate([0, *plan.ends[:-1]]):
        steps = train.open_phase(plan, dist.World(), SimpleNamespace(step=begin), phase)
        batches.append(next(steps)[0])
    return batches


def test_phases_take_other_examples_as_the_flags_say(shards, monkeypatch):
    recipe = optim.RECIPES["demo"]
    monkeypatch.setattr(optim, "RECIPES", {"demo": recipe._replace(phases=[recipe.phases[0]] * 2)})
    first, second = first_batches(shards)
    more, _ = first_batches(shards, "--mask-fraction", "0.6")
    sop, _ = first_batches(shards, "--pairs", "sop")
    other, _ = first_batches(shards, "--seed", "1")
    assert len({str(batch.bounds.tolist()) for batch in (first, second, other, sop)}) == 4
    few, many = (int((batch.labels != data.IGNORED).sum()) for batch in (first, more))
    assert many == pytest.approx(2 * few, rel=0.1)


@pytest.mark.parametrize("optimizer", ["lamb", "nvlamb", "lans", "adamw"])
def test_each_optimizer_in_16_bits_follows_fp32(shards, tmp_path, optimizer):
    """With accumulation, through two phases; fp16 with its loss scale."""
    argv = ("--steps 4 2 --batch 4 --micro-batch 2 --workers 0 --lr-scale 0.03 "
            f"--optimizer {optimizer}").split()
    precisions = "fp32", "bf16", "fp16"
    losses, norms = {}, {}
    together(*(functools.partial(run, shards, tmp_path / precision, *argv, "--precision", precision)
               for precision in precisions))
    for precision in precisions:
        lines = metrics(tmp_path / precision)
        losses[precision] = [line["loss"] for line in lines]
        norms[precision] = [line["grad_norm"] for line in lines]
        scale = 65536 if precision == "fp16" else 1
        assert {(line["skipped"], line["loss_scale"]) for line in lines} == {(0, scale)}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-2)
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=3e-3)
    assert norms["bf16"] == pytest.approx(norms["fp32"], rel=0.1)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.1)
    assert len(losses["fp16"]) == 6 and losses["fp16"] != losses["fp32"]


def build(shards, *flags):
    """Returns the state before the first step of a run on one rank."""
    plan = plan_of("--data", shards, "--precision", "fp32", *flags)
    return train.build(plan, dist.World(), None)


def test_compiled_layers_have_equal_gradients_complete_layer_by_layer(
        shards, monkeypatch):
    """By a backend that calls no C++ compiler, which would take half a minute."""
    shrink(monkeypatch.setattr)
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compile(
        module, backend="aot_eager", **options))
    batch = data.PretrainingData(shards, 32).batch([0, 1]).to("cpu")
    found = []
    for flags in [], ["--compile"]:
        state = build(shards, *flags)
        order = []
        for name, p in state.model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda _, layer=name.split(".")[:2]: order.append(layer))
        losses = state.model(batch)
        (losses.mlm_sum + losses.nsp_sum).backward()
        state.reducer.finish()
        # What a layer is to the reducer: one stretch, with none of another layer in it
        turns = [layer for layer, _ in itertools.groupby(order)]
        found.append((float(losses.mlm_sum.detach()), turns, torch.cat(state.reducer.flats)))
        state.reducer.close()
    plain, compiled = found
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5)
    assert compiled[1] == plain[1] and ["blocks", "1"] in plain[1]
    assert torch.allclose(compiled[2], plain[2], rtol=1e-4, atol=1e-6)


def test_a_model_begins_at_the_frequencies_with_a_bias_around_0(documents, tmp_path, monkeypatch):
    """NVLAMB and LANS step in proportion to a tensor's norm, most of which would be the mean."""
    shrink(monkeypatch.setattr)
    data.prepare(documents, tmp_path / "shards", vocab_size=319, shards=4)
    bias = build(tmp_path / "shards").model.mlm_bias.detach()
    expected = torch.from_numpy(data.unigram_losses(tmp_path / "shards")).float()
    pieces, padding = bias[:319], bias[319:]
    assert torch.allclose(pieces.log_softmax(0), -expected, atol=1e-5) and len(padding) == 1
    assert padding == pieces.min() and abs(pieces.mean()) < 1e-5


def test_the_loss_is_scaled_where_anything_is_fp16(shards, monkeypatch):
    shrink(monkeypatch.setattr)
    for compression, scale in (("fp16", 65536), ("bf16", 1)):
        assert build(shards, "--compression", compression).scaler.scale == scale


def note_seeds(world, folder):
    """Appends the seed of each training forward pass to a file of this rank."""
    forward = bert.BertForPreTraining.forward

    def noted_forward(self, batch):
        with open(folder / f"seeds-{world.rank}", "a") as file:
            file.write(f"{torch.initial_seed()}\n" if self.training else "")
        return forward(self, batch)

    bert.BertForPreTraining.forward = noted_forward


def test_steps_micro_batches_and_ranks_have_dropout_of_their_own(shards, tmp_path):
    argv = "--steps 2 0 --batch 8 --micro-batch 2 --workers 0".split()
    run(shards, tmp_path / "out", *argv, size=2, sabotage=(note_seeds, tmp_path))
    seeds = [(tmp_path / f"seeds-{rank}").read_text().split() for rank in (0, 1)]
    assert len({*seeds[0], *seeds[1]}) == 2 * 2 * 2          # steps, micro-batches, ranks


def test_the_optimizer_gets_the_rate_and_clipped_gradients(shards, tmp_path, monkeypatch):
    shrink(monkeypatch.setattr)
    seen = []
    step = optim.LAMB.step

    def noted_step(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        seen.append((self.param_groups[-1]["lr"], float(optim.global_norm(gradients))))
        step(self)

    monkeypatch.setattr(optim.LAMB, "step", noted_step)
    argv = f"--data {shards} --out {tmp_path} --steps 3 2 --batch 4 --precision fp32 --workers 0"
    plan = train.make_plan(train.parse_arguments(argv.split()), dist.World())
    train.train(plan, dist.World())
    lines = metrics(tmp_path)
    assert seen == [(line["lr"], pytest.approx(min(1, line["grad_norm"]), rel=1e-3))
                    for line in lines]
    assert max(line["grad_norm"] for line in lines) > 1


# ----- Steps that are not taken, and what ends a run -----

def spoil_loss(world, rank, calls):
    """The loss of one rank becomes infinite in some of its micro-batches (counted from 1)."""
    forward = bert.BertForPreTraining.forward
    count = itertools.count(1)

    def patched(self, batch):
        losses = forward(self, batch)
        if self.training and world.rank == rank and next(count) in calls:
            losses = losses._replace(mlm_sum=losses.mlm_sum * math.inf)
        return losses

    bert.BertForPreTraining.forward = patched


@pytest.mark.parametrize("precision,compression", [("fp16", "none"), ("fp32", "onebit")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(shards, tmp_path, precision, compression):
    argv = ["--steps", 20, "--batch", 4, "--micro-batch", 2, "--workers", 0, "--checkpoint-every",
            1, "--precision", precision, "--compression", compression]
    out = tmp_path / "out"
    before = run(shards, out, *argv, "--max-steps", 3, size=2)
    state = last_state(out)
    after = run(shards, out, *argv, "--max-steps", 4, size=2, sabotage=(spoil_loss, 1, {1}))
    assert after == before and before[0] == before[1]    # the weights, on both ranks
    skipped = last_state(out)
    assert skipped["step"] == 4 and skipped["scaler"]["scale"] == state["scaler"]["scale"] / 2
    for key in ("weights", "optimizer", "residuals"):
        assert_same(skipped[key], state[key], key)
    assert [line["skipped"] for line in metrics(out)] == [0, 0, 0, 1]
    moved = run(shards, out, *argv, "--max-steps", 5, size=2)
    assert moved != after
    assert metrics(out)[-1]["loss_scale"] == (32768 if precision == "fp16" else 0.5)


def test_training_stops_at_the_floor_and_says_where(shards, tmp_path):
    outcome, = run(shards, tmp_path / "out", *SHORT, "--steps", 90, "--batch", 4, "--precision",
                   "fp32", sabotage=(spoil_loss, 0, range(9, 10000)), check=False)
    assert isinstance(outcome, optim.TrainingStopped)
    assert re.match(r"step \d+: gradient of \S+ is not finite.*floor of 6.1\S*e-05", str(outcome))
    assert all(w.isfinite().all() for w in last_state(tmp_path / "out")["weights"].values())


def drift(world, rank):
    """One weight of one rank changes a little, as a bad memory would do it."""
    copy = optim.copy_to_model

    def patched(masters, model):
        if world.rank == rank:
            next(iter(masters.values())).data.view(-1)[0] += 1e-3
        copy(masters, model)

    optim.copy_to_model = patched


def spoil_moments(world, rank, moment):
    """An element of a moment of one rank is NaN."""
    step = optim.Optimizer.step

    def patched(self):
        step(self)
        if world.rank == rank:
            next(iter(self.state.values()))[moment].view(-1)[0] = math.nan

    optim.LAMB.step = patched


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_moments_that_are_not_finite_are_not_saved(shards, tmp_path, moment):
    outcomes = run(shards, tmp_path / "out", *SHORT, "--checkpoint-every", 1, size=2,
                   sabotage=(spoil_moments, 1, moment), check=False)
    assert all(isinstance(outcome, optim.TrainingStopped) for outcome in outcomes)
    assert "step 1: weights or moments are not finite" in str(outcomes[0])
    assert not steps_kept(tmp_path / "out")


def test_weights_that_drift_apart_stop_the_training(shards, tmp_path):
    outcomes = run(shards, tmp_path / "out", *SHORT, size=2, sabotage=(drift, 1), check=False)
    assert all(isinstance(outcome, dist.DistError) for outcome in outcomes)
    assert "rank 1 has other weights after step 3" in str(outcomes[0])
    assert not steps_kept(tmp_path / "out")


# ----- Evaluation, figures, memory -----

def test_evaluation_masks_15_percent_however_many_training_does(shards, monkeypatch):
    monkeypatch.setattr(train, "EVAL_EXAMPLES", 32)
    plans = plan_of("--data", shards), plan_of("--data", shards, "--mask-fraction", 0.6)
    state = SimpleNamespace(model=bert.BertForPreTraining(plans[0].config))
    usual, other = (train.evaluate(plan, dist.World(), state, plan.phases[0]) for plan in plans)
    assert usual == other and state.model.training


class Guesser(torch.nn.Module):
    """A model of loss 2 a masked token and 0.5 a pair, right in 3 tokens and 1 pair of a batch."""
    def forward(self, batch):
        predicted = (batch.labels != data.IGNORED).sum()
        return bert.Losses(2.0 * predicted, 0.5 * torch.tensor(len(batch.pair_labels)),
                           torch.tensor(3), torch.tensor(1))


def test_an_evaluation_adds_up_its_batches(shards, monkeypatch):
    monkeypatch.setattr(train, "EVAL_EXAMPLES", 32)
    plan = plan_of("--data", shards, "--micro-batch", 8)
    state = SimpleNamespace(model=Guesser())
    found = train.evaluate(plan, dist.World(), state, plan.phases[0])
    examples = data.PretrainingData(shards, 64, held_out=True)
    masked = sum(len(examples[i].labels) for i in range(32))
    assert found["mlm_loss"] == 2 and found["nsp_loss"] == 0.5
    assert found["mlm_accuracy"] == pytest.approx(4 * 3 / masked)
    assert found["nsp_accuracy"] == 4 / 32


def test_the_figures_of_a_step():
    plan = SimpleNamespace(config=bert.BertConfig.preset("tiny", 320))
    phase = SimpleNamespace(global_batch=10)
    totals = train.StepTotals(masked=20, rows=800, tokens=[300, 100])
    found = train.step_figures(plan, phase, totals, mlm_sum=60.0, nsp_sum=7.0, seconds=0.5)
    assert (found["mlm_loss"], found["nsp_loss"], found["loss"]) == (3.0, 0.7, 3.7)
    assert (found["padding"], found["imbalance"], found["examples_per_second"]) == (0.5, 1.5, 20)
    flops = 10 * bert.flops_per_example(plan.config, 40, 2)          # on two ranks, in 0.5 s
    assert found["tflops"] == pytest.approx(1e-12 * flops / 2 / 0.5)


def log_memory(world, path):
    """Appends the bytes that this process holds to a file, whenever a step is logged."""
    metric = train.Log.metric

    def patched(self, kind, **fields):
        metric(self, kind, **fields)
        with open("/proc/self/statm") as file, open(path, "a") as log:
            log.write(f"{kind} {int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')}\n")

    train.Log.metric = patched


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_memory_does_not_grow(shards, tmp_path):
    argv = "--steps 300 0 --batch 4 --workers 0 --checkpoint-every 50 --precision fp32".split()
    run(shards, tmp_path / "out", *argv, sabotage=(log_memory, tmp_path / "rss"))
    lines = [line.split() for line in (tmp_path / "rss").read_text().splitlines()]
    rss = [int(size) for kind, size in lines if kind == "train"]
    # From one checkpoint to the next, but for the worst: one of them takes 2 MB, mostly the first
    growth = sorted(after - before for before, after in zip(rss[99::50], rss[149::50]))
    assert len(rss) == 300 and len(growth) == 4 and sum(growth[:3]) <= 0.005 * 3 / 4 * rss[99]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_trains_and_resumes_with_the_same_bits(shards, tmp_path, precision):
    argv = [*SHORT, "--precision", precision, "--dropout", 0.1]
    size = min(2, torch.cuda.device_count())                   # over NCCL if there are two
    run(shards, tmp_path / "whole", *argv, size=size, gpu=True)
    run(shards, tmp_path / "parts", *argv, "--max-steps", 7, size=size, gpu=True)
    run(shards, tmp_path / "parts", *argv, size=size, gpu=True)
    assert_same(last_state(tmp_path / "whole"), last_state(tmp_path / "parts"))
