"""A process of the run of `tests/measure/test_calibrating.py`: measures what it waits for the other one, and prints
it."""

from __future__ import annotations

import json
import sys

import jax

rank, num, port = map(int, sys.argv[1:4])
jax.distributed.initialize(f"127.0.0.1:{port}", num, rank)

from splitjax.measure.calibrating.timing import Timer  # noqa: E402
from splitjax.measure.calibrating.waiting import waiting_curve  # noqa: E402

devices = tuple(sorted(jax.devices(), key=lambda device: device.process_index))
print(json.dumps([(point.size, point.seconds) for point in waiting_curve(Timer(devices), num, (1e-4, 1e-3)).points]))
