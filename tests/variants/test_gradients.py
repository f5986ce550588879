"""Tests of how the variants average gradients: reducers against plain autograd, compressors against
their definitions, the ring and the slow network against Gloo."""
import math
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dist
import train
from tests.local_ranks import on_threads
from tests.ranks import run_ranks, together
from tests.training import assert_same
from tests.variants import (bucket_clipping, buckets_after, common, gradientflow, local_steps,
                            one_by_one, onebit_adam, powersgd, ring, slow_network, synchronised,
                            topk)
from tests.variants.equations import (POWERSGD_BYTES, installed, one_step, powersgd_in_float64,
                                      tower)

ELEMENTS = 72                # in each of the five layers, and in each bucket


# ----- Reducers, on two ranks -----

def counted_step(world, kind, tower):
    """Returns a step in bf16, with `gradients`, those of its masters, and `calls`, its number of
    all-reduces."""
    calls = []
    all_reduce = world.all_reduce
    world.all_reduce = lambda tensor: calls.append(tensor.numel()) or all_reduce(tensor)
    step = one_step(world, tower, kind, torch.bfloat16, before=lambda _: calls.clear())
    step.calls = len(calls)
    step.gradients = {name: w.grad for name, w in step.masters.items()}
    for name, p in step.model.named_parameters():
        assert p.grad.data_ptr() == step.gradients[name].data_ptr(), (
            f"{name} and its master do not share one gradient")
    return step


@pytest.mark.parametrize("kind, calls", [
    (one_by_one.OneByOne, 10), (buckets_after.BucketsAfter, 5)])
def test_a_lower_rung_averages_the_same_after_backward(kind, calls):
    model = tower()
    on_top, below = (on_threads(counted_step, 2, each, model) for each in (dist.Reducer, kind))
    for rank, (plain, step) in enumerate(zip(on_top, below)):
        assert_same(plain.gradients, step.gradients, f"the gradients of rank {rank}")
        assert plain.early == [True] * 5, "dist.Reducer averages after backward"
        assert not any(step.early), "a bucket was launched during backward"
        assert step.calls == calls, f"a step takes {step.calls} all-reduces, not {calls}"
        assert step.reducer.bytes_sent == plain.reducer.bytes_sent == 4 * 5 * ELEMENTS
        assert step.reducer.norm() == pytest.approx(plain.reducer.norm(), rel=1e-5)


def test_one_rank_alone_averages_its_buckets_after_backward(monkeypatch):
    model, inputs = tower()
    reducer = buckets_after.BucketsAfter(model, dist.World())
    model(inputs[0, 0]).sum().backward()
    averaged = []                    # a clock that advances only while a bucket is averaged
    monkeypatch.setattr(dist, "time", SimpleNamespace(perf_counter=lambda: len(averaged)))
    for bucket in reducer.buckets:
        bucket.average = lambda scale, average=bucket.average: averaged.append(scale) or (
            average(scale))
    reducer.finish()
    assert reducer.norm() > 0
    assert len(averaged) == len(reducer.buckets), "not every bucket is averaged once"
    assert reducer.wait_seconds == 0, "a single rank has waited, with nobody to wait for"


@pytest.mark.parametrize("factor, scale", [(1000, 1), (1000, 1024), (0.001, 1)])
def test_each_bucket_is_clipped_before_it_is_averaged(factor, scale):
    steps = on_threads(one_step, 2, tower(), bucket_clipping.ClippingReducer, torch.float32, factor,
                       scale)
    bound = train.CLIP / 5 ** 0.5
    for bucket in steps[0].reducer.buckets:
        expected = 0
        for step in steps:
            own = torch.cat([step.own[name].flatten() for name in bucket.shapes])
            expected = expected + own * (bound / own.norm()).clamp(max=1) / 2
            assert (own.norm() > bound) == (factor > 1), (
                "not all buckets are clipped at a factor of 1000, or some are at 0.001")
        torch.testing.assert_close(bucket.flat / scale, expected, rtol=1e-4, atol=1e-7)


def local_step(world, tower, number):
    """Returns step `number` of local steps, after the step before it. In between, the masters of
    rank 1 drift by 1."""
    def reducer_with_state(module, world, masters, **options):
        reducer = local_steps.WeightReducer(module, world, masters=masters, **options)
        reducer.state = SimpleNamespace(
            counters=train.Counters(step=number - 1), masters=masters, model=module)
        return reducer

    def drift(step):
        step.reducer.state.counters.step = number
        for w in step.masters.values():
            w += world.rank

    return one_step(world, tower, reducer_with_state, torch.bfloat16, before=drift)


# due: the numbers of the buckets to average; bucket 0 has the last layer
@pytest.mark.parametrize("number, due", [(0, [0, 1]), (1, [2, 3]), (2, [4]), (3, [0, 1])])
def test_local_steps_average_the_weights_that_are_due(number, due, monkeypatch):
    """They average no gradients."""
    monkeypatch.setattr(local_steps, "PERIOD", 3)
    model = tower()
    for rank, step in enumerate(on_threads(local_step, 2, model, number)):
        assert step.reducer.bytes_sent == 4 * ELEMENTS * len(due)
        for name, w in model[0].named_parameters():
            master = step.masters[name]
            mean = 4 - int(name[0]) in due
            for what, ours, drift in [("master", master, 0.5 if mean else rank),
                                      ("model", step.model.get_parameter(name), 0.5 * mean)]:
                found = (ours - w).mean().item()
                assert found == pytest.approx(drift, abs=0.01), (
                    f"{name} in the {what} of rank {rank} has moved by {found}, not by {drift}")
            torch.testing.assert_close(master.grad, step.own[name].float(), rtol=0.1, atol=1e-3,
                                       msg=f"{name} does not have the gradient of rank {rank}")


def norms(world, kind, flat):
    """Returns the norm that a rank's Reducer finds if its only gradient is flat[rank]."""
    reducer = kind(nn.Linear(1, 1, bias=False), world)
    reducer.flats[0].fill_(flat[world.rank])
    return reducer.norm()


def test_norms_of_ranks_that_keep_their_gradients():
    found = on_threads(norms, 2, synchronised.LocalReducer, [3.0, 4.0])
    assert found == [2.5, 2.5], "the norms are not the root mean square of 3 and 4, over sqrt(2)"
    assert on_threads(norms, 2, local_steps.WeightReducer, [3.0, 4.0]) == [3, 4], (
        "the ranks do not find the norms of their own gradients")
    for kind in synchronised.LocalReducer, local_steps.WeightReducer:
        found = on_threads(norms, 2, kind, [3.0, math.inf])
        assert not any(map(math.isfinite, found)), (
            f"with norms {found}, only one of two ranks would skip the step")


# ----- Compressors -----

SHAPES = [(7, 33), (5,), (40, 33)]


def repeated_means(world):
    """Returns (this rank's tensors, their means in 31 calls, the bytes of a call). The mean forgets
    before the last call."""
    generator = torch.Generator().manual_seed(world.rank)
    given = [torch.randn(shape, generator=generator) for shape in SHAPES]
    mean = onebit_adam.CompressedMean(dict(zip("abc", given)), given, world)
    found = []
    for call in range(31):
        if call == 30:
            mean.forget()
        tensors = [tensor.clone() for tensor in given]
        sent = mean(tensors)
        found.append(tensors)
    return given, found, sent


def test_the_compressed_mean_is_the_mean_in_the_long_run():
    ranks = on_threads(repeated_means, 3)
    for _, found, sent in ranks:
        assert sent == 2 * 2 * 2 * (512 // 8 + 4), (
            f"a call sends {sent} bytes, not two blocks of signs to two others, twice")
        for number, shape in enumerate(SHAPES):
            assert torch.equal(found[30][number], found[0][number]), (
                "after `forget`, a mean is not that of the first call")
            exact = sum(given[number] for given, *_ in ranks) / 3
            mean = sum(tensors[number] for tensors in found[:30]) / 30
            errors = [float((x - exact).norm() / exact.norm()) for x in (found[0][number], mean)]
            assert errors[1] < 0.3 < errors[0], (
                f"{shape}: the relative errors of one call, and of the mean of 30, are {errors}")


def test_powersgd_is_its_algorithm(monkeypatch):
    monkeypatch.setattr(powersgd, "RANK", 2)
    for sent in on_threads(powersgd_in_float64, 2):
        assert sent == [POWERSGD_BYTES] * 4, "the bytes are not those of P, Q and the vector"


def exchanged(world, compressor):
    """Returns (value, residual, mean, bytes sent)."""
    generator = torch.Generator().manual_seed(world.rank)
    value = torch.randn(3109, generator=generator) * torch.linspace(0, 1, 3109)
    value = value.roll(1024 * world.rank)                  # each rank has a different largest chunk
    mean, residual, _, sent = compressor(world, value.clone(), {})
    return value, residual, mean, sent


def largest_elements(values, rank):
    """Returns which elements a rank sends with topk.py, as a mask: the largest hundredth."""
    return torch.isin(torch.arange(3109), values[rank].abs().argsort()[-31:])


def largest_chunk(values, rank):
    """Returns the same with gradientflow.py: of four chunks, the one that is largest on average."""
    norms = [sum(value[start:start + 1024].abs().sum() for value in values)
             for start in range(0, 3109, 1024)]
    return torch.arange(3109) // 1024 == torch.stack(norms).argmax()


@pytest.mark.parametrize("compressor, chosen, sent", [
    (topk.topk, largest_elements, 31 * 8), (gradientflow.chunk, largest_chunk, (4 + 1024) * 4)])
def test_what_is_largest_is_sent_and_the_rest_is_the_residual(compressor, chosen, sent):
    ranks = on_threads(exchanged, 2, compressor)
    values = [value for value, *_ in ranks]
    mean = sum(value * chosen(values, rank) for rank, value in enumerate(values)) / 2
    for rank, (value, residual, found, bytes_sent) in enumerate(ranks):
        assert torch.equal(residual, value * ~chosen(values, rank)), (
            f"the residual of rank {rank} is not its value without the elements sent")
        torch.testing.assert_close(found, mean, rtol=0, atol=1e-6,
                                   msg="the mean is not that of the chosen elements")
        assert torch.equal(found, ranks[0][2]), "the ranks' means differ in bits"
        assert bytes_sent == sent


def mean_with_inf(world, compressor):
    """Returns the mean if rank 1 alone has an inf, for which the step is skipped."""
    value = torch.linspace(1, 2, 3109)
    value[5] = torch.inf if world.rank else 0.0
    state = {"shapes": [(64, 48), (37,)]}
    mean, *_ = compressor(world, value, state)
    assert state == {"shapes": [(64, 48), (37,)]}, "the state from before a skipped step is lost"
    return mean


@pytest.mark.parametrize("compressor", [powersgd.powersgd, topk.topk, gradientflow.chunk])
def test_all_ranks_learn_of_an_inf(compressor):
    for rank, mean in enumerate(on_threads(mean_with_inf, 2, compressor)):
        assert not mean.isfinite().all(), f"rank {rank} does not learn of an inf on rank 1"


def test_a_compressor_is_told_shapes_and_what_it_kept():
    told = []

    def mean(world, value, state):
        told.append(state)
        return value, torch.zeros_like(value), {"kept": len(told)}, 0

    with installed(common.tell_shapes):
        common.use_compression("spy", mean)
        bucket = dist.Bucket({"a": (2, 3), "b": (4,)}, dist.World(), "spy")
        for _ in range(2):
            bucket.average(1.0)
            bucket.wire.commit(True)
    shapes = {"shapes": [(2, 3), (4,)]}
    assert told == [shapes, shapes | {"kept": 1}]


# ----- The ring, on one to four ranks -----

def around(world):
    """Checks sums around the ring in each World of this rank, and in one of this rank alone."""
    sent = []
    pass_on = ring.pass_on
    ring.pass_on = lambda outgoing, *given: sent.append(len(outgoing)) or pass_on(outgoing, *given)
    for each in [dist.World(), world, *(world.levels or [])]:
        for shape in (1,), (5,), (1000,), (10, 100), ():
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(each.rank))
            expected = each.all_gather(tensor).double().sum(0)
            sent.clear()
            ring.all_reduce(each, tensor)
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
            for other in each.all_gather(tensor):
                assert torch.equal(tensor, other), f"ranks have sums of {shape} that differ in bits"
            most = 2 * (each.size - 1) * math.ceil(tensor.numel() / each.size)
            assert len(sent) == 2 * (each.size - 1) and sum(sent) <= most, (
                f"one of W = {each.size} ranks sends {sent} elements of {shape}, not up to {most} "
                "in 2 (W - 1) parts")


def alone(world):
    """Rank 1 dies, and rank 0 sums."""
    if world.rank == 1:
        os._exit(1)
    ring.all_reduce(world, torch.ones(1000))


# ----- The slow network -----

# {ranks: {collective: its wait, in sizes of the tensor}}. Two ranks send in turns in all_to_all and
# all_gather, which takes 2 and 1.4 times as long.
SHARES = {4: {"all_reduce": 1.5, "all_to_all": 0.75, "all_gather": 3, "broadcast": 1},
          2: {"all_reduce": 1, "all_to_all": 2 * 0.5, "all_gather": 1.4, "broadcast": 1}}


def called(world, name, tensor):
    """Returns what a collective returns, or else the copy of the tensor that it has changed."""
    tensor = tensor.clone().view(world.size, -1)           # a row for each rank, for all_to_all
    result = getattr(world, name)(tensor)
    return tensor if result is None else result


def waits(world):
    """Compares collectives, over all four ranks and across the two nodes: results with those of a
    fast network, seconds with SHARES. Within a node there is no wait."""
    within, across = world.levels
    tensor = torch.randn(4, 1000, generator=torch.Generator().manual_seed(world.rank))   # 16 KB
    calls = [(team, name, share) for team in (world, across)
             for name, share in SHARES[team.size].items()]
    fast = [called(team, name, tensor) for team, name, _ in calls]
    slept = []
    slow_network.time = SimpleNamespace(sleep=slept.append)
    os.environ["GBPS"] = "0.01"
    slow_network.install()
    called(within, "all_reduce", tensor)
    called(dist.World(), "all_reduce", tensor)
    assert not slept, "a collective within a node waits"
    for (team, name, share), expected in zip(calls, fast):
        slept.clear()
        result = called(team, name, tensor)
        expected_waits = [share * 16000 * 8 / 0.01e9]
        if name == "broadcast" and team is world and within.rank > 0:
            expected_waits = []                            # it comes from the node's first rank
        assert slept == pytest.approx(expected_waits), f"{name} of {team.size} ranks waits wrongly"
        assert torch.equal(result, expected), f"{name} of {team.size} ranks gives other bits"


def test_a_second_group_of_all_ranks_of_one_node_is_slow_too(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert slow_network.crosses_nodes(dist.World(size=2, group="another"))


def test_ring_and_slow_network(tmp_path):
    _, [lost, _], _, _ = together(
        lambda: run_ranks(around, 3, tmp_path),
        lambda: run_ranks(alone, 2, tmp_path, check=False),
        lambda: run_ranks(around, 4, tmp_path, local_size=2),
        lambda: run_ranks(waits, 4, tmp_path, local_size=2))
    assert isinstance(lost, dist.RankLost), (
        f"a rank died in the ring, and the other ended with {lost!r}, not with RankLost")
