"""Which results of a computation are the same value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.planning.tables.same_ids import numbered_ids


def numbers(function, *shapes):
    return numbered_ids(jax.make_jaxpr(function)(*shapes))


IDS, TABLE = jnp.zeros((4, 3), jnp.int32), np.arange(4, dtype=np.int32)


def test_what_is_computed_alike_is_the_same():
    def each(ids):
        wrap = lambda k: jnp.where(k < 0, k + 7, k)
        return wrap(ids), wrap(ids), jax.jit(wrap)(ids), ids

    first, second, third, plain = numbers(each, IDS)
    assert first == second == third != plain


def test_other_operands_numbers_and_orders_are_not():
    found = numbers(lambda a, b: (a + 1, a + 2, b + 1, 1 - a, a - 1, a[:, ::-1], a.T.T), IDS, IDS)
    assert len(set(found)) == len(found)


def test_constants_are_the_same_where_they_are_one_array():
    alike = np.array(TABLE)
    one, two, three = numbers(lambda a: (a + TABLE[:, None], a + TABLE[:, None], a + alike[:, None]), IDS)
    assert one != three or one == two  # arrays that are equal need not be known to be


def test_what_holds_a_computation_is_like_itself_alone():
    def loops(ids):
        turn = lambda k: jax.lax.fori_loop(0, 3, lambda i, x: x + i, k)
        once = turn(ids)
        return once, once, turn(ids)

    one, two, three = numbers(loops, IDS)
    assert one == two != three
