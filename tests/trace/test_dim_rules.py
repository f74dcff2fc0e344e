"""Every dim rule against an oracle that knows nothing of it (see `oracle.py`), and every primitive of JAX accounted
for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import primitives

from splitjax import _compat
from splitjax.primitives.calls import CallKind, names
from splitjax.primitives.dims_shape import common_factors
from splitjax.primitives.table import OPERATIONS
from tests.trace.oracle import Equation, equations, places, problems
from tests.trace.programs import PROGRAMS

# Met only on accelerators, in other versions of JAX, in other libraries, or as stand-ins while a step is flattened.
NOT_RUN = set(
    """_branch _carry_back _carry_in _gradient _scan_in _scan_index _scan_out copy_p create_token debug_callback
    debug_print empty dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fwd
    dot_product_attention_fwd_wrapper empty2 eq_to from_edtype geqrf select_and_scatter inspect_sharding
    layout_constraint le_to log2 lt_to lu_pivots_to_permutation one_minus_square polynomial random_gamma_grad
    reciprocal reshard random_gamma rng_uniform scaled_matmul scaled_matmul_wrapper shard_map splitjax_copy
    splitjax_deal threefry2x32 to_edtype unvmap_all unvmap_any unvmap_max with_memory_space_constraint
    xla_metadata_value zeros_like""".split()
)


@pytest.fixture(scope="module")
def seen() -> dict[Any, str]:
    """What was checked so far: signature of an equation -> primitive."""
    return {}


@pytest.mark.parametrize("name", PROGRAMS)
def test_labels_run_along_each_other(name, seen):
    fn, args = PROGRAMS[name]
    found = equations(fn, *args)
    assert found
    new = [
        one
        for one in found
        if one.signature not in seen
        and one.name not in names(CallKind.SCAN, CallKind.WHILE, CallKind.COND, CallKind.BOUNDARY)
    ]
    seen.update((one.signature, one.name) for one in new)
    assert [one.name for one in new if one.name not in OPERATIONS.with_dims()] == []
    assert problems(new) == []


def test_every_rule_was_run(seen):
    met = set(seen.values())
    if len(met) < 100:
        pytest.skip("needs all programs of the table")
    assert set(OPERATIONS.with_dims()) - met <= NOT_RUN


def test_every_primitive_of_jax_is_accounted_for():
    known = {getattr(primitives, key).name for key in dir(primitives) if key.endswith("_p")}
    assert len(known) > 150
    refused = {name for name in OPERATIONS.names() if OPERATIONS[name].no_dims}
    seen_through = names() - names(CallKind.MANUAL)
    assert known - {*OPERATIONS.with_dims(), *seen_through, *refused} == set()
    assert refused & set(OPERATIONS.with_dims()) == set()


def test_the_oracle_finds_a_wrong_rule():
    (one,) = equations(
        lambda x, y: x + y, np.ones((3, 3), "float32") * np.arange(3), np.arange(9, dtype="float32").reshape(3, 3)
    )
    assert problems([one]) == []
    wrong = OPERATIONS["transpose"].dims([(3, 3)], [(3, 3)], {"permutation": (1, 0)})
    wrong = type(wrong)((*wrong.inputs, wrong.inputs[0]), wrong.outputs)

    class Wrong(Equation):
        dim_map = wrong

    assert problems([Wrong(one.name, one.params, one.operands, one.results, one.run)])


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.data())
@settings(max_examples=60, deadline=None)
def test_reshape_shares_factors(source, data):
    """Any two shapes of one size: the factors of both sides multiply up, and permuting a shared factor permutes it in
    the result."""
    size = int(np.prod(source))
    target, rest = [], size
    while rest > 1:
        factor = data.draw(st.sampled_from([d for d in range(2, rest + 1) if rest % d == 0]))
        target.append(factor)
        rest //= factor
    target = target or [1]
    sizes: dict[int, int] = {}
    left, right = common_factors(source, target, sizes)
    for shape, labels in ((source, left), (target, right)):
        assert [int(np.prod([sizes[label] for label in dim])) for dim in labels] == list(shape)
    x = np.arange(size).reshape(source)

    def run(v):
        return [np.reshape(v, target)]

    class Reshape(Equation):
        dim_map = OPERATIONS["reshape"].dims([tuple(source)], [tuple(target)], {"dimensions": None})

    assert problems([Reshape("reshape", {}, (x,), (x.reshape(target),), run)]) == []


def shared(fn, *args) -> list[tuple]:
    """Per label of the last equation that stands on both sides: (operand, dim) -> (result, dim)."""
    one = equations(fn, *args)[-1]
    sources, targets = places(one.dim_map)
    return [(where[0][:2], targets[label][0][:2]) for label, where in sources.items() if label in targets]


def test_what_a_permutation_cannot_show():
    """Links along which values move: splitting such a dim is meaningful, so the dims stay tied."""
    x = np.ones((2, 3), "float32")
    for fn in (lambda v: jnp.cumsum(v, 1), lambda v: jnp.flip(v, 1), lambda v: lax.sort(v, dimension=1)):
        assert ((0, 1), (0, 1)) in shared(fn, x)


def test_an_element_of_a_factored_statistic_is_broadcast():
    """Same-rank operands of size 1 are an implicit broadcast, and still tie their other dims."""
    rule = OPERATIONS["mul"].dims([(4, 3), (4, 1), ()], [(4, 3)], {})
    assert rule.inputs == (((0,), (1,)), ((0,), ()), ())
    assert rule.joins


def test_fused_attention_ties_heads_in_groups():
    shapes = [(2, 16, 8, 64), (2, 16, 4, 64), (2, 16, 4, 64), (0,), (0,), (0,), (0,), (0,), (0,), (0,)]
    rule = OPERATIONS["dot_product_attention_fwd_wrapper"].dims
    found = rule(shapes, [(2, 16, 8, 64), (2, 8, 16)], {"layout": 0})
    assert found.inputs[0] == (("b",), ("t",), ("n", "g"), ("h",)) and found.inputs[1][2] == ("n",)
    assert found.outputs == ((("b",), ("t",), ("n", "g"), ("v",)), (("b",), ("n", "g"), ("t",)))
    back = OPERATIONS["dot_product_attention_bwd_wrapper"].dims
    found = back([*shapes, (2, 8, 16), shapes[0], shapes[0]], shapes[:3], {"layout": 0})
    assert (
        found.outputs[0] == found.inputs[0]
        and found.outputs[2] == found.inputs[2]
        and found.inputs[-1] == found.inputs[-2]
    )


def test_source_of_every_equation_is_the_users():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(1.0)
    inner, _ = _compat.open_jaxpr(closed)
    assert all("test_dim_rules.py" in _compat.source_line(eqn) for eqn in inner.eqns)
