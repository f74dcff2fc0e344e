"""A process of the run of `tests/compile/test_choosing_processes.py`: chooses mesh and rules with others."""

from __future__ import annotations

import sys

import jax

rank, num, port = map(int, sys.argv[1:4])
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"127.0.0.1:{port}", num, rank)

import dataclasses  # noqa: E402
import pathlib  # noqa: E402

import numpy as np  # noqa: E402

import splitjax  # noqa: E402
from splitjax.compile.choosing import deciding  # noqa: E402
from splitjax.errors import BudgetError, ProcessError  # noqa: E402
from splitjax.machines.calibration import Calibration  # noqa: E402
from splitjax.step import agreement  # noqa: E402
from tests.compile.test_choosing_meshes import batch_of, make_state, step  # noqa: E402

EXAMPLE = (batch_of(),)


def chosen(**options):
    return splitjax.parallelize(step, **{"mesh": "auto", "rules": "auto"} | options)


FILE = pathlib.Path(__file__).parents[1] / "codec" / "data" / "calibration.json"
searched, rank_all = [], deciding.rank
deciding.rank = lambda *arguments, **options: (searched.append(1), rank_all(*arguments, **options))[1]

# Process 0 chooses for all, who compare it once, and train to the numbers of one device.
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
searches = [len(searched)]

# That holds for processes that each measured the machine: all have the choice of process 0, with its figures.
measured = Calibration.load(FILE)
measured = dataclasses.replace(measured, call_seconds=(1 + rank) * measured.call_seconds)
searched.clear()
decorated = chosen(target=measured)
state = decorated.init(make_state, jax.random.key(0), example=EXAMPLE)
searches.append(len(searched))
assert decorated.choice.best.program_seconds > 0
with_own = decorated.time(state, batch_of(), on=measured).seconds
has_own_figures = with_own == decorated.choice.best.program_seconds

# Where nothing fits, every process finds out why.
searched.clear()
try:
    chosen(memory_budget="1KiB").init(make_state, jax.random.key(0), example=EXAMPLE)
except BudgetError as error:
    assert "no layout that was found fits" in str(error) and searched, error
else:
    raise AssertionError("it fits")

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
# Looked at here, where no other process waits for this one any more.
assert searches == ([1, 1] if rank == 0 else [0, 0]), searches
assert has_own_figures == (rank == 0)
print("all well")
