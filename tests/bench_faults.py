"""What a run survives: every fault that one Linux machine can make, and what came of it, as a table.

    python tests/bench_faults.py                       # 15 minutes; as root also slow and cut links
    python tests/bench_faults.py kill-rank flags-seed  # some of them; --list tells their names
    python tests/bench_faults.py --soak 1              # 200 steps, disturbed 20 times, see soak.py

Each fault strikes a real run of train.py, mostly on two ranks under torchrun, from outside or by
tests/faulty.py. Then the same command is given again and must end with the weights of a run that
nothing disturbed. Columns: seconds from the fault until it was said, and until the last process was
gone; steps done again; the largest difference of the final weights.
"""
import argparse
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import data  # noqa: E402
import train  # noqa: E402
from tests.conftest import make_documents  # noqa: E402
from tests.faulty import Run, fill_disk, temporary_files  # noqa: E402

BASE = ("--steps 24 0 --batch 64 --micro-batch 8 --precision fp32 --checkpoint-every 5 "
        "--eval-every 12 --log-every 1 --timeout 10").split()
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
    hosts: str = ""              # "local": two agents; "links": in two network namespaces
    disk: int = 0                # MB of a small disk of its own for the results
    says: str = ""               # a line that must be printed (a regular expression)
    most: int = 1                # how often, at most
    trace: bool = False          # the product's own traceback is expected
    ends: str = "fails"          # "goes on", "stops" (with a checkpoint of the last step)
    again: bool = True           # the same command finishes it afterwards
    lost: int = 5                # steps, at most
    same: bool = True            # the weights end as those of the undisturbed run
    check: Callable = None       # what is wrong besides, a text, of (run, out)
    gpus: int = 0


def send(signum, kind, rank=None):
    return lambda run: run.send(signum, kind, rank)


def twice(act):
    def act_twice(run):
        act(run)
        time.sleep(0.3)
        act(run)
    return act_twice


TERM, KILL, STOP, INT = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT
FORWARD = "bert.BertForPreTraining.forward"                     # 4 calls a step and rank
ERROR = r"^(\[rank\d\]: )?RuntimeError: an injected error|^train.py: .*an injected error"
LOST = r"another rank died or did not answer"
GONE = "all gone within 20 s, one cause, resumable"
SAVED = "all ranks stop at the same step, with a checkpoint of it"
REFUSED = "said before step 1, by all ranks together"


def damage(name, change):
    """Returns what copies a finished run's folder and changes one file of it."""
    def before(bench, out, shards):
        if name.startswith("checkpoints"):
            shutil.copytree(bench.reference(2, BASE), out)
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


def steps_missing(run, out):
    return "" if run.steps() == [*range(1, 25)] else f"metrics.jsonl has steps {run.steps()}"


def link(state, seconds=0):
    def act(run):
        inside = "ip", "-n", HOSTS[0], "link", "set", *LINK
        subprocess.run([*inside, "down"], check=True)
        time.sleep(seconds)
        if state == "up":
            subprocess.run([*inside, "up"], check=True)
    return act


def other_flag(flag):
    name = flag.split()[0][2:]
    return Case(f"rank 1 has {flag}", REFUSED, f"flags 1 1 train.parse_arguments {flag}",
                says=f"rank 1.*{name.replace('-', '[-_]')}|{name.replace('-', '[-_]')}.*rank 1",
                again=False)


CASES = {
    # Ends that something else makes
    "kill-rank": Case("kill -9 of rank 1", "its peer stops within a second", says=LOST,
                      act=send(KILL, "rank", 1)),
    "restart": Case("the same with --max-restarts=1", "torchrun starts all again; it goes on",
                    act=send(KILL, "rank", 1), options="--max-restarts=1", ends="goes on",
                    says="resuming from the checkpoint of step", again=False),
    "kill-torchrun": Case("kill -9 of torchrun", "ranks stop within a step or two",
                          act=send(KILL, "torchrun")),
    "kill-torchrun-early": Case("the same before step 1", "ranks stop before step 1 or after it",
                                "pause * 1 train.build 2", act=send(KILL, "torchrun")),
    "kill-worker": Case("kill -9 of a worker", GONE, act=send(KILL, "worker", 1),
                        says="a worker process died"),
    "kill-server": Case("kill -9 of the server that forks workers", "goes on; phase 2 has another",
                        act=send(KILL, "server", 1), argv="--steps 12 12", ends="goes on",
                        again=False),
    "stop-rank": Case("SIGSTOP of rank 1", "an error at the timeout of 10 s names rank 1",
                      act=send(STOP, "rank", 1), options="--shutdown-timeout=3",
                      says=r"rank 1 (did not|does not|is silent|has not|was silent)"),
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
    "interrupt": Case("Ctrl-C", SAVED, act=Run.interrupt, ends="stops"),
    "interrupt-twice": Case("Ctrl-C twice", "leaves at once", act=twice(Run.interrupt)),
    "interrupt-rank": Case("SIGINT to rank 1 alone", SAVED, act=send(INT, "rank", 1), ends="stops"),
    "interrupt-alone": Case("Ctrl-C, without torchrun", SAVED, ranks=0, act=Run.interrupt,
                            ends="stops"),
    "interrupt-alone-twice": Case("Ctrl-C twice, without torchrun", "leaves at once", ranks=0,
                                  act=twice(Run.interrupt)),
    "max-minutes": Case("--max-minutes 0.03", SAVED, argv="--max-minutes 0.03", ends="stops"),
    # Errors in the program
    "raise": Case("an exception on rank 1", GONE, "raise 1 7 optim.learning_rate", says=ERROR,
                  trace=True),
    "raise-both": Case("the same on both ranks", GONE, "raise * 7 optim.learning_rate", says=ERROR,
                       most=2, trace=True),
    "raise-alone": Case("an exception without torchrun", GONE, "raise 0 7 optim.learning_rate",
                        ranks=0, says=ERROR, trace=True),
    "raise-worker": Case("an exception in a worker of rank 1", GONE, "raise 1 7 data.make_step",
                         says=ERROR, trace=True),
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
                         check=lambda run, out: one_step_skipped(run)),
    "overflow": Case("a gradient overflows in every step", "stops at the scale's floor, names step "
                     "and parameter", f"overflow 1 25 {FORWARD}", same=False,
                     says=r"step \d+: the gradient of \S+ is not finite.*floor"),
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
        "--lr-scale 2", "--max-minutes 5", "--checkpoint-minutes 5", "--micro-batch 4")},
    "refused-flag": Case("a flag that only rank 1 refuses", "rank 1 says it",
                         "flags 1 1 train.parse_arguments --seed x", says="--seed.*'x'",
                         again=False),
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
                   check=lambda run, out: "it ran" * Path("/tmp/thriftbert-evil").exists()),
    "backup": Case("a file step-000005-backup.pt", "left alone", ends="goes on", again=False,
                   before=lambda bench, out, shards: [
                       (out / "checkpoints").mkdir(parents=True),
                       (out / "checkpoints/step-000005-backup.pt").write_bytes(b"not ours")],
                   check=lambda run, out: "" if (out / "checkpoints/step-000005-backup.pt").exists()
                   else "removed"),
    "renamed": Case("a checkpoint renamed to a later step", "not believed, not removed",
                    before=damage("checkpoints/*20.pt", lambda path: path.rename(
                        path.with_name("step-00000099.pt"))), says="renamed|step-00000099",
                    ends="goes on", again=False,
                    check=lambda run, out: "" if (out / "checkpoints/step-00000099.pt").exists()
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
    "port": Case("the port is taken", "torchrun says so", hosts="local", again=False,
                 before=lambda bench, out, shards: bench.take_port(), says="EADDRINUSE|in use",
                 most=99),
    # Two nodes
    "node-term": Case("SIGTERM to one of two nodes", SAVED, hosts="local", ends="stops",
                      act=lambda run: run.roots[1].terminate()),
    "node-kill": Case("kill -9 of the rank on node 1", "the other node stops too", hosts="local",
                      act=send(KILL, "rank", 1), says=LOST),
    "node-link": Case("two hosts, no fault", "as on one host", hosts="links", ends="goes on",
                      again=False),
    "link-cut": Case("the link between two hosts is cut", "both stop at the timeout of 10 s",
                     hosts="links", act=link("down"), says=LOST, most=2),
    "link-4s": Case("the link is cut for 4 s", "the run goes on", hosts="links",
                    act=link("up", 4), ends="goes on", again=False),
    "slow-link": Case("a link of 100 Mb/s", "correct; metrics.jsonl has the waiting", ends="goes on",
                      hosts="links", again=False, before=lambda bench, out, shards: [
                          subprocess.run(["ip", "netns", "exec", host, "tc", "qdisc", "add", *LINK,
                                          *"root tbf rate 100mbit burst 32kb latency 100ms".split()],
                                         check=True) for host in HOSTS]),
    # What needs a GPU: NCCL's own ways to end
    "gpu-raise": Case("an exception, on a GPU", GONE, "raise 0 7 optim.learning_rate", ranks=0,
                      says=ERROR, trace=True, gpus=1),
    "gpu-memory": Case("out of memory, on a GPU", "names the flag to lower", ranks=0, gpus=1,
                       argv="--model large --batch 65536 --micro-batch 65536",
                       says="--micro-batch", again=False),
    "gpu-kill-rank": Case("kill -9 of rank 1, over NCCL", "its peer stops, and says why", gpus=2,
                          act=send(KILL, "rank", 1), says=LOST),
    "gpu-stop-rank": Case("SIGSTOP of rank 1, over NCCL", "an error at the timeout of 10 s",
                          gpus=2, act=send(STOP, "rank", 1), options="--shutdown-timeout=3",
                          says=r"rank 1 (did not|does not|is silent|has not|was silent)"),
}


def one_step_skipped(run):
    skipped = [line["skipped"] for line in train.Log(run.out, True).read()
               if line["kind"] == "train"]
    return "" if skipped == [0] * 6 + [1] * 18 else f"skipped steps: {skipped}"


# ----- How a case is run -----

class Bench:
    """Folders, and the undisturbed runs that the others are compared with."""

    def __init__(self, folder):
        self.folder, self.references, self.sockets = folder, {}, []
        self.shards = folder / "shards"
        data.prepare(make_documents(), self.shards, vocab_size=320, shards=4)

    def reference(self, ranks, argv):
        """Returns the folder of an undisturbed run."""
        key = ranks, *argv
        if key not in self.references:
            out = self.references[key] = self.folder / f"reference-{len(self.references)}"
            run = Run(out, [*argv, "--data", self.shards, "--out", out], ranks)
            run.wait(lambda: False, 300)
            if run.wait_until_gone(LIMIT)[1] or run.roots[0].returncode:
                sys.exit(f"the undisturbed run failed:\n{run.text()}")
        return self.references[key]

    def take_port(self):
        import socket
        self.sockets.append(socket.create_server(("127.0.0.1", 29533)))

    def hosts(self, how):
        if how != "links":
            return [((), ROOT)] * 2 if how else []
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "add", host], check=True)
        subprocess.run(["ip", "link", "add", "link0", "netns", HOSTS[0], "type", "veth", "peer",
                        "link0", "netns", HOSTS[1]], check=True)
        for number, host in enumerate(HOSTS, 1):
            for words in (f"address add 10.86.76.{number}/24 dev link0", "link set link0 up",
                          "link set lo up"):
                subprocess.run(["ip", "-n", host, *words.split()], check=True)
        return [(("ip", "netns", "exec", host), ROOT) for host in HOSTS]

    def skip(self, case):
        """Returns why a case cannot be run here, or an empty text."""
        if case.gpus > torch.cuda.device_count():
            return f"needs {case.gpus} GPU(s)"
        return "needs root" if os.geteuid() and (case.disk or case.hosts == "links") else ""

    def run(self, name, case):
        """Returns the table's cells of a case and a list of what is wrong."""
        out, shards = self.folder / name / "out", self.folder / name / "shards"
        out.parent.mkdir()
        shutil.copytree(self.shards, shards)
        if case.disk:
            out.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={case.disk}m", "none", out],
                           check=True)
        hosts = self.hosts(case.hosts)
        if case.before:
            case.before(self, out, shards)
        argv = [*BASE, *case.argv.split()]
        options = {"ranks": case.ranks, "options": case.options.split(), "hosts": hosts}
        command = out, [*argv, "--data", shards, "--out", out]
        run = Run(*command, fault=case.inject.format(out=out), **options)
        try:
            return self.watch(case, run, command, options, argv)
        finally:
            run.kill()
            while self.sockets:
                self.sockets.pop().close()
            if case.disk:
                subprocess.run(["umount", "--lazy", out])
            for host in HOSTS if case.hosts == "links" else ():
                subprocess.run(["ip", "netns", "delete", host])

    def watch(self, case, run, command, options, argv):
        wrong, out = [], run.out
        # 1. The fault, and how the run ends
        struck = time.time()
        if case.inject:
            if not run.wait(run.fault_mark.exists, 90):
                wrong.append("the fault never struck")
            else:
                struck = run.fault_mark.stat().st_mtime
        elif case.act and not run.wait(lambda: run.last_step() >= 7, 90):
            wrong.append("never came to step 7")
        if case.act:
            struck = time.time()
            case.act(run)
        says = re.compile(case.says, re.MULTILINE)
        heard = case.says and run.wait(lambda: says.search(run.text()), 90)
        noticed = time.time() - struck
        run.wait(lambda: False, 90)
        noticed = noticed if heard else time.time() - struck
        _, left = run.wait_until_gone(LIMIT)
        gone, text = time.time() - struck, run.text()
        codes = [root.returncode for root in run.roots]
        if left:
            wrong.append("left: " + ", ".join(f"{p.kind} {p.rank}" for p in left))
        if case.ends != "goes on" and gone > LIMIT + 5:
            wrong.append(f"gone after {gone:.0f} s")
        found = [match.group() for match in says.finditer(text)] if case.says else []
        if case.says and not 1 <= len(found) <= case.most:
            wrong.append(f"said {len(found)} times: {case.says}")
        if bool(re.search(r'File ".*/(train|dist|data|bert|optim).py"', text)) != case.trace:
            wrong.append("no traceback" if case.trace else "a traceback")
        done = "Done after step" in text
        if done != (case.ends == "goes on") or (done and any(codes)) or (
                case.ends == "fails" and not any(codes)):
            wrong.append(f"ended with {codes}" + ", done" * done)
        if case.check and (problem := case.check(run, out)):
            wrong.append(problem)
        # 2. The same command again
        lost, difference, last = "", "", run.last_step() if not case.disk or done else 0
        if case.again:
            if (out / "filler").exists():
                (out / "filler").unlink()
            if case.hosts == "links":
                options["hosts"] = self.hosts("links")
            last = run.last_step()
            # --max-minutes would stop it again
            second = Run(out, [word for word in command[1] if word not in case.argv.split()]
                         if "max-minutes" in case.argv else command[1], **options)
            second.wait(lambda: False, 120)
            if second.wait_until_gone(LIMIT)[1] or any(r.returncode for r in second.roots):
                wrong.append("the same command fails: " + second.text().strip()[-300:])
            resumed = re.search("resuming from the checkpoint of step (\\d+)", second.text())
            lost = last - int(resumed[1] if resumed else 0)
            if lost > (0 if case.ends == "stops" else case.lost):
                wrong.append(f"{lost} steps lost")
            done = "Done after step" in second.text()
        # 3. What came of it
        if done:
            difference = self.difference(case, out, argv)
            if case.same and difference:
                wrong.append("other weights")
            difference = f"{difference:.1e}" if difference else "0"
        if files := temporary_files(out):
            wrong.append(f"left: {files}")
        line = next((line for line in text.splitlines() if case.says and says.search(line)), "")
        seen = f"status {codes}" + (f", {len(found)} x `{line.strip()[:150]}`" if line else "")
        return [seen, f"{noticed:.1f}", f"{gone:.1f}" if not case.ends == "goes on" else "",
                str(lost), difference], wrong

    def difference(self, case, out, argv):
        if "max-minutes" in case.argv:
            argv = BASE
        whole, other = (train.read_checkpoint(max((folder / "checkpoints").glob("*24.pt")))[
            "weights"] for folder in (self.reference(0 if not case.ranks else 2, argv), out))
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
    try:
        if args.soak is not None:
            from tests import soak
            sys.exit(soak.main(args.soak, folder))
        bench, failed = Bench(folder), 0
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
