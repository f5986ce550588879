"""Does a damaged file ever load in silence, end in a traceback, or take long to be refused?

    python tests/bench/bench_damage.py   # 1,000 checkpoints, 1,000 others; 5 minutes
    python tests/bench/bench_damage.py --tries 100 --seed 1

Each try damages one file (bits flipped, cut, bytes inserted or zeroed, two files swapped, JSON
values of another type, keys removed), loads it as train.py does, and puts it back. Bad: any
exception but the product's own, other content without a word, more than 10 seconds. "unseen" counts
what no reader can see: a model folder (in Hugging Face's format) in which a number is another one.
"""
import argparse
import contextlib
import copy
import io
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import sentencepiece
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import bert  # noqa: E402
import data  # noqa: E402
import train  # noqa: E402
from tests.conftest import make_documents  # noqa: E402

REFUSED = train.ConfigError, train.CheckpointError, data.DataError, bert.ModelError
VALUES = [None, True, -1, 0, 1, 2.5, 1e300, 10 ** 9, 10 ** 30, float("nan"), "", "1", [], [1], {}]


class TooLong(BaseException):
    """Ten seconds have passed; no `except Exception` of the product catches it."""


# Damages: (random numbers, content of a file) -> other content

def flip(rng, content):
    for _ in range(rng.choice([1, 1, 1, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def flip_in_front(rng, content):
    """Where headers are."""
    content[rng.randrange(min(200, len(content)))] ^= 1 << rng.randrange(8)
    return content


def cut(rng, content):
    return content[:rng.choice([0, 1, len(content) - 1, rng.randrange(len(content))])]


def insert(rng, content):
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice([1, 8, 64])) + content[at:]


def zero(rng, content):
    at = rng.randrange(len(content))
    content[at:at + 512] = bytes(len(content[at:at + 512]))
    return content


def change_json(rng, content):
    """A value anywhere in a JSON file, or in the header of a safetensors file, goes or changes."""
    header = content[:1] != b"{"
    end = 8 + int.from_bytes(content[:8], "little") if header else len(content)
    tree = node = json.loads(content[8 * header:end])
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not isinstance(node[key], (dict, list)) or not node[key] or rng.random() < 0.2:
            break
        node = node[key]
    if rng.random() < 0.3:
        del node[key]
    else:
        node[key] = rng.choice(VALUES)
    text = json.dumps(tree).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + content[end:] if header else text)


# What is loaded, in a form that can be compared

def load_checkpoint(path):
    content = io.BytesIO()
    torch.save(train.read_checkpoint(path), content)
    return content.getvalue()


def load_shards(path):
    data.verify(path.parent)
    manifest = data.load_manifest(path.parent)
    data.PretrainingData(path.parent, 32).batch(range(8))
    return manifest, *((path.parent / name).read_bytes() for name in sorted(manifest["files"]))


def load_model(path):
    model = bert.load_huggingface(path.parent)
    with contextlib.suppress(RuntimeError):      # bert.py's `main` says it in a line
        sentencepiece.SentencePieceProcessor(str(path.parent / "tokenizer.model"))
    return model.config, *(p.detach().numpy().tobytes() for p in model.parameters())


def prepare(folder):
    """Makes shards and a trained model; returns {kind: (load, files to damage)}."""
    data.prepare(make_documents(), folder / "shards", vocab_size=320, shards=4)
    subprocess.run([sys.executable, "train.py", "--data", folder / "shards", "--out",
                    folder / "run", "--steps", "4", "0", "--batch", "8", "--checkpoint-every", "2"],
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return {"checkpoint": (load_checkpoint, [*(folder / "run" / "checkpoints").iterdir()]),
            "manifest": (load_shards, [folder / "shards" / "manifest.json"]),
            "shards": (load_shards, [path for path in sorted((folder / "shards").iterdir())
                                     if path.name != "manifest.json"]),
            "model": (load_model, sorted((folder / "run" / "model").iterdir()))}


def attempt(rng, load, files, good):
    """Damages a file, loads it, puts it back; returns (outcome, what was done)."""
    path, other = rng.choice(files), rng.choice(files)
    before = {file: file.read_bytes() for file in (path, other)}
    damages = [flip, flip, flip_in_front, cut, insert, zero]
    damages += [change_json] * 6 * (path.suffix in (".json", ".safetensors"))
    if other != path and path.suffix != ".pt":       # a checkpoint under another's name is whole
        damages.append("swap")
    damage, said = rng.choice(damages), io.StringIO()
    if damage == "swap":
        path.write_bytes(before[other])
        other.write_bytes(before[path])
    else:
        path.write_bytes(damage(rng, bytearray(before[path])))
    what = f"{path.name}: {damage if damage == 'swap' else damage.__name__}"
    signal.alarm(10)
    try:
        with contextlib.redirect_stderr(said):
            found = load(path)
        outcome = "harmless" if found == good[path] else "said" if said.getvalue() else "silent"
    except REFUSED as error:
        outcome = "refused" if "\n" not in str(error) else "lines"
        what += f": {error}"
    except TooLong:
        outcome = "too long"
    except Exception as error:
        outcome, what = "traceback", f"{what}: {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        for file, content in before.items():
            file.write_bytes(content)
    return outcome, what


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tries", type=int, default=1000, help="of checkpoints, and of all others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print what was refused, too")
    args = parser.parse_args()

    def too_long(*_):
        raise TooLong

    signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))      # a sound refusal takes little
    torch.set_num_threads(1)
    shares = {"checkpoint": 1, "manifest": 0.25, "shards": 0.25, "model": 0.5}
    print(f"{'kind':20}{'tried':>7}{'refused':>9}{'harmless':>10}{'unseen':>8}{'bad':>5}  slowest")
    with tempfile.TemporaryDirectory() as folder:
        for kind, (load, files) in prepare(Path(folder)).items():
            rng, counts, slowest = random.Random(f"{kind} {args.seed}"), Counter(), 0.0
            good = {path: copy.deepcopy(load(path)) for path in files}
            for _ in range(round(args.tries * shares[kind])):
                began = time.perf_counter()
                outcome, what = attempt(rng, load, files, good)
                slowest = max(slowest, time.perf_counter() - began)
                if kind == "model" and outcome in ("silent", "said"):
                    outcome = "unseen"
                counts[outcome] += 1
                if args.show or outcome not in ("refused", "harmless", "unseen"):
                    print(f"    {outcome}: {what}", flush=True)
            seen = [counts[outcome] for outcome in ("refused", "harmless", "unseen")]
            bad = counts.total() - sum(seen)
            print(f"{kind:20}{counts.total():7}{seen[0]:9}{seen[1]:10}{seen[2]:8}{bad:5}"
                  f"{slowest:7.2f} s", flush=True)


if __name__ == "__main__":
    main()
