"""train.py with one fault in it, and runs of it that are watched from outside.

    export FAULT="raise 1 7 optim.learning_rate" FAULT_MARK=struck
    torchrun --nproc_per_node=2 tests/bench/faulty.py --data ...

is train.py, but rank 1 raises an exception before its 7th call of that function ("*": all ranks).
Acts are in ACTS; what follows the function's name is an act's argument. Workers count calls of
their own. Only torchrun's first attempt has the fault. `Run` finds all processes of a run by a mark
in their environment, so it needs Linux.
"""
import concurrent.futures
import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
import types
import uuid
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

import bert  # noqa: E402, F401
import data  # noqa: E402, F401
import dist  # noqa: E402
import optim  # noqa: E402, F401
import train  # noqa: E402


# ----- Inside: the fault -----

def raise_error(*_):
    raise RuntimeError("an injected error")


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def cut_digest_and_kill(descriptor):
    os.truncate(descriptor, os.fstat(descriptor).st_size - 64)
    kill()


def change_weight(difference):
    def change(masters, model):
        next(iter(masters.values())).data.view(-1)[0] += difference
    return change


def spoil_gradient(factor, times):
    """Multiplies a gradient of the next `times` backward passes."""
    def spoil(model, *_):
        left = [times]

        def hook(gradient):
            left[0] -= 1
            return gradient * factor if left[0] >= 0 else gradient
        model.get_parameter("mlm_bias").register_hook(hook)
    return spoil


def limit_memory(megabytes):
    """Lets this process have so many MB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * os.sysconf("SC_PAGE_SIZE") + int(megabytes) * 1000000
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def fill_disk(path):
    """Leaves no byte free on the disk of `path`, which becomes a large file."""
    with open(path, "wb", buffering=0) as file:
        for size in 1 << 20, 1 << 12, 1:
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


def jumping_clock(*_):
    real, jumps = time.time, iter(range(10**9))
    time.time = lambda: real() + (-1) ** next(jumps) * 1e6


ACTS = {
    "raise": lambda argument: raise_error,
    "kill": lambda argument: kill,
    "cut": lambda argument: cut_digest_and_kill,
    "pause": lambda argument: lambda *_: time.sleep(float(argument)),
    "flags": lambda argument: lambda *_: sys.argv.extend(argument.split()),
    "memory": lambda argument: lambda *_: limit_memory(argument),
    "fill": lambda argument: lambda *_: fill_disk(argument),
    "clock": lambda argument: jumping_clock,
    "nan-weight": lambda argument: change_weight(float("nan")),
    "drift": lambda argument: change_weight(1e-3),
    "nan-gradient": lambda argument: spoil_gradient(float("nan"), 1),
    "overflow": lambda argument: spoil_gradient(float("inf"), 1 << 60),
}


def inject(text):
    """Patches this process so that the fault happens in it, if it is of the fault's rank."""
    what, rank, number, target, *argument = text.split(maxsplit=4)
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if rank not in ("*", os.environ.get("RANK", "0")) or not first_attempt:
        return
    act, calls = ACTS[what](*argument or [""]), []
    *path, name = target.split(".")
    owner = functools.reduce(getattr, path[1:], sys.modules[path[0]])
    function = getattr(owner, name)

    @functools.wraps(function)             # keeps the name by which workers find it
    def patched(*arguments, **options):
        calls.append(1)
        if len(calls) == int(number):
            Path(os.environ["FAULT_MARK"]).touch()
            act(*arguments)
        return function(*arguments, **options)

    setattr(owner, name, patched)


# ----- Outside: a run, all its processes and what it has said -----

Process = namedtuple("Process", "pid kind rank")


def lines_of(out):
    """Returns the lines of a run's metrics.jsonl, if there is one, without those damaged."""
    lines, path = [], out / "metrics.jsonl"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


class Run:
    """A started train.py with everything that it starts.

    out: the folder of results. arguments: the flags. ranks: under torchrun; 0: without it. options:
    torchrun's. hosts: for nodes of one rank each, their (prefix of the command, folder to run in,
    options that torchrun finds the others with). gpus: how many cards the ranks need.
    """

    def __init__(self, out, arguments, ranks=2, fault="", options=(), hosts=(), gpus=0, said=None):
        self.out, self.mark, self.ranks = Path(out), f"FAULTS_RUN={uuid.uuid4().hex}", ranks
        self.made_of = {"out": out, "arguments": arguments, "ranks": ranks, "options": options,
                        "hosts": hosts, "gpus": gpus}
        self.said = said or self.out.with_name(f"said-{self.mark[-32:]}")
        self.fault_mark = self.out.with_name(f"struck-{self.mark[-32:]}")
        one_card = ranks > gpus > 0
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options]
        script = [ROOT / ("tests/bench/faulty.py" if fault or one_card else "train.py"), *arguments]
        self.commands = [([*torchrun, "--standalone", f"--nproc_per_node={ranks}", *script], ROOT)]
        if not ranks:
            self.commands = [([sys.executable, *script], ROOT)]
        if hosts:
            self.commands = [([*prefix, *torchrun, f"--nnodes={len(hosts)}", "--nproc_per_node=1",
                               *meeting, *script], folder) for prefix, folder, meeting in hosts]
        self.environment = os.environ | dict([self.mark.split("=")]) | {
            "OMP_NUM_THREADS": "1", "FAULT": fault, "FAULT_MARK": str(self.fault_mark)}
        if not gpus:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        elif one_card:
            self.environment["ONE_CARD"] = "1"
        self.roots = [self.start(command) for command in self.commands]

    def start(self, command):
        """Starts the program, or the torchrun of a node."""
        with open(self.said, "ab") as file:
            return subprocess.Popen([*map(str, command[0])], cwd=command[1], env=self.environment,
                                    stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                    start_new_session=True)

    def again(self, **changes):
        """Starts the same without a fault."""
        return Run(**self.made_of | changes)

    def processes(self):
        """Returns all that live, as (pid, kind, rank); kinds: torchrun, rank, worker, tracker and
        other. The tracker is multiprocessing's process that cleans up after a rank."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue                                     # it has just ended
            if self.mark.encode() in words:
                rank = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
                found[int(folder.name)] = command, rank[0] if rank else 0
        roots, processes = {root.pid for root in self.roots}, []
        for pid, (command, rank) in found.items():
            kind = "other"
            if pid in roots:
                kind = "torchrun" if self.ranks else "rank"
            elif b"spawn_main" in command:
                kind = "worker"
            elif b"resource_tracker" in command:
                kind = "tracker"
            elif b"train.py" in command or b"faulty.py" in command:
                kind = "rank"
            processes.append(Process(pid, kind, rank))
        return processes

    def pids(self, kind, rank=None):
        return [process.pid for process in self.processes()
                if process.kind == kind and rank in (None, process.rank)]

    def send(self, signum, kind, rank=None):
        """Sends a signal to the processes of a kind; returns how many there were."""
        pids = self.pids(kind, rank)
        for pid in pids:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                pass                                         # it was faster
        return len(pids)

    def interrupt(self):
        """Presses Ctrl-C: every process of the terminal's group gets a SIGINT."""
        os.killpg(self.roots[0].pid, signal.SIGINT)

    def text(self):
        return self.said.read_text(errors="replace")

    def steps(self):
        """Returns the steps in metrics.jsonl."""
        return [line["step"] for line in lines_of(self.out)
                if line["kind"] == "train"]

    def last_step(self):
        return max(self.steps(), default=0)

    def ended(self):
        return all(root.poll() is not None for root in self.roots)

    def wait(self, condition, seconds):
        """Waits until condition() is true or the run is over; returns whether it became true."""
        deadline = time.monotonic() + seconds
        while not (reached := condition()) and not self.ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(reached or condition())

    def wait_until_gone(self, seconds):
        """Returns the seconds until no process was left; then ends what is left and returns what
        that was as well."""
        began, left = time.monotonic(), self.processes()
        while left and time.monotonic() < began + seconds:
            time.sleep(0.02)
            self.ended()                                     # no zombies
            left = self.processes()
        took = time.monotonic() - began
        self.kill()
        return took, left

    def kill(self):
        while pids := [process.pid for process in self.processes()]:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
        for root in self.roots:
            root.wait()


def temporary_files(*folders):
    """Returns what a run may leave only while it writes."""
    return [str(path) for folder in folders for pattern in ("unfinished", "*.tmp", "*.partial-*")
            for path in Path(folder).rglob(pattern)]


if "ONE_CARD" in os.environ:               # NCCL refuses two ranks on one card; Gloo copies
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    meet, properties = torch.distributed.init_process_group, torch.cuda.get_device_properties
    torch.distributed.init_process_group = lambda _, *arguments: meet("gloo", *arguments)
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(
        uuid=os.environ["RANK"], total_memory=properties(device).total_memory)
    # One Gloo for both kinds of tensors: the sum in `finish` must not come amid the thread's
    finish = dist.Reducer.finish
    dist.Reducer.finish = lambda self: (concurrent.futures.wait(self.jobs), finish(self))[1]
if text := os.environ.get("FAULT"):        # in a worker this file has another name than __main__
    inject(text)
if __name__ == "__main__":
    train.main()
