"""A process of the run of `tests/compile/test_choosing_processes.py`: chooses mesh and rules with others."""

from __future__ import annotations

import sys

import jax

rank, num, port = map(int, sys.argv[1:4])
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"127.0.0.1:{port}", num, rank)

import numpy as np  # noqa: E402

import splitjax  # noqa: E402
from splitjax.errors import ProcessError  # noqa: E402
from splitjax.step import agreement  # noqa: E402
from tests.compile.test_choosing_meshes import batch_of, make_state, step  # noqa: E402

EXAMPLE = (batch_of(),)


def chosen(**options):
    return splitjax.parallelize(step, **{"mesh": "auto", "rules": "auto"} | options)


# All choose alike, compare it once, and train to the numbers of one device.
met, compare = [], agreement._Meeting.compare
agreement._Meeting.compare = lambda self, *arguments: (met.append(self.name), compare(self, *arguments))[1]
decorated = chosen()
state = decorated.init(make_state, jax.random.key(0), example=EXAMPLE)
placed = decorated.place(make_state(jax.random.key(0)), example=EXAMPLE)
expected, loss = step(make_state(jax.random.key(0)), batch_of())
_, found = decorated(state, batch_of())
np.testing.assert_allclose(np.asarray(found), loss, rtol=1e-10)
assert decorated.mesh.size == 8 and met.count("step/choice") == 1 and met.count("step") == 1, met
agreement._Meeting.compare = compare

# Processes with other options choose otherwise; all of them are told so before anything waits for the others.
for make in (
    lambda decorated: decorated.init(make_state, jax.random.key(0), example=EXAMPLE),
    lambda decorated: decorated.place(make_state(jax.random.key(0)), example=EXAMPLE),
    lambda decorated: decorated(make_state(jax.random.key(0)), batch_of()),
):
    try:
        make(chosen(rules="megatron" if rank else "data_parallel"))
    except ProcessError as error:
        assert error.value == "choice" and "process 1 chose another mesh or other rules" in str(error), error
        assert "say mesh and rules yourself" in str(error) and ("there," in str(error)) == (rank == 1), error
    else:
        raise AssertionError("nothing was compared")

# Who plans alone waits for nobody.
if rank == 0:
    chosen(memory_budget="250KiB").plan(make_state(jax.random.key(0)), batch_of())
print("all well")
