"""Workers on CPUs keep the memory of a step for the next, and are asked for it neither on accelerators nor where the
environment tunes the allocator."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from splitjax.runtime.launch import launch
from splitjax.runtime.launch.kept_memory import kept_memory

NAMES = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX")
SHOW = f"import os; print(*[os.environ.get(name) for name in {NAMES}])"
# Prints the new pages of a call with 96 MB of temporary buffers, as the system counts them: the fewest of several, as
# the heap grows in one call or another until all buffers have their places.
FAULTS = """
import resource, jax, jax.numpy as jnp
f = jax.jit(lambda x: jnp.vdot(jnp.cumsum(x * 2)[::-1], jnp.cumsum(x + 1)))
x = jnp.arange(8_000_000, dtype=jnp.float32)
counts = []
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(x).block_until_ready()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts))
"""


def without_tuning(**more):
    base = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    base.pop("JAX_PLATFORMS", None)
    return {**base, **more}


def worker_prints(capfd, environment, **options):
    run = launch.start(
        launch.LaunchConfig(1, standby=False, **options), [sys.executable, "-c", SHOW], environment=environment
    )
    while (outcome := run.wait(0.1)) is None:
        pass
    assert outcome.status == 0
    return capfd.readouterr().out.split("] ", 1)[1].split()


def test_whoever_tunes_the_allocator_has_decided():
    assert set(kept_memory({})) == set(NAMES)
    assert kept_memory({"MALLOC_TOP_PAD_": "0"}) == {} == kept_memory({"LD_PRELOAD": "libjemalloc.so"})


@pytest.mark.parametrize(
    "more, options, keeps",
    [
        ({}, {"threads": 1}, True),
        ({"JAX_PLATFORMS": "cpu"}, {}, True),
        ({}, {"devices_per_process": 2}, True),
        ({}, {}, False),
        ({"JAX_PLATFORMS": "cuda,cpu"}, {}, False),
        ({"JAX_PLATFORMS": "cuda"}, {"threads": 2}, False),
        ({}, {"threads": 2, "gpus_per_process": 1}, False),
        ({}, {"threads": 1, "keep_memory": False}, False),
    ],
)
def test_workers_on_cpus_are_told_to_keep_memory(capfd, more, options, keeps):
    expected = list(kept_memory({}).values()) if keeps else ["None"] * len(NAMES)
    assert worker_prints(capfd, without_tuning(**more), **options) == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="these variables are glibc's")
def test_a_program_that_keeps_its_memory_needs_no_new_pages():
    base = without_tuning(JAX_PLATFORMS="cpu")
    run = lambda more: subprocess.run(
        [sys.executable, "-c", FAULTS], env={**base, **more}, capture_output=True, text=True, check=True
    )
    gives_back, keeps = (int(run(more).stdout.split()[-1]) for more in ({}, kept_memory({})))
    assert keeps < gives_back / 4, (keeps, gives_back)
