"""What several test files share: a small corpus, its shards, training in this process."""
import contextlib
import os
import random
import sys
from pathlib import Path

import pytest
import torch

import data

ROOT = Path(__file__).parent.parent
# What the course's tests draw by: grading sets another one than the copies of students have.
SEED = int(os.environ.get("THRIFTBERT_SEED", 0)) % 100         # some tests do more by a larger one
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
        config.option.tbstyle = "short"      # what a failure says shall stand near its beginning
    # Two threads take longer than one for tensors as small as those of the tests
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")            # of the programs


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def make_documents(count=400, seed=0):
    """Returns documents of made-up sentences, one a line; each has a small set of words of its own.
    """
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
    """Programs under test run on the CPU, several ranks too, also where there is a GPU."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        # torch has looked in this process before, and would say: there are GPUs, but 0 of them
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def programs_do_not_end_pytest(monkeypatch):
    """A program that fails in this process raises SystemExit: os._exit would end pytest."""
    monkeypatch.setattr(os, "_exit", sys.exit)


@pytest.fixture(scope="session")
def documents():
    return make_documents(seed=SEED)


@pytest.fixture(scope="session")
def shards(documents, tmp_path_factory):
    """A folder of prepared shards: 4 of them and the held-out one, vocabulary of 320 pieces."""
    folder = tmp_path_factory.mktemp("prepared") / "shards"
    data.prepare(documents, folder, vocab_size=320, shards=4)
    return folder


@pytest.fixture(scope="session")
def torchruns(shards, tmp_path_factory):
    """Three runs below a torchrun, {name: (the process, its folder, a future of its start)}; one
    ends when it is killed."""
    from tests.ranks import begin
    from tests.training import FAILS, LONG, SHELL, start_and_kill, torchrun
    words = {
        "fails": [sys.executable, "-c", FAILS,
                  *"--steps 4 0 --batch 2 --save-every 1 --compression onebit".split()],
        "refused": [*SHELL, "--batch=1"],
        "killed": [*SHELL, *LONG]}
    runs = {}
    for name in words:
        folder = tmp_path_factory.mktemp(name)
        process = torchrun(folder, *words[name], "--data", shards)
        # In a thread: the first process waits until the server of the ranks has imported torch
        begun = begin(start_and_kill, process, folder / "out") if name == "killed" else (
            begin(process.start))
        runs[name] = process, folder, begun
    return runs


@pytest.fixture(scope="module", autouse=True)
def begun_first(request):
    """Begins, before the first test, what takes long and leaves time to other tests, if any wants
    it: of the course, whose tests have processes of their own, the server of the ranks alone."""
    from tests.ranks import start_server
    wanted = {name for item in request.session.items for name in item.fixturenames}
    for name in wanted & {"torchruns", "in_trouble"}:
        start_server()
        with contextlib.suppress(Exception):         # told by the tests that want it
            "course" in request.path.parts or request.getfixturevalue(name)


@pytest.fixture
def train_here(shards, monkeypatch):
    """Trains on one rank in this process, as short as tests.training.shrink makes it, and leaves
    the process its signals. Returns train.py's arguments."""
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
