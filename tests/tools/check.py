"""Is a changed program still right in small micro-batches, on two ranks and after a resume?

    python tests/tools/check.py                              # train.py, as it is now
    python tests/tools/check.py --optimizer lion             # with flags of train.py
    python tests/tools/check.py tests/variants/albert.py     # a variant

Trains the program 21 times for a few steps, on the CPU, in about two minutes on two idle cores (19
times if the CPU has no bf16 instructions). For each property that nearly every program must keep,
it prints "yes", "NO" with the first difference, or "not tried" and why. The status is 1 if
something differs. The last line names the weights that no step changes, which are right if you have
frozen them.

With --compression losses on two ranks may differ by a hundredth and norms by two fifths, since each
rank rounds its own gradients; a step that overflows, as fp16's first one may, gives NO. Leave
--steps alone, and --save-every, --dropout, --precision and --hours, whose results differ by nature.
Variants that compress or clip by themselves, or whose ranks step alone, and came.py differ, too:
they get a NO for two ranks or for resumes, came.py also for an example at a time. This program does
not see whether a change does what you wanted, or what shows only in a long run, on a GPU or with
other flags. With --model, the loss of pairs may differ by a tenth in bf16 from step 3 on: in `mini`
it then differs by four hundredths.
"""
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

import bert
import optim

# With four steps in each phase, `first_six` reaches into the second phase. A save drops the
# residuals of a compressor, so a run that is stopped for its bits stops where all runs save. Two
# ranks cannot divide 13 examples evenly. At a quarter of the rate, sign-based optimizers drift
# less, but so do faults: hence the small TOLERANCE. Ranks in a deadlock end after a minute.
FLAGS = ("--steps 4 --batch 13 --save-every 3 --lr-scale 0.25 --dropout 0 --precision fp32 "
         "--timeout 60").split()
TOLERANCE = 2.5e-6           # relative; nearly all right programs differ by less than 6e-7

# Runs a program, given with its flags, after the lines in place of CHANGE.
CHANGED = """
import runpy, sys
from pathlib import Path

sys.argv = sys.argv[1:]
folders = Path(sys.argv[0]).resolve().parents
sys.path[0] = str(folders[0])            # as for a program that is started by itself
sys.path += [str(folder) for folder in folders if (folder / "dist.py").exists()]
import bert, data, dist, optim

CHANGE
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The gradients of two steps have an inf. Two, since some programs take two gradients in a step:
# then both are those of one step. The Reducer itself calls `zero_grad` once.
SPOILED = """
zero_grad = dist.Reducer.zero_grad
calls = []

def spoil(reducer, *loss_scale):
    zero_grad(reducer, *loss_scale)
    calls.append(0)
    if len(calls) in (6, 7):
        reducer.flats[0][0] = float("inf")

dist.Reducer.zero_grad = spoil
"""
# Each second step has half of the loss scale: a power of two changes no bit of the weights.
RESCALED = """
update = optim.LossScaler.update

def rescale(scaler, overflow, step):
    step_taken = update(scaler, overflow, step)
    scaler.scale *= 0.5 if step % 2 else 2.0
    return step_taken

optim.LossScaler.update = rescale
"""
# For each training batch, prints the number of its dataset, one for each phase, and the numbers of
# its examples.
NOTED = """
batch = data.PretrainingData.batch
datasets = []

def note(dataset, indices):
    if not str(dataset.paths[0]).endswith("heldout"):
        if dataset not in datasets:
            datasets.append(dataset)
        print("read", datasets.index(dataset), *indices)
    return batch(dataset, indices)

data.PretrainingData.batch = note
"""
# At the end of the program, compares the model with its folder, on the last batch that it has read.
COMPARED = f"""
to = data.Batch.to
save = bert.save_huggingface
end = dist.end
last = {{}}

def keep_batch(batch, device):
    last["batch"] = to(batch, device)
    return last["batch"]

def keep_model(model, tokenizer_path, folder, longest):
    save(model, tokenizer_path, folder, longest)
    last.update(model=model, folder=folder)

def compare_and_end(status):
    if status == 0:
        runpy.run_path({__file__!r})["compare"](**last)
    end(status)

data.Batch.to = keep_batch
bert.save_huggingface = keep_model
dist.end = compare_and_end
"""


class Failed(Exception):
    """The program ended with an error, which the message quotes, or has trained nothing."""


class Program:
    """A program and its flags; its runs are folders in `folder`."""

    def __init__(self, words, folder):
        self.folder = folder
        self.words = words
        if not (words and words[0].endswith(".py")):
            self.words = [str(Path(optim.__file__).with_name("train.py")), *words]
        # How much two ranks may differ: with int8, whose ranks round their own gradients, losses
        # differ by 6e-4, norms by 6e-3.
        compressed = any(word.startswith("--compression") for word in words)
        self.tolerance = 1e-2 if compressed else TOLERANCE
        self.said = {}                   # {run: what it has printed}

    def train(self, name, *flags, ranks=1, change=""):
        """Trains the run `name`, or resumes it. change: SPOILED, RESCALED, NOTED or COMPARED.
        Returns its training and held-out losses and norms of gradients, {("train" or "eval", step):
        {field: value}}, and keeps what it prints in `said`. Raises Failed."""
        program, *words = self.words
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if change:
            command += ["-c", CHANGED.replace("CHANGE", change)]
        command += [program, *FLAGS, *words, *flags, "--out", str(self.folder / name)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            # torchrun prints much. Keep the program's own lines and the last line of a traceback.
            said = process.stderr.strip().splitlines()
            own = [line for line in said if line.startswith("train.py: ") or "Error: " in line]
            raise Failed("; ".join((own or said)[:2])[:300])
        self.said[name] = process.stdout

        losses = {}
        for line in self.lines(name):
            losses[line["kind"], line.get("step")] = {
                field: line[field] for field in line
                if field.endswith("_loss") or field == "grad_norm"}
        return losses

    def lines(self, name):
        """Returns the lines of a run's metrics.jsonl, a list of dicts. Raises Failed."""
        path = self.folder / name / "metrics.jsonl"
        if not path.exists():
            raise Failed("it has written no metrics.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    def model(self, name):
        """Returns the weights of a run's model folder, {Hugging Face's name: tensor}."""
        return weights_in(self.folder / name / "model")


def weights_in(folder):
    """Returns the weights of a model folder, {Hugging Face's name: tensor}."""
    return bert.unpack(bytearray((folder / "model.safetensors").read_bytes()))


def unchanged(one, other):
    """Returns the names of the weights of two models that have the same bits in both."""
    return [name for name in one if torch.equal(one[name], other[name])]


def difference(losses, expected, tolerance):
    """Returns, in words, the first expected loss or norm that differs, is missing or is not finite;
    "" if there is none. The tolerance is relative, and that of a norm forty times as large. Only
    norms show a wrong factor of all gradients: they are clipped, and LAMB does not see it."""
    for (kind, step), numbers in expected.items():
        found = losses.get((kind, step), {})
        for name, number in numbers.items():
            other = found.get(name)
            what = f"{name} of step {step}{', held out,' * (kind == 'eval')}"
            if None in (number, other):              # null, or no such line
                return f"NO: {what} is not there, or not finite"
            allowed = 40 * tolerance if name == "grad_norm" else tolerance
            if not math.isclose(other, number, rel_tol=allowed):
                return f"NO: {what} is {other:.8g}, not {number:.8g}"
    return ""


# ----- The BERT of Hugging Face -----

def huggingface_logits(folder, batch):
    """Returns the logits that Hugging Face's BertForPreTraining has with the weights of a folder,
    {task: tensor}, for a data.Batch without its padding. By torch's functions alone, an example at
    a time."""
    config = json.loads((folder / "config.json").read_text())
    weights = weights_in(folder)

    def embedding(kind, indices):
        return weights[f"bert.embeddings.{kind}_embeddings.weight"][indices]

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"],
                            config["layer_norm_eps"])

    def layer(name, x):
        qkv = [linear(f"{name}.attention.self.{part}", x) for part in ("query", "key", "value")]
        heads = [part.unflatten(1, (config["num_attention_heads"], -1)).transpose(0, 1)
                 for part in qkv]                            # (H, T, D/H) each
        attended = F.scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1)
        attended = linear(f"{name}.attention.output.dense", attended)
        x = norm(f"{name}.attention.output.LayerNorm", x + attended)
        inner = F.gelu(linear(f"{name}.intermediate.dense", x))
        return norm(f"{name}.output.LayerNorm", x + linear(f"{name}.output.dense", inner))

    hidden = []
    for rows in torch.arange(int(batch.bounds[-2])).split(batch.lengths[:-1].tolist()):
        x = embedding("word", batch.tokens[rows])
        x = x + embedding("position", torch.arange(len(rows)))
        x = norm("bert.embeddings.LayerNorm", x + embedding("token_type", batch.segments[rows]))
        for number in range(config["num_hidden_layers"]):
            x = layer(f"bert.encoder.layer.{number}", x)
        hidden.append(x)                                     # (T, D)
    hidden = torch.cat(hidden)

    pooled = torch.tanh(linear("bert.pooler.dense", hidden[batch.bounds[:-2]]))
    predicted = F.gelu(linear("cls.predictions.transform.dense", hidden[batch.masked_rows]))
    predicted = norm("cls.predictions.transform.LayerNorm", predicted)
    mlm = predicted @ weights["bert.embeddings.word_embeddings.weight"].T
    return {"mlm": mlm + weights["cls.predictions.bias"],
            "nsp": linear("cls.seq_relationship", pooled)}


@torch.no_grad()
def compare(model, batch, folder):
    """Raises bert.ModelError if a folder says that it is a BERT, and Hugging Face's BERT would give
    other logits than the model. Runs in the program that has written the folder."""
    if json.loads((folder / "config.json").read_text())["model_type"] != "bert":
        return
    model.eval()
    logits = model(batch)
    expected = huggingface_logits(folder, batch)
    for task in sorted(logits.keys() & expected.keys()):
        error = (logits[task] - expected[task]).abs().max()
        if not error < 1e-4:
            raise bert.ModelError(f"Hugging Face's BERT with these weights has other {task} logits "
                                  f"({error:.2g} off); change MODEL_TYPES in bert.py")


# ----- What must hold -----
#
# Each function returns "" if its property holds, else "NO: " and the reason, or "not tried: " and
# the reason. whole: what an uninterrupted run on one rank returned.

def same_again(program, whole):
    """All random numbers follow from --seed."""
    return difference(program.train("again"), whole, 0)


def same_after_resume(program, whole):
    """A checkpoint has everything that the next step depends on, in each of up to three phases."""
    for stop in "3", "6", "9":
        program.train("resumed", "--max-steps", stop)
    found = difference(program.train("resumed"), whole, 0)
    if found:
        return found
    resumed = program.model("resumed")
    changed = resumed.keys() - unchanged(resumed, program.model("whole"))
    if changed:
        return f"NO: all losses are the same, but not {min(changed)} in model/"
    return ""


def same_with_dropout(program, whole):
    """Dropout follows from --seed and the step, and evaluation has none."""
    dropout = "--dropout", "0.1"
    expected = program.train("dropout", *dropout, "--max-steps", "6")
    program.train("dropout, resumed", *dropout, "--max-steps", "3")
    return difference(program.train("dropout, resumed", *dropout, "--max-steps", "6"), expected, 0)


def each_example_once(program, whole):
    """The steps of a phase read the examples 0, 1, 2 ..., each one once. Only this run shows it:
    what skips or repeats examples does so on all ranks alike."""
    program.train("noted", change=NOTED)
    read = {}                            # {number of the dataset: numbers of examples}
    for line in program.said["noted"].splitlines():
        if line.startswith("read "):
            dataset, *indices = map(int, line.split()[1:])
            read.setdefault(dataset, []).extend(indices)
    if not read:
        return "not tried: the program does not call data.PretrainingData.batch"
    for dataset, indices in read.items():
        for expected, index in enumerate(sorted(indices)):
            if index != expected:
                happens = "comes twice" if index < expected else f"comes in place of {expected}"
                return f"NO: in phase {dataset + 1} example {index} {happens}"
    return ""


def same_as_huggingface(program, whole):
    """What model/ calls a BERT is one: Hugging Face's gives the logits of the model written."""
    program.train("compared", change=COMPARED)
    config = json.loads((program.folder / "compared/model/config.json").read_text())
    if config["model_type"] != "bert":
        return f"not tried: its folder says that it is a {config['model_type']}"
    return ""


def same_one_at_a_time(program, whole):
    """No example depends on its neighbours; all labels of a step have the same weight."""
    return difference(program.train("small", "--micro-tokens", "1", "--max-steps", "6"),
                      first_six(whole), TOLERANCE)


def same_on_two_ranks(program, whole):
    """Examples depend on their numbers alone; losses are divided by the counts over all ranks."""
    return difference(program.train("two", "--max-steps", "6", ranks=2), first_six(whole),
                      program.tolerance)


def same_from_two_to_one(program, whole):
    """A checkpoint of two ranks has everything that one rank needs."""
    program.train("moved", "--max-steps", "2", ranks=2)
    return difference(program.train("moved", "--max-steps", "6"), first_six(whole),
                      program.tolerance)


def near_in_bf16(program, whole):
    """No added code needs more than 16 bits, or a type other than the model's. The batch is 104,
    because with 13 examples the loss of the pairs can differ by a hundredth."""
    many = "--batch", "104", "--max-steps", "6"
    found = program.train("many in bf16", "--precision", "bf16", *many)
    expected = first_six(program.train("many", *many))
    if not any(word.startswith("--model") for word in program.words):
        return difference(found, expected, 1e-2)
    strict = {}                          # all but the pairs of later steps
    for (kind, step), losses in expected.items():
        names = [name for name in losses if step <= 2 or name != "nsp_loss"]
        strict[kind, step] = {name: losses[name] for name in names}
    return difference(found, strict, 1e-2) or difference(found, expected, 0.1)


def same_from_folder(program, whole):
    """model/ has all weights, and --init loads them all; evaluation does not depend on the seed.
    Some variants refuse --init."""
    before = program.train("written", "--max-steps", "3")
    folder = program.folder / "written/model"
    try:
        after = program.train("taken up", "--init", str(folder), "--steps", "0", "--seed", "1")
    except Failed as error:
        if re.search("--init.*leave it out|leave out --init", str(error)):
            return f"not tried: {error}"
        raise
    return difference({("eval", 3): after["eval", 0]}, {("eval", 3): before["eval", 3]}, TOLERANCE)


def same_after_skipped_step(program, whole):
    """A step whose gradients have an inf changes nothing that evaluation uses, and the next step
    can be taken. Here, each step but the first is evaluated."""
    losses = program.train(
        "spoiled", "--steps", "9", "--max-steps", "8", "--save-every", "1", change=SPOILED)
    skipped = []                         # the numbers of the skipped steps
    for line in program.lines("spoiled"):
        if line["kind"] == "train" and line["skipped"] > len(skipped):
            skipped.append(line["step"])
    if 8 in skipped:
        return "NO: the gradients have an inf or NaN in later steps, too"
    evaluated = [step for step in skipped if step > 2]           # and so is the step before
    if not evaluated:
        return "not tried: no step after the second is skipped"
    after = {("eval", step): losses["eval", step] for step in evaluated}
    before = {("eval", step): losses["eval", step - 1] for step in evaluated}
    return difference(after, before, 0)


def same_with_other_scales(program, whole):
    """Whatever uses gradients divides them by the loss scale that they had."""
    tolerance = 0 if program.tolerance == TOLERANCE else program.tolerance       # fp16 rounds
    return difference(program.train("rescaled", change=RESCALED), whole, tolerance)


def first_six(whole):
    """Returns the losses and norms of steps 1 to 6: four of the first phase and two of the second.
    Later losses drift apart with sign-based optimizers, since sums are rounded differently."""
    return {(kind, step): losses for (kind, step), losses in whole.items() if step and step <= 6}


QUESTIONS = {
    "run again: the same bits": same_again,
    "stopped after steps 3, 6, 9, resumed: same bits": same_after_resume,
    "with dropout, stopped after step 3: same bits": same_with_dropout,
    "each example of a phase is read once": each_example_once,
    "an example at a time: the same losses": same_one_at_a_time,
    "two ranks: the same losses": same_on_two_ranks,
    "two ranks, resumed on one: the same losses": same_from_two_to_one,
    "model/ taken up by --init: the same held-out losses": same_from_folder,
    "model/, if called a BERT, is Hugging Face's": same_as_huggingface,
    "inf in gradients: skipped, the same held-out losses": same_after_skipped_step,
    "other loss scales: the same bits": same_with_other_scales,
    "bf16: losses within a hundredth": near_in_bf16,
}


def main():
    """Asks all questions and prints a line for each."""
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        return
    questions = dict(QUESTIONS)
    if optim.choose_precision("auto", torch.device("cpu")) != "bf16":
        print("bf16 is not tried: this CPU computes it slowly")
        del questions["bf16: losses within a hundredth"]
    with tempfile.TemporaryDirectory() as folder:
        program = Program(sys.argv[1:], Path(folder))
        try:
            whole = program.train("whole")
        except Failed as error:
            sys.exit(f"check.py: {' '.join(program.words)} does not run to its end: {error}")

        def ask(question):
            try:
                return question(program, whole)
            except Failed as error:
                return f"NO: {error}"

        right = True
        with ThreadPoolExecutor(2) as pool:
            for question, answer in zip(questions, pool.map(ask, questions.values())):
                print(f"{question:<53}{answer or 'yes'}", flush=True)
                right = right and not answer.startswith("NO")
        with suppress(FileNotFoundError):        # a run has failed
            names = unchanged(program.model("written"), program.model("whole"))
            said = ", ".join(names) or "none"
            print(f"{'weights that no step after the third changes':<53}{said}")
    sys.exit(not right)


if __name__ == "__main__":
    main()
