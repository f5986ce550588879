"""Ranks on threads: Gloo's bits, and errors instead of hangs. By them, the pictures in the
docstrings of dist.py, computed."""
import doctest
import hashlib
import inspect
import math
import traceback
from unittest import mock

import pytest
import torch

import dist
from tests import local_ranks
from tests.local_ranks import on_threads
from tests.ranks import run_ranks
from tests.test_dist import SHAPES, average, batch, gradients_of, one_process, toy


# ----- As Gloo -----

def hashes(world):
    """Returns {compressor: sha256 of the means of ten steps}. An inf of one rank reaches all."""
    found = {}
    for name in dist.COMPRESSORS:
        bucket = dist.Bucket(SHAPES, world, name)
        digest = hashlib.sha256()
        for step in range(10):
            mean, _ = average(world, bucket, step)
            bucket.wire.commit(True)
            digest.update(mean.numpy())
        found[name] = digest.hexdigest()
        mean, _ = average(world, bucket, 10, spoil=math.inf)
        assert not mean.isfinite().all(), f"{name}: a gradient is inf, and the mean is finite"
    return found


@pytest.mark.parametrize("size, local_size", [(1, 1), (2, 2), (4, 2), (3, 3)])
def test_bits_are_those_of_gloo(tmp_path, size, local_size):
    """On three ranks Gloo sums in another order: there only all ranks have the same bits."""
    processes = run_ranks(hashes, size, tmp_path, local_size=local_size)
    threads = on_threads(hashes, size, local_size=local_size)
    for name in dist.COMPRESSORS:
        assert len({found[name] for found in processes}) == 1, f"{name}: Gloo's ranks differ"
        assert len({found[name] for found in threads}) == 1, f"{name}: ranks on threads differ"
        if size != 3:
            assert threads[0][name] == processes[0][name], f"{name}: threads have other bits"


def reduced(world, models):
    """Returns the gradients of a step by the Reducer. models: one for each rank, made before, since
    all threads share torch.manual_seed."""
    model = models[world.rank]
    reducer = dist.Reducer(model, world, bucket_mb=0.0002)
    for _ in range(2):                                         # the second step begins clean
        reducer.zero_grad()
        (model(batch()[world.rank::world.size]) / 12 * world.size).backward()
        reducer.finish()
    return gradients_of(model)


def test_the_reducer_with_its_thread():
    models = [toy(rank) for rank in range(3)]
    for gradients in on_threads(reduced, 3, models):
        for name, gradient in one_process().items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5)


def copies(world):
    """Changes what it got, and then what it gave."""
    mine = [world.rank]
    everyone = world.all_gather_object(mine)
    everyone[0].append("changed")
    parameter = torch.nn.Parameter(torch.full((2,), world.rank + 1.0))
    world.broadcast(parameter)
    return mine, everyone, parameter.tolist()


def test_ranks_get_copies():
    everyone = [[0, "changed"], [1]]
    assert on_threads(copies, 2) == [([0], everyone, [1, 1]), ([1], everyone, [1, 1])]


# ----- Errors instead of hangs -----

def divide(world):
    if world.rank == 2:
        return 1 / 0
    return world.levels[world.rank % 2].barrier()


def test_an_error_is_that_of_the_rank_that_failed():
    with pytest.raises(ZeroDivisionError) as caught:
        on_threads(divide, 4, local_size=2)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == "return 1 / 0"


def rank_1_alone(world):
    if world.rank == 1:
        world.barrier()


def test_a_rank_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(local_ranks, "SECONDS", 0.1)
    with pytest.raises(dist.RankLost, match="come within 0.1 s; rank 1 of 2 waited .* in all_r"):
        on_threads(rank_1_alone, 2)


def other_shapes(world):
    world.all_reduce(torch.ones(world.rank + 3))


def test_different_collectives_are_an_error():
    with pytest.raises(dist.DistError, match=r"different collectives: all_reduce \[3\], .* \[4\]$"):
        on_threads(other_shapes, 2)


# ----- What docstrings show -----

def test_the_example_of_the_docstring():
    assert not doctest.testmod(local_ranks).failed


STEPS = ["value", "encode", "all_to_all", "mean", "encode", "all_gather"]


def steps_of(world, values, rounding):
    """Returns the numbers that a rank holds in compressed_mean, a list for each of STEPS, then
    those that stay in `value`, and the next s."""
    steps = []

    def encode(numbers):
        codes = rounding(numbers).int()
        steps.append(numbers.clone())                          # its rounding is taken out of it
        steps.append(codes)
        return codes, codes.float()

    def decode(codes):
        steps.append(codes)
        return codes.float()

    value = torch.tensor(values[world.rank])
    _, state, _ = dist.compressed_mean(encode, decode, world, value, {})
    return [step.flatten().tolist() for step in [*steps, value, state["part_residual"]]]


def table(values, rounding):
    """Returns the rows of the table in compressed_mean's docstring, and its two notes with numbers,
    for the values of two ranks and a C."""
    with mock.patch.object(dist, "BLOCK", 1):                  # one number is a block
        ranks = on_threads(steps_of, len(values), values, rounding)
    *steps, stays, next_s = zip(*ranks)                        # each of them of both ranks
    rows = []
    for name, (first, second) in zip(STEPS, steps):
        rows.append(f"{name:<15}{in_columns(first):<23}{in_columns(second)}")
    notes = [f"{' and '.join(map(in_words, stays))} stay in value",
             f"{' and '.join(map(in_words, next_s))} are the next s"]
    return rows + notes


def in_columns(numbers):
    return "".join(f"{round(x, 1):<7}" for x in numbers)


def in_words(numbers):
    return " ".join(f"{x:.1f}" for x in numbers)


def test_the_table_of_compressed_mean():
    docstring = inspect.getdoc(dist.compressed_mean)
    for text in table([[3.4, 1.0], [2.0, 5.2]], torch.floor):
        assert text in docstring, f"what is computed is not what the docstring says: {text!r}"


def ranks_in_collectives(world):
    """Returns {collective: the two ranks that meet in it} of this rank's part in Bucket.average."""
    ranks_in = {}
    for level in world.levels:
        watch(level, level.all_gather_object(world.rank), ranks_in)
    bucket = dist.Bucket({"weight": (600,)}, world, "none")
    bucket.flat.fill_(world.rank)
    bucket.average(1.0)
    assert bucket.flat.unique().tolist() == [1.5]
    return ranks_in


def watch(level, ranks, ranks_in):
    """Notes each collective of a level from now on."""
    run = level._run

    def run_and_note(collective, *arguments, **options):
        ranks_in[collective.__name__] = ranks
        run(collective, *arguments, **options)

    level._run = run_and_note


def test_the_picture_of_two_levels():
    docstring = inspect.getdoc(dist.Bucket)
    outcomes = on_threads(ranks_in_collectives, 4, local_size=2)
    for step, collective, arrow in [("1. reduce", "reduce", "{1} -> {0}"),
                                    ("2. wire.average", "all_reduce", "{0} <-> {1}"),
                                    ("3. broadcast", "broadcast", "{0} -> {1}")]:
        arrows = {arrow.format(*found[collective]) for found in outcomes if collective in found}
        row = f"{step:<21}{'    '.join(sorted(arrows))}  "
        assert row in docstring, f"what is computed is not what the docstring says: {row!r}"
