"""The compressors of tests/variants, on two ranks, against their definitions."""
import pytest
import torch

from tests.local_ranks import on_threads
from tests.variants import gradientflow, powersgd, topk

SHAPES = [torch.Size([64, 48]), torch.Size([37])]
N = 64 * 48 + 37
COMPRESSORS = {"powersgd": powersgd.powersgd, "topk": topk.topk, "chunk": gradientflow.chunk}


def gradient(rank, step):
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + rank))


def powersgd_in_float64(world):
    """Four steps of the compressor beside PowerSGD's algorithm 1 for all ranks, in float64. By
    course/test_graders.py."""
    powersgd.RANK = 2
    n = 64 * 48                                            # the vector after it goes dense
    state = {"shapes": SHAPES}
    q = torch.randn(2, 48, generator=torch.Generator().manual_seed(0)).double().T
    errors = [0.0] * world.size
    rest = torch.zeros(N)
    for step in range(4):
        slopes = [gradient(rank, step) for rank in range(world.size)]
        value = slopes[world.rank] + rest
        mean, state, sent = powersgd.powersgd(world, value, state)
        v = [g[:n].view(64, 48).double() + e for g, e in zip(slopes, errors)]
        p = torch.linalg.qr(sum(v_r @ q for v_r in v) / world.size).Q
        q = sum(v_r.T @ p for v_r in v) / world.size
        errors = [v_r - p @ q.T for v_r in v]
        rest = value
        vector = sum(slopes)[n:] / world.size
        found = {"the mean of the matrix": (mean[:n], (p @ q.T).flatten()),
                 "the mean of the vector, which goes dense,": (mean[n:], vector),
                 "what is left of the matrix": (rest[:n], errors[world.rank].flatten()),
                 "what is left of the vector, nothing,": (rest[n:], torch.zeros(37))}
        for what, (ours, theirs) in found.items():
            error = (ours - theirs).abs().max()
            assert error <= 1e-4, f"{what} is up to {error:.2g} off in step {step + 1} of four"
        expected = 4 * (2 * 64 + 2 * 48 + 37)              # 2 (W - 1) / W is 1 on two ranks
        assert sent == expected, f"{sent} bytes are sent, not {expected}: P, Q and the vector"


def exchanges(world):
    """Returns {name: (value before, what is left, mean, bytes, means where a rank has an inf)}."""
    results = {}
    for name, compressor in COMPRESSORS.items():
        state = {"shapes": SHAPES}
        before = gradient(world.rank, 0) * torch.linspace(0, 1, N)
        value = before.clone()
        mean, _, sent = compressor(world, value, state)
        assert state == {"shapes": SHAPES}                 # for a step that is skipped
        broken = before.clone()
        if world.rank == 1:
            broken[5] = torch.inf
        results[name] = before, value, mean, sent, compressor(world, broken, state)[0]
    return results


@pytest.fixture(scope="module")
def both_ranks():
    return on_threads(exchanges, 2)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_nothing_is_lost_and_an_inf_reaches_all_ranks(both_ranks, name):
    first, second = (outcome[name] for outcome in both_ranks)
    assert torch.equal(first[2], second[2])
    taken_out = [before - rest for before, rest, *_ in (first, second)]
    assert torch.allclose(sum(taken_out) / 2, first[2], atol=1e-5)
    assert not first[4].isfinite().all() and not second[4].isfinite().all()


def test_what_is_sent_is_the_largest(both_ranks):
    k = int(topk.FRACTION * N)
    for before, rest, _, sent, _ in (outcome["topk"] for outcome in both_ranks):
        expected = before.clone()
        expected[before.abs().argsort()[-k:]] = 0
        assert torch.equal(rest, expected) and sent == 8 * k

    size = gradientflow.CHUNK                              # of four chunks one is sent
    norms = 0
    for outcome in both_ranks:
        norms += torch.stack([part.abs().sum() for part in outcome["chunk"][0].split(size)])
    for before, rest, _, sent, _ in (outcome["chunk"] for outcome in both_ranks):
        for number, part in enumerate(before.split(size)):
            is_sent = number == norms.argmax()
            left = rest.split(size)[number]
            assert torch.equal(left, torch.zeros_like(part) if is_sent else part)
        assert sent == 4 * (4 + size)                      # the norms, then a chunk
