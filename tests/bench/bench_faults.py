"""What a run survives: the faults that one Linux machine can make, and what came of each, a table.

    sudo python tests/bench/bench_faults.py          # an hour; without root it leaves some out
    python tests/bench/bench_faults.py kill-rank ends          # some of them; --list names all
    python tests/bench/bench_faults.py --soak 1      # one run, disturbed 20 times: see soak.py

Each fault strikes a real run of train.py, mostly on two ranks under torchrun, from outside or by
faulty.py. Then the same command is given again and must end with the weights of a run that nothing
disturbed. Columns: seconds from the fault until it was said, and until the last process was gone;
steps done again; the largest difference of the final weights.
"""
import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import data  # noqa: E402
from tests.bench import hosts, soak  # noqa: E402
from tests.bench.faulty import Run, lines_of  # noqa: E402
from tests.conftest import make_documents  # noqa: E402

BASE = ("--steps 24 0 --batch 64 --micro-tokens 512 --precision fp32 --save-every 5 "
        "--timeout 10").split()
PORT = 29533
HOURS = 0.1                      # of the case "hours"; one percent of it is 3.6 s


@dataclasses.dataclass
class Case:
    """A fault: what it is, what must be said, how the run must end."""
    fault: str
    says: str = ""               # a line that must be printed (a regular expression)
    ends: str = "fails"          # "stops" with a checkpoint of the last step, "goes on" to the end;
                                 # "refused": before it takes a step
    inject: str = ""             # by faulty.py, in the run
    act: Callable = None         # or from outside, when step 7 is done or the injected fault began
    before: Callable = None      # changes the folders (out, shards) before the run
    argv: str = ""               # more flags
    ranks: int = 2               # 0: without torchrun
    options: str = ""            # of torchrun
    hosts: str = ""              # two nodes of one rank each, see Bench.nodes
    disk: int = 0                # MB of a small disk of its own for the results
    most: int = 1                # how often the line is printed, at most
    trace: bool = False          # the product's own traceback is expected
    lost: int = 5                # steps, at most
    limit: int = 20              # seconds until every process must be gone
    same: bool = True            # the weights end as those of the undisturbed run
    check: Callable = None       # what is wrong besides, a text, of (run)
    gpus: int = 0                # how many it needs


FORWARD = "bert.BertForPreTraining.forward"                  # 4 calls a step and rank
PRODUCT = r'File ".*/(train|dist|data|bert|optim)\.py"'      # in a traceback
ERROR = "^RuntimeError: an injected error"
LOST = r"train.py: rank [\d?].* died or did not answer"
LOST_1 = "train.py: .*rank 1 died or did not answer"
STOPPED = r"^train.py: .*stopped after step \d+; the same command resumes"
DAMAGED = "warning: .*24.pt is damaged"
RESUMED = "resuming from the checkpoint of step"
TERM, KILL, STOP, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT


# ----- Acts from outside, and what is changed before a run -----

def send(signum, kind="torchrun", rank=None):
    return lambda run: run.send(signum, kind, rank)


def interrupt_twice(run):
    run.interrupt()
    time.sleep(0.3)
    run.interrupt()


def free_disk(run):
    """Frees the disk when a failed save was reported."""
    run.wait(lambda: "no checkpoint of step" in run.text(), 60)
    (run.out / "filler").unlink()


def second_run(run):
    """Starts the same once more; what it says counts as said by the first."""
    other = run.again()
    other.wait_for_end(60)
    with open(run.said, "a") as file:
        file.write(other.text())


def restart_agent(run):
    """kill -9 of the torchrun of node 1, which somebody then starts again."""
    agent = run.roots.pop(1)
    agent.kill()
    agent.wait()
    run.start(run.commands[1])


def node_dies(node):
    def act(run):
        for process in run.processes():
            of_node = process.rank == node and process.kind == "rank"
            if process.pid == run.roots[node].pid or of_node:
                os.kill(process.pid, KILL)
    return act


def cut_link(run):
    hosts.run("ip", "-n", hosts.NAMES[0], "link", "set", *hosts.LINK, "down")


def mend_link(*_):
    hosts.run("ip", "-n", hosts.NAMES[0], "link", "set", *hosts.LINK, "up")


def cut_link_for_4_s(run):
    cut_link(run)
    time.sleep(4)
    mend_link()


def slow_link(bench, out, shards):
    for inside in hosts.INSIDE:
        hosts.limit("100mbit", inside)


def take_a_core(run):
    """From half of the time on, another program computes as well."""
    pid = [process.pid for process in run.processes() if process.kind == "rank"][0]
    age = float(Path("/proc/uptime").read_text().split()[0])
    age -= int(Path(f"/proc/{pid}/stat").read_text().split()[21]) / os.sysconf("SC_CLK_TCK")
    run.born = time.time() - age
    run.wait(lambda: False, 1800 * HOURS - age)
    busy = f"import time\nwhile time.monotonic() < {time.monotonic() + 1800 * HOURS}: pass"
    run.busy = subprocess.Popen([sys.executable, "-c", busy])


def finished(bench, out, shards):
    shutil.copytree(bench.reference(), out)


def damage(name, change):
    """Returns what copies a finished run's folder and changes one file of it, or one of shards."""
    def before(bench, out, shards):
        finished(bench, out, shards)
        change(min([*out.glob(name), *shards.glob(name)]))
    return before


def cut_in_half(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_all(path):
    for checkpoint in path.parent.glob("step-*.pt"):
        flip_bit(checkpoint)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/thriftbert-evil",)


def make_evil(path):
    flip_all(path)
    torch.save({"step": 24, "x": Evil()}, path)


def leave_a_file(bench, out, shards):
    out.mkdir(parents=True)
    (out / "step-000005-backup.pt").write_bytes(b"not ours")


def finish_on_node_1(bench, out, shards):
    (out.parent / "disk0").mkdir()
    shutil.copytree(bench.reference(), out.parent / "disk1/out")


# ----- What else is checked, after a run -----

def steps_missing(run):
    steps = sorted({line["step"] for line in lines_of(run.out)})
    return "" if steps == [*range(1, 25)] else f"metrics.jsonl has steps {steps}"


def one_step_skipped(run):
    skipped = [line["skipped"] for line in lines_of(run.out)]
    return "" if skipped == [0] * 6 + [1] * 18 else f"skipped steps: {skipped}"


def losses_differ(run):
    """Compares the losses with those of another number of ranks."""
    losses = []
    for out in run.out, run.out.parent.parent / "reference":
        losses.append(torch.tensor([line["mlm_loss"] for line in lines_of(out)]))
    ours, theirs = losses
    if len(ours) == len(theirs) and torch.allclose(ours, theirs, rtol=1e-5, atol=0):
        return ""
    return f"other losses: {ours} {theirs}"


def ends_late(run):
    run.busy.kill()
    share = (time.time() - run.born) / (3600 * HOURS)
    return "" if 0.99 < share < 1.01 else f"it took {share:.1%} of the hours"


def good_ends(count):
    """Returns a check that the same run ends well so many times."""
    def check(run):
        for number in range(count):
            shutil.rmtree(run.out)
            run = run.again()
            left = run.wait_for_end(120)
            if left or any(run.codes()) or "terminate called" in run.text():
                return f"end {number}: {left} {run.text()[-300:]}"
        return ""
    return check


# ----- The table -----

def other_flag(flag):
    name = flag.split()[0][2:]
    return Case(f"rank 1 has {flag}", f"rank 1 was started differently.*{name.replace('-', '.')}",
                "refused", f"flags 1 1 train.parse_arguments {flag}")


def other_ranks(before, after):
    def stop(bench, *folders):
        bench.train(*folders, before, "--max-steps 12")
    return Case(f"resumed on {after} rank(s), not {before}", RESUMED + " 12", "goes on",
                before=stop, ranks=after, same=False, check=losses_differ)


DIFFERENT = ("--bucket-mb 0.5", "--save-every 7", "--max-steps 9", "--seed 1", "--lr-scale 2",
             "--micro-tokens 256", "--hours 1")
HOURS_CASE = Case("--hours, and another program takes a core halfway", "", "goes on",
                  act=take_a_core, check=ends_late, same=False, limit=400,
                  argv=f"--steps 2300 400 --save-every 300 --hours {HOURS}")
CASES = {
    # Ends that something else makes
    "kill-rank": Case("kill -9 of rank 1", LOST_1, act=send(KILL, "rank", 1)),
    "kill-rank-0": Case("kill -9 of rank 0 of 8", "rank 0 died",
                        act=send(KILL, "rank", 0), ranks=8, limit=9, same=False),
    "restart": Case("kill -9 of rank 1, --max-restarts=1", RESUMED, "goes on",
                    act=send(KILL, "rank", 1), options="--max-restarts=1"),
    "kill-torchrun": Case("kill -9 of torchrun", STOPPED, "stops", act=send(KILL)),
    "kill-torchrun-early": Case("the same before step 1", STOPPED, "stops",
                                "pause * 1 train.build 2", send(KILL)),
    "stop-rank": Case("SIGSTOP of rank 1; torchrun waits 30 s more than --timeout", LOST_1,
                      act=send(STOP, "rank", 1), limit=50),
    "kill-mid-save": Case("kill -9 while a checkpoint is written", inject="kill 0 3 os.fsync",
                          lost=10),
    "slow-save": Case("SIGTERM, and the save takes longer than torchrun waits", "", "fails",
                      "pause 0 3 os.fsync 60", send(TERM), lost=10,
                      options="--shutdown-timeout=3"),
    # Requests to stop
    "term": Case("SIGTERM to torchrun", STOPPED, "stops", act=send(TERM)),
    "term-evaluation": Case("the same in evaluation", STOPPED, "stops",
                            "pause * 1 train.evaluate 2", send(TERM)),
    "term-early": Case("the same before step 1", STOPPED, "stops", "pause * 1 train.build 2",
                       send(TERM)),
    "term-verify": Case("the same while shards are checked", STOPPED, "stops",
                        "pause * 1 data.verify 2", send(TERM)),
    "hangup": Case("the terminal is closed", STOPPED, "stops", act=send(signal.SIGHUP)),
    "usr1": Case("SIGUSR1 to rank 1", STOPPED, "stops", act=send(signal.SIGUSR1, "rank", 1)),
    "interrupt": Case("Ctrl-C", STOPPED, "stops", act=Run.interrupt),
    "interrupt-twice": Case("Ctrl-C twice", act=interrupt_twice),
    "interrupt-rank": Case("SIGINT to rank 1 alone", STOPPED, "stops", act=send(INT, "rank", 1)),
    "interrupt-alone": Case("Ctrl-C, without torchrun", STOPPED, "stops", ranks=0,
                            act=Run.interrupt),
    "interrupt-alone-twice": Case("Ctrl-C twice, without torchrun", ranks=0, act=interrupt_twice),
    # Errors in the program
    "raise": Case("an exception on rank 1", ERROR, "fails", "raise 1 7 optim.learning_rate",
                  trace=True),
    "raise-both": Case("the same on both ranks", ERROR, "fails", "raise * 7 optim.learning_rate",
                       trace=True),
    "raise-alone": Case("an exception without torchrun", ERROR, "fails",
                        "raise 0 7 optim.learning_rate", ranks=0, trace=True),
    "raise-ahead": Case("an exception in the thread of rank 1 that makes batches", ERROR, "fails",
                        "raise 1 27 data.PretrainingData.batch", trace=True),
    "raise-evaluation": Case("an exception in evaluation, on rank 1", ERROR, "fails",
                             "raise 1 1 train.evaluate", trace=True),
    "raise-save": Case("an exception in a checkpoint, on rank 0", ERROR, "fails",
                       "raise 0 2 train.numbers_of", trace=True),
    "memory": Case("out of memory on rank 1", "--micro-tokens", "fails", f"memory 1 1 {FORWARD} 40",
                   argv="--batch 512 --micro-tokens 8192"),
    # Numbers
    "nan-gradient": Case("NaN in a gradient of rank 1", "", "goes on",
                         f"gradient 1 25 {FORWARD} nan", same=False, check=one_step_skipped),
    "overflow": Case("a gradient overflows in every step", r"step \d+: the gradients are not",
                     "fails", f"gradient 1 25 {FORWARD} inf", same=False),
    "nan-weights": Case("NaN in a weight", "step 10: weights .*not finite", "fails",
                        "weight * 8 optim.copy_to_model nan"),
    "nan-weights-1": Case("NaN in a weight of rank 1", "step 10: weights .*not finite", "fails",
                          "weight 1 8 optim.copy_to_model nan"),
    "drift": Case("a weight of rank 1 drifts", "rank 1 has other weights after step 10", "fails",
                  "weight 1 8 optim.copy_to_model 1e-3"),
    "clock": Case("a clock that jumps by days", "", "goes on", "clock * 1 train.build"),
    "hours": HOURS_CASE,
    "hours-alone": dataclasses.replace(HOURS_CASE, ranks=0),
    "ends": Case("50 good ends of 3 ranks", "", "goes on", ranks=3, argv="--steps 2 0", same=False,
                 check=good_ends(49)),
    # Other arguments and data on one rank, other runs
    **{f"flags-{flag.split()[0][2:]}": other_flag(flag) for flag in DIFFERENT},
    "refused-flag": Case("a flag that only node 1 refuses", "--seed.*'x'", "refused",
                         "flags 1 1 train.parse_arguments --seed x", hosts="local"),
    "other-model": Case("--model mini in a folder of tiny", "of another run: .*model tiny",
                        "refused", before=finished, argv="--model mini"),
    "two-runs": Case("another run is started in the same --out", "^train.py: .*another run writes",
                     "goes on", "pause * 7 optim.learning_rate 20", second_run),
    "ranks-2-1": other_ranks(2, 1),
    "ranks-1-2": other_ranks(1, 2),
    "ranks-2-4": other_ranks(2, 4),
    "three-shards": Case("3 shards, 2 ranks", "", "goes on", same=False,
                         before=lambda bench, out, shards: bench.prepare(shards, 3)),
    # Disks and files
    "full-save": Case("the disk is full in a save, then free", "no checkpoint of step 10",
                      "goes on", "fill 0 7 optim.learning_rate {out}/filler", free_disk, disk=60,
                      check=steps_missing),
    "full-export": Case("the disk is full in the export", "model.*No space|No space.*model",
                        "fails", "fill 0 1 bert.save_huggingface {out}/filler", disk=60),
    "read-only": Case("--out cannot be written", "Read-only file system", "refused", disk=60,
                      before=lambda bench, out, shards: hosts.run(
                          "mount", "-o", "remount,ro", out)),
    "cut": Case("the newest checkpoint is cut in half", DAMAGED, "goes on",
                before=damage("*24.pt", cut_in_half)),
    "flip": Case("one flipped bit in it", DAMAGED, "goes on", before=damage("*24.pt", flip_bit)),
    "all-bad": Case("every checkpoint is damaged", "no checkpoint .* is whole", "refused",
                    before=damage("*24.pt", flip_all)),
    "pickle": Case("a pickle that runs code as a checkpoint", "no checkpoint .* is whole",
                   "refused", before=damage("*24.pt", make_evil),
                   check=lambda run: "it ran" * Path("/tmp/thriftbert-evil").exists()),
    "backup": Case("a file step-000005-backup.pt", "", "goes on", before=leave_a_file,
                   check=lambda run: "removed" * (not [*run.out.glob("*backup.pt")])),
    "metrics": Case("metrics.jsonl is damaged", RESUMED, "goes on",
                    before=damage("metrics.jsonl", flip_bit)),
    "shard-flip": Case("one flipped bit in a shard", "train-00001.tokens", "refused",
                       before=damage("train-00001.tokens*", flip_bit)),
    "shard-cut": Case("a shard is truncated", "train-00001.tokens", "refused",
                      before=damage("train-00001.tokens*", cut_in_half)),
    "shard-missing": Case("a shard is missing", "train-00001.tokens", "refused",
                          before=damage("train-00001.tokens*", Path.unlink)),
    "manifest": Case("one flipped bit in manifest.json", "manifest.json", "refused",
                     before=damage("manifest.json", flip_bit)),
    "port": Case("the port is taken", "EADDRINUSE|in use", "refused", hosts="one", most=99,
                 before=lambda bench, out, shards: bench.take_port()),
    # Two nodes
    "unequal-nodes": Case("nodes of 1 and 3 ranks", "set the same --nproc_per_node", "refused",
                          hosts="unequal"),
    "newer-elsewhere": Case("ranks numbered otherwise: node 1's disk has step 24, node 0's none",
                            "rank 1: step 24 is in .* here", "refused", hosts="disks",
                            before=finish_on_node_1),
    "node-term": Case("SIGTERM to one of two nodes", STOPPED, "stops", hosts="local",
                      options="--max-restarts=2", act=lambda run: run.roots[1].terminate()),
    "node-kill": Case("kill -9 of the rank on node 1", LOST_1, hosts="local",
                      act=send(KILL, "rank", 1)),
    "node-0-dies": Case("all of node 0 is killed, the store with it", LOST, hosts="local",
                        act=node_dies(0)),
    "node-1-dies": Case("all of node 1 is killed", LOST_1, hosts="local", act=node_dies(1)),
    "node-link": Case("two hosts, 10 good ends", "", "goes on", hosts="links",
                      check=good_ends(9)),
    "node-restart": Case("kill -9 of a rank of two hosts, --max-restarts=2", RESUMED, "goes on",
                         hosts="links", options="--max-restarts=2", act=send(KILL, "rank", 1)),
    "node-restart-0": Case("the same of rank 0", RESUMED, "goes on", hosts="links",
                           options="--max-restarts=2", act=send(KILL, "rank", 0)),
    "node-agent": Case("kill -9 of a host's torchrun, which is started again", RESUMED, "goes on",
                       hosts="links", options="--max-restarts=2", act=restart_agent),
    "node-agent-c10d": Case("the same under --rdzv_backend=c10d", RESUMED, "goes on", hosts="c10d",
                            options="--max-restarts=2", act=restart_agent),
    "link-cut": Case("the link between two hosts is cut", LOST, hosts="links", act=cut_link,
                     most=2, limit=40),
    "link-4s": Case("the link is cut for 4 s", "", "goes on", hosts="links", act=cut_link_for_4_s),
    "slow-link": Case("a link of 100 Mb/s", "", "goes on", hosts="links", before=slow_link),
    # What needs a GPU: NCCL's own ways to end
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

class Bench:
    """Folders, and the undisturbed runs that the others are compared with."""

    def __init__(self, folder):
        self.folder = folder
        self.references = {}
        self.sockets = []
        self.shards = folder / "shards"
        self.prepare(self.shards, 4)

    def prepare(self, folder, shards):
        shutil.rmtree(folder, ignore_errors=True)
        data.prepare(make_documents(), folder, vocab_size=320, shards=shards)

    def train(self, out, shards, ranks, more, gpus=0):
        """Trains without a fault, to the end or as the flags `more` say."""
        run = Run(out, [*BASE, *more.split(), "--data", shards, "--out", out], ranks, gpus=gpus)
        if run.wait_for_end(300) or any(run.codes()):
            sys.exit(f"the undisturbed run failed:\n{run.text()}")

    def reference(self, ranks=2, more="", gpus=0):
        """Returns the folder of an undisturbed run."""
        key = ranks, more, gpus
        if key not in self.references:
            number = len(self.references) or ""
            self.references[key] = self.folder / f"reference{number}"
            self.train(self.references[key], self.shards, *key)
        return self.references[key]

    def take_port(self):
        self.sockets.append(socket.create_server(("127.0.0.1", PORT)))

    def nodes(self, how, folder):
        """Returns the nodes as Run takes them. one: a node without --standalone; local: two on this
        host; unequal: with 1 and 3 ranks; c10d: torchrun's other rendezvous; disks: each with a
        disk of its own; links: on two hosts."""
        nodes = []
        address = "127.0.0.1"
        if how == "links":
            address = f"{hosts.ADDRESS}1"
        for node in range(2):
            prefix = []
            place = ROOT
            meeting = [f"--node_rank={node}", f"--master_addr={address}", f"--master_port={PORT}"]
            if how == "c10d":    # torch 2.13: without it a torchrun cannot join those that restart
                prefix = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
                meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint={address}:{PORT}",
                           "--rdzv_id=faults", f"--rdzv_conf=is_host={1 - node}"]
            elif how == "disks":
                place = folder / f"disk{node}"
            elif how == "links":
                prefix = hosts.INSIDE[node]
            elif how == "unequal":
                meeting.append(f"--nproc_per_node={1 + 2 * node}")
            nodes.append((prefix, place, meeting))
        return nodes[:{"": 0, "one": 1}.get(how, 2)]

    def run(self, name, case):
        """Returns the table's cells of a case and a list of what is wrong."""
        out = self.folder / name / "out"
        shards = self.folder / name / "shards"
        shutil.copytree(self.shards, shards)
        with contextlib.ExitStack() as stack:
            if case.disk:
                out.mkdir()
                hosts.run("mount", "-t", "tmpfs", "-o", f"size={case.disk}m", "none", out)
                stack.callback(subprocess.run, ["umount", "--lazy", out])
            if case.hosts == "links":
                stack.enter_context(hosts.two_hosts())
            if case.before:
                case.before(self, out, shards)
            written = out
            nodes = self.nodes(case.hosts, out.parent)
            if case.hosts == "disks":                        # each node has an `out` of its own
                written = "out"
                out = out.parent / "disk0/out"
            run = Run(out, [*BASE, *case.argv.split(), "--data", shards, "--out", written],
                      case.ranks, case.inject.format(out=out), case.options.split(), nodes,
                      case.gpus)
            stack.callback(run.kill)
            cells, wrong = self.watch(case, run)
        for taken in self.sockets:
            taken.close()
        return cells, wrong

    def watch(self, case, run):
        """Lets the fault happen, and the same command run again; returns as `run` does."""
        wrong = []
        lost = ""
        difference = ""
        # 1. The fault
        began = run.last_step()
        struck = time.time()
        if case.inject:
            if not run.wait(run.fault_mark.exists, 120):
                wrong.append("the fault never struck")
            struck = time.time()
        elif case.act and not run.wait(lambda: run.last_step() >= 7, 120):
            wrong.append("never came to step 7")
        if case.act:
            struck = time.time()
            case.act(run)

        # 2. What is said, and how the run ends
        says = re.compile(case.says or "(?!)", re.MULTILINE)
        run.wait(lambda: says.search(run.text()), 90)
        noticed = time.time() - struck
        wrong += run.wait_for_end(max(90, case.limit))
        gone = time.time() - struck
        text = run.text()
        if case.ends != "goes on" and gone > case.limit:
            wrong.append(f"gone after {gone:.0f} s")
        found = [line for line in text.splitlines() if says.search(line)]
        if case.says and not 1 <= len(found) <= case.most:
            wrong.append(f"said {len(found)} times: {case.says}")
        if bool(re.search(PRODUCT, text)) != case.trace:
            wrong.append("no traceback" if case.trace else "a traceback")
        if "terminate called" in text:
            wrong.append("aborted")
        done = "Done after step" in text
        as_it_must = not done and all(run.codes())
        if case.ends == "goes on":
            as_it_must = done and not any(run.codes())
        if not as_it_must:
            said = re.findall("^train.py: .*", text, re.MULTILINE) or [text.strip()[-300:]]
            wrong.append(f"ended with {run.codes()}: {said}")
        if case.ends == "refused" and run.last_step() > began:
            wrong.append("trained")

        # 3. The same command again
        last = run.last_step()
        if case.ends in ("fails", "stops"):
            (run.out / "filler").unlink(missing_ok=True)
            if case.hosts == "links":
                mend_link()
            second = run.again()
            wrong += second.wait_for_end(120)
            done = "Done after step" in second.text()
            if not done or any(second.codes()):
                wrong.append(f"the same command fails: {second.text().strip()[-300:]}")
            resumed = re.search(RESUMED + r" (\d+)", second.text())
            lost = last - int(resumed[1] if resumed else 0)
            if lost > (case.lost if case.ends == "fails" else 0):
                wrong.append(f"{lost} steps lost")

        # 4. What came of it
        problem = case.check(run) if case.check else ""
        wrong += [problem] * bool(problem)
        if done and case.same:
            difference = self.difference(case, run.out)
            if difference:
                wrong.append("other weights")
        if [*run.out.parent.rglob("unfinished")]:
            wrong.append("left: unfinished")
        said = f", `{found[0].strip()[:150]}`" if found else ""
        return [f"status {run.codes()}{said}", f"{noticed:.1f}" if found else "", f"{gone:.1f}",
                str(lost), str(difference)], wrong

    def difference(self, case, out):
        """Returns the largest difference of a weight or moment at the end from those of the
        undisturbed run."""
        reference = self.reference(min(case.ranks, 2), case.argv, case.gpus)
        ours, theirs = (torch.load(folder / "step-00000024.pt", weights_only=True)["tensors"]
                        for folder in (out, reference))
        # torch's max, since Python's passes over NaN.
        most = [(ours[name] - theirs[name]).abs().max() for name in theirs]
        return float(torch.stack(most).max())


def skip(case):
    """Returns why a case cannot be run here, or an empty text."""
    if case.gpus > torch.cuda.device_count():
        return f"needs {case.gpus} GPU(s)"
    return "needs root" if os.geteuid() and (case.disk or case.hosts == "links") else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--list", action="store_true", help="print the names of all")
    parser.add_argument("--soak", type=int, metavar="SEED", help="disturb one run 20 times instead")
    args = parser.parse_args()
    if args.list:
        return print(*CASES, sep="\n")
    for signum in TERM, INT:                                 # so that all is cleaned up then, too
        signal.signal(signum, lambda *_: sys.exit(1))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        bench = Bench(Path(folder))
        if args.soak is not None:
            sys.exit(soak.main(args.soak, bench.folder, bench.shards))
        bench.reference()
        print("| fault | seen | said after, s | gone after, s | steps lost | weights differ by | "
              "verdict |\n|---|---|---|---|---|---|---|")
        for name in args.names or CASES:
            case = CASES[name]
            verdict = f"skipped: {skip(case)}"
            cells = [""] * 5
            if not skip(case):
                cells, wrong = bench.run(name, case)
                verdict = "; ".join(wrong) or "ok"
                failed += bool(wrong)
            print("|", " | ".join([f"{name}: {case.fault}", *cells, verdict]), "|", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
