"""A network of its own for every worker: namespaces joined by a bridge, each behind a link of a given rate (Linux,
root, iproute2).

The namespaces have no names. They live as long as the launcher holds them open or a worker runs inside, so the kernel
takes down everything (bridge, links, limits) when these processes are gone, however they went: there is nothing to
clean up and nothing to leave behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from splitjax.errors import LaunchError
from splitjax.runtime.launch.outcome import Traffic
from splitjax.runtime.launch.variables import NETWORK_DEVICE

DEVICE = "eth0"
# Addresses that never leave the namespaces: 10.213.0.1 is worker 0.
_PREFIX, _PREFIX_BITS = "10.213", 16
MAX_WORKERS = 1023  # ports of a Linux bridge
_BRIDGE = "br0"
# A token bucket must hold what the rate yields between two looks at the clock; 1 ms and the size of the largest segment
# are enough.
_MIN_BURST_BYTES, _BURST_SECONDS = 128 * 1024, 0.001
_QUEUE_MILLISECONDS = 400
# The kernel's default lets one connection fill the queue of a slow link; rounds of pairwise exchanges then run at 0.6
# of its rate, with this at 0.83 (measured with gloo, 8 to 16 workers).
_TCP_SEND_BUFFER = "4096 65536 131072"
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_CLONE_NEWNET = 0x40000000
_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount")

T = TypeVar("T")


def parse_bandwidth(text: str) -> int:
    """Returns the bits a second that `text` says: 200,000,000 for `"200mbit"`. Raises `LaunchError` for anything that
    is no rate."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)", text.strip().lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if rate < 8000:
        raise LaunchError(
            "a bandwidth is a number of kbit, mbit or gbit a second, 8kbit or more",
            value=text,
            place="--bandwidth",
            remedy="write it as 200mbit or 1gbit",
        )
    return rate


def check_available() -> None:
    """Raises `LaunchError` where namespaces cannot be made, saying what is missing."""
    if sys.platform != "linux":
        raise LaunchError(
            "workers have networks of their own on Linux only",
            value=sys.platform,
            place="--bandwidth",
            remedy="leave --bandwidth out: workers then talk over the loopback",
        )
    if os.geteuid() != 0:
        raise LaunchError(
            "network namespaces need root",
            value=f"user {os.geteuid()}",
            place="--bandwidth",
            remedy="run it with sudo, or leave --bandwidth out: workers then talk over the loopback",
        )
    missing = [tool for tool in _TOOLS if _find(tool) is None]
    if missing:
        raise LaunchError(
            f"network namespaces need programs that are not installed: {', '.join(missing)}",
            value=missing,
            place="--bandwidth",
            remedy="install the packages iproute2 and util-linux",
        )


def bytes_sent() -> tuple[int, int] | None:
    """Returns the bytes sent and the bytes received by this worker's network device so far; None in a run without a
    network of its own.

    From `/proc/net/dev`, which shows the reader's namespace; `/sys/class/net` shows that of whoever mounted it.
    """
    device = os.environ.get(NETWORK_DEVICE)
    if device is None:
        return None
    with open("/proc/net/dev") as file:
        for line in file:
            name, _, counts = line.partition(":")
            if name.strip() == device:
                numbers = counts.split()
                return int(numbers[8]), int(numbers[0])
    return None


class Network:
    """One namespace for each worker and one for the bridge between them.

    **Arguments:**

    - `num_workers`: how many namespaces.
    - `bits_per_second`: the rate of each worker's link, in each direction.

    **Raises:** `LaunchError` if this machine cannot have it.
    """

    def __init__(self, num_workers: int, bits_per_second: int):
        check_available()
        if num_workers > MAX_WORKERS:
            raise LaunchError(
                f"a bridge joins at most {MAX_WORKERS} workers", value=num_workers, place="-n", remedy="start fewer"
            )
        self.bits_per_second = bits_per_second
        self._files: list[int] = []
        self._bridge = -1
        try:
            self._bridge = _new_namespace()
            for _ in range(num_workers):
                self._files.append(_new_namespace())
            self._build()
        except BaseException:
            self.close()
            raise

    def address(self, rank: int) -> str:
        """Returns the private address of worker `rank`."""
        return f"{_PREFIX}.{(rank + 1) >> 8}.{(rank + 1) & 255}"

    def file(self, rank: int) -> int:
        """Returns the descriptor of the open file that holds the namespace of worker `rank`."""
        return self._files[rank]

    def enter(self, rank: int) -> list[str]:
        """Returns the start of a command that runs in the namespace of worker `rank`, with mounts of its own; it needs
        `file(rank)`."""
        return [_tool("nsenter"), f"--net=/proc/self/fd/{self._files[rank]}", "--", _tool("unshare"), "--mount", "--"]

    def call(self, rank: int, function: Callable[[], T]) -> T:
        """Returns what `function` returns, or raises what it raises, inside the namespace of worker `rank`: sockets
        that it opens are there."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(self._files[rank], _CLONE_NEWNET) != 0:  # of this thread alone
                    raise OSError(ctypes.get_errno(), "setns")
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def set_link(self, rank: int, *, up: bool) -> None:
        """Cuts the link of worker `rank`, or, where it is to be `up`, joins it again. The worker's own device stays as
        it is: nothing tells it."""
        port = f"master {_BRIDGE}" if up else "nomaster"
        self._in(self._bridge, "ip", "link", "set", "dev", _port(rank), *port.split())

    def traffic(self) -> tuple[Traffic, ...]:
        """Returns what each worker sent and received so far, whether it still runs or not: counted at the bridge."""
        shown = json.loads(self._in(self._bridge, "ip", "-s", "-j", "link", "show"))
        counts = {link["ifname"]: link["stats64"] for link in shown}
        return tuple(
            Traffic(rank, counts[_port(rank)]["rx"]["bytes"], counts[_port(rank)]["tx"]["bytes"])
            for rank in range(len(self._files))
        )

    def close(self) -> None:
        """Lets go of the namespaces; the kernel frees them as soon as nothing runs inside."""
        for file in (self._bridge, *self._files):
            if file >= 0:
                os.close(file)
        self._bridge, self._files = -1, []

    def _build(self) -> None:
        burst = max(_MIN_BURST_BYTES, round(self.bits_per_second / 8 * _BURST_SECONDS))
        limit = f"root tbf rate {self.bits_per_second}bit burst {burst}b latency {_QUEUE_MILLISECONDS}ms"
        ports = [_port(rank) for rank in range(len(self._files))]
        lines = [f"link add {_BRIDGE} type bridge", f"link set {_BRIDGE} up"]
        for port, file in zip(ports, self._files):
            lines += [
                f"link add {port} type veth peer name {DEVICE} netns /proc/self/fd/{file}",
                f"link set {port} master {_BRIDGE} up",
            ]
        self._quiet(self._bridge)
        for file in self._files:
            self._quiet(file)
        self._in(self._bridge, "ip", "-batch", "-", lines=lines, files=self._files)
        self._in(self._bridge, "tc", "-batch", "-", lines=[f"qdisc add dev {port} {limit}" for port in ports])
        for rank, file in enumerate(self._files):
            address = f"{self.address(rank)}/{_PREFIX_BITS}"
            self._in(
                file,
                "ip",
                "-batch",
                "-",
                lines=["link set lo up", f"addr add {address} dev {DEVICE}", f"link set {DEVICE} up"],
            )
            self._in(file, "tc", "qdisc", "add", "dev", DEVICE, *limit.split())

    def _quiet(self, file: int) -> None:
        """Settings of a namespace: no IPv6, whose announcements would be counted too, and small send buffers."""
        script = (
            f'echo "{_TCP_SEND_BUFFER}" > /proc/sys/net/ipv4/tcp_wmem; cd /proc/sys/net/ipv6/conf 2>/dev/null || exit'
            " 0; for which in all default; do echo 1 > $which/disable_ipv6; done"
        )
        self._in(file, "sh", "-c", script)

    def _in(
        self, namespace: int, tool: str, *arguments: str, lines: Sequence[str] = (), files: Sequence[int] = ()
    ) -> str:
        command = [_tool("nsenter"), f"--net=/proc/self/fd/{namespace}", "--", _tool(tool), *arguments]
        done = subprocess.run(
            command, input="\n".join(lines) + "\n", capture_output=True, text=True, pass_fds=[namespace, *files]
        )
        if done.returncode != 0:
            raise _refused(" ".join([tool, *arguments]), done.stderr)
        return done.stdout


def _new_namespace() -> int:
    """An open file on a new network namespace; the process that made it is gone when this returns."""
    maker: Any = subprocess.Popen(
        [_tool("unshare"), "--net", "--", "sh", "-c", "echo made; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with maker:
        if not maker.stdout.readline():
            raise _refused("unshare --net", maker.stderr.read())
        file = os.open(f"/proc/{maker.pid}/ns/net", os.O_RDONLY)
        maker.stdin.close()
    return file


def _refused(what: str, words: str) -> LaunchError:
    return LaunchError(
        f"`{what}` failed: {words.strip().splitlines()[0] if words.strip() else 'no reason given'}",
        place="--bandwidth",
        remedy=(
            "it needs CAP_SYS_ADMIN and CAP_NET_ADMIN (in a container: --privileged), and a kernel with veth, bridge"
            " and sch_tbf"
        ),
    )


def _port(rank: int) -> str:
    return f"worker{rank}"


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _tool(tool: str) -> str:
    return _find(tool) or tool
