"""Which results of a computation are the same value."""

from __future__ import annotations

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from splitjax.planning.tables.same_ids import numbered_ids


def numbers(function, *shapes):
    return numbered_ids(jax.make_jaxpr(function)(*shapes))


IDS = jnp.zeros((4, 3), jnp.int32)


def test_what_is_computed_alike_is_the_same():
    def each(ids):
        wrap = lambda k: jnp.where(k < 0, k + 7, k)
        return wrap(ids), wrap(ids), jax.jit(wrap)(ids), ids

    first, second, third, plain = numbers(each, IDS)
    assert first == second == third != plain


def test_other_operands_numbers_and_orders_are_not():
    found = numbers(lambda a, b: (a + 1, a + 2, b + 1, 1 - a, a - 1, a[:, ::-1], a.T.T), IDS, IDS)
    assert len(set(found)) == len(found)


class Shifted:
    """Adds a number that its text does not tell."""

    def __init__(self, by):
        self.by = by

    def __call__(self, ids):
        return np.asarray(ids + self.by, np.int32)

    def __repr__(self):
        return "Shifted()"


def test_functions_that_look_alike_are_not_the_same():
    one, seven = Shifted(1), Shifted(7)
    call = lambda function, ids: jax.pure_callback(function, ids, ids)
    first, second, third = numbers(lambda ids: (call(one, ids), call(one, ids), call(seven, ids)), IDS)
    assert first != third and second != third


def test_what_has_an_effect_is_never_the_same():
    draw = jax.jit(lambda ids: jax.experimental.io_callback(Shifted(1), ids, ids))
    first, second = numbers(lambda ids: (draw(ids), draw(ids)), IDS)
    assert first != second


def test_what_is_computed_again_in_the_backward_pass_is_the_same():
    wrapped = jax.checkpoint(lambda ids: ids % 7)
    first, second, plain = numbers(lambda ids: (wrapped(ids), wrapped(ids), ids % 7), IDS)
    assert first == second == plain


def test_what_holds_a_computation_is_like_itself_alone():
    def loops(ids):
        turn = lambda k: jax.lax.fori_loop(0, 3, lambda i, x: x + i, k)
        once = turn(ids)
        return once, once, turn(ids)

    one, two, three = numbers(loops, IDS)
    assert one == two != three
