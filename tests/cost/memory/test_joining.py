"""Which steps become one kernel, of small schedules whose modules for an H200 were looked at."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from splitjax.cost.memory.joining import Domain, Kernel, joined
from splitjax.cost.memory.lifetimes import PlacedProgram
from splitjax.cost.time.work import tasks_of, totals, walk
from tests.cost.memory.on_a_gpu import compiled

LOOP, ROWS = Domain(1024), Domain(1024, (1,))
MIB = 2**20


def kernels(*specs):
    return [
        Kernel(number, domain, dict.fromkeys(reads, 4096), tuple(writes))
        for number, (domain, reads, writes) in enumerate(specs)
    ]


def numbers(found):
    return [each.numbers for each in found]


def test_sums_of_one_array_are_one_kernel():
    (one,) = joined(kernels((ROWS, [1], [2]), (ROWS, [1], [3])), dict.fromkeys((1, 2, 3), 4096), [2, 3])
    assert one.reads == {1: 4096} and one.writes == (2, 3)


def test_a_loop_does_not_go_on_from_a_sum():
    specs = (ROWS, [1], [2]), (LOOP, [1, 2], [3])
    assert numbers(joined(kernels(*specs), dict.fromkeys((1, 2, 3), 4096), [3])) == [(0,), (1,)]


def test_a_softmax_is_one_kernel():
    specs = (Domain(1024, (1,), is_row_max=True), [1], [2]), (ROWS, [1, 2], [3]), (LOOP, [1, 2, 3], [4])
    (one,) = joined(kernels(*specs), dict.fromkeys((1, 2, 3, 4), 4096), [4])
    assert one.reads == {1: 4096} and one.writes == (4,)


@pytest.mark.parametrize(("bias", "num_kernels"), [(64, 1), (4096, 2)])
def test_a_bias_is_added_where_the_product_is_made(bias, num_kernels):
    found = joined(
        [
            Kernel(0, Domain(0, is_product=True), {1: 4096, 2: 4096}, (3,)),
            Kernel(1, LOOP, {3: 4096, 4: bias}, (5,)),
        ],
        {1: 4096, 2: 4096, 3: 4096, 4: bias, 5: 4096},
        [5],
    )
    assert len(found) == num_kernels and found[-1].writes == (5,)


def test_nothing_runs_before_what_it_reads():
    # The third reads what the second one, which joins nothing, makes: it cannot join the first.
    specs = (LOOP, [1], [2]), (None, [2], [3]), (LOOP, [1, 3], [4])
    assert numbers(joined(kernels(*specs), dict.fromkeys((1, 2, 3, 4), 4096), [2, 4])) == [(0,), (1,), (2,)]


def moved(function, *arguments, platform):
    placed = PlacedProgram(
        jax.make_jaxpr(function)(*arguments), [None] * len(arguments), [None], {}, {"data": 1}, platform
    )
    return totals(tasks_of(placed))["num_bytes"], [task.name for task, _ in walk(tasks_of(placed))]


# What XLA's compiler for an H200 makes of these: a kernel that reads x twice less (batch norm's sums), reads and writes
# once (softmax), and reads a slice of each turn alone.
def test_kernels_of_a_gpu():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    size = 4 * MIB
    found, _ = moved(lambda x: jnp.sum(x, 0) * jnp.sum(x * x, 0), x, platform="gpu")
    assert size <= found < 1.1 * size
    assert moved(lambda x: jnp.sum(x, 0) * jnp.sum(x * x, 0), x, platform="cpu")[0] > 1.9 * size
    found, names = moved(lambda x: jax.nn.softmax(x), x, platform="gpu")
    assert found == 2 * size and len(names) == 1
    scanned = lambda x: jax.lax.scan(lambda carry, row: (carry + jnp.sin(row), None), jnp.zeros(1024), x)[0]
    # Of a slice every compiler's kernels read the part alone.
    assert all(moved(scanned, x, platform=platform)[0] < 4 * size for platform in ("gpu", "tpu", "cpu"))


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("batch_sums", r"\(f32\[1024\]\S*, f32\[1024\]\S*\) fusion\(%x"),
        ("softmax", r"f32\[4096,1024\]\S* fusion\(%x"),
        ("scanned_slices", r"f32\[1024\]\S* fusion\("),
        ("rectified", r"f32\[4096,4096\]\S* (fusion|custom-call)\("),
    ],
)
def test_what_the_compiler_makes_of_them(name, kernel):
    # Kernels of the program itself, or of a turn of its loop: none in what they are made of.
    bodies = re.split(r"\n(?=%|ENTRY )", compiled(name))
    of_loop = [body for body in bodies if body.startswith("%region_0")]
    (body,) = of_loop if name == "scanned_slices" else [body for body in bodies if body.startswith("ENTRY")]
    lines = [line for line in body.splitlines() if re.search(r" (fusion|custom-call)\(", line)]
    large = [line for line in lines if "f32[" in line.split(" fusion(")[0]]
    assert len(large) == 1 and re.search(kernel, large[0]), lines
