"""What XLA finds equal to a part of erfc: exp(-x^2), which the derivative of a GELU asks for again."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from splitjax.cost.memory.program import Kind
from splitjax.cost.memory.reading import read

SHAPE = (64, 128)


def gelu_step(x):
    return jax.value_and_grad(lambda x: jnp.sum(jax.nn.gelu(jnp.sin(x), approximate=False)))(x)


def by_hand(x):
    y = jnp.sin(x)
    return jax.lax.erfc(y), jnp.exp(-(y * y)), jnp.exp(-(y**2)), jnp.exp(-y)


def nodes_of(fn, dtype=jnp.float32):
    jaxpr = jax.make_jaxpr(fn)(jnp.zeros(SHAPE, dtype))
    program = read(jaxpr, [None] * len(jaxpr.in_avals), [None] * len(jaxpr.out_avals), {})
    return program.body.nodes


def test_the_exponential_of_a_gelu_is_computed_once():
    (made,) = [node for node in nodes_of(gelu_step) if node.name == "exp"]
    (erfc,) = [node for node in nodes_of(gelu_step) if node.name == "erfc"]
    assert made.outputs[0] in erfc.inputs and made.kind is Kind.LOOP
    (again,) = [node for node in nodes_of(gelu_step) if node.name == "same"]
    assert again.kind is Kind.VIEW and again.inputs == made.outputs


def test_the_compiler_computes_it_once_too():
    text = jax.jit(gelu_step).lower(jnp.zeros(SHAPE)).compile().as_text()
    assert len(re.findall(r"= f32\[64,128\]\{1,0\} exponential\(", text)) == 1
    apart = lambda x: (jax.lax.erfc(jnp.sin(x)), jnp.exp(-jnp.sin(x)))
    text = jax.jit(apart).lower(jnp.zeros(SHAPE)).compile().as_text()
    assert len(re.findall(r"= f32\[64,128\]\{1,0\} exponential\(", text)) == 2


def test_all_ways_to_write_a_square_and_nothing_else():
    names = [node.name for node in nodes_of(by_hand)]
    assert names.count("exp") == 2 and names.count("same") == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_computed_in_a_wider_dtype_is_another_exponential(dtype):
    names = [node.name for node in nodes_of(gelu_step, dtype)]
    assert names.count("exp") == 1 and "same" not in names
