"""Tests of ranks on threads and over Gloo: they name the cause of an error, and do not hang. Ranks
on threads also compute the pictures in dist.py's docstrings. test_dist.py tests that both kinds of
ranks give the same bits."""
import doctest
import inspect
import re
import traceback

import pytest
import torch

import dist
from tests import local_ranks
from tests.local_ranks import on_threads
from tests.ranks import run_ranks


def divide(world):
    if world.rank == 2:
        print("here is rank 2")
        return 1 / 0
    return world.barrier()


def test_an_error_is_that_of_the_rank_that_failed(tmp_path, caplog):
    with pytest.raises(ZeroDivisionError) as caught:
        on_threads(divide, 3)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == "return 1 / 0"
    with pytest.raises(ZeroDivisionError, match="on rank 2"):
        run_ranks(divide, 3, tmp_path)
    for shown in "here is rank 2\n", "return 1 / 0":
        assert shown in caplog.text, f"run_ranks does not log {shown!r}"


def only_rank_1(world):
    if world.rank == 1:
        world.levels[0].barrier()


def test_a_rank_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(local_ranks, "SECONDS", 0.1)
    with pytest.raises(dist.RankLost, match="come within 0.1 s; rank 1 of 2 waited .* in all_r"):
        on_threads(only_rank_1, 4, local_size=2)


def other_shapes(world):
    world.all_reduce(torch.ones(world.rank + 3))


def test_different_collectives_are_an_error():
    with pytest.raises(dist.DistError, match=r"different collectives: all_reduce \[3\], .* \[4\]$"):
        on_threads(other_shapes, 2)


# ----- What docstrings show -----

def test_the_example_of_the_docstring():
    assert not doctest.testmod(local_ranks).failed


def rows_of(world, values):
    """Returns a rank's part of each row in compressed_mean's table, and the residual of each."""
    rows = []

    def encode(numbers):
        rows.extend([numbers.clone(), numbers.floor()])
        return rows[-1]

    def decode(codes):
        if codes is not rows[-1]:                      # not its own codes, for the residual
            rows.append(codes)
        return codes

    value = torch.tensor(values[world.rank])
    _, residual, state, _ = dist.compressed_mean(encode, decode, world, value, {})
    none = torch.zeros(0)
    return rows, [none, residual, none, none, state["part_residual"], none]


def test_the_table_of_compressed_mean(monkeypatch):
    monkeypatch.setattr(dist, "BLOCK", 1)                      # a block is one number
    ranks = on_threads(rows_of, 2, [[3.4, 1.0], [2.0, 5.2]])
    (first, first_left), (second, second_left) = ranks
    # The row "residual" becomes a part of the row before it.
    text = re.sub("\n +residual  ", "", inspect.getdoc(dist.compressed_mean))
    table = re.findall(r"(?m)^ +(value|encode|all_to_all|mean|all_gather) {3}(.*)$", text)
    for (name, row), *parts in zip(table, first, second, first_left, second_left, strict=True):
        computed = torch.cat([part.flatten() for part in parts]).tolist()
        told = [float(number) for number in re.findall(r"\d+\.?\d*", row)]
        assert told[:len(computed)] == pytest.approx(computed), (
            f"the ranks do not compute the docstring's row `{name}`")


def meetings(world):
    """Returns {(level, collective): the ranks that meet in it}, for this rank's calls in
    Bucket.average. level: 0 within the node, 1 across nodes."""
    met = {}
    for level, team in enumerate(world.levels):
        ranks, run = team.all_gather_object(world.rank), team._run

        def noted(collective, *arguments, level=level, ranks=ranks, run=run, **options):
            met[level, collective.__name__] = ranks
            run(collective, *arguments, **options)

        team._run = noted
    bucket = dist.Bucket({"weight": (600,)}, world, "none")
    bucket.flat.fill_(world.rank)
    bucket.average(1.0)
    assert bucket.flat.unique().tolist() == [1.5], "the bucket is not the mean over the ranks, 1.5"
    return met


def test_the_picture_of_two_levels():
    docstring = inspect.getdoc(dist.Bucket)
    outcomes = on_threads(meetings, 4, local_size=2)
    for step, level, collective, arrow in [("1. all_reduce", 0, "all_reduce", "{0} <-> {1}"),
                                           ("2. wire.average", 1, "all_reduce", "{0} <-> {1}"),
                                           ("3. broadcast", 0, "broadcast", "{0} -> {1}")]:
        arrows = {arrow.format(*met[level, collective]) for met in outcomes
                  if (level, collective) in met}
        row = f"{step:<21}{'    '.join(sorted(arrows))}  "
        assert row in docstring, f"the docstring lacks this row, which the ranks compute: {row!r}"
