"""What test files share: a small corpus and its shards, training in this process, background runs.
"""
import contextlib
import os
import random
import sys
from pathlib import Path

import pytest
import torch

import data

ROOT = Path(__file__).parent.parent
# The course's tests draw by it. Grading sets one that students do not have in their copies.
SEED = int(os.environ.get("THRIFTBERT_SEED", 0)) % 100         # some tests do more if it is larger
WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car
city name team minute idea kid body back parent face level office door health person art war
history party result change morning reason research girl guy moment air teacher force education
""".split()


def pytest_configure(config):
    if not __debug__:
        raise pytest.UsageError("python -O leaves out assertions: unset PYTHONOPTIMIZE")
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"      # puts the message of a failure near its beginning
    # For tensors as small as those of the tests, two threads are slower than one.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")            # in the programs


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def make_documents(count=400, seed=0):
    """Returns documents of made-up sentences, one a line. Each document has its own small set of
    words."""
    rng = random.Random(seed)
    documents = []
    for _ in range(count):
        topic = [a + b for a, b in zip(rng.sample(WORDS, 30), rng.choices(WORDS, k=30))]
        documents.append("\n".join(
            " ".join(rng.choices(topic, k=rng.randint(4, 14))).capitalize() + "."
            for _ in range(rng.randint(1, 12))))
    return documents


@pytest.fixture(autouse=True)
def programs_without_gpu(request, monkeypatch):
    """Makes programs under test use the CPU, even if there is a GPU; not in tests marked `gpu`."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        # torch has looked for GPUs in this process before: it would still say that there are some,
        # but count 0 of them.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def programs_do_not_end_pytest(monkeypatch):
    """Makes a program that fails in this process raise SystemExit: os._exit would end pytest."""
    monkeypatch.setattr(os, "_exit", sys.exit)


@pytest.fixture(scope="session")
def documents():
    return make_documents(seed=SEED)


@pytest.fixture(scope="session")
def shards(documents, tmp_path_factory):
    """A folder of prepared shards: 4 for training, 1 held out; the vocabulary has 320 pieces."""
    folder = tmp_path_factory.mktemp("prepared") / "shards"
    data.prepare(documents, folder, vocab_size=320, shards=4)
    return folder


@pytest.fixture(scope="session")
def torchruns(shards, tmp_path_factory):
    """Starts three programs, each under its own torchrun: {name: (process, its folder, a future)}.

    The fixture waits for none of them. For each program it starts a thread in pytest's process; the
    future is done when the thread has done what the table says. The program runs in processes of
    its own, beside the tests. `ended` in test_stops.py waits for the future, then for the process.

                   the program                   its thread
        fails      rank 1 raises an error once   starts it
        refused    train.py refuses its flags    starts it
        killed     trains on and on              starts it, waits until a step is saved, kills the
                                                 torchrun, waits until the ranks have ended
    """
    from tests.ranks import begin
    from tests.training import FAILS, LONG, SHELL, start_and_kill, torchrun
    words = {
        "fails": [sys.executable, "-c", FAILS,
                  *"--steps 4 0 --batch 2 --save-every 1 --compression int8".split()],
        "refused": [*SHELL, "--batch=1"],
        "killed": [*SHELL, *LONG]}
    runs = {}
    for name in words:
        folder = tmp_path_factory.mktemp(name)
        process = torchrun(folder, *words[name], "--data", shards)
        # In a thread, since `start` waits until the server of the ranks has imported torch.
        begun = begin(start_and_kill, process, folder / "out") if name == "killed" else (
            begin(process.start))
        runs[name] = process, folder, begun
    return runs


@pytest.fixture(scope="module", autouse=True)
def begun_first(request):
    """Begins the slow fixtures early, so that they work in the background of other tests.

    It runs in pytest's main thread, before the first test of each file, and waits for no result.
    It begins only what some test of the session wants: `torchruns` before the first file outside of
    the course, `in_trouble` before the first test of test_dist.py. In files of the course, whose
    tests have processes of their own, it starts only the server of the ranks.
    """
    from tests.ranks import start_server
    wanted = {name for item in request.session.items for name in item.fixturenames}
    for name in wanted & {"torchruns", "in_trouble"}:
        start_server()
        # The tests that want the fixture report its error. In other files there is no `in_trouble`.
        with contextlib.suppress(Exception):
            if request.path.parent.name != "course":
                request.getfixturevalue(name)


@pytest.fixture
def train_here(shards, monkeypatch):
    """Returns a function that trains on one rank in this process and returns train.py's arguments.
    Training is small, see tests.training.shrink, and the process keeps its signal handlers."""
    import dist
    import train
    from tests.training import args_of, shrink
    shrink(monkeypatch.setattr)
    monkeypatch.setattr(dist, "listen_to_signals", list)

    def run(out, *argv):
        args = args_of("--data", shards, "--out", out, *argv)
        train.train(args, dist.World())
        return args

    return run
