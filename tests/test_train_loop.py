"""The loop of train.py: the same training on any number of ranks, what the flags change, steps that
are skipped or stop the run, evaluation."""
import dataclasses
import functools
import itertools
import math
import re
import shutil
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

import bert
import data
import dist
import optim
import train
from tests.conftest import make_documents
from tests.ranks import together
from tests.training import (SHORT, args_of, assert_same, column, last_state, losses_of, metrics,
                            random_batch, run, steps_kept)
from tests.variants import compiled

# ----- The same training on any number of ranks -----

EQUAL = "--batch 33 32 --dropout 0 --precision fp32".split()
PHASES = {1: ["--steps", 4, 0], 2: ["--steps", 0, 4]}


def losses_and_norms(out):
    """Returns the losses and the norm of the gradient of each step."""
    return column(out, "mlm_loss", "nsp_loss", "grad_norm")


@pytest.fixture(scope="module")
def one_rank(shards, tmp_path_factory):
    """`losses_and_norms` on one rank, for each phase alone."""
    folder = tmp_path_factory.mktemp("one")
    together(*(functools.partial(run, shards, folder / f"phase{phase}", *EQUAL, *PHASES[phase])
               for phase in PHASES))
    return {phase: losses_and_norms(folder / f"phase{phase}") for phase in PHASES}


@pytest.mark.parametrize("phase,size,micro_tokens", [
    (1, 1, 150), (1, 3, 320), (2, 2, 1), (2, 4, 8192)])
def test_losses_do_not_depend_on_ranks_or_micro_batches(
        shards, tmp_path, one_rank, phase, size, micro_tokens):
    sums = run(shards, tmp_path / "out", *EQUAL, *PHASES[phase], "--micro-tokens", micro_tokens,
               size=size)
    found = losses_and_norms(tmp_path / "out")
    assert len(set(found)) == 12 and len(set(sums)) == 1
    assert found[:3] == pytest.approx(one_rank[phase][:3], rel=1e-6)
    assert found == pytest.approx(one_rank[phase], rel=1e-4)


def take_share(world, folder):
    """Makes this rank a node that holds only its share of the shards."""
    parse = train.parse_arguments
    train.parse_arguments = lambda argv: parse([*argv, "--data", f"{folder}-{world.rank}"])


def test_a_rank_reads_only_its_shards(shards, tmp_path, one_rank):
    for node in 0, 1:
        folder = tmp_path / f"wiki-{node}"
        shutil.copytree(shards, folder)
        for number in 1 - node, 3 - node:
            for path in folder.glob(f"train-{number:05}.*"):
                path.unlink()
    argv = *EQUAL, *PHASES[1]
    share = take_share, tmp_path / "wiki"
    run(shards, tmp_path / "out", *argv, size=2, sabotage=share)
    assert losses_and_norms(tmp_path / "out") == pytest.approx(one_rank[1], rel=1e-4)
    # Of three ranks each reads all four shards.
    shutil.copytree(tmp_path / "wiki-0", tmp_path / "wiki-2")
    outcomes = run(shards, tmp_path / "no", *argv, size=3, sabotage=share, check=False)
    assert all(re.search(r"wiki-\d/train-\S+", str(outcome)) for outcome in outcomes)


def make_the_demo(world, folder):
    """Takes a second for the demo's text."""
    train.DEMO_SHARDS = folder
    data.machine_documentation = lambda: time.sleep(1) or make_documents()


def test_all_ranks_wait_for_the_demos_shards(tmp_path):
    run(tmp_path / "demo", tmp_path / "out", "--steps", 0, size=2,
        sabotage=(make_the_demo, tmp_path / "demo"))


# ----- What the flags change -----

def test_without_pairs_their_heads_are_not_trained(train_here, tmp_path, capsys):
    train_here(tmp_path, "--steps", 2, 0, "--pairs", "none")
    assert "nsp" not in capsys.readouterr().out
    assert not [name for line in metrics(tmp_path) for name in line if "nsp" in name]
    # Decay would wear them away
    assert not any(name.startswith(("pooler", "nsp")) for name in last_state(tmp_path)["tensors"])


def first_batches(shards, *flags):
    """Returns the first batch of each phase."""
    args = args_of("--data", shards, "--micro-tokens", 8192, *flags)
    state = SimpleNamespace(counters=train.Counters(), masters={})
    return [next(train.begin_phase(args, dist.World(), state, phase))[0] for phase in (0, 1)]


def test_phases_take_other_examples_as_the_flags_say(shards, monkeypatch):
    recipe = optim.RECIPES["demo"]
    twice = [recipe["phases"][0]] * 2
    monkeypatch.setattr(optim, "RECIPES", {"demo": recipe | {"phases": twice}})
    first, second = first_batches(shards)
    more, _ = first_batches(shards, "--mask-fraction", "0.6")
    other, _ = first_batches(shards, "--seed", "1")
    assert len({str(batch.bounds.tolist()) for batch in (first, second, other)}) == 3
    few, many = (int((batch.labels["mlm"] != data.IGNORED).sum()) for batch in (first, more))
    assert many == pytest.approx(2 * few, rel=0.1)


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_each_optimizer_in_16_bits_follows_fp32(shards, tmp_path, optimizer):
    """With accumulation, through two phases; fp16 with its loss scale."""
    argv = f"--steps 4 2 --batch 4 --micro-tokens 64 --lr-scale 0.03 --optimizer {optimizer}"
    precisions = "fp32", "bf16", "fp16"
    together(*(functools.partial(run, shards, tmp_path / precision, *argv.split(), "--precision",
                                 precision) for precision in precisions))
    for precision, rel, scale in ("bf16", 1e-2, 1), ("fp16", 3e-3, 65536):
        for field, most in ("mlm_loss", rel), ("grad_norm", 0.1):
            found, exact = (column(tmp_path / name, field) for name in (precision, "fp32"))
            assert found == pytest.approx(exact, rel=most) and found != exact
        assert column(tmp_path / precision, "skipped", "loss_scale") == [0, scale] * 6


def build(shards, *flags):
    """Returns the state before the first step of a run on one rank."""
    args = args_of("--data", shards, "--precision", "fp32", *flags)
    args.vocab_size = data.load_manifest(shards)["vocab_size"]
    return train.build(args, dist.World())


def test_compiled_layers_have_equal_gradients_complete_layer_by_layer(
        shards, monkeypatch, train_here):
    """By a backend that calls no C++ compiler, which would take half a minute."""
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compile(
        module, backend="aot_eager", **options))
    monkeypatch.setattr(bert, "attention", torch.compiler.disable(bert.attention))
    batch = random_batch(320, 2, 32)
    found = []
    for compile_blocks in False, True:
        state = build(shards)
        if compile_blocks:
            compiled.compile_blocks(None, None, state)
        order = []
        for name, p in state.model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda _, layer=name.split(".")[:2]: order.append(layer))
        loss = sum(losses_of(state.model(batch), batch).values())
        loss.backward()
        state.reducer.finish()
        # What a layer is to the reducer: one stretch, with none of another layer in it
        turns = [layer for layer, _ in itertools.groupby(order)]
        found.append((float(loss.detach()), turns, torch.cat(state.reducer.flats)))
    plain, fused = found
    assert fused[0] == pytest.approx(plain[0], rel=1e-5)
    assert fused[1] == plain[1] and ["blocks", "1"] in plain[1]
    assert torch.allclose(fused[2], plain[2], rtol=1e-4, atol=1e-6)


def test_a_model_begins_at_the_frequencies_with_a_bias_around_0(
        documents, tmp_path, train_here):
    """The variant LANS steps in proportion to a tensor's norm, most of which would be the mean."""
    data.prepare(documents, tmp_path / "shards", vocab_size=319, shards=4)
    bias = build(tmp_path / "shards").model.mlm_bias.detach()
    expected = data.unigram_losses(tmp_path / "shards").float()
    pieces, padding = bias[:319], bias[319:]
    assert torch.allclose(pieces.log_softmax(0), -expected, atol=1e-5) and len(padding) == 1
    assert padding == pieces.min() and abs(pieces.mean()) < 1e-5


def test_the_loss_is_scaled_where_anything_is_fp16(shards, train_here):
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
    argv = "--steps 2 0 --batch 8 --micro-tokens 64 --dropout 0.1".split()
    run(shards, tmp_path / "out", *argv, size=2, sabotage=(note_seeds, tmp_path))
    seeds = [(tmp_path / f"seeds-{rank}").read_text().split() for rank in (0, 1)]
    assert len({*seeds[0], *seeds[1]}) == 2 * 2 * 2          # steps, micro-batches, ranks
    assert str(hash((0, 1, 1, 1)) % 2 ** 64) in seeds[1]     # --seed, and the last of these


def test_the_optimizer_gets_the_rate_and_clipped_gradients(train_here, tmp_path, monkeypatch):
    seen = []
    step = optim.LAMB.step

    def noted_step(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        rates = {group["lr"] for group in self.param_groups}
        seen.append((rates, float(torch.nn.utils.get_total_norm(gradients))))
        step(self)

    commits = []
    monkeypatch.setattr(optim.LAMB, "step", noted_step)
    monkeypatch.setattr(dist.Reducer, "commit", lambda _, taken: commits.append(taken))
    args = train_here(tmp_path, *SHORT, "--precision", "fp32")
    assert commits == [True] * 14
    lines = metrics(tmp_path)
    assert seen == [({line["lr"]}, pytest.approx(min(1, line["grad_norm"]), rel=1e-3))
                    for line in lines]
    assert max(line["grad_norm"] for line in lines) > 1
    begin = 0
    for phase in args.phases:
        done = [step / (phase.steps + 1) for step in range(1, phase.steps + 1)]
        found = [line["lr"] for line in lines[begin:begin + phase.steps]]
        assert found == pytest.approx([optim.learning_rate(part, phase) for part in done])
        begin += phase.steps


def test_new_positions_begin_as_copies(train_here, tmp_path, monkeypatch):
    copies = []
    copy_positions = train.copy_positions

    def noted_copy(args, state):
        weight = state.masters["embeddings.positions.weight"]
        before = weight.clone()
        args.init = tmp_path                     # a model that may know all positions
        copy_positions(args, state)
        assert torch.equal(weight, before)
        args.init = None
        copy_positions(args, state)
        copies.append((before, weight.clone()))

    monkeypatch.setattr(train, "copy_positions", noted_copy)
    train_here(tmp_path, *"--steps 1 1 --batch 8 --precision fp32".split())
    (before, after), = copies                    # once, where phase 2 begins
    assert torch.equal(after[32:64], before[:32]) and not torch.equal(before[32:64], before[:32])
    after[32:64] = before[32:64]
    assert torch.equal(after, before)


# ----- Steps that are not taken, and what ends a run -----

def spoil_loss(world, rank, calls):
    """The loss of one rank is NaN in some of its micro-batches (counted from 1). Checks that
    residuals move in all steps but those."""
    forward = bert.BertForPreTraining.forward
    commit = dist.Reducer.commit
    count = itertools.count(1)

    def patched(self, batch):
        logits = forward(self, batch)
        if self.training and world.rank == rank and next(count) in calls:
            logits["mlm"] = logits["mlm"] * math.inf
        return logits

    def watched_commit(self, step_taken):
        wires = [bucket.wire for bucket in self.buckets]
        wires = [wire for wire in wires if isinstance(wire, dist.ErrorFeedback)]
        before = [wire.kept for wire in wires]
        commit(self, step_taken)
        moved = [wire.kept is not old for old, wire in zip(before, wires)]
        assert moved == [math.isfinite(self.norm())] * len(wires)

    bert.BertForPreTraining.forward = patched
    dist.Reducer.commit = watched_commit


def test_an_overflow_on_one_rank_skips_the_step_on_all(shards, tmp_path):
    argv = ("--steps 20 0 --batch 4 --micro-tokens 32 --save-every 1 --precision fp16 "
            "--compression onebit").split()
    out = tmp_path / "out"
    run(shards, out, *argv, "--max-steps", 3, size=2)
    state = last_state(out)
    # Two micro-batches a step and a rank: the first one of step 5, and the last one of step 6
    sums = run(shards, out, *argv, "--max-steps", 4, size=2, sabotage=(spoil_loss, 1, {2}))
    skipped = last_state(out)
    assert sums[0] == sums[1]
    assert skipped["counters"]["step"] == 4
    assert skipped["scaler"]["scale"] == state["scaler"]["scale"] / 2
    assert_same(skipped["tensors"], state["tensors"])
    assert skipped["groups"] == [group | {"lr": state["groups"][0]["lr"]}
                                 for group in state["groups"]]
    run(shards, out, *argv, "--max-steps", 7, size=2, sabotage=(spoil_loss, 0, {3}))
    assert column(out, "skipped") == [0, 0, 0, 1, 1, 2, 2]
    assert column(out, "loss_scale") == [65536] * 4 + [32768] * 2 + [16384]
    assert metrics(out)[5]["mlm_loss"] is metrics(out)[5]["grad_norm"] is None   # no NaN in JSON
    assert last_state(out)["groups"][0]["step"] == 5


def test_training_stops_at_the_floor_and_says_where(shards, tmp_path):
    outcome, = run(shards, tmp_path / "out", *SHORT, "--steps", 90, "--batch", 4, "--precision",
                   "fp32", sabotage=(spoil_loss, 0, range(9, 10000)), check=False)
    assert isinstance(outcome, optim.TrainingStopped)
    assert re.match(r"step 23: the gradients of 15 steps were not finite.*--lr-scale", str(outcome))
    tensors = last_state(tmp_path / "out")["tensors"].values()
    assert all(tensor.isfinite().all() for tensor in tensors)


def spoil(world, rank, part, value):
    """After an update, one weight or moment of one rank has another value."""
    step = optim.LAMB.step

    def patched(self):
        step(self)
        if world.rank == rank:
            p, state = next(iter(self.state.items()))
            ({"weight": p} | state)[part].view(-1)[0] = value

    optim.LAMB.step = patched


@pytest.mark.parametrize("part,value,kind,message", [
    ("weight", 1e-3, dist.DistError, "rank 1 has other weights after step 3"),
    ("weight", math.nan, optim.TrainingStopped, "step 3: weights or moments are not finite"),
    ("exp_avg", math.nan, optim.TrainingStopped, "step 3: weights or moments are not finite"),
    ("exp_avg_sq", math.inf, optim.TrainingStopped, "step 3: weights or moments are not finite")])
def test_weights_that_are_wrong_on_one_rank_are_not_saved(
        shards, tmp_path, part, value, kind, message):
    outcomes = run(shards, tmp_path / "out", *SHORT, size=2, sabotage=(spoil, 1, part, value),
                   check=False)
    assert type(outcomes[1]) is kind and message in str(outcomes[1])
    assert isinstance(outcomes[0], dist.DistError)
    assert not steps_kept(tmp_path / "out")


# ----- Evaluation, GPUs -----

def test_an_evaluation_is_that_of_all_examples_at_once(shards, train_here):
    args = args_of("--data", shards, "--micro-tokens", 200, "--mask-fraction", 0.6)
    torch.manual_seed(0)
    config = bert.BertConfig.preset("tiny", 320)
    model = bert.BertForPreTraining(dataclasses.replace(config, init_std=0.3))
    state = SimpleNamespace(model=model, counters=train.Counters(step=3))
    log = Mock()
    found = train.evaluate(args, dist.World(), log, state)
    assert log.say.call_count == 1 and model.training
    model.eval()
    batch = data.PretrainingData(shards, 32, held_out=True).batch(range(32)).to("cpu")
    counted = batch.labels["mlm"] != data.IGNORED
    labels, rows = batch.labels["mlm"][counted], len(batch.tokens) - int(batch.lengths[-1])
    assert 0.1 < len(labels) / rows < 0.2                 # 15 %, however many training masks
    logits = model(batch)
    mlm_logits, nsp_logits = logits["mlm"], logits["nsp"]
    unigram_losses = data.unigram_losses(shards)
    expected = {
        "mlm_loss": F.cross_entropy(mlm_logits[counted], labels),
        "mlm_accuracy": (mlm_logits[counted].argmax(1) == labels).double().mean(),
        "unigram_loss": unigram_losses[labels].mean(),
        "nsp_loss": F.cross_entropy(nsp_logits, batch.labels["nsp"]),
        "nsp_accuracy": (nsp_logits.argmax(1) == batch.labels["nsp"]).double().mean()}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-5), name


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_trains_and_resumes_with_the_same_bits(shards, tmp_path, precision):
    argv = [*SHORT, "--precision", precision, "--dropout", 0.1]
    size = min(2, torch.cuda.device_count())                   # over NCCL if there are two
    run(shards, tmp_path / "whole", *argv, size=size, gpu=True)
    run(shards, tmp_path / "parts", *argv, "--max-steps", 7, size=size, gpu=True)
    run(shards, tmp_path / "parts", *argv, size=size, gpu=True)
    assert_same(last_state(tmp_path / "whole"), last_state(tmp_path / "parts"))


def test_a_run_ends_well_and_is_evaluated(train_here, tmp_path, monkeypatch):
    """Also if a signal comes in the last step. The same command evaluates again: the run may have
    died in its last evaluation."""
    monkeypatch.setattr(dist, "listen_to_signals", lambda: ["SIGTERM"])
    for _ in range(2):
        train_here(tmp_path, "--steps", 1, 0)
        assert metrics(tmp_path, "eval")
        (tmp_path / "metrics.jsonl").unlink()
