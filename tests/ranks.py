"""Runs a function on several Gloo ranks, in fresh processes (forkserver) that meet in a file.

It also runs programs in such processes, which have torch already: importing it takes 3 to 5 s.
"""
import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import operator
import os
import pickle
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

import dist

ROOT = Path(__file__).parent.parent
# pytest shows this log if a test fails.
LOG = logging.getLogger("ranks")
LOG.setLevel(logging.INFO)
# Processes are forked from a server, which has imported these modules; see `start_server`. The
# first optimizer of a process imports torch._dynamo, which would take each rank a second.
CONTEXT = multiprocessing.get_context("forkserver")
if len(tempfile.gettempdir()) > 60:
    tempfile.tempdir = "/tmp"        # of the server's socket, whose path has at most 107 letters
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "sentencepiece", "pytest", "train"])
STARTING = threading.Lock()
# A process that starts would first poll all others; but two threads that poll the same one at the
# same time can read a wrong exit code, 255.
multiprocessing.process._cleanup = lambda: None
# tqdm's own lock is shared between processes: it outlives a killed rank, and then pytest ends with
# a warning.
tqdm.set_lock(threading.RLock())
IDLE = 30                    # seconds after which ranks that only wait count as hanging
# A stack frame, as Python prints it for an error, and faulthandler for a thread.
FRAME = re.compile(r'File "(.*)", line (\d+),? in (\w+)')
COLLECTIVES = {*vars(dist.World), "watch"}


def start_server():
    """Starts the server that ranks are forked from, unless it runs; does not wait for its imports.
    """
    with STARTING, contextlib.chdir(ROOT):           # the server imports train from here
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def no_room(room=0):
    """A context in which no file of this process grows beyond `room` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def doze(seconds):
    """Sleeps half as long, or a tenth as long if `seconds` is less than 1."""
    time.sleep(seconds / 2 if seconds >= 1 else seconds / 10)


def _begin(environment, stdout, stderr):
    """Gives a fork of the server the environment of a test, and files for its output."""
    gc.freeze()  # or each collection, also that at exit, goes through all of torch: 0.15 s
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate([stdout, stderr], 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)


def _main(function, arguments, rank, store, timeout, environment, path):
    _begin(environment, f"{path}.said", f"{path}.said")
    sys.stdout = sys.stderr = open(f"{path}.said", "a", buffering=1)
    faulthandler.enable(sys.stderr)                # prints the threads' stacks after a crash
    faulthandler.register(signal.SIGURG, sys.stderr)           # and on this signal
    torch.set_num_threads(1)
    # Ranks may poll their store ten times as often, since no network is between them.
    dist.time = types.SimpleNamespace(**vars(time) | {"sleep": doze})
    outcome = None
    try:
        world = dist.init(timeout, f"file://{store}")
        outcome = function(world, *arguments)
        with contextlib.suppress(dist.DistError):  # another rank may be gone already
            world.barrier()
    except BaseException as error:
        traceback.print_exc()
        if not isinstance(error, (AssertionError, ValueError, dist.DistError, ArithmeticError)):
            error = RuntimeError(repr(error))      # others may not be picklable
        error.add_note(f"on rank {rank}\n{traceback.format_exc()}")
        outcome = error
    Path(path).write_bytes(pickle.dumps(outcome))
    if isinstance(outcome, BaseException):
        os._exit(1)  # a rank whose peers are gone can hang in a clean exit


def one_of_two():
    """Returns a World of two ranks of which only this one exists: its collectives do nothing."""
    world = dist.World(size=2)
    world._run = lambda *arguments, **options: None
    return world


def together(*calls):
    """Makes several calls of run_ranks at the same time, on more cores; returns their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(operator.call, calls))


def begin(function, *arguments, **options):
    """Starts function(*arguments, **options) in a new thread. Returns a future of its result."""
    return ThreadPoolExecutor(1).submit(function, *arguments, **options)


def computed(process):
    """Returns the CPU seconds that a process has used so far."""
    try:
        # "PID (NAME) STATE ...", where NAME can be anything.
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:                                # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end_hanging(ranks, timeout, idle):
    """Waits until the processes have ended; returns the ranks that hang.

    Ranks hang if they take longer than `timeout`, or if they wait for each other: all together then
    compute for less than a second in `idle` seconds. They print their stacks and are killed.
    """
    end = time.monotonic() + timeout
    busy = time.monotonic()
    before = 0.0
    for process in ranks:
        while process.is_alive() and time.monotonic() < min(end, busy + idle):
            process.join(1)
            now = sum(map(computed, ranks))
            if abs(now - before) > 1:            # a rank that has ended counts 0
                busy = time.monotonic()
                before = now
    hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hanging:
        with contextlib.suppress(ProcessLookupError):          # it has just ended
            os.kill(ranks[rank].pid, signal.SIGURG)
        ranks[rank].join(0.5)
        ranks[rank].kill()
        ranks[rank].join()
    return hanging


def where(said):
    """Returns where a rank is, as text, from the stacks that it printed last: for each thread, the
    innermost line of the program that is not in a collective. "" if there is none."""
    *_, last = said.rpartition("Traceback (most recent call last)")
    stacks = [FRAME.findall(last)[::-1]]
    if "(most recent call first)" in last:
        stacks = map(FRAME.findall, last.split("(most recent call first)")[1:])
    places = []
    for stack in stacks:
        for file, line, function in stack:
            path = Path(file)
            if path.parent in (ROOT, ROOT / "tests/variants") and function not in COLLECTIVES:
                places.append(f"{path.name} line {line} ({function})")
                break
    return " and ".join(places)


def run_ranks(function, size, tmp_path, *arguments, local_size=None, nodes=None, check=True,
              gpu=False, timeout=60, store=None, idle=IDLE, environment=os.environ):
    """Returns what function(world, *arguments) returned on each rank, in order of rank.

    An exception of a rank is raised here; of several, one that is the cause, not a RankLost. If
    there is no cause, but ranks hang, were killed or have lost others, an AssertionError names the
    line where each is. With check=False, only ranks that hang raise an error; otherwise a rank's
    exception is its outcome, and a killed rank has the outcome None. pytest shows the output of the
    ranks if the test fails: it is logged, and outside of the main thread a note of the error.

    nodes: the number of ranks of each node, if not local_size. store: the name of a file in
    tmp_path in which ranks met before. environment: of the ranks; outside of the main thread a
    copy, since tests change os.environ.
    """
    __tracebackhide__ = True                 # pytest shows the call, not these lines
    start_server()
    store = tmp_path / (store or f"store-{uuid.uuid4().hex}")
    local_size = local_size or size
    nodes = nodes or [local_size] * (size // local_size)
    environment = environment | {"WORLD_SIZE": str(size)}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""      # Gloo, even if there is a GPU
    one_gpu = gpu and torch.cuda.device_count() < size
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for node_size in nodes:
            for local_rank in range(node_size):
                rank = len(ranks)
                own = {"RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}",
                       "LOCAL_WORLD_SIZE": f"{node_size}"}
                if one_gpu:
                    # NCCL refuses two ranks on one GPU, unless they seem to be on two hosts: then
                    # they meet over sockets.
                    own["NCCL_HOSTID"] = f"{rank}"
                path = f"{folder}/{rank}"
                Path(f"{path}.said").touch()
                ranks.append(CONTEXT.Process(target=_main, args=(
                    function, arguments, rank, store, timeout, environment | own, path)))
                ranks[rank].start()
        hanging = end_hanging(ranks, 2 * timeout + 10, idle)

        outcomes = []
        places = []
        output = ""
        ended = True                         # whether all ranks have left an outcome
        for rank, process in enumerate(ranks):
            fate = f"ended with exit code {process.exitcode}"
            if rank in hanging:
                fate = f"hangs, as ranks {hanging} do,"
            said = Path(folder, f"{rank}.said").read_text(errors="replace")
            output += f"rank {rank} {fate} and has printed:\n{said[-5000:]}\n"
            places.append(f"rank {rank}: {where(said) or fate}")
            result = Path(folder, f"{rank}")
            ended = ended and result.exists()
            outcomes.append(pickle.loads(result.read_bytes()) if result.exists() else None)
    LOG.info(output)

    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    causes = [error for error in errors if not isinstance(error, dist.RankLost)]
    if check or hanging:
        if not causes and (errors or not ended):
            causes = [AssertionError(
                "the ranks wait for each other, or one has died (do all call the same collectives, "
                f"in the same order?): {', '.join(places)}; {errors or ''}")]
        if causes:
            if threading.current_thread() is not threading.main_thread():
                causes[0].add_note(output)       # the log is that of the test which runs meanwhile
            raise causes[0]
    return outcomes


def _script(arguments, cwd, environment, folder):
    _begin(environment | {"CUDA_VISIBLE_DEVICES": ""}, f"{folder}/stdout", f"{folder}/stderr")
    os.setsid()  # makes a process group that tests can send signals to
    # Forget pytest's resource tracker: at its end it would report the semaphores that a killed
    # program has left.
    multiprocessing.resource_tracker._resource_tracker._fd = None
    os.chdir(cwd)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def script(folder, *arguments, cwd=ROOT):
    """Returns a process that runs a Python file with its arguments; the caller starts it. It is a
    fork of the server, in its own session. Its output is in the files stdout and stderr of the
    folder."""
    start_server()
    return CONTEXT.Process(target=_script, args=([*map(str, arguments)], cwd, dict(os.environ),
                                                 folder), daemon=True)


def run_script(*arguments, cwd=ROOT):
    """Runs a process of `script` to its end; returns a subprocess.CompletedProcess."""
    with tempfile.TemporaryDirectory() as folder:
        process = script(folder, *arguments, cwd=cwd)
        process.start()
        process.join(240)
        stdout, stderr = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
        assert process.exitcode is not None, f"{arguments} hangs. It has printed:\n{stdout}{stderr}"
        return subprocess.CompletedProcess(process.name, process.exitcode, stdout, stderr)
