"""Arguments that are copied before results are written over them, and what is stored in their places, beside what
XLA's CPU compiler does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from splitjax.cost.memory.compilers import GPU, TPU
from splitjax.cost.memory.donating import in_places
from splitjax.cost.memory.lifetimes import PlacedProgram, predict_program_memory, predict_timeline
from splitjax.cost.memory.schedule import Place, Schedule, Step
from splitjax.cost.memory.timeline import peak_of

MEMORY_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
BATCH, WIDTH = 8, 256
WEIGHT = WIDTH * WIDTH * 4


def step(first, second, third, x):
    def loss(weights):
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return jnp.mean(y**2)

    weights = (first, second, third)
    return tuple(w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True))


def shapes():
    return *(jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),) * 3, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def placed(platform="cpu", donated=(0, 1, 2)):
    whole = [((), ())] * 4
    return PlacedProgram(
        jax.make_jaxpr(step)(*shapes()), whole, [None] * 3, {i: i for i in donated}, {"data": 1}, platform,
        paths=("first", "second", "third", "x"),
    )  # fmt: skip


def copies(program):
    return sorted(span.array.layer for span in predict_timeline(program).spans if span.array.made_by == "copy")


def test_a_weight_that_its_gradient_passes_through_is_copied():
    # No gradient passes through the first weight: its update is the last to read it.
    assert copies(placed()) == ["second", "third"]
    compiled = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*shapes()).compile(MEMORY_SCHEDULER)
    module = compiled.as_text()
    assert module.count(f"= f32[{WIDTH},{WIDTH}]{{1,0}} copy(") == 2
    found = predict_program_memory(placed())
    assert found.temporary_bytes == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.02)


@pytest.mark.parametrize("donated, copied", [((), []), ((0,), []), ((1,), ["second"])])
def test_what_is_not_donated_is_not_copied(donated, copied):
    assert copies(placed(donated=donated)) == copied


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_other_compilers_copy_behind_the_order(platform):
    assert copies(placed(platform)) == []
    assert not TPU.copies_donated and not GPU.copies_donated


def schedule(*, size, reads_late=False):
    """An argument 1 that is copied to 2 and read, and written over by 3; 4 is stored in between."""
    steps = [
        Step("copy", [1], [2]), Step("make", [2], [4]), Step("use", [4], [5]),
        Step("update", [2, 5], [3], shares=True), Step("late", [4] if reads_late else [5], [6]),
    ]  # fmt: skip
    sizes = {1: 8, 2: 8, 3: 8, 4: size, 5: 1, 6: 1}
    return Schedule(steps, [3, 6], [], (Place(2, 3, 8),)), sizes


@pytest.mark.parametrize(
    "size, reads_late, peak",
    [
        (8, False, 9),  # the copy and 5: 4 is where the argument was
        (9, False, 18),  # it does not fit in there
        (8, True, 16),  # it is read behind the step that takes the place: 5 is there
    ],
)
def test_what_fits_is_stored_where_the_argument_was(size, reads_late, peak):
    made, sizes = schedule(size=size, reads_late=reads_late)
    assert peak_of(made, sizes, {1, 3}).num_bytes == peak


def test_the_smallest_place_is_taken_and_once_at_a_time():
    steps = [Step("copy", [1], [2]), Step("copy", [3], [4]), Step("a", [2], [5]), Step("b", [4, 5], [6]),
             Step("c", [5, 6], [7]), Step("update", [7], [8]), Step("update", [7], [9])]  # fmt: skip
    sizes = {1: 8, 2: 8, 3: 4, 4: 4, 5: 3, 6: 3, 7: 3, 8: 8, 9: 4}
    first = {b: i for i, each in enumerate(steps) for b in each.writes}
    last = {2: 2, 4: 3, 5: 4, 6: 4, 7: 6, 8: 7, 9: 7}
    places = (Place(2, 8, 8), Place(4, 9, 4))
    # 4 fits into the place of 1; 5 is in that of 3, and 6 in none as it meets both.
    assert in_places(places, steps, first, last, sizes) == {4, 5}
