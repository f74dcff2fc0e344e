"""Holds a coordinator, has strangers come to its port, and prints as JSON what they could do. In a process of its own:
JAX's client ends its process when it loses the service."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

from jax._src.lib import _jax

from splitjax.runtime.launch.workers import Coordinator

SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
GARBAGE = (
    b"",
    b"\xff" * (1 << 20),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01" + bytes(500),
    SETTINGS + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(1 << 20),  # a message of 16 MB that never comes
)
# A stranger that speaks the protocol, in the place of the process that its argument names.
STRANGER = """
import os, sys
from jax._src.lib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], int(sys.argv[2]), init_timeout=20)
client.connect()
client.key_value_set("stranger", "was here")
client.key_value_set("large", "x" * (16 << 20))
print("done", flush=True)
os._exit(0)
"""


def joined(address: str) -> list:
    """Both processes of the run."""
    clients = [_jax.get_distributed_runtime_client(address, rank, init_timeout=60) for rank in (0, 1)]
    together([client.connect for client in clients])
    return clients


def together(calls: list) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def main() -> None:
    coordinator = Coordinator("127.0.0.1", 2, 60)
    host, port = coordinator.address.split(":")
    silent, hung_up = [], 0
    for said in GARBAGE * 10:
        stranger = socket.create_connection((host, int(port)), 10)
        silent.append(stranger)
        try:
            stranger.sendall(said)
        except OSError:
            hung_up += 1
    clients = joined(coordinator.address)
    clients[0].key_value_set("asked", "answered")
    found = {"after garbage": clients[1].blocking_key_value_get("asked", 30_000)}
    for rank in (1, 7):
        done = subprocess.run(
            [sys.executable, "-c", STRANGER, coordinator.address, str(rank)],
            capture_output=True,
            text=True,
            timeout=100,
        )
        found[f"stranger in place of {rank}"] = "done" in done.stdout
    found["key of a stranger"] = clients[0].blocking_key_value_get("stranger", 30_000)
    clients[1].key_value_set("again", "answered")
    found["after strangers"] = clients[0].blocking_key_value_get("again", 30_000)
    for stranger in silent:
        stranger.close()
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
