"""Runs a function on several Gloo ranks: fresh processes (forkserver) that meet in a file.

And a program in such a process, which has torch already: to import it takes 3 to 5 seconds.
"""
import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import multiprocessing.forkserver
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
# pytest shows what is logged in a test that fails
LOG = logging.getLogger("ranks")
LOG.setLevel(logging.INFO)
# Processes are forked from a server. Whoever needs the first one starts it, with these modules.
# torch._dynamo is what every optimizer imports when it is first made: a second for each rank
CONTEXT = multiprocessing.get_context("forkserver")
if len(tempfile.gettempdir()) > 60:
    tempfile.tempdir = "/tmp"        # its socket lies there, whose path has 107 letters at most
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "sentencepiece", "pytest", "train"])
STARTING = threading.Lock()
# Its own is shared between processes: it outlives a killed rank, and ends pytest with a warning
tqdm.set_lock(threading.RLock())
IDLE = 30                    # seconds after which ranks that only wait are taken to hang
# A frame of a stack, as Python prints it for an error, and faulthandler of a thread
FRAME = re.compile(r'File "(.*)", line (\d+),? in (\w+)')
COLLECTIVES = {*vars(dist.World), "watch"}


def start_server():
    """Starts the server that ranks are forked from, unless it runs."""
    with STARTING, contextlib.chdir(ROOT):           # where it finds train
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def no_room(room=0):
    """Within it no file of this process grows beyond `room` bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def doze(seconds):
    """Waits half as long, a tenth of what is less than a second."""
    time.sleep(seconds / 2 if seconds >= 1 else seconds / 10)


def _begin(environment, stdout, stderr):
    """Gives a fork of the server the environment of a test, and files for what it prints."""
    gc.freeze()  # else each collection, and the one at exit, goes through all of torch: 0.15 s
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate([stdout, stderr], 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)


def _main(function, arguments, rank, store, timeout, environment, path):
    _begin(environment, f"{path}.said", f"{path}.said")
    sys.stdout = sys.stderr = open(f"{path}.said", "a", buffering=1)
    faulthandler.enable(sys.stderr)                # prints where its threads stand at a crash
    faulthandler.register(signal.SIGURG, sys.stderr)           # and when it is asked
    torch.set_num_threads(1)
    # Ranks look at their store ten times as often: there is no network to spare
    dist.time = types.SimpleNamespace(**vars(time) | {"sleep": doze})
    outcome = None
    try:
        world = dist.init(timeout, f"file://{store}")
        outcome = function(world, *arguments)
        with contextlib.suppress(dist.DistError):  # of a rank that is not there any more
            world.barrier()
    except BaseException as error:
        traceback.print_exc()
        if not isinstance(error, (AssertionError, ValueError, dist.DistError, ArithmeticError)):
            error = RuntimeError(repr(error))      # others may not survive pickle
        error.add_note(f"on rank {rank}\n{traceback.format_exc()}")
        outcome = error
    Path(path).write_bytes(pickle.dumps(outcome))
    if isinstance(outcome, BaseException):
        os._exit(1)  # a rank whose peers are gone can hang in a clean exit


def one_of_two():
    """Returns a World of two ranks of which only this one is there: collectives do nothing."""
    world = dist.World(size=2)
    world._run = lambda *arguments, **options: None
    return world


def together(*calls):
    """Returns what each of the calls of run_ranks returns: at the same time, as there are cores."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(operator.call, calls))


def begin(function, *arguments, **options):
    """Returns a future of what a function returns, which runs in a thread of its own."""
    return ThreadPoolExecutor(1).submit(function, *arguments, **options)


def computed(process):
    """Returns the seconds that a process has computed until now."""
    try:
        # "PID (NAME) STATE ...", where NAME can be anything
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:                                # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end_hanging(ranks, timeout, idle):
    """Waits until the processes have ended. If they take too long, or wait for each other, which is
    to compute less than a second in `idle`, they print where they stand, and are killed. Returns
    their ranks."""
    end = time.monotonic() + timeout
    busy = time.monotonic()
    before = 0.0
    for process in ranks:
        while process.is_alive() and time.monotonic() < min(end, busy + idle):
            process.join(1)
            now = sum(map(computed, ranks))
            if abs(now - before) > 1:            # it is less when one has ended
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
    """Returns where a rank stands, by the stacks that it has printed last: of each thread the
    innermost line of the program that is no collective, as text, "" if there is none."""
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
              gpu=False, timeout=60, store=None, idle=IDLE):
    """Returns what function(world, *arguments) returned on each rank, in order of rank.

    An exception of a rank is raised here, or is the rank's outcome where `check` is False; None is
    the outcome of a rank that was killed. Of several exceptions the cause is raised: one that is
    not of a rank which has lost another one. What ranks print is logged, and in a test that fails
    it is shown. nodes: how many ranks each node has, if not local_size. store: a file in tmp_path
    that ranks met in before.
    """
    __tracebackhide__ = True                 # pytest shows the call, not these lines
    start_server()
    store = tmp_path / (store or f"store-{uuid.uuid4().hex}")
    local_size = local_size or size
    nodes = nodes or [local_size] * (size // local_size)
    environment = os.environ | {"WORLD_SIZE": str(size)}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""      # Gloo also where there is a GPU
    one_gpu = gpu and torch.cuda.device_count() < size
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for node_size in nodes:
            for local_rank in range(node_size):
                rank = len(ranks)
                own = {"RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}",
                       "LOCAL_WORLD_SIZE": f"{node_size}"}
                if one_gpu:
                    # NCCL refuses two ranks of one host on one GPU; those of two meet over sockets
                    own["NCCL_HOSTID"] = f"{rank}"
                path = f"{folder}/{rank}"
                Path(f"{path}.said").touch()
                ranks.append(CONTEXT.Process(target=_main, args=(
                    function, arguments, rank, store, timeout, environment | own, path)))
                ranks[rank].start()
        hanging = end_hanging(ranks, 2 * timeout + 10, idle)

        outcomes = []
        places = []
        ended = True                         # all of them, and have left an outcome
        for rank, process in enumerate(ranks):
            fate = f"ended with exit code {process.exitcode}"
            if rank in hanging:
                fate = f"hangs, as ranks {hanging} do,"
            said = Path(folder, f"{rank}.said").read_text(errors="replace")
            LOG.info(f"rank {rank} {fate} and has printed:\n{said[-5000:]}")
            places.append(f"rank {rank}: {where(said) or fate}")
            result = Path(folder, f"{rank}")
            ended = ended and result.exists()
            outcomes.append(pickle.loads(result.read_bytes()) if result.exists() else None)

    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    causes = [error for error in errors if not isinstance(error, dist.RankLost)]
    if check or hanging:
        if causes:
            raise causes[0]
        if errors or not ended:
            raise AssertionError(
                "the ranks wait for each other, or one has died (do all call the same collectives, "
                f"in the same order?): {', '.join(places)}; {errors or ''}")
    return outcomes


def _script(arguments, cwd, environment, folder):
    _begin(environment | {"CUDA_VISIBLE_DEVICES": ""}, f"{folder}/stdout", f"{folder}/stderr")
    os.setsid()  # a group that tests can send signals to
    # Else pytest's, at its end, prints the semaphores that a killed program has left
    multiprocessing.resource_tracker._resource_tracker._fd = None
    os.chdir(cwd)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def script(folder, *arguments, cwd=ROOT):
    """Returns a process, in a fork of the server and a session of its own, of a Python file and its
    arguments, which is to be started; what it prints is in the files stdout and stderr of the
    folder."""
    start_server()
    return CONTEXT.Process(target=_script, args=([*map(str, arguments)], cwd, dict(os.environ),
                                                 folder), daemon=True)


def run_script(*arguments, cwd=ROOT):
    """Returns the completed process of `script`."""
    with tempfile.TemporaryDirectory() as folder:
        process = script(folder, *arguments, cwd=cwd)
        process.start()
        process.join(240)
        stdout, stderr = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
        assert process.exitcode is not None, f"{arguments} hangs; it has printed:\n{stdout}{stderr}"
        return subprocess.CompletedProcess(process.name, process.exitcode, stdout, stderr)
