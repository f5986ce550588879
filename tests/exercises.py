"""A course of twelve exercises: blank a part of thriftbert, write it anew, be told if it is right.

    python tests/exercises.py list
    python tests/exercises.py start attention       # its functions keep their docstrings alone
    python tests/exercises.py check attention       # runs the tests that tell when it is right
    python tests/exercises.py hint attention        # one hint, the next time one more
    python tests/exercises.py solve attention       # its functions as in the last commit
    python tests/exercises.py start --all FOLDER    # a copy for students, without the solutions
    python tests/exercises.py verify                # red blanked, green solved, red done wrong

Each exercise needs those before it, and none after it: in a copy for students go in this order. The
docstrings of a function and of its class are the specification. Python's standard library is enough
for this file, the checks need what requirements.txt names.
"""
import argparse
import ast
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOLUTIONS = Path("tests/wrong_solutions.py"), Path("tests/test_exercises.py")   # not for students


class Exercise(NamedTuple):
    """An exercise. Functions are named as data.PretrainingData.mask, tests as pytest does it."""
    functions: str       # that `start` blanks
    tests: str           # that `check` runs, all in the folder tests
    minutes: int
    lines: int           # of our solution
    learns: str
    hints: list


EXERCISES = {
    "masking": Exercise(
        "data.PretrainingData.mask",
        "test_data.py::test_the_masks_of_an_array",
        60, 17, "what a masked language model is asked, and why an example is a pure function of i",
        ["Draw one number for each place of (B, T) by `uniform(counters, self.keys[1])`, where a "
         "counter is index * seq_len + t: it must not depend on the other examples, nor on T. The "
         "k smallest draws of a row are its chosen tokens; places that are not text draw 2.",
         "A row has n tokens of text and wants mask_fraction * n of them, rarely a whole number: "
         "take the floor, and one more with a chance of what is left. The draw of [CLS] is free "
         "for that. For whole words all tokens of a word share the draw of its first one "
         "(`word_starts`); compare draws with the k-th smallest in place of counting tokens.",
         "The fate of a chosen token is another draw (keys[2]): below 0.8 [MASK], below 0.9 a "
         "random token (keys[3]) that is none of SPECIALS, else itself. Labels are read before."]),
    "pairs": Exercise(
        "data.PretrainingData.cut",
        "test_data.py::test_pairs_are_half_true_and_others_from_elsewhere "
        "test_data.py::test_sentence_order_and_no_pairs "
        "test_data.py::test_an_a_ends_where_a_sentence_does",
        45, 13, "how next-sentence pairs are made, and what a classifier could cheat by",
        ["`self.shard(s)` has where sentences and documents begin, sorted: bisect finds those "
         "between two offsets. First the place `middle` at which A ends, then the three answers.",
         "Sentence beginnings strictly inside (start, end) are where A may end; take the one at "
         "the fraction `place` of them, or the middle of the text. A true pair and a swapped one "
         "(\"sop\") only name the two halves; \"none\" has an empty B at the end, label IGNORED.",
         "For a random B count all tokens of the shard but those of A's document, take the one at "
         "the fraction `other`, and skip A's document if it is at or after its beginning. "
         "`segment_start` with the length of what B replaces says where B begins."]),
    "attention": Exercise(
        "bert.attention",
        "test_bert.py::test_losses_and_gradients_are_those_of_a_padded_model "
        "test_bert.py::test_a_block_is_torchs_encoder_layer",
        45, 14, "attention over examples that stand one after another, without padding or a mask",
        ["Loop over the examples first: `qkv.split(lengths.tolist())` are their rows. One of no "
         "rows is left out or gives none.",
         "F.scaled_dot_product_attention wants (..., H, T, D/H), the heads before the tokens, and "
         "has the scale 1 / sqrt(D/H) by itself; bring the heads back to their place afterwards.",
         "Then make it fast: neighbours of equal length are one call on (b, H, T, D/H). On a CPU "
         "16 bits are computed in fp32 and cast back at the end, which is nearer to the exact "
         "result too."]),
    "schedule": Exercise(
        "optim.learning_rate",
        "test_optim.py::test_learning_rate_with_decay_from_0_is_nvidias "
        "test_optim.py::test_learning_rate_warms_up_holds_and_decays_to_zero",
        15, 4, "warm-up, hold and polynomial decay, and the steps at which they begin and end",
        ["Draw the rate of the recipe nvlamb-64k by hand at x = 0, w, just after w, and 1.",
         "The first step must not have rate 0, nor the last one: n steps cut (0, 1) into n + 1 "
         "parts.",
         "In the hold (1 - x) / (1 - d) is above 1: that is what the min is for."]),
    "precision": Exercise(
        "optim.LossScaler.update optim.unscale_and_clip_ optim.master_weights optim.copy_to_model",
        "test_optim.py::test_loss_scaler_halves_doubles_and_is_bounded "
        "test_optim.py::test_loss_scaler_stops_at_the_floor_and_names_the_parameter "
        "test_optim.py::test_unscale_and_clip_is_torchs "
        "test_optim.py::test_master_weights_keep_what_16_bits_would_lose "
        "test_optim.py::test_master_weights_of_fp32_are_the_parameters",
        60, 20, "why 16 bits need fp32 masters and a scaled loss, and in what order one unscales",
        ["`update`: count, adjust the scale, look at the floor, answer. An overflow resets the "
         "count of good steps; each growth_interval of them doubles the scale, up to `largest`.",
         "`unscale_and_clip_`: the norm that is given is that of scaled gradients. The unscaled "
         "norm is norm / scale, and both divisions are one factor.",
         "`master_weights` of an fp32 parameter is the parameter itself, not a copy: what the "
         "optimizer does to it is then done to the model, and `copy_to_model` has nothing to do."]),
    "lamb": Exercise(
        "optim.LAMB._update",
        "test_optim.py::test_lamb_is_its_equations "
        "test_optim.py::test_lamb_at_ratio_one_is_adamw "
        "test_optim.py::test_tensor_groups_are_bounded_and_change_nothing",
        45, 11, "what lets a batch of 64K learn: a step as long as the layer's weights ask for",
        ["Write it for one tensor in a loop, w.add_(...), and see it pass; then on lists, by "
         "torch._foreach_*. `move_moments` has the first line of the equations.",
         "The ratio is of norms of w and of all of u, decay included; `norms` and `safe_ratios` "
         "are there. It is 1 for a group without decay, but for adapt_all.",
         "eps is added after the bias correction of v. The step count t begins at 1, and `step` "
         "of the base class counts."]),
    "dealing": Exercise(
        "data.micro_batches train.step_totals",
        "test_data.py::test_a_step_has_the_same_examples_on_any_number_of_ranks "
        "test_data.py::test_balance_evens_ranks_and_saves_padding "
        "test_train.py::test_the_divisor_is_that_of_the_whole_step",
        45, 12, "the same step on any number of ranks: who takes which example, and the divisor",
        ["Nothing needs to divide: slices may be short, and a rank may have one example more.",
         "By length: sort the indices, and give them out from the longest on in rounds of `size`, "
         "every other round backwards. A rank's own are then in order of length, longest last.",
         "`step_totals`: each rank fills in its own numbers, and its own place among the tokens of "
         "each rank, zeros elsewhere; one sum over the ranks makes all of them whole."]),
    "buckets": Exercise(
        "dist.fill_buckets dist.dense dist.Bucket.average",
        "test_dist.py::test_embeddings_have_the_last_buckets_and_none_is_a_crumb "
        "test_dist.py::test_buckets_are_averaged_in_one_format_and_on_two_levels",
        45, 20, "why gradients travel in buckets, how a mean stays in range, two levels of network",
        ["`fill_buckets`: go through each list and begin a new bucket where the one before has "
         "its bucket_mb; a new list begins one too.",
         "`dense`: divide by the ranks before the sum. `all_reduce` works in place on the tensor "
         "in wire format; a ring of n ranks sends 2 (n - 1) / n times its bytes.",
         "`average`: `inner` are the ranks of this node (or this rank alone), `outer` those that "
         "exchange. Mean of means: divide by inner.size before the inner sum. Only the leader "
         "sends (`_send` where lossy, else `dense`), then it broadcasts."]),
    "overlap": Exercise(
        "dist.Reducer._ready dist.Reducer._launch dist.Reducer.finish",
        "test_dist.py::test_gradients_are_those_of_one_process[2-2] "
        "test_dist.py::test_16_bits_neither_overflow_nor_swallow_small_gradients "
        "test_dist.py::test_buckets_are_averaged_in_order_while_backward_goes_on "
        "test_dist.py::test_an_unused_parameter_is_named "
        "test_dist.py::test_seconds_of_the_thread_are_counted "
        "test_dist.py::test_the_next_step_is_right_after_all_that_can_happen",
        90, 24, "how an all-reduce hides behind backward, and why order is all that ranks share",
        ["`_ready` gets the parameter: its gradient is p.grad, which may be the view already. "
         "Add, do not copy: micro-batches add up. A 16-bit p.grad is then dropped.",
         "`_launch`: bucket k starts when its own and all before it are complete, whatever came "
         "first. len(self.jobs) have started; go on from there while nothing is missing.",
         "`submit(self._average, bucket, event, before)` gives a job; before is self.jobs[-1:], "
         "and the event is torch.cuda.Event(blocking=True) on a stream, else torch.cpu.Event(), "
         "recorded here. `finish` raises for what is missing first, else it would wait for ever; "
         "job.result() waits, gives (bytes, seconds) and raises what the thread raised."]),
    "powersgd": Exercise(
        "dist.powersgd",
        "test_dist.py::test_powersgd_is_algorithm_1",
        60, 19, "a compressor that is linear, so that an all-reduce can add what it sends",
        ["`split` cuts a flat tensor into views of state[\"shapes\"], `dense_list` averages a list "
         "of tensors by one all-reduce. Write to `mean`, leave the rest in `value`.",
         "V Q is (a, r), its mean over the ranks P; orthonormal columns by torch.linalg.qr. Then "
         "V^T P, its mean Q: all ranks have both, so all have P Q^T. Keep Q in the state.",
         "The first Q is random and must be the same on all ranks: a generator with a fixed seed. "
         "Put new tensors into `state`, never change those that are there. What goes dense goes "
         "with the second all-reduce, and leaves zeros."]),
    "feedback": Exercise(
        "dist.Bucket._send dist.Bucket.commit",
        "test_dist.py::test_what_went_out_and_the_residual_are_what_came_in[2-2] "
        "test_dist.py::test_padding_does_not_count_in_the_scale_of_onebit "
        "test_dist.py::test_an_overflow_leaves_no_trace_and_a_constant_gradient_arrives_in_full",
        45, 14, "why a lossy mean still converges, and what a skipped step must leave as it was",
        ["A compressor is called as (self.outer, value, mean, state, self.argument). value is "
         "self.pending, mean is self.padded, whose first part is self.flat.",
         "Residuals are unscaled, gradients are not: the scale may change from step to step. "
         "Padding holds zeros when the compressor is called, whatever was left in it.",
         "`commit` swaps pending and residual, and takes the new state, if an average waits for "
         "it and the step is taken; either way nothing waits any more. The compressor replaces "
         "what is in its state, so a shallow copy keeps the old one right."]),
    "resume": Exercise(
        "train.write_checkpoint train.save train.restore",
        "test_train.py::test_a_checkpoint_is_whole_or_is_not_there "
        "test_train.py::test_a_damaged_checkpoint_is_passed_over "
        "test_train.py::test_a_killed_run_ends_with_the_same_bits[bf16-3] "
        "test_train.py::test_a_run_with_lossy_compression_resumes_with_the_same_bits[onebit] "
        "test_train.py::test_a_later_checkpoint_on_another_node_is_not_passed_over",
        90, 46, "all that the next step depends on, and a file that is whole or not there",
        ["`write_checkpoint`: build the content in memory, write it and its digest under another "
         "name, flush and fsync, rename, fsync the folder; leave no unfinished file. Then remove "
         "all that is older but the newest of those and those in `keep`.",
         "`save`: make the ranks' weights agree first (`synchronise`, `copy_to_model`, "
         "`compare_weights`), then collect on all ranks, since some parts are collective; only "
         "log.active writes. The masters are the weights, a 16-bit model has lost bits. Keep "
         "plan.same_run as \"run\" and log.bytes() as \"log_bytes\".",
         "`restore`: rank 0 finds the state (`find_checkpoint`, by world.on_all_ranks), all get "
         "it by broadcast_object, and load what `save` kept; log.cut forgets what comes after. "
         "First gather from all ranks the newest step in their folders, and where that is."]),
}


# ----- Functions in source text -----

def functions_of(name):
    """Returns an exercise's functions, a list of (Path of the file, "Class.method")."""
    return [place_of(function) for function in EXERCISES[name].functions.split()]


def place_of(function):
    """Returns (Path of the file, "Class.method") of "file.Class.method"."""
    file, _, inside = function.partition(".")
    return Path(f"{file}.py"), inside


parse = functools.cache(ast.parse)       # the same text is asked for several functions


def find(source, function):
    """Returns the syntax tree of a function, as "Bucket.average", in a file's text."""
    node = parse(source)
    for part in function.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node


def with_lines(source, first, last, new):
    """Returns the text with other lines (a list) in place of the lines first to last, from 1."""
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:first - 1], *new, *lines[last:]])


def blank(source, function):
    """Returns the text with a function's signature and docstring alone."""
    node = find(source, function)
    docstring = node.body[0]
    body = " " * docstring.col_offset + "raise NotImplementedError\n"
    return with_lines(source, docstring.end_lineno + 1, node.end_lineno, [body])


def text_of(source, function):
    """Returns the lines (a list) of a function."""
    node = find(source, function)
    return source.splitlines(keepends=True)[node.lineno - 1:node.end_lineno]


def with_function(source, function, lines):
    """Returns the text with other lines in place of a function's own."""
    node = find(source, function)
    return with_lines(source, node.lineno, node.end_lineno, lines)


def spoil(source, function, changes):
    """Returns the text with a function done wrong: changes are pairs (old text, new text)."""
    text = "".join(text_of(source, function))
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{function} has not once, but {text.count(old)} times: {old}")
        text = text.replace(old, new)
    return with_function(source, function, [text])


# ----- The commands -----

def git(*arguments):
    """Returns what a git command prints; ends the program where git fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else sys.exit(done.stderr.strip())


def show_list():
    """Prints a table of the exercises."""
    for number, (name, exercise) in enumerate(EXERCISES.items(), 1):
        print(f"{number:>2}  {name:<10}{exercise.minutes:>3} min {exercise.lines:>3} lines  "
              f"{exercise.functions}\n    {exercise.learns}")


def start(name):
    """Blanks the functions of an exercise; ends the program where that would lose changes."""
    files = {str(path) for path, _ in functions_of(name)}
    if changed := git("status", "--porcelain", "--", *files):
        sys.exit(f"{changed.split()[1]} has uncommitted changes; commit or stash them first")
    blank_functions([name])


def blank_functions(names):
    """Blanks the functions of exercises."""
    for path, function in itertools.chain(*map(functions_of, names)):
        path.write_text(blank(path.read_text(), function))


def check(name, *flags):
    """Runs an exercise's tests; returns (True if all pass, False if not, None if they cannot run;
    a line that says so)."""
    began, tests = time.monotonic(), [f"tests/{test}" for test in EXERCISES[name].tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", *flags, *tests]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        said = process.communicate(timeout=300)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)         # with the ranks that wait for each other
        return False, f"{name}: no end after 300 s; does a rank wait for another?"
    passed = sum(map(int, re.findall(r"(\d+) passed", said)))
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.M)
    if process.returncode == 0:
        return True, f"{name}: all {passed} tests pass ({time.monotonic() - began:.0f} s)"
    if process.returncode == 1:
        return False, (f"{name}: {passed} of {passed + len(failed)} tests pass; to see why: "
                       f"python -m pytest '{failed[0]}'")
    return None, f"{name}: the tests cannot run: {said.strip()[-500:]}"


def hint(name):
    """Prints one hint more than the last time."""
    path = Path(git("rev-parse", "--git-path", "exercise-hints.json").strip())
    shown = json.loads(path.read_text()) if path.exists() else {}
    shown[name] = shown.get(name, 0) + 1
    path.write_text(json.dumps(shown))
    hints = EXERCISES[name].hints
    for number, text in enumerate(hints[:shown[name]], 1):
        print(f"{number} of {len(hints)}: {text}")


def solve(name):
    """Brings back an exercise's functions, and nothing else, from the last commit."""
    for path, function in functions_of(name):
        solution = text_of(git("show", f"HEAD:./{path}"), function)
        if solution[-1].strip() == "raise NotImplementedError":
            sys.exit(f"{name}: the solutions are not in this copy")
        path.write_text(with_function(path.read_text(), function, solution))


def copy_repository(folder, for_students=False):
    """Writes the tracked files as they are now to a new folder, a git repository of one commit, and
    makes it the working directory. For students all exercises are blanked in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")
    for path in map(Path, git("ls-files").splitlines()):
        if not (for_students and path in SOLUTIONS):
            (folder / path.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder / path)
    os.chdir(folder)
    if for_students:
        blank_functions(EXERCISES)
    git("init", "--quiet")
    git("add", "--all")
    git("-c", "user.name=course", "-c", "user.email=course@localhost", "-c", "commit.gpgsign=false",
        "commit", "--quiet", "--message", "thriftbert")


def verify(names):
    """Tells, in a temporary copy, whether the checks of exercises are red where the functions are
    blanked, green where they are solved, red where they are done wrong. Later exercises stay
    blanked meanwhile. Returns the exit status."""
    if not SOLUTIONS[0].exists():
        sys.exit("the solutions are not in this copy")
    from wrong_solutions import WRONG
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        blank_functions(EXERCISES)
        for name in EXERCISES:
            red = {"blanked": check(name, "-x")} if name in names else {}
            solve(name)
            if name not in names:
                continue
            passes, line = check(name)
            for what, (function, *changes) in WRONG[name].items():
                path, function = place_of(function)
                path.write_text(spoil(path.read_text(), function, changes))
                red[what] = check(name, "-x")
                solve(name)
            good = passes and all(outcome is False for outcome, _ in red.values())
            print(f"{'ok ' if good else 'BAD'} {line}; red where {', '.join(red)}", flush=True)
            status |= not good
            for what, (outcome, said) in red.items():
                if outcome is not False:
                    print(f"        {what}: {said}", flush=True)
        os.chdir(ROOT)                                 # before the folder goes
    return status


def main():
    """Runs the program; what it cannot do is one line on stderr and status 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("command", choices=["list", "start", "check", "hint", "solve", "verify"])
    add("name", nargs="?", choices=EXERCISES)
    add("--all", metavar="FOLDER", type=os.path.abspath, help="start: a copy for students there")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.command == "list":
        show_list()
    elif args.command == "verify":
        sys.exit(verify([args.name] if args.name else [*EXERCISES]))
    elif args.command == "start" and args.all:
        copy_repository(Path(args.all), for_students=True)
    elif not args.name:
        parser.error(f"{args.command} needs a name")
    elif args.command == "check":
        passes, line = check(args.name)
        print(line)
        sys.exit(not passes)
    else:
        {"start": start, "hint": hint, "solve": solve}[args.command](args.name)


if __name__ == "__main__":
    main()
