"""What does a run survive? A table of faults that one Linux machine can cause and no test covers.

    sudo python tests/bench/bench_faults.py            # half an hour
    python tests/bench/bench_faults.py kill-rank ends          # some of them; --list names all
    python tests/bench/bench_faults.py --soak 1        # one run, disturbed 20 times: see soak.py

Each fault strikes a real run of train.py, mostly of two ranks under torchrun, from outside or by
faulty.py. If it ends the run, the same command is started again, unless it would be refused again.
A finished run must have the checkpoint of an undisturbed one, bit for bit, except in
`kill-rank-0`, `hours` and `ends`. Faults on two hosts are skipped without root, and faults on GPUs
without enough GPUs.

    seen              exit statuses, and the line that reports the fault
    said after, s     seconds from the fault to that line
    gone after, s     seconds from the fault to the end of the last process
    steps lost        steps that the second start repeats
    verdict           "ok", or what is wrong

Faults with the same outcome in one process or without torchrun are tests: tests/test_stops.py,
test_checkpoints.py, test_program.py, test_train_loop.py and others cover damaged files, full disks,
wrong flags, different numbers of ranks, NaN and exceptions.
"""
import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

import beside
import hosts
import soak
import torch
from faulty import TORCHRUN, Run

import data
from tests.conftest import make_documents

BASE = ("--steps 24 0 --batch 64 --micro-tokens 512 --precision fp32 --save-every 5 "
        "--timeout 10").split()
PORT = 29533
HOURS = 0.1                      # for the case "hours"; 1 % of it is 3.6 s


@dataclasses.dataclass
class Case:
    """A fault, the message it must cause, and how the run must end."""
    fault: str
    says: str = ""               # a line that must be printed, as a regular expression
    ends: str = "fails"          # "stops" with a checkpoint of the last step, "goes on" to the end,
                                 # or is "refused", as the same command would be again
    inject: str = ""             # a fault inside the run, for faulty.py
    act: Callable = None         # a fault from outside, after step 7 or after `inject`
    argv: str = ""               # more flags of train.py
    ranks: int = 2               # 0: without torchrun
    options: str = ""            # flags of torchrun
    nodes: str = ""              # two nodes of one rank each, see `launchers`
    most: int = 1                # how many times the line may be printed
    trace: bool = False          # whether the five files print a traceback
    limit: int = 20              # seconds until every process must be gone
    same: bool = True            # whether it ends with the undisturbed run's bits
    check: Callable = None       # (run) -> list of texts: what else is wrong
    gpus: int = 0                # how many the case needs


ERROR = "^RuntimeError: an injected error"
LOST = r"train.py: rank [\d?].* died or did not answer"
LOST_1 = "train.py: .*rank 1 died or did not answer"
STOPPED = r"^train.py: .*stopped after step \d+; the same command resumes"
RESUMED = "resuming from the checkpoint of step"
TERM, KILL, STOP, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT
LOST_STEPS = 5                   # the most, from one checkpoint to the next


# ----- Acts from outside -----

def send(signum, kind="torchrun", rank=None):
    return lambda run: run.send(signum, kind, rank)


def interrupt_twice(run):
    run.send(INT, "torchrun")
    time.sleep(0.3)
    run.send(INT, "torchrun")


def restart_agent(run):
    """Kills the torchrun of node 1 with SIGKILL, and starts it again."""
    agent = run.roots.pop(1)
    agent.kill()
    agent.wait()
    run.start(run.commands[1])


def node_dies(node):
    def act(run):
        run.roots[node].kill()
        run.send(KILL, "rank", node)
    return act


def set_link(state):
    hosts.run("ip", "-n", hosts.NAMES[0], "link", "set", *hosts.LINK, state)


def cut_link_for_4_s(run):
    set_link("down")
    time.sleep(4)
    set_link("up")


# ----- What else is checked, after a run -----

def ends_in_time(run):
    share = (time.monotonic() - run.began) / (3600 * HOURS)
    return [] if 0.99 < share < 1.01 else [f"it took {share:.1%} of the hours"]


def good_ends(count):
    """Returns a check that starts the same run `count` more times; each must end well."""
    def check(run):
        for number in range(count):
            shutil.rmtree(run.out)
            run = run.again()
            wrong = run.wait_for_end(120)
            if wrong or any(run.codes()):
                return [f"end {number}: {wrong} {run.text()[-300:]}"]
        return []
    return check


# ----- The table -----

CASES = {
    # Killed and stopped processes
    "kill-rank": Case("kill -9 of rank 1", LOST_1, act=send(KILL, "rank", 1)),
    "kill-rank-0": Case("kill -9 of rank 0 of 8", "rank 0 died",
                        act=send(KILL, "rank", 0), ranks=8, limit=9, same=False),
    "restart": Case("kill -9 of rank 1, --max-restarts=1", RESUMED, "goes on",
                    act=send(KILL, "rank", 1), options="--max-restarts=1"),
    "kill-torchrun": Case("kill -9 of torchrun", STOPPED, "stops", act=send(KILL)),
    "kill-torchrun-early": Case("kill -9 of torchrun before step 1", STOPPED, "stops",
                                "pause * 1 train.build 2", send(KILL)),
    "stop-rank": Case("SIGSTOP of rank 1; torchrun waits 30 s more than --timeout", LOST_1,
                      act=send(STOP, "rank", 1), limit=50),
    "kill-mid-save": Case("kill -9 while a checkpoint is written", inject="kill 0 3 os.fsync"),
    "slow-save": Case("SIGTERM, and the save takes longer than torchrun waits", "", "fails",
                      "pause 0 3 os.fsync 60", send(TERM), options="--shutdown-timeout=3"),
    # Requests to stop
    "term": Case("SIGTERM to torchrun", STOPPED, "stops", act=send(TERM)),
    "term-evaluation": Case("the same in evaluation", STOPPED, "stops",
                            "pause * 1 train.evaluate 2", send(TERM)),
    "term-early": Case("the same before step 1", STOPPED, "stops", "pause * 1 train.build 2",
                       send(TERM)),
    "term-verify": Case("the same while shards are checked", STOPPED, "stops",
                        "pause * 1 data.verify 2", send(TERM)),
    "interrupt": Case("Ctrl-C", STOPPED, "stops", act=send(INT)),
    "interrupt-twice": Case("Ctrl-C twice", act=interrupt_twice),
    "interrupt-rank": Case("SIGINT to rank 1 alone", STOPPED, "stops", act=send(INT, "rank", 1)),
    "interrupt-alone": Case("Ctrl-C, without torchrun", STOPPED, "stops", ranks=0,
                            act=send(INT, None)),
    "hangup": Case("the terminal is closed", STOPPED, "stops", act=send(signal.SIGHUP)),
    # Errors, time, many ends
    "raise": Case("an exception on rank 1", ERROR, "fails", "raise 1 7 optim.learning_rate",
                  trace=True),
    "raise-both": Case("the same on both ranks", ERROR, "fails", "raise * 7 optim.learning_rate",
                       trace=True),
    "raise-evaluation": Case("an exception in evaluation, on rank 1", ERROR, "fails",
                             "raise 1 1 train.evaluate", trace=True),
    "raise-save": Case("an exception in a checkpoint, on rank 0", ERROR, "fails",
                       "raise 0 2 train.numbers_of", trace=True),
    "raise-ahead": Case("an exception in the thread of rank 1 that makes batches", ERROR, "fails",
                        "raise 1 27 data.PretrainingData.batch", trace=True),
    "memory": Case("out of memory on rank 1", "--micro-tokens", "fails",
                   "memory 1 1 bert.BertForPreTraining.forward 40",
                   argv="--batch 512 --micro-tokens 8192"),
    "hours": Case("--hours by a real clock", "", "goes on", ranks=0, same=False, limit=400,
                  argv=f"--steps 2300 400 --save-every 300 --hours {HOURS}", check=ends_in_time),
    "ends": Case("50 good ends of 3 ranks", "", "goes on", ranks=3, argv="--steps 2 0", same=False,
                 check=good_ends(49)),
    # Two nodes
    "flags-seed": Case("rank 1 has --seed 1", "rank 1 was started differently: seed 1", "refused",
                       "flags 1 1 train.parse_arguments --seed 1"),
    "flags-micro": Case("rank 1 has --micro-tokens 256", "rank 1 was started differently: micro_t",
                        "refused", "flags 1 1 train.parse_arguments --micro-tokens 256"),
    "refused-flag": Case("a flag that only node 1 refuses", "--seed.*'x'", "fails",
                         "flags 1 1 train.parse_arguments --seed x", nodes="local"),
    "node-term": Case("SIGTERM to one of two nodes", STOPPED, "stops", nodes="local",
                      options="--max-restarts=2", act=lambda run: run.roots[1].terminate()),
    "node-kill": Case("kill -9 of the rank on node 1", LOST_1, nodes="local",
                      act=send(KILL, "rank", 1)),
    "node-0-dies": Case("all of node 0 is killed, the store with it", LOST, nodes="local",
                        act=node_dies(0)),
    "node-1-dies": Case("all of node 1 is killed", LOST_1, nodes="local", act=node_dies(1)),
    "node-link": Case("two hosts, 10 good ends", "", "goes on", nodes="hosts",
                      check=good_ends(9)),
    "node-restart": Case("kill -9 of a rank of two hosts, --max-restarts=2", RESUMED, "goes on",
                         nodes="hosts", options="--max-restarts=2", act=send(KILL, "rank", 1)),
    "node-restart-0": Case("the same of rank 0", RESUMED, "goes on", nodes="hosts",
                           options="--max-restarts=2", act=send(KILL, "rank", 0)),
    "node-agent": Case("kill -9 of a host's torchrun, which is started again", RESUMED, "goes on",
                       nodes="hosts", options="--max-restarts=2", act=restart_agent),
    "node-agent-c10d": Case("the same under --rdzv_backend=c10d", RESUMED, "goes on", nodes="c10d",
                            options="--max-restarts=2", act=restart_agent),
    "link-cut": Case("the link between two hosts is cut", LOST, nodes="hosts", most=2, limit=40,
                     act=lambda run: set_link("down")),
    "link-4s": Case("the link is cut for 4 s", "", "goes on", nodes="hosts", act=cut_link_for_4_s),
    # On GPUs, where NCCL fails in its own ways
    "gpu-raise": Case("an exception, on a GPU", ERROR, "fails", "raise 0 7 optim.learning_rate",
                      ranks=0, trace=True, gpus=1),
    "gpu-memory": Case("out of memory, on a GPU", "--micro-tokens", "refused", ranks=0, gpus=1,
                       argv="--model large --batch 65536 --micro-tokens 4194304"),
    "gpu-kill-rank": Case("kill -9 of rank 1, over NCCL", LOST_1, gpus=2,
                          act=send(KILL, "rank", 1)),
    "gpu-stop-rank": Case("SIGSTOP of rank 1, over NCCL", LOST_1, gpus=2, limit=50,
                          act=send(STOP, "rank", 1)),
}


# ----- How a case is run -----

def launchers(case):
    """Returns the `launchers` of a case, for Run. case.nodes: "local", two nodes on this host;
    "c10d", the same with torchrun's c10d rendezvous; "hosts", one node on each of two hosts."""
    if not case.ranks:
        return [[sys.executable]]
    torchrun = [*TORCHRUN, *case.options.split()]
    if not case.nodes:
        return [[*torchrun, "--standalone", f"--nproc_per_node={case.ranks}"]]
    found = []
    address = f"{hosts.ADDRESS}1" if case.nodes == "hosts" else "127.0.0.1"
    for node in range(2):
        prefix = hosts.INSIDE[node] if case.nodes == "hosts" else []
        meeting = [f"--node_rank={node}", f"--master_addr={address}", f"--master_port={PORT}"]
        if case.nodes == "c10d":
            # torch 2.13: without it, a torchrun that is started again cannot rejoin.
            prefix = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
            meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint={address}:{PORT}",
                       "--rdzv_id=faults", f"--rdzv_conf=is_host={1 - node}"]
        found.append([*prefix, *torchrun, "--nnodes=2", "--nproc_per_node=1", *meeting])
    return found


class Bench:
    """A folder with shards, and with the undisturbed runs to compare others with."""

    def __init__(self, folder):
        self.folder = folder
        self.references = {}
        self.shards = folder / "shards"
        data.prepare(make_documents(), self.shards, vocab_size=320, shards=4)

    def start(self, name, case):
        """Starts the run of a case in a folder called `name`."""
        out = self.folder / name / "out"
        out.parent.mkdir()
        flags = [*BASE, *case.argv.split(), "--data", self.shards]
        return Run(out, flags, launchers(case), case.gpus, case.inject)

    def reference(self, case):
        """Returns the folder of an undisturbed run with the flags and ranks of a case."""
        key = min(case.ranks, 2), case.argv, case.gpus
        if key not in self.references:
            ranks, argv, gpus = key
            run = self.start(f"reference{len(self.references)}",
                             Case("none", ranks=ranks, argv=argv, gpus=gpus))
            if run.wait_for_end(300) or not run.done():
                sys.exit(f"the undisturbed run failed:\n{run.text()}")
            self.references[key] = run.out
        return self.references[key]

    def run(self, name, case):
        """Returns the middle cells of a case's row, and a list of what is wrong."""
        with contextlib.ExitStack() as stack:
            if case.nodes == "hosts":
                stack.enter_context(hosts.two_hosts())
            run = self.start(name, case)
            stack.callback(run.kill)
            return self.watch(case, run)

    def watch(self, case, run):
        """Waits for the fault and starts the same command again. Returns the same as `run`."""
        wrong = []
        lost = ""
        # 1. The fault
        if case.inject and not run.wait(run.fault_mark.exists, 120):
            wrong.append("the fault never struck")
        if case.act and not case.inject and not run.wait(lambda: run.last_step() >= 7, 120):
            wrong.append("never came to step 7")
        struck = time.monotonic()
        if case.act:
            case.act(run)

        # 2. The message and the end
        says = re.compile(case.says or "(?!)", re.MULTILINE)
        run.wait(lambda: says.search(run.text()), 90)
        noticed = time.monotonic() - struck
        wrong += run.wait_for_end(max(90, case.limit))
        gone = time.monotonic() - struck
        if case.ends != "goes on" and gone > case.limit:
            wrong.append(f"gone after {gone:.0f} s")
        found = [line for line in run.text().splitlines() if says.search(line)]
        if case.says and not 1 <= len(found) <= case.most:
            wrong.append(f"said {len(found)} times: {case.says}")
        if run.has_traceback() != case.trace:
            wrong.append("no traceback" if case.trace else "a traceback")
        if not (run.done() if case.ends == "goes on" else all(run.codes())):
            wrong.append(f"ended with {run.codes()}: {run.text()[-300:]}")
        if case.check:
            wrong += case.check(run)

        # 3. The same command again
        end = run
        if case.ends in ("fails", "stops"):
            last = run.last_step()
            if case.nodes == "hosts":
                set_link("up")
            end = run.again()
            wrong += end.wait_for_end(120)
            if not end.done():
                wrong.append(f"the same command fails: {end.text()[-300:]}")
            resumed = re.search(RESUMED + r" (\d+)", end.text())
            lost = last - int(resumed[1] if resumed else 0)
            if lost > (LOST_STEPS if case.ends == "fails" else 0):
                wrong.append(f"{lost} steps lost")

        # 4. The result
        if case.same and end.done():
            wrong += beside.other_bits(self.reference(case), run.out)
        if (run.out / "unfinished").exists():
            wrong.append("left: unfinished")
        said = f", `{found[0].strip()[:150]}`" if found else ""
        return [f"status {run.codes()}{said}", f"{noticed:.1f}" if found else "", f"{gone:.1f}",
                str(lost)], wrong


def skip(case):
    """Returns why a case cannot run here, or an empty text."""
    if case.gpus > torch.cuda.device_count():
        return f"needs {case.gpus} GPU(s)"
    return "needs root" if os.geteuid() and case.nodes == "hosts" else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--list", action="store_true", help="print the names of all")
    parser.add_argument("--soak", type=int, metavar="SEED", help="disturb one run 20 times instead")
    args = parser.parse_args()
    for name in args.names:
        if name not in CASES:
            parser.error(f"no fault is called {name}, see --list")
    if args.list:
        return print(*CASES, sep="\n")
    signal.signal(TERM, lambda *_: sys.exit(1))              # cleans up then, too
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        bench = Bench(Path(folder))
        if args.soak is not None:
            sys.exit(soak.main(args.soak, bench.folder, bench.shards))
        print("| fault | seen | said after, s | gone after, s | steps lost | verdict |\n"
              "|---|---|---|---|---|---|")
        for name in args.names or CASES:
            case = CASES[name]
            verdict = f"skipped: {skip(case)}"
            cells = [""] * 4
            if not skip(case):
                cells, wrong = bench.run(name, case)
                verdict = "; ".join(wrong) or "ok"
                failed += bool(wrong)
            print("|", " | ".join([f"{name}: {case.fault}", *cells, verdict]), "|", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
