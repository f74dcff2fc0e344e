"""A launcher whose workers' links can be cut: `python -m benchmarks.faults.cut [options] -- COMMAND`, told by
`cut RANK` and `join RANK`.

What `splitjax launch --bandwidth` does, with the one thing that a command line has no use for.
"""

from __future__ import annotations

import argparse
import sys
import threading

from splitjax.runtime.launch import launch
from splitjax.runtime.network import Network


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--heartbeat-seconds", type=int, default=100)
    parser.add_argument("--grace-seconds", type=float, default=2.0)
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("command", nargs="+")
    options = vars(parser.parse_args(argv))
    command = options.pop("command")
    run = launch.start(launch.LaunchConfig(num_processes=2, threads=1, **options), command)
    threading.Thread(target=_obey, args=(run.network,), daemon=True).start()
    outcome = run.wait()
    return outcome.status


def _obey(network: Network) -> None:
    for line in sys.stdin:
        what, rank = line.split()
        network.set_link(int(rank), up=what == "join")
        print(f"done: {what} {rank}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
