"""The line that keeps a call whole names the user's function."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

import splitjax
from splitjax.errors import UnknownPrimitiveError

MESH = {"data": 4}


def refusal(step, *arguments):
    with pytest.raises(UnknownPrimitiveError) as caught:
        splitjax.parallelize(step, mesh=MESH, rules="data_parallel").plan(*arguments)
    return caught.value


def _double(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]


def doubled(x):
    return pl.pallas_call(_double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


nameless = lambda x: pl.pallas_call(_double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@pytest.mark.parametrize(("double", "name"), [(doubled, "doubled"), (nameless, "kernel")])
def test_the_line_names_the_function_that_makes_the_call(double, name):
    def step(params, batch):
        return params, (double(batch) @ params).mean()

    error = refusal(step, np.ones((16, 2), "f"), np.ones((8, 16), "f"))
    assert f'{name} = splitjax.kernel({name}, dims="b a -> b a", whole="a")' in error.remedy
