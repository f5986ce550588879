"""What a run survives: the faults that one Linux machine can make, and what came of each, a table.

    python tests/bench/bench_faults.py   # 25 minutes; as root also slow and cut links
    python tests/bench/bench_faults.py kill-rank flags-seed   # some of them; --list names all
    python tests/bench/bench_faults.py --soak 1   # 200 steps, disturbed 20 times, see soak.py

Each fault strikes a real run of train.py, mostly on two ranks under torchrun, from outside or by
faulty.py. Then the same command is given again and must end with the weights of a run that nothing
disturbed. Columns: seconds from the fault until it was said, and until the last process was gone;
steps done again; the largest difference of the final weights.
"""
import argparse
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
import train  # noqa: E402
from tests.bench import soak  # noqa: E402
from tests.conftest import make_documents  # noqa: E402
from tests.bench.faulty import Run, lines_of, temporary_files  # noqa: E402

BASE = ("--steps 24 0 --batch 64 --micro-batch 8 --precision fp32 --checkpoint-every 5 "
        "--eval-every 12 --timeout 10").split()
LIMIT = 20                       # seconds in which every process must be gone
HOSTS = [f"faults{os.getpid()}{side}" for side in "ab"]          # two network namespaces
LINK = "dev", "link0"


@dataclasses.dataclass
class Case:
    """A fault: where it comes from, what must be said, how the run must end."""
    fault: str
    expected: str
    inject: str = ""             # by faulty.py, in the run
    act: Callable = None         # or from outside, when step 7 is done or the injected fault began
    before: Callable = None      # changes the folders (out, shards) before the run
    argv: str = ""               # more flags
    ranks: int = 2               # 0: without torchrun
    options: str = ""            # of torchrun
    hosts: str = ""              # two nodes of one rank each, see Bench.hosts
    disk: int = 0                # MB of a small disk of its own for the results
    says: str = ""               # a line that must be printed (a regular expression)
    most: int = 1                # how often, at most
    trace: bool = False          # the product's own traceback is expected
    ends: str = "fails"          # "goes on", "stops" (with a checkpoint of the last step)
    again: bool = True           # the same command finishes it afterwards
    lost: int = 5                # steps, at most
    limit: int = 20              # seconds until every process must be gone
    same: bool = True            # the weights end as those of the undisturbed run
    check: Callable = None       # what is wrong besides, a text, of (run)
    gpus: int = 0                # how many it needs


def send(signum, kind, rank=None):
    return lambda run: run.send(signum, kind, rank)


def twice(act):
    def act_twice(run):
        act(run)
        time.sleep(0.3)
        act(run)
    return act_twice


TERM, KILL, STOP, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT
HUP = signal.SIGHUP
FORWARD = "bert.BertForPreTraining.forward"                     # 4 calls a step and rank
PRODUCT = r'File ".*/(train|dist|data|bert|optim)\.py"'          # in a traceback
PORT = 29533
ERROR = r"^(\[rank\d\]: )?RuntimeError: an injected error|^train.py: .*an injected error"
LOST = r"rank [\d?].* died or did not answer"
LOST_1 = "rank 1 died or did not answer"
GONE = "all gone within 20 s, one cause, resumable"
SAVED = "all ranks stop at the same step, with a checkpoint of it"
REFUSED = "said before step 1, by all ranks together"


def finished(bench, out, shards):
    shutil.copytree(bench.reference(), out)


def damage(name, change):
    """Returns what copies a finished run's folder and changes one file of it."""
    def before(bench, out, shards):
        if name.startswith("checkpoints"):
            finished(bench, out, shards)
        path = min(path for path in (out, shards) for path in path.glob(name))
        change(path)
    return before


def cut_in_half(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/thriftbert-evil",)


def make_evil(path):
    for old in path.parent.iterdir():
        old.unlink()
    train.write_checkpoint(path.parent, {"step": 24, "x": Evil()}, set())


def free_disk(run):
    """Frees the disk when a failed save was reported."""
    run.wait(lambda: "no checkpoint of step" in run.text(), 60)
    (run.out / "filler").unlink()


def steps_missing(run):
    return "" if run.steps() == [*range(1, 25)] else f"metrics.jsonl has steps {run.steps()}"


def one_step_skipped(run):
    skipped = [line["skipped"] for line in lines_of(run.out)
               if line["kind"] == "train"]
    return "" if skipped == [0] * 6 + [1] * 18 else f"skipped steps: {skipped}"


def losses_differ(run):
    """Compares the losses with those of another number of ranks."""
    lines = [lines_of(out) for out in (run.out, run.out.parent.parent / "reference")]
    a, b = ([line["loss"] for line in some if line["kind"] == "train"] for some in lines)
    worst = max((abs(x / y - 1) for x, y in zip(a, b)), default=1)
    return "" if len(a) == len(b) and worst < 1e-4 else f"{len(a)} losses, off by {worst:.1g}"


def no_checkpoint_of_it(run):
    kept = train.checkpoints_in(run.out / "checkpoints")
    return "" if 0 < run.last_step() in kept else f"step {run.last_step()}, checkpoints {[*kept]}"


def other_ranks(before, after):
    return Case(f"resumed on {after} rank(s), not {before}", "the same losses within 1e-4",
                before=lambda bench, *folders: bench.train(*folders, before, "--max-steps 12"),
                ranks=after, ends="goes on", says="resuming from the checkpoint of step 12",
                again=False, same=False, check=losses_differ)


def restart_agent(run):
    """kill -9 of the torchrun of node 1, which somebody then starts again."""
    os.kill(run.roots[1].pid, signal.SIGKILL)
    run.roots[1].wait()
    run.roots[1] = run.start(run.commands[1])


def node_dies(node):
    def act(run):
        for pid, kind, rank in run.processes():
            if pid == run.roots[node].pid or (kind != "torchrun" and rank == node):
                os.kill(pid, signal.SIGKILL)
    return act


def link(state, seconds=0):
    def act(run):
        inside = "ip", "-n", HOSTS[0], "link", "set", *LINK
        subprocess.run([*inside, "down"], check=True)
        time.sleep(seconds)
        if state == "up":
            subprocess.run([*inside, "up"], check=True)
    return act


def slow_down(bench, out, shards):
    for host in HOSTS:
        subprocess.run(["ip", "netns", "exec", host, "tc", "qdisc", "add", *LINK, "root", "tbf",
                        *"rate 100mbit burst 32kb latency 100ms".split()], check=True)


def other_flag(flag):
    name = flag.split()[0][2:]
    return Case(f"rank 1 has {flag}", REFUSED, f"flags 1 1 train.parse_arguments {flag}",
                says=f"rank 1.*{name.replace('-', '[-_]')}|{name.replace('-', '[-_]')}.*rank 1",
                again=False)


CASES = {
    # Ends that something else makes
    "kill-rank": Case("kill -9 of rank 1", "its peer names it within a second or two",
                      says=LOST_1, act=send(KILL, "rank", 1)),
    "restart": Case("the same with --max-restarts=1", "torchrun starts all again; it goes on",
                    act=send(KILL, "rank", 1), options="--max-restarts=1", ends="goes on",
                    says="resuming from the checkpoint of step", again=False),
    "kill-torchrun": Case("kill -9 of torchrun", "ranks stop within a step or two",
                          act=send(KILL, "torchrun")),
    "kill-torchrun-early": Case("the same before step 1", "ranks stop before step 1 or after it",
                                "pause * 1 train.build 2", act=send(KILL, "torchrun")),
    "kill-worker": Case("kill -9 of a worker", GONE, act=send(KILL, "worker", 1),
                        says="a worker process died"),
    "kill-tracker": Case("kill -9 of Python's resource tracker", "nobody needs it",
                         act=send(KILL, "tracker", 1), ends="goes on", again=False),
    "stop-rank": Case("SIGSTOP of rank 1", "an error at the timeout of 10 s names rank 1; torchrun "
                      "waits 30 s more for it", act=send(STOP, "rank", 1), says=LOST_1, limit=50),
    "kill-mid-save": Case("kill -9 while a checkpoint is written", "the one before is used",
                          "kill 0 3 os.fsync", lost=10),
    "kill-before-digest": Case("kill -9 between data and digest", "the one before is used",
                               "cut 0 3 os.fsync", lost=10),
    "slow-save": Case("SIGTERM, and the save takes longer than torchrun waits",
                      "the one before is used", "pause 0 3 os.fsync 60", lost=10,
                      act=send(TERM, "torchrun"), options="--shutdown-timeout=3"),
    # Requests to stop
    "term": Case("SIGTERM to torchrun", SAVED, act=send(TERM, "torchrun"), ends="stops"),
    "term-evaluation": Case("the same in evaluation", SAVED, "pause * 1 train.evaluate 2",
                            act=send(TERM, "torchrun"), ends="stops"),
    "term-early": Case("the same before step 1", "no hang", "pause * 1 train.build 2",
                       act=send(TERM, "torchrun")),
    "term-verify": Case("the same while shards are checked", "no hang", "pause * 1 data.verify 2",
                        act=send(TERM, "torchrun")),
    "hangup": Case("the terminal is closed", SAVED, act=send(HUP, "torchrun"), ends="stops"),
    "interrupt": Case("Ctrl-C", SAVED, act=Run.interrupt, ends="stops"),
    "interrupt-twice": Case("Ctrl-C twice", "leaves at once", act=twice(Run.interrupt)),
    "interrupt-rank": Case("SIGINT to rank 1 alone", SAVED, act=send(INT, "rank", 1), ends="stops"),
    "interrupt-alone": Case("Ctrl-C, without torchrun", SAVED, ranks=0, act=Run.interrupt,
                            ends="stops"),
    "interrupt-alone-twice": Case("Ctrl-C twice, without torchrun", "leaves at once", ranks=0,
                                  act=twice(Run.interrupt)),
    "max-minutes": Case("--max-minutes 0.2", SAVED, argv="--steps 2000 0 --max-minutes 0.2",
                        ends="stops", again=False, check=no_checkpoint_of_it, limit=60),
    # Errors in the program
    "raise": Case("an exception on rank 1", GONE, "raise 1 7 optim.learning_rate", says=ERROR,
                  trace=True),
    "raise-both": Case("the same on both ranks", GONE, "raise * 7 optim.learning_rate", says=ERROR,
                       most=2, trace=True),
    "raise-alone": Case("an exception without torchrun", GONE, "raise 0 7 optim.learning_rate",
                        ranks=0, says=ERROR, trace=True),
    "raise-worker": Case("an exception in a worker of rank 1", GONE + ", with both tracebacks",
                         "raise 1 7 data.make_step", says=ERROR, most=2, trace=True),
    "raise-evaluation": Case("an exception in evaluation, on rank 1", GONE, lost=12,
                             inject="raise 1 1 train.evaluate", says=ERROR, trace=True),
    "raise-save": Case("an exception in a checkpoint, on rank 0", GONE, lost=10,
                       inject="raise 0 2 train.write_checkpoint", says=ERROR, trace=True),
    "memory": Case("out of memory on rank 1", "names the flag to lower; " + GONE,
                   f"memory 1 5 {FORWARD} 40", argv="--batch 512 --micro-batch 128",
                   says="--micro-batch"),
    # Numbers
    "nan-gradient": Case("NaN in a gradient of rank 1", "every rank skips the step",
                         f"nan-gradient 1 25 {FORWARD}", ends="goes on", again=False, same=False,
                         check=one_step_skipped),
    "overflow": Case("a gradient overflows in every step", "stops at the scale's floor, names step "
                     "and parameter", f"overflow 1 25 {FORWARD}", same=False,
                     says=r"step \d+: gradient of \S+ is not finite.*floor"),
    "nan-weights": Case("NaN in a weight", "stops; no such checkpoint", lost=10,
                        inject="nan-weight * 8 optim.copy_to_model", says="not finite"),
    "nan-weights-1": Case("NaN in a weight of rank 1", "stops; no such checkpoint", lost=10,
                          inject="nan-weight 1 8 optim.copy_to_model", says="not finite"),
    "drift": Case("a weight of rank 1 drifts", "found at the next save", lost=10,
                  inject="drift 1 8 optim.copy_to_model", says="rank 1 has other weights"),
    "clock": Case("a clock that jumps by days", "nothing depends on it", "clock * 1 train.build",
                  ends="goes on", again=False),
    # Other arguments and data on one rank
    **{f"flags-{flag.split()[0][2:]}": other_flag(flag) for flag in (
        "--bucket-mb 0.5", "--eval-every 7", "--checkpoint-every 7", "--max-steps 9", "--seed 1",
        "--lr-scale 2", "--max-minutes 5", "--micro-batch 4")},
    "refused-flag": Case("a flag that only node 1 refuses", "node 1 says it", hosts="local",
                         inject="flags 1 1 train.parse_arguments --seed x", says="--seed.*'x'",
                         again=False),
    "other-model": Case("--model mini in a folder of tiny", "refused, the fields are shown",
                        before=finished, argv="--model mini", says="of another run.*model.width",
                        again=False),
    "two-runs": Case("another run is started in the same --out", "the second one is refused",
                     "pause * 7 optim.learning_rate 15",
                     act=lambda run: run.again(said=run.said).wait(lambda: False, 60),
                     says=r"^train.py: .*(in use|another run|lock|already)", ends="goes on",
                     again=False),
    "ranks-2-1": other_ranks(2, 1),
    "ranks-1-2": other_ranks(1, 2),
    "ranks-2-4": other_ranks(2, 4),
    "three-shards": Case("3 shards, 2 ranks", "no hang, equal steps", ends="goes on", again=False,
                         same=False, before=lambda bench, out, shards: bench.prepare(shards, 3)),
    # Disks and files
    "full-save": Case("the disk is full in a save, then free", "goes on; old checkpoints whole",
                      "fill 0 7 optim.learning_rate {out}/filler", act=free_disk, disk=60,
                      says="no checkpoint of step 10", ends="goes on", again=False,
                      check=steps_missing),
    "full-export": Case("the disk is full in the export", "one line with the path",
                        "fill 0 1 bert.save_huggingface {out}/filler", disk=60,
                        says="model.*No space left|No space left.*model"),
    "read-only": Case("--out cannot be written", "refused before training", disk=60, again=False,
                      before=lambda bench, out, shards: subprocess.run(
                          ["mount", "-o", "remount,ro", out], check=True),
                      says="Read-only file system"),
    "cut": Case("the newest checkpoint is cut in half", "the one before, with a warning",
                before=damage("checkpoints/*24.pt", cut_in_half), says="cut or damaged",
                ends="goes on", again=False),
    "flip": Case("one flipped bit in it", "the one before, with a warning",
                 before=damage("checkpoints/*24.pt", flip_bit), says="cut or damaged",
                 ends="goes on", again=False),
    "all-bad": Case("every checkpoint is damaged", "a plain message, no new start", again=False,
                    before=lambda bench, out, shards: [damage("checkpoints/*20.pt", flip_bit)(
                        bench, out, shards), flip_bit(out / "checkpoints/step-00000024.pt")],
                    says="no checkpoint .* is whole"),
    "pickle": Case("a pickle that runs code as a checkpoint", "refused, nothing runs", again=False,
                   before=damage("checkpoints/*24.pt", make_evil), says="no checkpoint .* is whole",
                   check=lambda run: "it ran" * Path("/tmp/thriftbert-evil").exists()),
    "backup": Case("a file step-000005-backup.pt", "left alone", ends="goes on", again=False,
                   before=lambda bench, out, shards: [
                       (out / "checkpoints").mkdir(parents=True),
                       (out / "checkpoints/step-000005-backup.pt").write_bytes(b"not ours")],
                   check=lambda run: "" if (run.out / "checkpoints/step-000005-backup.pt").exists()
                   else "removed"),
    "metrics": Case("metrics.jsonl is damaged", "resumes", ends="goes on", again=False,
                    before=damage("checkpoints/../metrics.jsonl", flip_bit)),
    "shard-flip": Case("one flipped bit in a shard", "the shard is named", again=False,
                       before=damage("train-00001.tokens*", flip_bit), says="train-00001.tokens"),
    "shard-cut": Case("a shard is truncated", "named, with both sizes", again=False,
                      before=damage("train-00001.tokens*", cut_in_half), says="train-00001.tokens"),
    "shard-missing": Case("a shard is missing", "named", again=False, says="train-00001.tokens",
                          before=damage("train-00001.tokens*", Path.unlink)),
    "manifest": Case("one flipped bit in manifest.json", "refused", again=False,
                     before=damage("manifest.json", flip_bit), says="manifest.json"),
    "port": Case("the port is taken", "torchrun says so", hosts="one", again=False,
                 says="EADDRINUSE|in use",
                 before=lambda bench, out, shards: bench.take_port(), most=99),
    # Two nodes
    "unequal-nodes": Case("nodes of 1 and 3 ranks", "refused, says what to set", hosts="unequal",
                          again=False, says="set the same --nproc_per_node"),
    "newer-elsewhere": Case("ranks numbered otherwise: node 1's disk has step 24, node 0's none",
                            "refused, says where step 24 is", hosts="disks", again=False,
                            before=lambda bench, out, shards: [
                                (out.parent / "disk0").mkdir(), shutil.copytree(
                                    bench.reference(), out.parent / "disk1/out")],
                            says="step 24"),
    "restart-nodes": Case("kill -9 of a rank of two nodes, --max-restarts=2", "goes on",
                          hosts="c10d", options="--max-restarts=2", act=send(KILL, "rank", 1),
                          says="resuming from the checkpoint of step", ends="goes on", again=False),
    "restart-agent": Case("kill -9 of a node's torchrun, which is started again", "goes on",
                          hosts="c10d", options="--max-restarts=2", act=restart_agent,
                          says="resuming from the checkpoint of step", ends="goes on", again=False),
    "node-term": Case("SIGTERM to one of two nodes", SAVED, hosts="local", ends="stops",
                      options="--max-restarts=2", act=lambda run: run.roots[1].terminate()),
    "node-kill": Case("kill -9 of the rank on node 1", "the other node stops too", hosts="local",
                      act=send(KILL, "rank", 1), says=LOST),
    "node-0-dies": Case("all of node 0 is killed, the store with it", "node 1 says so and stops",
                        hosts="local", act=node_dies(0), says=LOST),
    "node-1-dies": Case("all of node 1 is killed", "node 0 says so and stops", hosts="local",
                        act=node_dies(1), says=LOST),
    "node-link": Case("two hosts, no fault", "as on one host", hosts="links", ends="goes on",
                      again=False),
    "link-cut": Case("the link between two hosts is cut", "both stop at the timeout of 10 s",
                     hosts="links", act=link("down"), says=LOST, most=2, limit=40),
    "link-4s": Case("the link is cut for 4 s", "the run goes on", hosts="links",
                    act=link("up", 4), ends="goes on", again=False),
    "slow-link": Case("a link of 100 Mb/s", "correct", hosts="links", before=slow_down,
                      ends="goes on", again=False),
    # What needs a GPU: NCCL's own ways to end
    "gpu-raise": Case("an exception, on a GPU", GONE, "raise 0 7 optim.learning_rate", ranks=0,
                      says=ERROR, trace=True, gpus=1),
    "gpu-memory": Case("out of memory, on a GPU", "names the flag to lower", ranks=0, gpus=1,
                       argv="--model large --batch 65536 --micro-batch 65536",
                       says="--micro-batch", again=False),
    "gpu-one-card": Case("two ranks on one card, over Gloo", "as on two", gpus=1, ends="goes on",
                         again=False, same=False),
    "gpu-kill-rank": Case("kill -9 of rank 1, over NCCL", "its peer stops, and says why", gpus=2,
                          act=send(KILL, "rank", 1), says=LOST),
    "gpu-stop-rank": Case("SIGSTOP of rank 1, over NCCL", "an error at the timeout of 10 s",
                          gpus=2, act=send(STOP, "rank", 1), says=LOST_1, limit=50),
}


# ----- How a case is run -----

class Bench:
    """Folders, and the undisturbed runs that the others are compared with."""

    def __init__(self, folder):
        self.folder, self.references, self.sockets = folder, {}, []
        self.shards = folder / "shards"
        self.prepare(self.shards, 4)

    def prepare(self, folder, shards):
        shutil.rmtree(folder, ignore_errors=True)
        data.prepare(make_documents(), folder, vocab_size=320, shards=shards)

    def train(self, out, shards, ranks, more):
        """Trains without a fault, to the end or as the flags `more` say."""
        run = Run(out, [*BASE, *more.split(), "--data", shards, "--out", out], ranks)
        run.wait(lambda: False, 300)
        if run.wait_until_gone(LIMIT)[1] or run.roots[0].returncode:
            sys.exit(f"the undisturbed run failed:\n{run.text()}")

    def reference(self, ranks=2, more=""):
        """Returns the folder of an undisturbed run."""
        if (ranks, more) not in self.references:
            number = len(self.references)
            self.references[ranks, more] = self.folder / f"reference{number or ''}"
            self.train(self.references[ranks, more], self.shards, ranks, more)
        return self.references[ranks, more]

    def take_port(self):
        self.sockets.append(socket.create_server(("127.0.0.1", PORT)))

    def hosts(self, how, folder):
        """Returns the nodes as Run takes them. one: a node without --standalone; local: two on this
        host; unequal: with 1 and 3 ranks; c10d: torchrun can start them again; disks: each with a
        disk of its own; links: in two network namespaces."""
        address = "10.86.76.1" if how == "links" else "127.0.0.1"
        meeting = [["--node_rank=0"], ["--node_rank=1"]] if how != "c10d" else [
            ["--rdzv_backend=c10d", f"--rdzv_endpoint={address}:{PORT}", "--rdzv_id=faults",
             f"--rdzv_conf=is_host={host}"] for host in (1, 0)]
        if how != "c10d":
            meeting = [[*words, f"--master_addr={address}", f"--master_port={PORT}"]
                       for words in meeting]
        if how == "unequal":
            meeting[1].append("--nproc_per_node=3")
        prefixes, folders = [(), ()], [ROOT, ROOT]
        if how == "c10d":        # torch 2.13: without it a torchrun cannot join those that restart
            prefixes = [("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")] * 2
        if how == "disks":
            folders = [folder / "disk0", folder / "disk1"]
        if how == "links":
            prefixes = [("ip", "netns", "exec", host) for host in HOSTS]
        nodes = [*zip(prefixes, folders, meeting)] if how else []
        return nodes[:1] if how == "one" else nodes

    def make_links(self):
        for host in HOSTS:
            subprocess.run(["ip", "netns", "add", host], check=True)
        subprocess.run(["ip", "link", "add", "link0", "netns", HOSTS[0], "type", "veth", "peer",
                        "link0", "netns", HOSTS[1]], check=True)
        for number, host in enumerate(HOSTS, 1):
            for words in (f"address add 10.86.76.{number}/24 dev link0", "link set link0 up",
                          "link set lo up"):
                subprocess.run(["ip", "-n", host, *words.split()], check=True)

    def skip(self, case):
        """Returns why a case cannot be run here, or an empty text."""
        if case.gpus > torch.cuda.device_count():
            return f"needs {case.gpus} GPU(s)"
        return "needs root" if os.geteuid() and (case.disk or case.hosts == "links") else ""

    def run(self, name, case):
        """Returns the table's cells of a case and a list of what is wrong."""
        out, shards = self.folder / name / "out", self.folder / name / "shards"
        shutil.copytree(self.shards, shards)
        if case.disk:
            out.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={case.disk}m", "none", out],
                           check=True)
        if case.hosts == "links":
            self.make_links()
        run = None
        try:
            if case.before:
                case.before(self, out, shards)
            disks = case.hosts == "disks"
            argv = [*BASE, *case.argv.split(), "--data", shards, "--out", "out" if disks else out]
            run = Run(out.parent / "disk0/out" if disks else out, argv, case.ranks,
                      case.inject.format(out=out), case.options.split(),
                      self.hosts(case.hosts, out.parent), case.gpus)
            return self.watch(case, run)
        finally:
            if run:
                run.kill()
            while self.sockets:
                self.sockets.pop().close()
            if case.disk:
                subprocess.run(["umount", "--lazy", out])
            for host in HOSTS if case.hosts == "links" else ():
                subprocess.run(["ip", "netns", "delete", host])

    def watch(self, case, run):
        """Lets the fault happen, and the same command run again; returns as `run` does."""
        wrong, says = [], re.compile(case.says or "(?!)", re.MULTILINE)
        # 1. The fault
        struck = time.time()
        if case.inject:
            if run.wait(run.fault_mark.exists, 120):
                struck = run.fault_mark.stat().st_mtime
            else:
                wrong.append("the fault never struck")
        elif case.act and not run.wait(lambda: run.last_step() >= 7, 120):
            wrong.append("never came to step 7")
        if case.act:
            struck = time.time()
            case.act(run)
        # 2. What is said, and how the run ends
        run.wait(lambda: says.search(run.text()), 90)
        noticed = time.time() - struck
        run.wait(lambda: False, 90 - noticed)
        left = run.wait_until_gone(LIMIT if run.ended() else 0)[1]
        gone, text = time.time() - struck, run.text()
        if left:
            wrong.append("left: " + ", ".join(f"{p.kind} {p.rank}" for p in left))
        if case.ends != "goes on" and gone > case.limit:
            wrong.append(f"gone after {gone:.0f} s")
        found = [line for line in text.splitlines() if says.search(line)]
        if case.says and not 1 <= len(found) <= case.most:
            wrong.append(f"said {len(found)} times: {case.says}")
        if bool(re.search(PRODUCT, text)) != case.trace:
            wrong.append("no traceback" if case.trace else "a traceback")
        done, codes = "Done after step" in text, [root.returncode for root in run.roots]
        if done != (case.ends == "goes on") or (case.ends != "stops" and done == any(codes)):
            wrong.append("ended" + " well" * done)
        if case.check and (problem := case.check(run)):
            wrong.append(problem)
        # 3. The same command again
        lost, last = "", run.last_step()
        if case.again:
            (run.out / "filler").unlink(missing_ok=True)
            if case.hosts == "links":
                subprocess.run(["ip", "-n", HOSTS[0], "link", "set", *LINK, "up"], check=True)
            second = run.again()
            second.wait(lambda: False, 120)
            left = second.wait_until_gone(LIMIT)[1]
            done = "Done after step" in second.text()
            if left or not done or any(root.returncode for root in second.roots):
                wrong.append(f"the same command fails: {second.text().strip()[-300:]}")
            resumed = re.search(r"resuming from the checkpoint of step (\d+)", second.text())
            lost = last - int(resumed[1] if resumed else 0)
            if lost > (0 if case.ends == "stops" else case.lost):
                wrong.append(f"{lost} steps lost")
        # 4. What came of it
        difference = self.difference(case, run.out) if done else ""
        if case.same and difference:
            wrong.append("other weights")
        if files := temporary_files(run.out.parent):
            wrong.append(f"left: {files}")
        line = f", {len(found)} x `{found[0].strip()[:150]}`" if found else ""
        return [f"status {codes}{line}", f"{noticed:.1f}" if found else "", f"{gone:.1f}",
                str(lost), f"{difference:.1g}" if done else ""], wrong

    def difference(self, case, out):
        """Returns the largest difference of a weight at the end from the undisturbed run's."""
        reference = self.reference(min(case.ranks, 2), case.argv)
        whole, other = (train.read_checkpoint(folder / "checkpoints/step-00000024.pt")["weights"]
                        for folder in (reference, out))
        return max(float((whole[name] - other[name]).detach().abs().max()) for name in whole)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="only these faults")
    add("--list", action="store_true", help="print the names of all")
    add("--soak", type=int, metavar="SEED", help="disturb one run 20 times instead")
    args = parser.parse_args()
    if args.list:
        return print(*CASES, sep="\n")
    folder = Path(tempfile.mkdtemp(prefix="thriftbert-faults-"))
    for signum in (signal.SIGTERM, signal.SIGINT):           # so that all is cleaned up then, too
        signal.signal(signum, lambda *_: sys.exit(1))
    try:
        if args.soak is not None:
            sys.exit(soak.main(args.soak, folder, Bench(folder).shards))
        bench, failed = Bench(folder), 0
        bench.reference()
        print("| fault | what must happen | seen | said after, s | gone after, s | steps lost | "
              "weights differ by | verdict |\n|---|---|---|---|---|---|---|---|")
        for name in args.names or CASES:
            case = CASES[name]
            reason = bench.skip(case)
            cells, wrong = ([f"skipped: {reason}", *[""] * 4], []) if reason else bench.run(
                name, case)
            failed += bool(wrong)
            verdict = "" if reason else "; ".join(wrong) or "ok"
            print(f"| {name}: {case.fault} | {case.expected} |", " | ".join(cells),
                  f"| {verdict} |", flush=True)
        sys.exit(failed > 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
