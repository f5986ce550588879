"""Each variant as a program: train.py as it changes it, from its flags to a resumed run."""
import functools
import runpy
import shutil
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
from tests.training import args_of, assert_same, column, last_state, metrics
from tests.variants import (albert, common, local_steps, modern, onebit_adam, onebit_lamb,
                            slow_momentum, zero1, zeroone_adam)
from tests.variants.equations import FOLDER, installed, module_of, train_as, variant_names

# compiled.py: test_train_loop.py, by a compiler that is fast; slow_network.py: test_gradients.py
NAMES = [name for name in variant_names() if name not in ("compiled", "slow_network")]
# Those that are tried on one rank; all others on two
ALONE = {"albert", "came", "lans", "merit", "modern", "modern_muon", "onebit_adam", "whole_words"}
# Their results are those of train.py, one_by_one's but for rounding
AS_TRAIN = ["buckets_after", "ring", "zero1"]
SAME_RUNS = {*AS_TRAIN, "one_by_one"}


# ----- All of them, trained and resumed -----

def train_twice(world, shards, folder, name):
    """Trains through two phases, at once and in two parts. In bf16 on two ranks: there a model that
    is not copied from averaged masters shows."""
    for module in local_steps, slow_momentum:
        module.PERIOD = 4
    install = list if name == "train" else module_of(name).install
    # It resumes within a phase; stacking within its second stage
    steps = (2, 7, 0, 0) if name == "stacking" else (5, 4)
    precision = "bf16" if world.size > 1 else "fp32"
    for run in "whole", "parts":
        train_as(install, world, shards, folder / run, "--batch", 4, "--lr-scale", 0.1,
                 "--precision", precision, "--save-every", 7, "--steps", *steps)
        if world.rank == 0 and run == "whole":             # the part to step 7
            shutil.copytree(folder / "whole", folder / "parts")
            (folder / "parts" / "step-00000009.pt").unlink()
        world.barrier()


@pytest.fixture(scope="module")
def run_of(shards, tmp_path_factory):
    """Returns a function: of a program's name the folder of its two runs."""
    @functools.cache
    def run_of(name):
        folder = tmp_path_factory.mktemp(name)
        run_ranks(train_twice, 1 if name in ALONE else 2, folder, shards, folder, name)
        return folder

    return run_of


@pytest.mark.parametrize("name", NAMES)
def test_it_resumes_bit_for_bit(name, run_of):
    whole, parts = run_of(name) / "whole", run_of(name) / "parts"
    assert_same(last_state(whole), last_state(parts), "what was resumed")
    losses = column(whole, "mlm_loss")
    assert losses == column(parts, "mlm_loss") and len(losses) == 9


@pytest.mark.parametrize("name", AS_TRAIN)
def test_its_bits_are_those_of_train(name, run_of):
    """So is its checkpoint: each takes up runs of the other."""
    plain, ours = run_of("train") / "whole", run_of(name) / "whole"
    assert_same(last_state(plain), last_state(ours))
    for field in "mlm_loss", "nsp_loss", "grad_norm":
        assert column(plain, field) == column(ours, field), f"other {field}"


def test_one_by_one_is_train_but_for_rounding(run_of):
    ours, theirs = (column(run_of(name) / "whole", "mlm_loss", "nsp_loss")
                    for name in ("one_by_one", "train"))
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_what_one_bit_variants_send(run_of):
    # The second stages of 1-bit LAMB are the steps 2 to 5 and 7 to 9
    sent = column(run_of("onebit_lamb") / "whole", "bytes_sent")
    assert sent[0] == sent[5] and 0 < max(sent[1:5] + sent[6:]) < sent[0] / 25, sent
    # 0/1 Adam sends nothing in the steps 4 and 9, but agrees before the save after step 5, which
    # compares the ranks' weights
    sent = column(run_of("zeroone_adam") / "whole", "bytes_sent")
    assert sent[3] == sent[8] == 0 and 0 < sent[4] < sent[0] / 25, sent


def test_what_is_sent_before_a_save_is_counted_in_the_next_step(run_of):
    whole = run_of("local_steps") / "whole"
    everything = sum(tensor.nbytes for tensor in last_state(whole)["tensors"].values())
    found = [line["step"] for line in metrics(whole) if line["bytes_sent"] >= everything]
    assert found == [2, 6, 8], "the saves are after the steps 1, 5, 7 and 9"


def test_the_folder_of_an_albert_is_a_plain_bert(run_of):
    model = bert.load_huggingface(run_of("albert") / "whole" / "model")
    assert isinstance(model, bert.BertForPreTraining) and len(model.blocks) == 2


# ----- What is refused, and said -----

def test_no_program_takes_up_a_run_of_another(shards):
    manifest = data.load_manifest(shards)
    settings = {}
    for name in ["train", *NAMES, "compiled"]:
        with installed(list if name == "train" else module_of(name).install):
            mine = train.run_settings(args_of(), manifest)
        same = [other for other in settings if settings[other] == mine]
        assert same == (["train"] if name in SAME_RUNS else []), f"{name} takes up runs of {same}"
        if not same:
            settings[name] = mine


@pytest.mark.parametrize("name", ["bucket_clipping", "gradientflow", "topk", "local_steps"])
def test_where_buckets_change_results_they_have_to_stay(name, shards):
    with installed(module_of(name).install):
        one, other = (train.run_settings(args_of("--bucket-mb", size), data.load_manifest(shards))
                      for size in (1, 2))
    assert one != other


@pytest.mark.parametrize("name", variant_names())
def test_it_is_a_program_that_heeds_gbps(name, monkeypatch, capsys):
    """A speed of 0 is refused before anything trains. And what it changes is restored."""
    monkeypatch.setenv("GBPS", "0")
    monkeypatch.setattr(train, "main", lambda: pytest.fail("it trains by a fast network"))
    before = bert.BertConfig.preset("tiny", 64), dist.World.all_reduce, train.parse_arguments
    with installed(), pytest.raises(SystemExit):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert "GBPS: must be in" in capsys.readouterr().err
    assert before == (bert.BertConfig.preset("tiny", 64), dist.World.all_reduce,
                      train.parse_arguments), "the five files are not as before"


def test_a_variant_runs_as_a_script(shards, tmp_path):
    done = run_script("tests/variants/onebit_lamb.py", "--data", shards, "--out", tmp_path / "out",
                      *"--steps 9 0 --max-steps 2 --batch 2".split())
    assert done.returncode == 0 and "optimizer onebit-lamb" in done.stdout, done.stderr


@pytest.mark.parametrize("variant", [albert, modern])
def test_the_weights_of_a_bert_are_refused(variant, shards, tmp_path):
    with pytest.raises(bert.ModelError, match="leave out --init"):
        train_as(variant.install, dist.World(), shards, tmp_path / "out", "--init", tmp_path)


@pytest.mark.parametrize("argv, words", [
    ("--compression int8", "needs --compression none, fp16 or bf16, and no --optimizer"),
    ("--optimizer adamw", "needs --compression none, fp16 or bf16, and no --optimizer"),
    ("--steps 3 2", "frozen before its first update; take more --steps")])
def test_what_one_bit_lamb_cannot_do_is_refused(shards, tmp_path, argv, words):
    with pytest.raises((ValueError, ArithmeticError), match=words):
        train_as(onebit_lamb.install, dist.World(), shards, tmp_path / "out", "--max-steps", 1,
                 *argv.split())


def test_every_variant_is_in_the_readme():
    readme = (FOLDER / "README.md").read_text()
    absent = [name for name in variant_names() if f"`{name}.py`" not in readme]
    assert not absent, f"README.md does not name {absent}"


# ----- The 1-bit family in train.py -----

def test_where_the_variance_freezes():
    """After the warm-up, or a fifth of a phase."""
    with installed(onebit_lamb.install):
        args = args_of("--recipe", "nvidia-64k")
        assert args.betas == (0.9, 0.999)
    counters = train.Counters()
    state = SimpleNamespace(counters=counters)
    for counters.phase, first_frozen in (0, 2001), (1, 312):
        for counters.phase_step in range(args.phases[counters.phase].steps):
            frozen = onebit_adam.is_frozen(args, state)
            assert frozen == (counters.phase_step >= first_frozen), counters


def spoiled_run(world, shards, out):
    """Trains three steps, then the fourth with an infinite loss on rank 1, then a fifth; after each
    part returns what the bits of this rank's weights and moments add up to."""
    onebit_adam.FREEZE = 0.1                               # from the third step on
    forward = bert.BertForPreTraining.forward
    states = []
    sums = []
    for last in 3, 4, 5:
        def spoiled(self, batch):
            logits = forward(self, batch)
            if self.training and world.rank == 1 and last == 4:
                logits["mlm"] = logits["mlm"] * float("inf")
            return logits

        def install():
            onebit_lamb.install()
            bert.BertForPreTraining.forward = spoiled
            common.after_build(lambda args, world, state: states.append(state))

        train_as(install, world, shards, out, "--steps", 20, "--batch", 4, "--save-every", 1,
                 "--max-steps", last)
        tensors = train.tensors_of(states[-1]).values()
        sums.append(sum(int(tensor.view(torch.int32).long().sum()) for tensor in tensors))
    return sums


def test_an_overflow_in_the_second_stage_skips_the_step_on_all(shards, tmp_path):
    out = tmp_path / "out"
    first, second = run_ranks(spoiled_run, 2, tmp_path, shards, out)
    before, skipped, moved = first
    assert first == second, "the ranks have other weights"
    assert before == skipped, "the skipped step has changed weights or moments"
    assert skipped != moved, "the step after it changes nothing"
    assert column(out, "skipped") == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("variant", [onebit_adam, onebit_lamb, zeroone_adam])
def test_fp16_follows_fp32(shards, tmp_path, variant):
    """With accumulation and a loss scale, through both stages of two phases."""
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
    assert losses["fp16"] != losses["fp32"], "it computes in fp32"
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.1)


# ----- ZeRO -----

def zero_runs(world, shards, folder):
    """On three ranks: AdamW by train.py and divided, to step 4. On two: both go on from what the
    divided one has saved."""
    flags = "--optimizer", "adamw", "--batch", 6, "--steps", 4, 3, "--precision", "fp32"
    for name, install in ("plain", list), ("zero1", zero1.install):
        out = folder / name
        if world.size == 2 and world.rank == 0:
            shutil.copytree(folder / "zero1", folder / f"{name}_on_two")
        if world.size == 2:
            out = folder / f"{name}_on_two"
        world.barrier()
        train_as(install, world, shards, out, *flags,
                 *([] if world.size == 2 else ["--max-steps", 4]))


def test_zero_is_train_on_any_number_of_ranks(shards, tmp_path):
    for size in 3, 2:
        run_ranks(zero_runs, size, tmp_path, shards, tmp_path)
    for plain, divided in ("plain", "zero1"), ("plain_on_two", "zero1_on_two"):
        assert_same(last_state(tmp_path / plain), last_state(tmp_path / divided))
        assert column(tmp_path / plain, "mlm_loss") == column(tmp_path / divided, "mlm_loss")
    plain, divided = (column(tmp_path / name, "bytes_sent")[0] for name in ("plain", "zero1"))
    assert divided == pytest.approx(1.5 * plain, abs=3), "2 (W - 1) / W of all, then half as many"
    assert column(tmp_path / "zero1_on_two", "step") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("size", [1, 3, 50])
def test_each_rank_has_a_part_of_the_moments(size, monkeypatch):
    """Before and after a save; in it rank 0 has all."""
    monkeypatch.setattr(train, "restore", lambda *_: None)
    monkeypatch.setattr(train, "save", lambda args, world, log, state: log.kept.append(
        zero1.megabytes_of_moments(state.optimizer)))

    def divided(world):
        masters = {str(n): torch.zeros(n, 5) for n in range(1, 41)}
        optimizer = optim.make_optimizer("lamb", masters, (0.9, 0.98))
        for master in masters.values():
            master.grad = torch.ones_like(master)
        state = SimpleNamespace(masters=masters, optimizer=optimizer,
                                reducer=SimpleNamespace(bytes_sent=0))
        said = []
        log = SimpleNamespace(said=said, say=said.append, kept=[])
        train.restore(None, world, log, state)
        log.kept.append(zero1.megabytes_of_moments(optimizer))
        optimizer.step()
        train.save(None, world, log, state)
        log.kept.append(zero1.megabytes_of_moments(optimizer))
        log.stepped = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        return log

    with installed(zero1.install):
        ranks = on_threads(divided, size)
    elements = 5 * 820
    stepped = [log.stepped for log in ranks]
    assert sum(stepped) == elements, "not each master has one owner"
    assert max(stepped) <= 1.02 * max(5 * 40, elements / size), f"unequal parts: {stepped}"
    assert ranks[0].kept[1] == pytest.approx(8e-6 * elements), "rank 0 does not save all moments"
    for log in ranks:
        # One element stands for a tensor of others
        own, most = 8e-6 * log.stepped, 8e-6 * (log.stepped + 40)
        assert own <= log.kept[0] <= most, "a rank keeps moments of others"
        assert log.kept[1] <= most or log is ranks[0], "a rank gets moments of others in a save"
        assert own <= log.kept[2] <= most, "a rank keeps moments of others after a save"
        assert log.said == [f"moments of {log.kept[0]:.1f} MB on this rank; in train.py 0.0 MB"]
