"""Tests each variant as a program, that is, train.py as it changes it: flags, runs, resumes."""
import functools
import os
import re
import runpy
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import bert
import data
import dist
import optim
import train
from tests.local_ranks import on_threads
from tests.ranks import run_ranks, run_script
from tests.training import args_of, assert_same, column, last_state, metrics, run
from tests.variants import (local_steps, onebit_adam, onebit_lamb, slow_momentum, stream, zero1,
                            zeroone_adam)
from tests.variants.equations import FOLDER, installed, module_of, train_as, variant_names

# Tested elsewhere: compiled.py with a fast compiler, in test_train_loop.py; slow_network.py in
# test_gradients.py.
NAMES = [name for name in variant_names() if name not in ("compiled", "slow_network")]
# Trained on one rank here; all others on two.
ALONE = {"albert", "came", "lans", "merit", "modern", "modern_muon", "onebit_adam", "whole_words"}
# Their results have the bits of train.py; those of one_by_one differ by rounding.
AS_TRAIN = ["buckets_after", "ring", "zero1"]
SAME_RUNS = {*AS_TRAIN, "one_by_one"}
# Their results depend on --bucket-mb.
BY_BUCKET = {"bucket_clipping", "gradientflow", "topk", "local_steps", "powersgd"}


# ----- All of them, trained and resumed -----

def train_twice(world, shards, folder, name):
    """Trains through two phases, once without a break and once in two parts. Two ranks train in
    bf16, which reveals a model that is not a copy of the averaged masters."""
    for module in local_steps, slow_momentum:
        module.PERIOD = 4
    stream.WINDOW = 3000                         # eleven examples of 64 tokens
    install = list if name == "train" else module_of(name).install
    # The resume is within a phase; that of stacking within its second stage, of stream in its third
    # window.
    steps = {"stacking": (2, 7, 0, 0), "stream": (0, 9)}.get(name, (5, 4))
    precision = "bf16" if world.size > 1 else "fp32"
    # The buckets of stacking change. Variants that compress train with their own compression.
    compression = ["--compression", "int8"] if name == "stacking" else []
    for run in "whole", "parts":
        train_as(install, world, shards, folder / run, "--batch", 4, "--lr-scale", 0.1,
                 "--precision", precision, *compression, "--save-every", 7, "--steps", *steps)
        if world.rank == 0 and run == "whole":             # the first part, to step 7
            shutil.copytree(folder / "whole", folder / "parts")
            (folder / "parts" / "step-00000009.pt").unlink()
        world.barrier()


@pytest.fixture(scope="module", autouse=True)
def text(documents, tmp_path_factory):
    """Writes the text of `shards` into a file, and sets TEXT for stream.py."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEXT", str(path))
        yield


@pytest.fixture(scope="module")
def run_of(request, shards, tmp_path_factory):
    """Returns a function run_of(name): it waits until a program has trained, and returns the folder
    of its two runs. name: of a variant, or "train".

    Three threads of pytest's process train, each one program at a time, by run_ranks. Before the
    first test that wants this fixture, they get the programs of all tests that resume, so that
    later programs train while earlier ones are tested; any other when a test asks for it.
    """
    pool = ThreadPoolExecutor(3)
    environment = dict(os.environ)

    @functools.cache
    def begin(name):
        folder = tmp_path_factory.mktemp(name)
        size = 1 if name in ALONE else 2
        return folder, pool.submit(run_ranks, train_twice, size, folder, shards, folder, name,
                                   environment=environment)

    def run_of(name):
        folder, trained = begin(name)
        trained.result()
        return folder

    for item in request.session.items:
        if item.originalname == test_it_resumes_bit_for_bit.__name__:
            begin(item.callspec.params["name"])
    yield run_of
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", NAMES)
def test_it_resumes_bit_for_bit(name, run_of):
    whole, parts = run_of(name) / "whole", run_of(name) / "parts"
    assert_same(last_state(whole), last_state(parts), "the checkpoint of the resumed run")
    losses = column(whole, "mlm_loss")
    assert losses == column(parts, "mlm_loss") and len(losses) == 9


@pytest.mark.parametrize("name", AS_TRAIN)
def test_its_bits_are_those_of_train(name, run_of):
    """Its checkpoint, too: each program resumes runs of the other."""
    plain, ours = run_of("train") / "whole", run_of(name) / "whole"
    assert_same(last_state(plain), last_state(ours))
    for field in "mlm_loss", "nsp_loss", "grad_norm":
        assert column(plain, field) == column(ours, field), f"{field} differs from that of train.py"


def test_what_one_bit_variants_send(run_of):
    # The second stages of 1-bit LAMB are steps 2 to 5 and 7 to 9.
    sent = column(run_of("onebit_lamb") / "whole", "bytes_sent")
    assert sent[0] == sent[5] and 0 < max(sent[1:5] + sent[6:]) < sent[0] / 25, sent
    # 0/1 Adam sends nothing in steps 4 and 9. It sends before the save after step 5, which compares
    # the ranks' weights.
    sent = column(run_of("zeroone_adam") / "whole", "bytes_sent")
    assert sent[3] == sent[8] == 0 and 0 < sent[4] < sent[0] / 25, sent


def test_what_is_sent_before_a_save_is_counted_in_the_next_step(run_of):
    whole = run_of("local_steps") / "whole"
    everything = sum(tensor.nbytes for tensor in last_state(whole)["tensors"].values())
    found = [line["step"] for line in metrics(whole) if line["bytes_sent"] >= everything]
    assert found == [2, 6, 8], (
        f"what saves after steps 1, 5, 7 and 9 send is counted in steps {found}, not 2, 6 and 8")


def test_the_folder_of_an_albert_is_a_plain_bert(run_of):
    model = bert.load_huggingface(run_of("albert") / "whole" / "model")
    assert isinstance(model, bert.BertForPreTraining) and len(model.blocks) == 2


# ----- What is refused, and said -----

def test_no_program_takes_up_a_run_of_another(shards):
    """Nor of itself with a different --bucket-mb, if its results depend on it."""
    manifest = data.load_manifest(shards)
    settings = {}
    for name in ["train", *NAMES, "compiled"]:
        with installed(list if name == "train" else module_of(name).install):
            runs = [args_of("--data", shards, "--bucket-mb", size) for size in (1, 2)]
            mine, other = (train.run_settings(args, manifest) for args in runs)
        assert (mine != other) == (name in BY_BUCKET), (
            f"{name}: its settings must depend on --bucket-mb if, and only if, it is in BY_BUCKET")
        same = [other for other in settings if settings[other] == mine]
        assert same == (["train"] if name in SAME_RUNS else []), (
            f"{name} resumes runs of {same}")
        if not same:
            settings[name] = mine


@pytest.mark.parametrize("name", variant_names())
def test_it_is_a_program_that_heeds_gbps(name, monkeypatch, capsys):
    """It refuses a speed of 0 before it trains. What it has changed is restored afterwards."""
    monkeypatch.setenv("GBPS", "0")
    monkeypatch.setattr(train, "main", lambda: pytest.fail("it ignores GBPS, and trains"))
    before = bert.BertConfig.preset("tiny", 64), dist.World.all_reduce, train.parse_arguments
    with installed(), pytest.raises(SystemExit):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert "GBPS: must be in" in capsys.readouterr().err
    assert before == (bert.BertConfig.preset("tiny", 64), dist.World.all_reduce,
                      train.parse_arguments), "its changes are not restored"


@pytest.mark.parametrize("name", variant_names())
def test_train_is_imported_before_torch(name):
    """train.py sets how libgomp's threads wait, which is read when torch is imported."""
    imports = re.findall(r"^(?:import|from) (\w+)", (FOLDER / f"{name}.py").read_text(), re.M)
    others = [module for module in imports if module not in sys.stdlib_module_names]
    assert others[0] == "train", f"{name}.py imports {others[0]} before train"


def test_a_variant_runs_as_a_script(shards, tmp_path):
    done = run_script("tests/variants/onebit_lamb.py", "--data", shards, "--out", tmp_path / "out",
                      *"--steps 9 0 --max-steps 2 --batch 2".split())
    assert done.returncode == 0 and "optimizer onebit-lamb" in done.stdout, done.stderr


ONE_BIT = "needs --compression none, fp16 or bf16, and no --optimizer"


@pytest.mark.parametrize("name, argv, words", [
    ("albert", "--init nowhere", "leave out --init"),
    ("modern", "--init nowhere", "leave out --init"),
    ("stacking", "--init nowhere", "--init: leave it out"),
    ("stacking", "--model odd", "needs a multiple of 2 layers"),
    ("one_by_one", "--compression int8", "sent in full: leave out --compression"),
    ("local_steps", "--compression int8", "send no gradients: leave out --compression"),
    ("slow_momentum", "--compression int8", "leave out --optimizer and --compression"),
    ("slow_momentum", "--optimizer adamw", "leave out --optimizer and --compression"),
    ("onebit_lamb", "--compression int8", ONE_BIT),
    ("onebit_lamb", "--optimizer adamw", ONE_BIT),
    ("onebit_lamb", "--steps 3 2", "frozen before its first update; take more --steps")])
def test_what_a_variant_cannot_do_is_refused(shards, tmp_path, monkeypatch, name, argv, words):
    monkeypatch.setattr(bert, "PRESETS", bert.PRESETS | {"odd": (3, 64)})
    monkeypatch.setattr(bert, "init_from", lambda *_: None)      # as if the folder did fit
    with pytest.raises((ValueError, ArithmeticError), match=words):
        train_as(module_of(name).install, dist.World(), shards, tmp_path / "out", "--max-steps", 1,
                 *argv.split())


def test_every_variant_is_in_the_readme():
    readme = (FOLDER / "README.md").read_text()
    absent = [name for name in variant_names() if f"`{name}.py`" not in readme]
    assert not absent, f"README.md does not name the variants {absent}"


# ----- The 1-bit family in train.py -----

@pytest.mark.parametrize("phase, last_free", [(0, 2000), (1, 311)])
def test_the_variance_freezes_after_the_warm_up_or_a_fifth_of_a_phase(phase, last_free):
    with installed(onebit_lamb.install):
        args = args_of("--recipe", "nvidia-64k")
        assert args_of().betas == (0.9, 0.999), (
            f"the demo's betas are {args_of().betas}, not those of the 1-bit family")
    for step in last_free, last_free + 1:
        state = SimpleNamespace(counters=train.Counters(phase=phase, phase_step=step))
        assert onebit_adam.is_frozen(args, state) == (step > last_free), (
            f"after {step} steps is_frozen must return {step > last_free}")


def one_bit_with_an_overflow(world):
    """Makes train.py train with 1-bit LAMB. Its second stage begins with step 3; on rank 1 the loss
    of step 4 is infinite."""
    onebit_adam.FREEZE = 0.1
    onebit_lamb.install()
    forward = bert.BertForPreTraining.forward
    trained = []                                           # for each call, whether it trains

    def spoiled(self, batch):
        logits = forward(self, batch)
        trained.append(self.training)
        if sum(trained) == 4 and self.training and world.rank == 1:
            logits["mlm"] = logits["mlm"] * float("inf")
        return logits

    bert.BertForPreTraining.forward = spoiled


def test_an_overflow_in_the_second_stage_skips_the_step_on_all(shards, tmp_path):
    out = tmp_path / "out"
    sums = run(shards, out, *"--steps 20 --batch 4 --save-every 1 --max-steps 4".split(), size=2,
               sabotage=[one_bit_with_an_overflow])
    assert sums[0] == sums[1], f"the ranks have different weights, with checksums {sums}"
    assert column(out, "skipped") == [0, 0, 0, 1]
    before, after = (torch.load(path, weights_only=True)["tensors"]
                     for path in sorted(out.glob("step-*.pt")))
    assert_same(before, after, "the checkpoint after the skipped step")


@pytest.mark.parametrize("variant", [onebit_adam, onebit_lamb, zeroone_adam])
def test_fp16_follows_fp32(shards, tmp_path, variant):
    """The runs accumulate, have a loss scale, and go through both stages of two phases."""
    losses = {}
    norms = {}
    for precision, scale in ("fp32", 1), ("fp16", 65536):
        out = tmp_path / precision
        train_as(variant.install, dist.World(), shards, out, "--precision", precision,
                 *"--steps 4 2 --batch 4 --micro-tokens 64 --lr-scale 0.03".split())
        losses[precision] = column(out, "mlm_loss")
        norms[precision] = column(out, "grad_norm")
        assert column(out, "skipped", "loss_scale") == 6 * [0, scale]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=3e-3)
    assert losses["fp16"] != losses["fp32"], "the run with --precision fp16 computes in fp32"
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.1)


# ----- ZeRO -----

def twenty_masters():
    """Returns masters with gradients, {name: tensor} of 170 to 3,400 elements, and their LAMB."""
    masters = {str(n): torch.ones(n, 170) for n in range(1, 21)}
    optimizer = optim.make_optimizer("lamb", masters, (0.9, 0.98))
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for n, master in enumerate(masters.values()):
        master.grad = torch.arange(170.0).expand_as(master) + n
    return masters, optimizer


def divided_step(world):
    """Takes a step of a divided optimizer and saves. Returns a namespace of what the rank has. Its
    `held` is the memory of moments, in MB: after train.restore, in train.save and at the end."""
    masters, optimizer = twenty_masters()
    state = SimpleNamespace(masters=masters, optimizer=optimizer,
                            reducer=SimpleNamespace(bytes_sent=0))
    rank = SimpleNamespace(masters=masters, state=state, said=[], held=[])
    rank.say = rank.said.append
    rank.hold = lambda: rank.held.append(zero1.megabytes_of_moments(optimizer))
    train.restore(None, world, rank, state)
    rank.hold()
    optimizer.step()
    train.save(None, world, rank, state)
    rank.hold()
    rank.own = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return rank


@pytest.mark.parametrize("size", [1, 3, 25])
def test_zero_is_the_undivided_optimizer_in_parts(size, monkeypatch):
    """The weights, and what rank 0 saves, have the same bits; the moments are divided."""
    masters, optimizer = twenty_masters()
    optimizer.step()
    whole = train.tensors_of(SimpleNamespace(masters=masters, optimizer=optimizer))

    def save(args, world, rank, state):
        rank.hold()
        rank.saved = {name: x.clone() for name, x in train.tensors_of(state).items()}

    monkeypatch.setattr(train, "restore", lambda *_: None)
    monkeypatch.setattr(train, "save", save)
    with installed(zero1.install):
        ranks = on_threads(divided_step, size)
    assert_same(ranks[0].saved, whole, "what rank 0 saves")
    elements = 170 * 210
    owned = [rank.own for rank in ranks]
    assert sum(owned) == elements, (
        f"the ranks own {sum(owned)} elements, not {elements}: a master has no owner, or several")
    assert max(owned) <= 1.02 * max(170 * 20, elements / size), (
        f"the parts of the ranks are too unequal; their elements are {owned}")
    for rank, next_owned in zip(ranks, [*owned[1:], owned[0]]):
        assert_same(rank.masters, masters, "a rank's set of masters")
        assert rank.state.reducer.bytes_sent == 4 * (elements - next_owned), (
            "in a ring a rank does not send what the next rank owns, and sends all else")
        # One element is in place of each moment of other ranks.
        own, most = 8e-6 * rank.own, 8e-6 * (rank.own + 20)
        for when, held in zip(["before a save", "in a save", "after a save"], rank.held):
            all_are_due = when == "in a save" and rank is ranks[0]
            assert own <= held <= most or all_are_due, (
                f"{when}, a rank holds {held:.6f} MB of moments, not {own:.6f} to {most:.6f}: does "
                "it keep those of other ranks?")
        assert rank.said == [f"moments of {rank.held[0]:.1f} MB on this rank; in train.py 0.3 MB"]
