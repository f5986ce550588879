"""Runs a function on several Gloo ranks: fresh processes (forkserver) that meet in a file.

And a program in such a process, which has torch already: to import it takes 3 to 5 seconds.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import pickle
import runpy
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
CONTEXT = multiprocessing.get_context("forkserver")
# Its own is shared between processes: it outlives a killed rank, and ends pytest with a warning
tqdm.set_lock(threading.RLock())


def start_server():
    """Starts the server that ranks are forked from, before a DataLoader starts it with less."""
    # torch._dynamo is what every optimizer imports when it is first made: a second for each rank
    CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "sentencepiece", "pytest", "train"])
    multiprocessing.forkserver.ensure_running()


def doze(seconds):
    """Waits half as long, a tenth of what is less than a second."""
    time.sleep(seconds / 2 if seconds >= 1 else seconds / 10)


def _main(function, rank, size, store, arguments, local_size, gpu, timeout):
    gc.freeze()  # else each collection, and the one at exit, goes through all of torch: 0.15 s
    local_size = local_size or size
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Gloo also where there is a GPU
    elif torch.cuda.device_count() < size:
        # NCCL refuses two ranks of one host on one GPU; those of two hosts meet over sockets
        os.environ["NCCL_HOSTID"] = str(rank)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank % local_size),
        LOCAL_WORLD_SIZE=str(local_size),
    )
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # what a rank says is dropped
    # Ranks look at their store ten times as often: there is no network to spare
    dist.time = types.SimpleNamespace(**vars(time) | {"sleep": doze})
    try:
        world = dist.init(timeout, f"file://{store}")
        outcome = function(world, *arguments)
        with contextlib.suppress(dist.DistError):  # of a rank that is not there any more
            world.barrier()
    except BaseException as error:
        outcome = error
        if not isinstance(error, (ValueError, dist.DistError, ArithmeticError)):
            outcome = RuntimeError(f"{error!r} on rank {rank}\n{traceback.format_exc()}")
    with open(f"{store}.{rank}", "wb") as file:
        pickle.dump(outcome, file)
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
        return [each.result() for each in [pool.submit(call) for call in calls]]


def run_ranks(function, size, tmp_path, *arguments, local_size=None, check=True, gpu=False,
              timeout=60, store=None):
    """Returns what function(world, *arguments) returned on each rank, in order of rank.

    An exception of a rank is raised here, or is the rank's outcome where `check` is False; None is
    the outcome of a rank that was killed. store: a file in tmp_path that ranks met in before.
    """
    store = tmp_path / (store or f"store-{uuid.uuid4().hex}")
    ranks = [CONTEXT.Process(target=_main, args=(function, rank, size, store, arguments, local_size,
                                                 gpu, timeout)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(2 * timeout)
        if process.is_alive():
            for other in ranks:
                other.kill()
            raise TimeoutError("a rank hangs")
    outcomes = []
    for rank in range(size):
        path = Path(f"{store}.{rank}")
        assert path.exists() or not check, f"rank {rank} ended without an outcome"
        outcomes.append(pickle.loads(path.read_bytes()) if path.exists() else None)
        path.unlink(missing_ok=True)
        if check and isinstance(outcomes[-1], BaseException):
            raise outcomes[-1]
    return outcomes


def _script(arguments, cwd, environment, folder):
    gc.freeze()
    os.setsid()  # a group that tests can send signals to
    # Else pytest's, at its end, prints the semaphores that a killed program has left
    multiprocessing.resource_tracker._resource_tracker._fd = None
    os.chdir(cwd)
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    for number, name in enumerate(["stdout", "stderr"], 1):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), number)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def start_script(folder, *arguments, cwd=ROOT):
    """Returns a process, in a fork of the server and a session of its own, of a Python file and its
    arguments; what it prints is in the files stdout and stderr of the folder."""
    process = CONTEXT.Process(target=_script, args=([*map(str, arguments)], cwd, dict(os.environ),
                                                    folder), daemon=True)
    process.start()
    return process


def run_script(*arguments, cwd=ROOT):
    """Returns the completed process of `start_script`."""
    with tempfile.TemporaryDirectory() as folder:
        process = start_script(folder, *arguments, cwd=cwd)
        process.join(240)
        assert process.exitcode is not None, "hangs"
        stdout, stderr = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(process.name, process.exitcode, stdout, stderr)
