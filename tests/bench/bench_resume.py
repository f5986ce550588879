"""What a resume sends and holds: bytes that leave the first node, peak memory of each rank.

    sudo python tests/bench/bench_resume.py --data shards/docs     # Linux, iproute2; 3 minutes

Two hosts are made of one machine, as in bench_network.py, with --ranks ranks on each. A run of
`--model` takes one step and saves. It is started again to do no step: so all that leaves the first
host's interface then is the resume (and the first broadcast of the weights). `state` is the size of
the checkpoint.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.bench_network import ADDRESS, make_hosts  # noqa: E402

HOSTS = "resume0", "resume1"


def sent(host):
    """Returns the bytes that have left a host's interface."""
    path = "/sys/class/net/link0/statistics/tx_bytes"
    command = ["ip", "netns", "exec", host, "cat", path]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def train(args, out):
    """Trains until step 1 on both hosts; returns the peak memory of each rank in MB."""
    processes = []
    size = 2 * args.ranks
    for rank in range(size):
        node, local = divmod(rank, args.ranks)
        environment = dict(
            os.environ, OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(size),
            LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(args.ranks), MASTER_ADDR=f"{ADDRESS}1",
            MASTER_PORT="29533")
        command = ["ip", "netns", "exec", HOSTS[node], sys.executable, str(ROOT / "train.py"),
                   "--data", args.data, "--out", str(out), "--model", args.model, "--batch",
                   str(size), "--steps", "1", "0", "--workers", "0", "--eval-every", "1000",
                   "--precision", args.precision]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    peaks = {}
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                continue
            found = re.search(r"VmHWM:\s+(\d+)", status)
            if found:
                peaks[rank] = int(found.group(1)) / 1e3
        time.sleep(0.05)
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    return [peaks[rank] for rank in range(size)]


def main():
    parser = argparse.ArgumentParser(description="Measure what a resume sends and holds.")
    parser.add_argument("--data", default="shards/docs")
    parser.add_argument("--model", default="small")
    parser.add_argument("--ranks", type=int, default=1, help="on each of the two hosts")
    parser.add_argument("--precision", default="auto")
    args = parser.parse_args()
    try:
        make_hosts(HOSTS)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            train(args, out)
            state = max((out / "checkpoints").glob("*.pt")).stat().st_size
            before = sent(HOSTS[0])
            peaks = train(args, out)
            left = sent(HOSTS[0]) - before
        print(f"{args.model}, 2 nodes x {args.ranks} rank(s): state {state / 1e6:.0f} MB, left the "
              f"first node {left / 1e6:.0f} MB, {left / state:.2f} of the state; peak MB of each "
              f"rank: {', '.join(f'{peak:.0f}' for peak in peaks)}")
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host])


if __name__ == "__main__":
    main()
