"""What XLA finds equal to a part of erfc: exp(-x^2), which the derivative of a GELU asks for again."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from splitjax.cost.memory.program import Kind
from splitjax.cost.memory.reading import read

SHAPE = (64, 128)


@jax.custom_jvp
def erfc(x):
    """The function with the derivative that it has in JAX before 0.12. In later ones it asks for a more precise
    exponential, which XLA does not find equal to that of the function."""
    return jax.lax.erfc(x)


@erfc.defjvp
def _derive(primals, tangents):
    (x,), (dx,) = primals, tangents
    return erfc(x), -2 * jnp.pi**-0.5 * jnp.exp(-jnp.square(x)) * dx


def gelu(x):
    return 0.5 * x * erfc(-x * 0.5**0.5)


def step_with(gelu):
    return jax.value_and_grad(lambda x: jnp.sum(gelu(jnp.sin(x))))


gelu_step = step_with(gelu)
of_jax = step_with(functools.partial(jax.nn.gelu, approximate=False))


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
    assert num_exponentials(gelu_step) == 1
    assert num_exponentials(lambda x: (jax.lax.erfc(jnp.sin(x)), jnp.exp(-jnp.sin(x)))) == 2


def test_the_gelu_of_jax_is_read_as_it_is_compiled():
    names = [node.name for node in nodes_of(of_jax)]
    assert names.count("same") == (1 if num_exponentials(of_jax) == 1 else 0)


def num_exponentials(fn):
    text = jax.jit(fn).lower(jnp.zeros(SHAPE)).compile().as_text()
    return len(re.findall(r"= f32\[64,128\]\{1,0\} exponential\(", text))


def test_all_ways_to_write_a_square_and_nothing_else():
    names = [node.name for node in nodes_of(by_hand)]
    assert names.count("exp") == 2 and names.count("same") == 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_computed_in_a_wider_dtype_is_another_exponential(dtype):
    names = [node.name for node in nodes_of(gelu_step, dtype)]
    assert names.count("exp") == 1 and "same" not in names
