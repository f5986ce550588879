"""The compressors of tests/variants against their definitions. test_dist.py has the invariants that
they share with those of dist.py."""
import pytest
import torch

import dist
import train
from tests.ranks import run_ranks
from tests.test_dist import gradient, mean_gradient
from tests.variants import gradientflow, powersgd

CHUNK = gradientflow.CHUNK


def powersgd_in_float64(world):
    """Four steps of the compressor beside PowerSGD's algorithm 1 for all ranks, in float64."""
    n = 64 * 48
    state = {"shapes": [torch.Size([64, 48]), torch.Size([37])]}           # the vector goes dense
    q = torch.randn(2, 48, generator=torch.Generator().manual_seed(0)).double().T
    errors, rest, mean = [0.0] * world.size, torch.zeros(n + 37), torch.empty(n + 37)
    for step in range(4):
        slopes = [gradient(rank, step)[:n + 37] for rank in range(world.size)]
        value = slopes[world.rank] + rest
        sent = powersgd.powersgd(world, value, mean, state, 2)
        v = [g[:n].view(64, 48).double() + e for g, e in zip(slopes, errors)]
        p = torch.linalg.qr(sum(v_r @ q for v_r in v) / world.size).Q
        q = sum(v_r.T @ p for v_r in v) / world.size
        errors, rest = [v_r - p @ q.T for v_r in v], value
        exact = torch.cat([(p @ q.T).flatten(), mean_gradient(world, step)[n:n + 37]])
        left = torch.cat([errors[world.rank].flatten(), torch.zeros(37)])
        found = {"the mean of the matrix": (mean[:n], exact[:n]),
                 "the mean of the vector, which goes dense,": (mean[n:], exact[n:]),
                 "what is left of the matrix": (rest[:n], left[:n]),
                 "what is left of the vector, nothing,": (rest[n:], left[n:])}
        for what, (ours, theirs) in found.items():
            error = (ours - theirs).abs().max()
            assert error <= 1e-4, f"{what} is up to {error:.2g} off in step {step + 1} of four"
        expected = 4 * (2 * 64 + 2 * 48 + 37)              # 2 (n - 1) / n is 1 on two ranks
        assert sent == expected, f"{sent} bytes are sent, not {expected}: P, Q and the vector"


def test_powersgd_is_algorithm_1(tmp_path):
    run_ranks(powersgd_in_float64, 2, tmp_path)


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


@pytest.mark.parametrize("variant, name", [(powersgd, "powersgd"), (gradientflow, "chunk")])
def test_a_variant_is_the_default(variant, name, monkeypatch):
    for module, attribute in (train, "parse_arguments"), (dist, "parse_compression"):
        monkeypatch.setattr(module, attribute, getattr(module, attribute))      # restored after it
    variant.install()
    assert train.parse_arguments([]).compression == name
    assert train.parse_arguments(["--compression", "int8"]).compression == "int8"


def test_the_command_lines_text():
    assert dist.parse_compression("powersgd")[:2] == (powersgd.powersgd, 4)
    assert dist.parse_compression("powersgd:2")[:2] == (powersgd.powersgd, 2)
    assert dist.parse_compression("chunk:0.1")[:2] == (gradientflow.chunk, 0.1)
    for text in "powersgd:0", "powersgd:x", "powersgd:0.5", "powersgd:", "chunk:2":
        with pytest.raises(dist.DistError, match=f"--compression {text} cannot work; known are "
                           ".*powersgd, chunk"):
            dist.parse_compression(text)


def test_one_chunk_is_sent_at_least():
    assert dist.wire_bytes("chunk", ((5,),), 2) == 2 * 4 + 4 * CHUNK      # and the norms of two
