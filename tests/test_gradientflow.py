"""tests/variants/gradientflow.py: its chunks against their definition, and invariants."""

import pytest
import torch

import dist
import train
from tests.ranks import run_ranks
from tests.test_dist import COUNT, constant, fifty_steps, overflow, six_steps
from tests.variants import gradientflow

CHUNK = gradientflow.CHUNK


@pytest.fixture
def installed(monkeypatch):
    """Installs the variant for one test in this process."""
    monkeypatch.setattr(train, "parse_arguments", train.parse_arguments)
    monkeypatch.setitem(dist.COMPRESSORS, "chunk", None)
    gradientflow.install()


def fifty_steps_of_chunks(world):
    gradientflow.install()
    return fifty_steps(world, "chunk")


@pytest.mark.parametrize("size,local_size", [(1, 1), (3, 3), (4, 2)])
def test_what_went_out_and_the_residual_are_what_came_in(tmp_path, size, local_size):
    outcomes = run_ranks(fifty_steps_of_chunks, size, tmp_path, local_size=local_size)
    exchanging = size // local_size if size > local_size else size
    chunks = exchanging * -(-COUNT // (exchanging * CHUNK))
    chosen = max(1, round(0.05 * chunks))
    # A ring sends 2 (N - 1) / N of the norms, then of the chosen chunks
    expected = sum(2 * (exchanging - 1) * 4 * elements // exchanging
                   for elements in (chunks, chosen * CHUNK))
    for rank, (difference, last, sent, rest) in enumerate(outcomes):
        assert difference < 2e-4 and rest < 9
        assert torch.equal(last, outcomes[0][1])               # on all ranks the same bits
        leads = size == local_size or rank % local_size == 0
        assert sent == (expected if leads else 0)


def overflow_constant_and_resumed(world):
    gradientflow.install()
    saved, state = six_steps(world, "chunk", save_after=3)
    state = {name: value.clone() for name, value in state.items()}
    resumed, _ = six_steps(world, "chunk", state=state, first=3)
    return overflow(world, "chunk"), constant(world, "chunk"), torch.equal(saved, resumed)


def test_an_overflow_leaves_no_trace_and_a_resumed_run_is_the_same(tmp_path):
    for finite, error, same in run_ranks(overflow_constant_and_resumed, 2, tmp_path):
        assert finite and error < 0.25 and same


def one_exchange(world):
    """Returns (value before, value after, mean) of eight chunks, of which a quarter is sent."""
    torch.manual_seed(world.rank)
    value = torch.randn(8, CHUNK) * torch.rand(8, 1)
    before, mean = value.clone(), torch.full((8 * CHUNK,), 9.0)
    gradientflow.chunk(world, value.view(-1), mean, {}, 0.25)
    return before, value, mean.view(8, CHUNK)


def test_the_chunks_with_the_largest_mean_norms_are_sent(tmp_path):
    outcomes = run_ranks(one_exchange, 2, tmp_path)
    exact = (outcomes[0][0] + outcomes[1][0]) / 2
    norms = (outcomes[0][0].abs().sum(1) + outcomes[1][0].abs().sum(1)) / 2
    largest = norms.argsort(descending=True)[:2].tolist()
    for before, after, mean in outcomes:
        for number in range(8):
            sent = number in largest
            assert torch.equal(mean[number], exact[number] if sent else torch.zeros(CHUNK))
            assert torch.equal(after[number], torch.zeros(CHUNK) if sent else before[number])


def test_chunks_are_the_default_and_take_a_fraction(installed):
    assert train.parse_arguments([]).compression == "chunk"
    assert train.parse_arguments(["--compression", "int8"]).compression == "int8"
    assert dist.parse_compression("chunk:0.1")[:2] == (gradientflow.chunk, 0.1)
    with pytest.raises(dist.DistError, match="chunk:2 cannot work; known are .*chunk"):
        dist.parse_compression("chunk:2")
    # At least one chunk goes out, beside the norms of two
    assert dist.wire_bytes("chunk", ((5,),), 2) == 2 * 4 + 4 * CHUNK


def test_a_part_without_gradients_stays_zero(installed):
    bucket = dist.Bucket({"matrix": (40, CHUNK)}, dist.World(), "chunk")
    for _ in range(3):
        bucket.flat[:CHUNK] = 1.0
        bucket.flat[CHUNK:] = 0.0
        bucket.average(1.0)
        assert bucket.flat[:CHUNK].any() and not bucket.flat[CHUNK:].any()
