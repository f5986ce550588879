"""train.py with one fault in it, and runs of it that are watched from outside.

    export FAULT="raise 1 7 optim.learning_rate" FAULT_MARK=struck
    torchrun --nproc_per_node=2 tests/bench/faulty.py --data ...

is train.py, but rank 1 raises an exception before its 7th call of that function ("*": all ranks).
Acts are in ACTS; what follows the function's name is an act's argument. Calls of an evaluation,
which has no gradients, do not count. Only torchrun's first attempt has the fault. `Run` finds all
processes of a run by a mark in their environment, so it needs Linux.
"""
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections import namedtuple
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import train  # noqa: E402


# ----- Inside: the fault. An act gets its argument, then what the patched function gets -----

def raise_error(*_):
    raise RuntimeError("an injected error")


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def pause(seconds, *_):
    time.sleep(float(seconds))


def add_flags(flags, *_):
    sys.argv.extend(flags.split())


def limit_memory(megabytes, *_):
    """Lets this process have so many MB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * os.sysconf("SC_PAGE_SIZE") + int(megabytes) * 1000000
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def fill_disk(path, *_):
    """Leaves no byte free on the disk of `path`, which becomes a large file."""
    with open(path, "wb", buffering=0) as file:
        for size in 1 << 20, 1 << 12, 1:
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


def jump_clock(*_):
    """The time of day goes forwards and backwards by 11 days."""
    real = time.time
    sign = [1]

    def jumping():
        sign[0] *= -1
        return real() + sign[0] * 1e6
    time.time = jumping


def change_weight(difference, masters, _):
    next(iter(masters.values())).view(-1)[0] += float(difference)


def spoil_gradient(factor, model, _):
    """Multiplies a gradient of the backward passes to come; NaN only once."""
    left = [float(factor)]

    def hook(gradient):
        spoilt = gradient * left[0]
        if factor == "nan":
            left[0] = 1.0
        return spoilt
    model.get_parameter("mlm_bias").register_hook(hook)


ACTS = {"raise": raise_error, "kill": kill, "pause": pause, "flags": add_flags,
        "memory": limit_memory, "fill": fill_disk, "clock": jump_clock, "weight": change_weight,
        "gradient": spoil_gradient}


def inject(text):
    """Patches this process so that the fault happens in it, if it is of the fault's rank."""
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
                ACTS[what](*argument or [""], *arguments)
        return function(*arguments, **options)

    setattr(owner, name, patched)


# ----- Outside: a run, all its processes and what it has said -----

Process = namedtuple("Process", "pid kind rank")


def lines_of(out, kind="train"):
    """Returns the lines of a kind of a run's metrics.jsonl, if there is one, without those damaged.
    """
    lines = []
    if (out / "metrics.jsonl").exists():
        for text in (out / "metrics.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if line.get("kind") == kind:
                    lines.append(line)
    return lines


class Run:
    """A started train.py with everything that it starts.

    out: the folder of results. arguments: the flags. ranks: under torchrun; 0: without it. options:
    torchrun's. hosts: for nodes of one rank each, their (prefix of the command, folder to run in,
    options that torchrun finds the others with). gpus: how many cards the ranks need.
    """

    def __init__(self, out, arguments, ranks=2, fault="", options=(), hosts=(), gpus=0):
        self.out = Path(out)
        self.ranks = ranks
        self.made_of = {"out": out, "arguments": arguments, "ranks": ranks, "options": options,
                        "hosts": hosts, "gpus": gpus}
        name = uuid.uuid4().hex
        self.mark = f"FAULTS_RUN={name}".encode()
        self.said = self.out.with_name(f"said-{name}")
        self.fault_mark = self.out.with_name(f"struck-{name}")
        self.environment = os.environ | {
            "FAULTS_RUN": name, "FAULT": fault, "FAULT_MARK": str(self.fault_mark),
            "OMP_NUM_THREADS": "1"}
        if not gpus:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""

        script = ROOT / "train.py"
        if fault:
            script = Path(__file__)
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
        self.commands = [([*torchrun, "--standalone", f"--nproc_per_node={ranks}"], ROOT)]
        if not ranks:
            self.commands = [([sys.executable], ROOT)]
        if hosts:
            self.commands = [([*prefix, *torchrun, f"--nnodes={len(hosts)}", "--nproc_per_node=1",
                               *meeting], folder) for prefix, folder, meeting in hosts]
        self.program = [script, *arguments]
        self.roots = []
        for command in self.commands:
            self.start(command)

    def start(self, command):
        """Starts the program, or the torchrun of a node."""
        with open(self.said, "ab") as file:
            self.roots.append(subprocess.Popen(
                [*map(str, command[0] + self.program)], cwd=command[1], env=self.environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True))

    def again(self, **changes):
        """Starts the same without a fault."""
        return Run(**self.made_of | changes)

    def processes(self):
        """Returns all that live, a list of Process; kinds: torchrun, rank and other."""
        roots = [root.pid for root in self.roots]
        processes = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue                                     # it has just ended
            if self.mark not in words:
                continue
            kind = "other"
            if self.ranks and int(folder.name) in roots:
                kind = "torchrun"
            elif b"train.py" in command or b"faulty.py" in command:
                kind = "rank"
            rank = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
            processes.append(Process(int(folder.name), kind, sum(rank)))
        return processes

    def send(self, signum, kind, rank=None):
        """Sends a signal to the processes of a kind."""
        for process in self.processes():
            if process.kind == kind and rank in (None, process.rank):
                with contextlib.suppress(ProcessLookupError):        # it was faster
                    os.kill(process.pid, signum)

    def interrupt(self):
        """Presses Ctrl-C: every process of the terminal's group gets a SIGINT."""
        os.killpg(self.roots[0].pid, signal.SIGINT)

    def text(self):
        return self.said.read_text(errors="replace")

    def last_step(self):
        return max([line["step"] for line in lines_of(self.out)], default=0)

    def ended(self):
        """Returns whether no process is left."""
        return all(root.poll() is not None for root in self.roots) and not self.processes()

    def codes(self):
        """Returns the exit statuses; 0 is a good end."""
        return [root.returncode for root in self.roots]

    def wait(self, condition, seconds):
        """Waits until condition() is true or the run is over; returns whether it became true."""
        deadline = time.monotonic() + seconds
        while not condition() and not self.ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        return condition()

    def wait_for_end(self, seconds):
        """Waits until no process is left, at most so long. Then ends what is left, and returns what
        that was."""
        try:
            self.wait(lambda: False, seconds)
            left = self.processes()
        finally:
            self.kill()
        return [f"left: {process.kind} {process.rank}" for process in left]

    def kill(self):
        while left := self.processes():
            for kind in {process.kind for process in left}:
                self.send(signal.SIGKILL, kind)
            time.sleep(0.05)
        for root in self.roots:
            root.wait()


if os.environ.get("FAULT"):
    inject(os.environ["FAULT"])
if __name__ == "__main__":
    train.main()
