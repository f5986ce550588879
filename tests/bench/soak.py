"""The soak: does a run that is disturbed at 20 random moments still end with the same bits?

    python tests/bench/bench_faults.py --soak SEED   # six minutes on two cores

Two ranks take 200 steps of the demo's recipe on a small corpus. The seed draws the disturbances and
their moments: a step of the run, or a time while it starts. If one ends the run, the same command
resumes it. At the end, weights, moments, model folder and the losses of every step must be those of
the undisturbed run, bit for bit, and no process or temporary file may be left. Without
root, no disk is filled.
"""
import contextlib
import os
import random
import re
import signal
import time

import beside
import hosts
from faulty import Run

from tests.training import steps_kept

STEPS = 200
ARGV = (f"--steps {STEPS} 0 --batch 32 --micro-tokens 512 --precision fp32 --save-every 10 "
        "--timeout 5").split()
DISTURBANCES = 20
FULL = "full disk"
FAILED = "no checkpoint of step"
SIGNALS = {                      # name: (signal, kind of process, rank)
    "kill -9 of rank 0": (signal.SIGKILL, "rank", 0),
    "kill -9 of rank 1": (signal.SIGKILL, "rank", 1),
    "kill -9 of torchrun": (signal.SIGKILL, "torchrun", None),
    "SIGTERM to torchrun": (signal.SIGTERM, "torchrun", None),
    "SIGTERM to rank 0": (signal.SIGTERM, "rank", 0),
    "Ctrl-C": (signal.SIGINT, "torchrun", None),
    "SIGINT to rank 1": (signal.SIGINT, "rank", 1),
    "SIGUSR1 to rank 0": (signal.SIGUSR1, "rank", 0),
    "SIGSTOP of rank 1 until the timeout": (signal.SIGSTOP, "rank", 1),
}


def fill_and_free(run):
    """Fills the disk to the last byte, until a save has failed."""
    failures = run.text().count(FAILED)
    filler = run.out / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in 1 << 20, 1 << 12, 1:
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass
    run.wait(lambda: run.text().count(FAILED) > failures, 60)
    filler.unlink()


def disturb(run, what, moment, rng):
    """Waits for the moment, disturbs the run and, except with a full disk, waits for its end.
    Returns (what was seen, list of problems)."""
    before = run.last_step()
    starting = before >= moment
    if starting:                                             # at most as long as a start takes
        run.wait(lambda: run.last_step() != before, 8 * rng.random())
    else:
        run.wait(lambda: run.last_step() >= moment, 120)
        time.sleep(0.1 * rng.random())                       # anywhere in a step
    when = f"step {run.last_step():>3}" + " (starting)" * starting
    if run.ended():
        return when, ["the run had ended: " + run.text()[-500:]]
    if what == FULL:
        fill_and_free(run)
        return when, ["ended: " + run.text()[-500:]] * run.ended()

    signum, kind, rank = SIGNALS[what]
    before = len(run.text())
    # While the run starts, it may not have ranks yet.
    run.wait(lambda: any(each.kind == kind for each in run.processes()), 60)
    began = time.monotonic()
    run.send(signum, kind, rank)
    if signum == signal.SIGSTOP:                             # else torchrun waits 30 s for the rank
        run.wait(lambda: "in time" in run.text()[before:], 60)
        run.send(signal.SIGCONT, kind, rank)
    problems = run.wait_for_end(60)
    seconds = time.monotonic() - began
    if seconds > 20:
        problems.append(f"gone after {seconds:.0f} s")
    lost = run.last_step() - max(steps_kept(run.out), default=0)
    asked = signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) and not starting
    if lost > (0 if asked else 10 + 10 * run.text().count(FAILED)):
        problems.append("too many steps lost")
    if run.has_traceback():
        problems.append("a traceback")
    said = re.findall(r"^train.py: .*|^Done.*", run.text()[before:], re.MULTILINE)
    if len(said) > 1:
        problems.append("said more than once")
    return f"{when}, gone after {seconds:.1f} s, {lost} steps lost, said {said}", problems


def compare(whole, out):
    """Returns the differences of two finished runs, a list of texts."""
    wrong = beside.other_bits(whole, out)
    for file in sorted((whole / "model").iterdir()):
        other = out / "model" / file.name
        if not other.exists() or other.read_bytes() != file.read_bytes():
            wrong.append(f"another {file.name}")
    # A step that was lost and repeated has two lines in the log, which must agree.
    logs = []
    for folder in whole, out:
        logs.append({(line["step"], line["mlm_loss"], line["nsp_loss"])
                     for line in beside.lines_of(folder, "train")})
    if logs[0] != logs[1]:
        wrong.append(f"the logs differ in {sorted(logs[0] ^ logs[1])}")
    return wrong


def main(seed, folder, shards):
    """Prints a line for each disturbance, then the verdict. Returns the exit status."""
    rng = random.Random(seed)
    began = time.monotonic()
    whole = folder / "whole"
    out = folder / "out"
    flags = [*ARGV, "--data", shards]
    wrong = Run(whole, flags).wait_for_end(300)
    out.mkdir()
    names = list(SIGNALS)
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            names.append(FULL)
            hosts.run("mount", "-t", "tmpfs", "-o", "size=60m", "none", out)
            stack.callback(hosts.run, "umount", "--lazy", out)
        names = (names * 3)[:DISTURBANCES]                   # each at least twice
        rng.shuffle(names)
        moments = sorted(rng.sample(range(STEPS - 30), DISTURBANCES))
        run = Run(out, flags)
        stack.callback(run.kill)
        for what, moment in zip(names, moments):
            seen, problems = disturb(run, what, moment, rng)
            wrong += problems
            print(f"{what}: {seen}", *problems, sep="  WRONG: ", flush=True)
            if run.ended():
                run = run.again()
                stack.callback(run.kill)
        wrong += run.wait_for_end(300)
        wrong += [str(path) for path in out.rglob("unfinished")]
        if "Done after" in run.text():
            wrong += compare(whole, out)
        else:
            wrong.append(run.text()[-1000:])
    print(f"seed {seed}, {time.monotonic() - began:.0f} s: "
          + ("; ".join(wrong) or "equal bit for bit, no example lost or repeated, nothing left"))
    return len(wrong) > 0
