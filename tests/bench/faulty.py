"""train.py with one injected fault, and `Run`, which watches train.py from outside.

    export FAULT="raise 1 7 optim.learning_rate" FAULT_MARK=struck
    torchrun --nproc_per_node=2 tests/bench/faulty.py --data ...

is train.py, except that rank 1 raises an exception before its 7th call of that function. The rank
"*" means all ranks. Acts are in ACTS; words after the function's name are an act's argument. Calls
in an evaluation, which has no gradients, do not count. Only torchrun's first attempt has the fault.
`Run` finds all processes of a run by a mark in their environment, so it needs Linux.
"""
import contextlib
import functools
import os
import re
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections import namedtuple
from pathlib import Path

import beside
import torch

import train


# ----- Inside: the fault -----

def raise_error():
    raise RuntimeError("an injected error")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def pause(seconds):
    time.sleep(float(seconds))


def add_flags(flags):
    sys.argv.extend(flags.split())


def limit_memory(megabytes):
    """Lets this process have `megabytes` MB more memory than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * os.sysconf("SC_PAGE_SIZE") + int(megabytes) * 1000000
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


ACTS = {"raise": raise_error, "kill": kill, "pause": pause, "flags": add_flags,
        "memory": limit_memory}


def inject(text):
    """Patches this process if the fault is meant for its rank and attempt."""
    what, rank, number, target, *argument = text.split(maxsplit=4)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank not in ("*", os.environ.get("RANK", "0")) or attempt != "0":
        return
    *path, name = target.split(".")
    owner = functools.reduce(getattr, path[1:], sys.modules[path[0]])
    function = getattr(owner, name)
    calls = []

    def patched(*arguments, **options):
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == int(number):
                Path(os.environ["FAULT_MARK"]).touch()
                ACTS[what](*argument)
        return function(*arguments, **options)

    setattr(owner, name, patched)


# ----- Outside: a run, all its processes and its output -----

Process = namedtuple("Process", "pid kind rank")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO_RANKS = [[*TORCHRUN, "--standalone", "--nproc_per_node=2"]]


class Run:
    """A run of train.py, with all of its processes.

    out: the folder of results. flags: all flags but --out. launchers: for each node, the words
    before the program: python's or torchrun's. gpus: how many the ranks need. fault: as in FAULT.
    """

    def __init__(self, out, flags, launchers=TWO_RANKS, gpus=0, fault=""):
        self.out = out
        self.made_of = out, flags, launchers, gpus
        name = uuid.uuid4().hex
        self.mark = f"FAULTS_RUN={name}".encode()
        self.said = out.with_name(f"said-{name}")
        self.fault_mark = out.with_name(f"struck-{name}")
        self.environment = os.environ | {
            "FAULTS_RUN": name, "FAULT": fault, "FAULT_MARK": str(self.fault_mark),
            "OMP_NUM_THREADS": "1"}
        if not gpus:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        script = __file__ if fault else train.__file__
        self.commands = [[*launcher, script, "--out", out, *flags] for launcher in launchers]
        self.began = time.monotonic()
        self.roots = []
        for command in self.commands:
            self.start(command)

    def start(self, command):
        """Starts the program, or the torchrun of a node."""
        with open(self.said, "ab") as file:
            self.roots.append(subprocess.Popen(
                [*map(str, command)], cwd=beside.ROOT, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True))

    def again(self):
        """Starts the same command without the fault, and returns its Run."""
        return Run(*self.made_of)

    def processes(self):
        """Returns all live processes, a list of Process of the kinds torchrun, rank and other."""
        processes = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue                                     # the process has just ended
            if self.mark not in words:
                continue
            kind = "other"
            if b"torch.distributed.run" in command:
                kind = "torchrun"
            elif b"train.py" in command or b"faulty.py" in command:
                kind = "rank"
            rank = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
            processes.append(Process(int(folder.name), kind, sum(rank)))
        return processes

    def send(self, signum, kind=None, rank=None):
        """Sends a signal to the processes of a kind and a rank. None means any."""
        for process in self.processes():
            if kind in (None, process.kind) and rank in (None, process.rank):
                with contextlib.suppress(ProcessLookupError):        # it has ended meanwhile
                    os.kill(process.pid, signum)

    def text(self):
        return self.said.read_text(errors="replace")

    def last_step(self):
        return max([line["step"] for line in beside.lines_of(self.out, "train")], default=0)

    def ended(self):
        """Returns whether no process is left."""
        return all(root.poll() is not None for root in self.roots) and not self.processes()

    def codes(self):
        """Returns the exit statuses; 0 is a good end."""
        return [root.returncode for root in self.roots]

    def done(self):
        """Returns whether it has reported its last step, and no process has failed."""
        return "Done after step" in self.text() and not any(self.codes())

    def wait(self, condition, seconds):
        """Waits until condition() is true or the run is over; returns whether it became true."""
        deadline = time.monotonic() + seconds
        while not condition() and not self.ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        return condition()

    def wait_for_end(self, seconds):
        """Waits up to `seconds` until no process is left, then kills the rest. Returns what
        was wrong, a list of texts: processes that were left, an abort."""
        try:
            self.wait(lambda: False, seconds)
            left = self.processes()
        finally:
            self.kill()
        wrong = [f"left: {process.kind} {process.rank}" for process in left]
        _, abort, cause = self.text().partition("terminate called")
        if abort:
            wrong.append(f"aborted: {abort}{cause:.300}")
        return wrong

    def has_traceback(self):
        """Returns whether the output has a traceback through one of the five files."""
        return bool(re.search(r'File ".*/(train|dist|data|bert|optim)\.py"', self.text()))

    def kill(self):
        while self.processes():
            self.send(signal.SIGKILL)
            time.sleep(0.05)
        for root in self.roots:
            root.wait()


if os.environ.get("FAULT"):
    inject(os.environ["FAULT"])
if __name__ == "__main__":
    train.main()
