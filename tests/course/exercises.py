"""A course of twelve exercises: blank a part of thriftbert, write it anew, be told if it is right.

    python tests/course/exercises.py list
    python tests/course/exercises.py start attention     # leaves of its functions the docstrings
    python tests/course/exercises.py check attention     # runs the tests that say when it is right
    python tests/course/exercises.py hint attention      # one hint, the next time one more
    python tests/course/exercises.py solve attention     # its functions as in the last commit
    python tests/course/exercises.py start --all FOLDER  # a copy for students, without solutions
    python tests/course/exercises.py verify              # red blanked, green solved, red done wrong

README.md beside this file says how a course goes, and has six experiments for a report. This file
needs Python's standard library alone, the checks what requirements.txt names.
"""
import argparse
import ast
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COURSE = Path("tests/course")
SOLUTIONS = COURSE / "wrong_solutions.py", COURSE / "test_exercises.py"      # not for students


class Exercise(NamedTuple):
    """An exercise. Functions are named as data.PretrainingData.mask (of a file in a folder, as
    tests/variants/powersgd.powersgd), tests as pytest does it."""
    functions: str       # that `start` blanks
    tests: str           # that `check` runs, all in the folder tests
    minutes: int
    lines: int           # of our solution, about
    learns: str
    hints: list


EXERCISES = {
    "masking": Exercise(
        "data.PretrainingData.mask data.PretrainingData.choose",
        "test_data.py::test_the_masks_of_an_array",
        60, 23, "what a masked language model is asked, and why example i depends on i alone",
        ["`mask`: a counter is index * seq_len + t, whatever B and T are. `choose` takes them. "
         "`uniform(counters, self.fate_key)` says what becomes of a chosen token: [MASK] below "
         "0.8, a random token by self.token_key that is none of SPECIALS below 0.9, else itself.",
         "`choose`: draw `uniform(counters, self.choice_key)` for all of (B, T). A word's tokens "
         "share its first one's draw. The draw of [CLS] is free to decide about rounding.",
         "A row of n tokens of text wants mask_fraction * n of them, rounded up or down by chance. "
         "All tokens whose draw is at most that of the last one wanted are chosen."]),
    "pairs": Exercise(
        "data.PretrainingData.pair",
        "test_data.py::test_pairs_are_half_true_and_others_from_elsewhere "
        "test_data.py::test_both_parts_of_a_pair_are_of_the_same_epoch "
        "test_data.py::test_sentence_order_and_no_pairs "
        "test_data.py::test_a_b_from_elsewhere_looks_like_a_true_one",
        45, 22, "how next-sentence pairs are made, and what a classifier could cheat by",
        ["Example i is of shard i mod S; `order` says which window is its turn in an epoch. `text` "
         "says where a window's text begins, is cut in two and ends: a true pair, the swapped one "
         "(\"sop\") and \"none\" need no more; \"none\" has an empty B at the end.",
         "`shard.windows` says how many windows come before each document, and all together. Draw "
         "one of those that are not A's document's, by the number `other`.",
         "Cut its text in two as well. B begins where its second part does, and goes on until the "
         "pair has `length` tokens or its document ends."]),
    "attention": Exercise(
        "bert.plain_attention bert.attention",
        "test_bert.py::test_losses_and_gradients_are_those_of_a_padded_model "
        "test_bert.py::test_packed_attention_is_the_plain_one_of_each_example "
        "test_bert.py::test_a_block_is_torchs_encoder_layer "
        "test_bert.py::test_dropout_is_of_the_attention_weights",
        60, 23, "attention over examples that stand one after another, without padding or a mask",
        ["`plain_attention`: bring the heads before the tokens, (H, T, D/H), and back at the end.",
         "`attention`, at first: loop over the examples, `qkv.split(lengths.tolist())` are their "
         "rows. F.scaled_dot_product_attention scales by itself, and knows dropout_p.",
         "Then make it fast: neighbours of one length are one call on (b, H, T, D/H). On a CPU "
         "16 bits are faster, and nearer to the exact result, computed in fp32."]),
    "schedule": Exercise(
        "optim.learning_rate",
        "test_optim.py::test_learning_rate_with_decay_from_0_is_nvidias "
        "test_optim.py::test_learning_rate_decays_by_a_power_of_what_is_left "
        "test_optim.py::test_learning_rate_warms_up_holds_and_decays_to_zero",
        15, 5, "warm-up, hold and polynomial decay, and the steps at which they begin and end",
        ["Draw the rates of the recipe nvlamb-64k by hand: as the phase begins, near the end of "
         "the warm-up, as the phase ends.",
         "phase_step counts from 0, and no step has a rate of 0.",
         "Decay is ((1 - x) / (1 - d))^power times lr; in the hold, before d, it would be above "
         "lr: take the minimum."]),
    "precision": Exercise(
        "optim.LossScaler.update optim.unscale_and_clip_ optim.master_weights optim.copy_to_model",
        "test_optim.py::test_loss_scaler_halves_doubles_and_is_bounded "
        "test_optim.py::test_loss_scaler_stops_at_the_floor_and_names_the_parameter "
        "test_optim.py::test_unscale_and_clip_is_torchs "
        "test_optim.py::test_master_weights_keep_what_16_bits_would_lose "
        "test_optim.py::test_master_weights_of_fp32_are_the_parameters",
        60, 27, "why 16 bits need fp32 masters and a scaled loss, and in what order one unscales",
        ["`update`: an overflow resets the count of good steps; each growth_interval of them "
         "doubles the scale. Look at the floor after that, and answer last.",
         "`unscale_and_clip_`: the unscaled norm is norm / scale; both divisions are one factor.",
         "The master of an fp32 parameter is the parameter itself: what the optimizer does to it "
         "is done to the model, and `copy_to_model` has nothing to copy."]),
    "lamb": Exercise(
        "optim.LAMB._update",
        "test_optim.py::test_lamb_is_its_equations "
        "test_optim.py::test_fast_lamb_computes_what_the_plain_function_does "
        "test_optim.py::test_lamb_without_decay_is_adam "
        "test_optim.py::test_tensor_groups_are_bounded_and_change_nothing",
        45, 11, "what lets a batch of 64K learn: a step as long as the layer's weights ask for",
        ["Write it for one tensor in a loop and see it pass, then for lists by torch._foreach_*. "
         "`move_moments` is the first line of the equations, `corrected_roots` makes the divisor in u.",
         "The ratio is of the norms (`norms`, `safe_ratios`) of w and of all of u, decay included; "
         "it is 1 for a group without decay, unless adapt_all.",
         "eps is added after v is corrected. m need not be corrected on its own: the correction is a "
         "number, the `value` of torch._foreach_addcdiv_."]),
    "dealing": Exercise(
        "data.micro_batches train.step_totals",
        "test_data.py::test_a_step_has_the_same_examples_on_any_number_of_ranks "
        "test_data.py::test_balance_evens_ranks_and_joins_equal_lengths "
        "test_train_loop.py::test_the_divisor_is_that_of_the_whole_step",
        45, 17, "the same step on any number of ranks: who takes which example, and the divisor",
        ["Nothing has to divide: a rank may have one example more, a micro-batch may be short.",
         "By length: sort the indices, and give them out from the longest on in rounds of `size`, "
         "every other round backwards. A rank's own stay in order of length, the longest last.",
         "`step_totals`: gather one row of three numbers from each rank, and add up the columns but "
         "that of tokens. See data.Batch for what is padding."]),
    "buckets": Exercise(
        "dist.fill_buckets dist.dense dist.Bucket.average",
        "test_dist.py::test_embeddings_have_the_last_buckets "
        "test_dist.py::test_buckets_take_turns_to_be_led "
        "test_dist.py::test_a_mean_that_fits_fp16_does_not_overflow_on_the_way "
        "test_dist.py::test_buckets_are_averaged_in_one_format_and_on_two_levels",
        45, 27, "why gradients travel in buckets, how a mean stays in range, two levels of network",
        ["`fill_buckets`: a new bucket begins where the one before has its bucket_mb, and with "
         "each list.",
         "`dense`: divide first, since the sum may not fit into fp16; sum in the wire's format.",
         "`average`: `inner` are the ranks of this node, or this one alone, `outer` those that "
         "exchange. The leader of the node alone sends: by `_send` where lossy, else by `dense`."]),
    "overlap": Exercise(
        "dist.Reducer._ready dist.Reducer._launch dist.Reducer.finish",
        "test_dist.py::test_gradients_are_those_of_one_process[2-2] "
        "test_dist.py::test_16_bits_do_not_swallow_small_gradients "
        "test_dist.py::test_buckets_are_averaged_in_order_while_backward_goes_on "
        "test_dist.py::test_an_unused_parameter_is_named "
        "test_dist.py::test_seconds_of_the_thread_are_counted "
        "test_dist.py::test_the_next_step_is_right_after_all_that_can_happen",
        90, 33, "how an all-reduce hides behind backward, and why order is all that ranks share",
        ["`_ready`: add, do not copy, since micro-batches add up. `self.sends` says that this is "
         "the last one. Afterwards an fp32 p.grad is the view, a 16-bit one None.",
         "`_launch`: bucket k starts when its own and all before it are complete, whatever came "
         "first. len(self.jobs) have started. An event is torch.cuda.Event(blocking=True) if there "
         "is a `stream`, else torch.cpu.Event().",
         "`self.thread.submit(self._average, bucket, event, self.jobs[-1:])` is the job. `finish` "
         "looks for what is missing first, or it would wait for ever; job.result() waits, raises "
         "what the thread raised, and else is (bytes, seconds)."]),
    "powersgd": Exercise(
        "tests/variants/powersgd.powersgd tests/variants/powersgd.first_factors",
        "test_compressor_variants.py::test_powersgd_is_algorithm_1",
        60, 31, "a compressor that is linear, so that an all-reduce can add what it sends",
        ["`split` cuts `value` and `mean` into views of state[\"shapes\"], `dense_list` averages a "
         "list of tensors by one all-reduce: one for P, one for Q and all that goes dense.",
         "All ranks have P and Q, so all have P Q^T: write it to `mean`. What is left of `value` "
         "is value - mean, and zeros where it went dense.",
         "Put a new list into `state`, never change tensors that are there: after a skipped step "
         "the old state counts. The first Q, the same on all ranks, is torch.randn of a generator "
         "with the seed 0, (rank, b) a matrix."]),
    "feedback": Exercise(
        "dist.Bucket._send dist.Bucket.commit",
        "test_dist.py::test_what_went_out_and_the_residual_are_what_came_in[2-2] "
        "test_dist.py::test_padding_does_not_count_in_the_scale_of_onebit "
        "test_dist.py::test_an_overflow_leaves_no_trace_and_a_constant_gradient_arrives_in_full",
        45, 16, "why a lossy mean still converges, and what a skipped step must leave as it was",
        ["Residuals are unscaled, gradients are not: the "
         "scale may be another one in the next step.",
         "self.compressor(self.outer, self.next_residual, self.padded, state, self.argument), "
         "where state is dict(self.state); afterwards `flat` holds q.",
         "`commit` swaps `residual` and `next_residual` and takes `next_state` if one waits and "
         "the step is taken; in any case none waits afterwards."]),
    "resume": Exercise(
        "train.write_checkpoint train.save train.restore",
        "test_checkpoints.py::test_a_checkpoint_is_whole_or_is_not_there "
        "test_checkpoints.py::test_a_damaged_checkpoint_is_passed_over "
        "test_checkpoints.py::test_a_killed_run_ends_with_the_same_bits "
        "test_checkpoints.py::test_a_run_with_lossy_compression_resumes_with_the_same_bits "
        "test_checkpoints.py::test_a_later_checkpoint_on_another_node_is_not_passed_over",
        90, 60, "all that the next step depends on, and a file that is whole or not there",
        ["`write_checkpoint`: write content and digest under another name, flush, fsync, rename, "
         "leave no unfinished file. `read_checkpoint` says what is expected.",
         "`save`: first `check_weights`. All ranks collect what the next step depends on, since "
         "parts of it are collective; the one with an active log writes. Masters are the weights: "
         "a 16-bit model has lost bits. \"run\" is plan.run.",
         "`restore` loads all that `save` kept: `check_for_later_checkpoints`, then rank 0 finds "
         "the checkpoint, `broadcast_checkpoint`. `log.cut` forgets what the log has after it."]),
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
        found = [child for child in node.body if getattr(child, "name", None) == part]
        node = found[0] if found else sys.exit(f"{function} is not where EXERCISES has it")
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
    # Ranks that wait for each other are ended after two minutes, see tests/ranks.py. A pipe would
    # stay open until the server of the ranks has ended, too
    with tempfile.TemporaryFile("w+") as file:
        run = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
        file.seek(0)
        said = file.read()
    passed = sum(map(int, re.findall(r"(\d+) passed", said)))
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.M)
    if run.returncode == 0:
        return True, f"{name}: all {passed} tests pass ({time.monotonic() - began:.0f} s)"
    if run.returncode == 1:
        return False, (f"{name}: {passed} of {passed + len(failed)} tests pass; to see why: "
                       f"{sys.executable} -m pytest '{failed[0]}'")
    return None, f"{name}: the tests cannot run: {said.strip()[-500:]}"


def is_blank(name):
    """Returns True if a function of an exercise has no body but the one that `blank` gives it."""
    for path, function in functions_of(name):
        if text_of(path.read_text(), function)[-1].strip() == "raise NotImplementedError":
            return True
    return False


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
    """Runs the program; what it cannot do is one line on stderr and status 1; a wrong command line
    is status 2."""
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
        before = itertools.takewhile(lambda other: other != args.name, EXERCISES)
        still_blank = [other for other in (*before, args.name) if is_blank(other)]
        if still_blank:
            print(f"{', '.join(still_blank)}: still blank; {args.name} may need what comes before")
        print(f"{args.name}: the tests run, which takes up to a minute", flush=True)
        passes, line = check(args.name)
        print(line)
        sys.exit(not passes)
    else:
        {"start": start, "hint": hint, "solve": solve}[args.command](args.name)


if __name__ == "__main__":
    main()
