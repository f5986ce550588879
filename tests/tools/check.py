"""Is a changed program still right in small micro-batches, on two ranks, after a resume?

    python tests/tools/check.py                              # train.py, as it is now
    python tests/tools/check.py --optimizer lion             # with flags of train.py
    python tests/tools/check.py tests/variants/albert.py     # a variant

Trains the program fourteen times for a few steps, on the CPU: a minute on two idle cores. For each
thing that nearly every program must keep it prints "yes", or "NO" and what differs first, or that
it was "not tried", since the program refuses --init. Status 1 if something differs.

What is dropped out, compressed, rounded or timed differs by its nature, so leave --dropout,
--compression, --precision and --hours alone, and --steps. So do variants that compress by
themselves, and whose ranks step alone: they have a NO at two ranks or resumes. It does not see
whether a change does what you wanted, nor what shows only in a long run, on a GPU or with other
flags.
"""
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import optim

# So few steps in each phase that `first_six` has some of the second one. Two ranks and small micro-
# batches cannot divide 13 examples equally. At a quarter of the rate optimizers of signs drift
# less. So does what is wrong: therefore the small tolerance of `difference`. Ranks that wait for
# each other end after a minute.
FLAGS = "--steps 4 --batch 13 --lr-scale 0.25 --dropout 0 --precision fp32 --timeout 60".split()


class Failed(Exception):
    """The program ended with an error; the message is what it said."""


class Program:
    """A program with flags, whose runs are folders below `folder`."""

    def __init__(self, words, folder):
        self.folder = folder
        self.words = words
        if not (words and words[0].endswith(".py")):
            self.words = ["train.py", *words]

    def train(self, name, *flags, ranks=1):
        """Trains the run of this name, or resumes it. Returns the losses of its steps and held-out
        losses, {("train" or "eval", step): {name: value}}. Raises Failed."""
        program, *words = self.words
        out = self.folder / name
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [program, *FLAGS, *words, *flags, "--out", str(out)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            # torchrun says much; the program's own lines begin so, or are the end of a traceback.
            said = process.stderr.strip().splitlines()
            own = [line for line in said if line.startswith("train.py: ") or "Error: " in line]
            raise Failed("; ".join((own or said)[:2])[:300])

        losses = {}
        for text in (out / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            losses[line["kind"], line.get("step")] = {
                field: line[field] for field in line if field.endswith("_loss")}
        return losses

    def model(self, name):
        """Returns the bytes of a run's model."""
        return (self.folder / name / "model/model.safetensors").read_bytes()


def difference(losses, expected, tolerance=2.5e-6):
    """Returns in words the first of the expected losses that is another one, or that is not finite;
    "" if there is none. tolerance: as a part of a loss."""
    for (kind, step), numbers in expected.items():
        found = losses.get((kind, step), {})
        for name, number in numbers.items():
            other = found.get(name)
            what = f"{name} of step {step}{', held out,' * (kind == 'eval')}"
            if None in (number, other):              # null, or no such line
                return f"NO: {what} is not there, or not finite"
            if not math.isclose(other, number, rel_tol=tolerance):
                return f"NO: {what} is {other:.8g}, not {number:.8g}"
    return ""


# ----- What must hold. Each returns "" or, in words, why it does not ("NO: ..."), or that it was
# ----- not tried. whole: the losses of a run without a stop, on one rank

def same_again(program, whole):
    """Nothing is drawn but from --seed."""
    return difference(program.train("again"), whole, 0)


def same_after_resume(program, whole):
    """A checkpoint has all that the next step depends on, in each of up to three phases."""
    for stop in "3", "6", "10":
        program.train("resumed", "--max-steps", stop)
    found = difference(program.train("resumed"), whole, 0)
    if not found and program.model("resumed") != program.model("whole"):
        return "NO: all losses are the same, but not model/"
    return found


def same_one_at_a_time(program, whole):
    """No example depends on those beside it; all labels of a step weigh the same."""
    return difference(program.train("small", "--micro-tokens", "1", "--max-steps", "6"),
                      first_six(whole))


def same_on_two_ranks(program, whole):
    """Examples follow from their numbers, and losses are divided by the counts of all ranks."""
    return difference(program.train("two", "--max-steps", "6", ranks=2), first_six(whole))


def same_from_two_to_one(program, whole):
    """A checkpoint of two ranks has all that one rank needs."""
    program.train("moved", "--max-steps", "2", ranks=2)
    return difference(program.train("moved", "--max-steps", "6"), first_six(whole))


def near_in_bf16(program, whole):
    """Nothing that was added needs more than 16 bits, or another type than the model's. (Of 13
    examples alone the pairs' loss can differ by a hundredth.)"""
    many = "--batch", "104", "--max-steps", "6"
    return difference(program.train("many in bf16", "--precision", "bf16", *many),
                      first_six(program.train("many", *many)), 1e-2)


def same_from_folder(program, whole):
    """model/ has all weights, and --init takes them all up (some variants refuse it)."""
    before = program.train("written", "--max-steps", "3")
    folder = program.folder / "written/model"
    try:
        after = program.train("taken up", "--init", str(folder), "--steps", "0")
    except Failed as error:
        if re.search("--init.*leave it out|leave out --init", str(error)):
            return f"not tried: {error}"
        raise
    return difference({("eval", 3): after["eval", 0]}, {("eval", 3): before["eval", 3]})


def first_six(whole):
    """Returns the losses of steps 1 to 6, four of the first phase and two of the second. (Later
    those of an optimizer that takes signs drift apart, since sums are rounded otherwise.)"""
    return {(kind, step): losses for (kind, step), losses in whole.items() if step and step <= 6}


QUESTIONS = {
    "run again: the same bits": same_again,
    "stopped after steps 3, 6, 10, resumed: same bits": same_after_resume,
    "an example at a time: the same losses": same_one_at_a_time,
    "two ranks: the same losses": same_on_two_ranks,
    "two ranks, resumed on one: the same losses": same_from_two_to_one,
    "model/ taken up by --init: the same held-out losses": same_from_folder,
    "bf16: losses within a hundredth": near_in_bf16,
}


def main():
    """Asks all questions, and prints a line for each."""
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
    sys.exit(not right)


if __name__ == "__main__":
    main()
