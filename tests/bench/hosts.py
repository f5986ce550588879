"""Makes two hosts of this machine: two linked network namespaces (Linux, root)."""
import contextlib
import os
import signal
import subprocess
import sys

NAMES = [f"bench{os.getpid()}{side}" for side in "ab"]
# The words before a command that runs on a host. Gloo must use the link.
INSIDE = [["ip", "netns", "exec", name, "env", "GLOO_SOCKET_IFNAME=link0"] for name in NAMES]
ADDRESS = "10.86.75."            # .1 and .2 are the hosts, visible only to each other
LINK = ["dev", "link0"]


def run(*command):
    """Runs a command; raises CalledProcessError if it fails."""
    subprocess.run(command, check=True)


@contextlib.contextmanager
def two_hosts():
    """A context in which the two hosts exist."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))    # runs `finally` below
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "link0", "netns", NAMES[0],
            "type", "veth", "peer", "link0", "netns", NAMES[1])
        for number, name in enumerate(NAMES, 1):
            for words in (f"address add {ADDRESS}{number}/24 dev link0",
                          "link set link0 mtu 9000 up", "link set lo up"):
                run("ip", "-n", name, *words.split())
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name])


def limit(rate, inside=()):
    """Limits the rate at which a host sends over the link, such as "100mbit"; "none" lifts the
    limit. inside: the host's words in INSIDE, if this process does not run on it."""
    queue = [*inside, "tc", "qdisc"]
    subprocess.run([*queue, "del", *LINK, "root"], stderr=subprocess.DEVNULL)
    if rate != "none":
        burst = "32kb"
        if "gbit" in rate:
            burst = "128kb"                          # 1 ms of 1 Gb/s
        run(*queue, "add", *LINK, "root", "tbf", "rate", rate, "burst", burst, "latency", "100ms")
