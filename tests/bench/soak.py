"""The soak: one run disturbed at 20 random moments, started again until it is done.

    python tests/bench/bench_faults.py --soak SEED   # five minutes on two cores

Two ranks take 200 steps of the demo's recipe on a small corpus. Moments (a step of the run, or a
time while it starts) and disturbances are drawn from the seed; the same command follows each of
them. In the end weights, model folder and the log of every step must be those of the undisturbed
run, bit for bit, and no process and no temporary file may be left.
"""
import os
import random
import re
import signal
import subprocess
import time

import torch

import train
from tests.bench.faulty import Run, fill_disk, lines_of, temporary_files

ARGV = ("--steps 200 0 --batch 32 --micro-batch 8 --precision fp32 --checkpoint-every 10 "
        "--eval-every 50 --timeout 5").split()
STEPS, DISTURBANCES, LIMIT = 200, 20, 20
FULL = "full disk"
SIGNALS = {                      # name: (signal, kind of process, rank)
    "kill -9 of rank 0": (signal.SIGKILL, "rank", 0),
    "kill -9 of rank 1": (signal.SIGKILL, "rank", 1),
    "kill -9 of torchrun": (signal.SIGKILL, "torchrun", None),
    "kill -9 of a worker": (signal.SIGKILL, "worker", 1),
    "SIGTERM to torchrun": (signal.SIGTERM, "torchrun", None),
    "SIGTERM to rank 0": (signal.SIGTERM, "rank", 0),
    "Ctrl-C": (signal.SIGINT, "torchrun", None),
    "SIGINT to rank 1": (signal.SIGINT, "rank", 1),
    "SIGSTOP of rank 1 until the timeout": (signal.SIGSTOP, "rank", 1),
}


def fill_and_free(run):
    """Leaves no room on the disk until a save has failed; returns whether the run goes on."""
    failures = run.text().count("no checkpoint of step")
    fill_disk(run.out / "filler")
    run.wait(lambda: run.text().count("no checkpoint of step") > failures, 30)
    (run.out / "filler").unlink()
    return not run.ended()


def newest_checkpoint(out):
    return max(train.checkpoints_in(out / "checkpoints"), default=0)


def disturb(run, what, moment, rng):
    """Waits for the moment, disturbs, waits for the end; returns (line of the report, problem)."""
    startup = run.last_step() >= moment
    if startup:                                              # as long as a start takes, about
        run.wait(lambda: False, 6 * rng.random())
    else:
        run.wait(lambda: run.last_step() >= moment, 120)
        time.sleep(0.1 * rng.random())                       # anywhere in a step
    if run.ended():
        return f"step {run.last_step():>3}  {what}: too late, the run had ended", run.text()[-500:]
    when = f"step {run.last_step():>3}{' (starting)' * startup}"
    if what == FULL:
        goes_on = fill_and_free(run)
        said = re.findall("no checkpoint of step \\d+", run.text())[-1:]
        return f"{when}  {what}: {said}, goes on: {goes_on}", "" if goes_on else run.text()[-500:]
    signum, kind, rank = SIGNALS[what]
    run.wait(lambda: run.pids(kind, rank), 60)
    began, before = time.monotonic(), len(run.text())
    run.send(signum, kind, rank)
    if signum == signal.SIGSTOP:                             # torchrun would wait 30 s for it
        lost = "did not answer", "did not come in time"      # amid training, or at the start
        run.wait(lambda: any(words in run.text()[before:] for words in lost), 60)
        run.send(signal.SIGCONT, kind, rank)
    run.wait(lambda: False, 60)
    _, left = run.wait_until_gone(LIMIT)
    seconds, last, newest = time.monotonic() - began, run.last_step(), newest_checkpoint(run.out)
    said = re.findall(r"^(?:train.py: .*|Stopped.*|Done.*)", run.text()[before:], re.MULTILINE)
    problems = [f"left: {process.kind} {process.rank}" for process in left]
    problems += [f"gone after {seconds:.0f} s"] * (seconds > LIMIT)
    asked = signum in (signal.SIGTERM, signal.SIGINT) and not startup and rank is None
    missed = run.text().count("no checkpoint of step")       # as the disk was full
    if last - newest > (0 if asked else 10 * (1 + missed)):
        problems.append(f"{last - newest} steps lost")
    own = re.search(r'File ".*/(train|dist|data|bert|optim).py"', run.text())
    if own and not (startup and "KeyboardInterrupt" in run.text()):      # amid Python's imports
        problems.append("a traceback")
    return (f"{when}  {what}: gone after {seconds:.1f} s, {max(0, last - newest)} steps lost, said "
            f"{'; '.join(said)[:150] or 'nothing'}"), ", ".join(problems)


def compare(whole, out):
    """Returns what differs between two finished runs, a list of texts."""
    wrong = []
    states = [train.read_checkpoint(folder / "checkpoints" / f"step-{STEPS:08d}.pt")
              for folder in (whole, out)]
    if not all(torch.equal(states[0]["weights"][name], weight)
               for name, weight in states[1]["weights"].items()):
        wrong.append("other weights")
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, out)]
    if models[0] != models[1]:
        wrong.append("another model.safetensors")
    logs = [[(line["step"], line["examples"], line["loss"]) for line in lines_of(folder)
             if line["kind"] == "train"] for folder in (whole, out)]
    if [line[:2] for line in logs[1]] != [(step, 32 * step) for step in range(1, STEPS + 1)]:
        steps = [line[0] for line in logs[1]]
        wrong.append(f"missing steps {sorted(set(range(1, STEPS + 1)) - set(steps))}, repeated "
                     f"{sorted({step for step in steps if steps.count(step) > 1})}")
    if not {*logs[1]} <= {*logs[0]}:
        wrong.append("other losses")
    return wrong


def main(seed, folder, shards):
    """Prints a line a disturbance and a verdict; returns the exit status."""
    rng, began = random.Random(seed), time.monotonic()
    whole, out = folder / "whole", folder / "out"
    run = Run(whole, [*ARGV, "--data", shards, "--out", whole])
    run.wait(lambda: False, 300)
    run.wait_until_gone(LIMIT)
    out.mkdir()
    root = os.geteuid() == 0
    if root:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "none", out], check=True)
    names = [*SIGNALS, *[FULL] * root]
    names = (names * 3)[:DISTURBANCES]                       # each of them twice
    rng.shuffle(names)
    moments, wrong = sorted(rng.sample(range(1, STEPS - 10), DISTURBANCES)), []
    command = out, [*ARGV, "--data", shards, "--out", out]
    run = Run(*command, options=["--shutdown-timeout=5"])
    try:
        for number, (what, moment) in enumerate(zip(names, moments), 1):
            if run.ended():
                run = run.again()
            line, problem = disturb(run, what, moment, rng)
            wrong += [f"{what}: {problem}"] if problem else []
            print(f"{number:>2}  {line}" + f"  WRONG: {problem}" * bool(problem), flush=True)
        if run.ended():
            run = run.again()
        run.wait(lambda: False, 300)
        wrong += [f"left: {process}" for process in run.wait_until_gone(LIMIT)[1]]
        wrong += temporary_files(out, shards)
        wrong += compare(whole, out) if "Done after" in run.text() else [run.text()[-1000:]]
    finally:
        run.kill()
        if root:
            subprocess.run(["umount", "--lazy", out])
    print(f"seed {seed}, {time.monotonic() - began:.0f} s: "
          + ("; ".join(wrong) or "equal bit for bit, no example lost or repeated, nothing left"))
    return len(wrong) > 0
