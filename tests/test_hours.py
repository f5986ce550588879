"""--hours: the rate and the phases follow the clock. Here a clock that the test turns on."""
from types import SimpleNamespace

import pytest

import dist
import optim
import train
from tests.training import args_of, assert_same, column, last_state, metrics, run, shrink

# 3600 s, of which 3564 are trained, about two thirds in phase 1: 600 of its steps have 64 parts of
# the tokens, 150 of the other 32.
ARGV = "--hours 1 --steps 600 150 --batch 4 --precision fp32 --save-every 1000".split()


def fake_clock(world, seconds_of_step, patch=lambda *arguments: setattr(*arguments)):
    """A step takes as long as seconds_of_step(step, rank) says, all else no time."""
    clock = SimpleNamespace(now=0.0)
    finish = dist.Reducer.finish
    build = train.build
    built = []

    def noted_build(args, world):
        built.append(build(args, world))
        return built[-1]

    def patched_finish(self):
        finish(self)
        clock.now += seconds_of_step(built[-1].step, world.rank)

    patch(train, "build", noted_build)
    patch(dist.Reducer, "finish", patched_finish)
    patch(train, "STARTED", 0.0)
    patch(train, "time", SimpleNamespace(monotonic=lambda: clock.now,
                                         perf_counter=train.time.perf_counter))
    return clock
