"""Networks of workers: what a link really carries and how fast, cutting it, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from splitjax.errors import LaunchError
from splitjax.runtime import network

from .conftest import command, until


def why_not() -> str | None:
    try:
        network.Network(1, 10**6).close()
    except LaunchError as error:
        return error.message
    return None


REASON = why_not()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces: {REASON}")

RANK = "import os, socket, sys, time; rank = int(os.environ['SPLITJAX_PROCESS_ID'])\n"
# Worker 0 sends, worker 1 listens; the host name means each worker's own address.
TRANSFER = """
import os, socket, sys, time
rank, num_bytes = int(os.environ["SPLITJAX_PROCESS_ID"]), 2_000_000
own = socket.gethostbyname(socket.gethostname())
if rank == 1:
    server = socket.create_server((own, 5000))
    peer, _ = server.accept()
    began, got = time.perf_counter(), 0
    while piece := peer.recv(1 << 16):
        got += len(piece)
    print("received", got, time.perf_counter() - began, own)
else:
    while True:
        try:
            peer = socket.create_connection(("10.213.0.2", 5000), timeout=5)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    peer.sendall(bytes(num_bytes))
    peer.close()
"""


def processes() -> dict[int, tuple[int, str]]:
    """Process -> its parent, and its network namespace."""
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parent = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            found[int(pid)] = parent, os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            pass  # gone
    return found


def namespaces_below(root: int) -> set[str]:
    """The network namespaces that processes started by `root` are in, but for that of `root` itself. Others on this
    machine may make some too: whose they are is known by descent only."""
    known = processes()
    below, grown = {root}, True
    while grown:
        more = {pid for pid, (parent, _) in known.items() if parent in below} - below
        grown, below = bool(more), below | more
    return {known[pid][1] for pid in below if pid in known} - {known[root][1]}


def are_gone(namespaces: set[str]) -> bool:
    return not namespaces & {namespace for _, namespace in processes().values()}


@pytest.mark.parametrize(
    ("text", "rate"), [("200mbit", 200_000_000), ("1gbit", 10**9), ("1.5 Mbit", 1_500_000), ("64kbit", 64_000)]
)
def test_bandwidths(text, rate):
    assert network.parse_bandwidth(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "100", "25mbps", "-1mbit", "0mbit", "mbit"])
def test_what_is_no_bandwidth(text):
    with pytest.raises(LaunchError, match="a bandwidth is a number"):
        network.parse_bandwidth(text)


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match="need root"):
        network.check_available()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "_find", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(LaunchError, match="not installed: tc") as caught:
        network.check_available()
    assert "iproute2" in caught.value.remedy
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LaunchError, match="on Linux only"):
        network.check_available()


def test_without_a_network_no_bytes_are_counted(monkeypatch):
    monkeypatch.delenv("SPLITJAX_NETWORK_DEVICE", raising=False)
    assert network.bytes_sent() is None


@pytest.mark.one_version
@needs_namespaces
def test_a_link_has_its_rate_and_its_bytes_are_counted(launched):
    run = launched(TRANSFER, num_processes=2, bandwidth="8mbit")
    mine: set[str] = set()
    until(lambda: mine.update(namespaces_below(os.getpid())) or len(mine) == 2, seconds=10)
    outcome = run.wait()
    assert outcome.status == 0, run.err.getvalue()
    _, got, seconds, own = run.out.getvalue().split("received")[1].join(["received ", ""]).split()
    assert int(got) == 2_000_000 and own == "10.213.0.2"
    # 2 MB at 8 Mb/s take 2 s, less what the buckets let through at once.
    assert 1.4 < float(seconds) < 4
    sender, receiver = outcome.traffic
    assert 2_000_000 < sender.sent_bytes < 2_300_000 and 2_000_000 < receiver.received_bytes < 2_300_000
    assert sender.received_bytes < 200_000
    until(lambda: are_gone(mine), seconds=5)


@pytest.mark.one_version
@needs_namespaces
def test_bytes_of_a_killed_worker_count_and_restarts_add_up(launched):
    # Without the launcher's variable, so that importing splitjax does not wait for the other worker at each start.
    script = (
        RANK + "del os.environ['SPLITJAX_COORDINATOR']\nfrom splitjax.runtime import network\npeer ="
        " socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nfor _ in range(20): peer.sendto(bytes(1000),"
        " ('10.213.0.1', 9))\ntime.sleep(0.2); print('sent', network.bytes_sent()); os.kill(os.getpid(), 9) if rank"
        " == 1 else time.sleep(100)"
    )
    run = launched(script, num_processes=2, bandwidth="100mbit", restarts=1, grace_seconds=0.1)
    outcome = run.wait()
    assert outcome.status == 137 and len(outcome.attempts) == 2
    own = [eval(line.split("sent ")[1])[0] for line in run.out.getvalue().splitlines() if line.startswith("[1] sent")]
    assert own[0] >= 20_000 and own[1] >= own[0] + 20_000
    assert outcome.traffic[1].sent_bytes >= own[1] and outcome.traffic[1].sent_bytes < 60_000


@pytest.mark.one_version
@needs_namespaces
def test_a_link_can_be_cut_and_joined(launched):
    script = (
        RANK + "peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); peer.settimeout(0.1)\nif rank == 1:\n   "
        " peer.bind(('10.213.0.2', 7))\n    while True:\n        try: peer.sendto(b'x', peer.recvfrom(9)[1])\n       "
        " except TimeoutError: pass\nwhile True:\n    peer.sendto(b'x', ('10.213.0.2', 7))\n    try:"
        " peer.recvfrom(9); print('answer', flush=True)\n    except TimeoutError: print('silence', flush=True)\n   "
        " time.sleep(0.05)"
    )
    run = launched(script, num_processes=2, bandwidth="100mbit")
    run.until("answer", 3)
    run.run.network.set_link(1, up=False)
    run.until("silence", run.out.getvalue().count("silence") + 5)
    run.run.network.set_link(1, up=True)
    run.until("answer", run.out.getvalue().count("answer") + 5)


@pytest.mark.one_version
@needs_namespaces
def test_the_command_reports_and_leaves_nothing_when_killed(tmp_path):
    file = tmp_path / "network.json"
    with command("-n", "2", "--bandwidth", "1gbit", "--network-json", str(file), "--", "true") as run:
        _, err = run.communicate(timeout=60)
        assert run.returncode == 0 and "network, 1gbit a link" in err
    value = json.loads(file.read_text())
    assert value["bits_per_second"] == 10**9 and [one["rank"] for one in value["workers"]] == [0, 1]
    with command("-n", "2", "--bandwidth", "1gbit", "--", "sh", "-c", "sleep 100 & echo ready; sleep 100") as run:
        run.stdout.readline(), run.stdout.readline()
        mine = namespaces_below(run.pid)
        assert len(mine) == 2
        run.kill()
        until(lambda: are_gone(mine), seconds=10)
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
    assert "worker" not in links


@needs_namespaces
def test_jax_joins_over_the_network(launched):
    from tests.runtime.launch.test_initialize import COLLECTIVE

    script = COLLECTIVE + "print('sum', float(total(x)), os.environ['SPLITJAX_COORDINATOR'].split(':')[0])"
    run = launched(script, num_processes=2, threads=1, bandwidth="1gbit")
    assert run.wait().status == 0, run.err.getvalue()
    assert "[0] sum 3.0 10.213.0.1" in run.out.getvalue() and "[1] sum 3.0 10.213.0.1" in run.out.getvalue()
