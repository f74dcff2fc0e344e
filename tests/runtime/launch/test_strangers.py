"""Strangers at the launcher's ports: where these are, and what who reaches them can do. On the loopback only."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from splitjax.errors import CheckpointError, ProcessError
from splitjax.runtime.launch.peers import Peers
from splitjax.step import agreement
from tests.runtime.conftest import ROOT

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
# The addresses, in hexadecimal as the kernel has them, on which a process listens.
LISTENING = """
import os, pathlib
def listening():
    sockets = set()
    for file in pathlib.Path("/proc/self/fd").iterdir():
        try:
            sockets.add(os.readlink(file))
        except OSError:
            pass
    rows = [line.split() for name in ("tcp", "tcp6") if pathlib.Path("/proc/net", name).exists()
            for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]]
    return sorted({row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets})
"""
linux = pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="reads /proc/net")


@linux
def test_launcher_and_workers_listen_on_the_loopback_only(launched):
    own: dict = {}
    exec(LISTENING, own)
    before = set(own["listening"]())
    run = launched(
        "import splitjax, jax\n"
        + LISTENING
        + "print('listens', *listening(), flush=True)\nimport time; time.sleep(60)",
        num_processes=2,
    )
    run.until("listens", 2)
    launcher = set(own["listening"]())
    run.run.kill()
    run.wait()
    workers = {word for line in run.out.getvalue().splitlines() if "listens" in line for word in line.split()[2:]}
    assert launcher and launcher - before <= LOOPBACK and workers <= LOOPBACK


def test_what_strangers_can_do_at_the_coordinators_port():
    """`SECURITY.md` says so: garbage and silence harm nobody; who speaks JAX's protocol is taken for a process."""
    worker = pathlib.Path(__file__).with_name("strangers_worker.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(worker)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "after garbage": "answered",
        "stranger in place of 1": True,
        "stranger in place of 7": False,
        "key of a stranger": "was here",
        "after strangers": "answered",
    }


class Store:
    """Stands for the coordination service after a stranger wrote to it."""

    def __init__(self, text: str):
        self.text = text

    def blocking_key_value_get(self, key, milliseconds):
        return self.text

    def key_value_dir_get(self, folder):
        return [(f"{folder}0", json.dumps([["plan", "x"]])), (f"{folder}1", self.text)]

    def key_value_set(self, key, value):
        pass

    def wait_at_barrier(self, key, milliseconds):
        pass


@pytest.mark.parametrize("said", ["", "{", "[" * 5000, "9" * 5000, "[1]", '{"x": 1}', '{"message": "no"}', "null"])
def test_what_a_stranger_wrote_is_a_typed_error(said):
    peers = Peers("test")
    peers.rank, peers.count, peers._client = 1, 2, Store(said)
    with pytest.raises(CheckpointError, match="no answer of splitjax"):
        peers.decide("topic", dict, 1.0)


@pytest.mark.parametrize("said", ["", "{", "[" * 5000, "3", "[3]", '[["plan"]]', "[[1, 2]]"])
def test_entries_that_a_stranger_wrote_are_a_typed_error(said):
    entries = Store(said).key_value_dir_get("splitjax/step/0/items/")
    with pytest.raises(ProcessError, match="cannot be read"):
        agreement._items_of(entries, "first call of step")


@pytest.mark.parametrize("key", ["splitjax/step/0/items/x", "splitjax/step/0/items/"])
def test_entries_of_no_process_are_a_typed_error(key):
    with pytest.raises(ProcessError, match="cannot be read"):
        agreement._items_of([(key, "[]")], "first call of step")
