"""What the table says of one operation agrees with itself: dims, examples, sums, rows and traits."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Collection

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import splitjax
from splitjax.primitives.operation import Examples, RowAction, Trait
from splitjax.primitives.rows import row_facts
from splitjax.primitives.table import OPERATIONS

ROOT = pathlib.Path(splitjax.__file__).parent
NAMES = OPERATIONS.names()
# Elementwise, but their rules know more: which case of a selection is taken.
OWN_EXAMPLE_RULE = {"select_n"}
# Elementwise, but they say where the whole of an array lies.
WHOLE_ROWS = {"device_put", "layout_constraint", "reshard", "sharding_constraint", "with_memory_space_constraint"}


def test_an_example_rule_has_a_dim_rule_or_a_reason():
    silent = {
        name
        for name in NAMES
        if OPERATIONS[name].examples is not Examples.MIXED
        and OPERATIONS[name].dims is None
        and not OPERATIONS[name].no_dims
    }
    # `scatter_add` and the like are how other releases call "scatter-add"; the lookup is made after dims were linked.
    assert silent == {f"scatter_{kind}" for kind in ("add", "max", "min", "mul", "sub")} | {"splitjax_lookup"}
    for name in silent - {"splitjax_lookup"}:
        assert OPERATIONS[name].examples is OPERATIONS[name.replace("_", "-")].examples


def test_elementwise_operations_are_so_to_every_analysis():
    add = OPERATIONS["add"]
    elementwise = sorted(OPERATIONS.with_trait(Trait.ELEMENTWISE))
    assert len(elementwise) > 90
    for name in elementwise:
        operation = OPERATIONS[name]
        assert operation.dims is add.dims, name
        assert operation.examples is add.examples or name in OWN_EXAMPLE_RULE, name
        facts = row_facts(OPERATIONS[name], {}, [(4, 3)], [(4, 3)])
        assert (facts.action is RowAction.APART) == (name not in WHOLE_ROWS), name


def test_an_identity_is_elementwise_and_linear():
    for name in OPERATIONS.with_trait(Trait.IDENTITY):
        assert OPERATIONS[name].has(Trait.ELEMENTWISE), name


def test_what_is_linear_keeps_sums():
    """What may meet a sum over examples has a rule for single examples as well, stand-ins of flat steps aside."""
    for name in NAMES:
        if OPERATIONS[name].linear is not None and not name.startswith("_"):
            assert OPERATIONS[name].examples is not Examples.MIXED, name


def test_a_collective_has_no_dims_outside_of_shard_map():
    collectives = OPERATIONS.with_trait(Trait.COLLECTIVE)
    assert "psum" in collectives and all(OPERATIONS[name].no_dims for name in collectives)


@pytest.mark.parametrize(
    "name, operation, numbers",
    [
        ("add", lax.add, (2.5, -1.5)),
        ("sub", lax.sub, (2.5, -1.5)),
        ("mul", lax.mul, (2.5, -1.5)),
        ("div", lax.div, (2.5, -1.5)),
        ("max", lax.max, (2.5, -1.5)),
        ("min", lax.min, (2.5, -1.5)),
        ("pow", lax.pow, (2.5, -1.5)),
        ("neg", lax.neg, (2.5,)),
        ("abs", lax.abs, (-2.5,)),
        ("sign", lax.sign, (-2.5,)),
        ("square", lax.square, (-2.5,)),
        ("sqrt", lax.sqrt, (2.5,)),
        ("exp", lax.exp, (0.5,)),
        ("log1p", lax.log1p, (0.5,)),
        ("expm1", lax.expm1, (0.5,)),
        ("tanh", lax.tanh, (0.5,)),
        ("sin", lax.sin, (0.5,)),
        ("cos", lax.cos, (0.5,)),
        ("clamp", lax.clamp, (-1.0, 2.5, 2.0)),
        ("ge", lax.ge, (2.5, 2.5)),
        ("lt", lax.lt, (2.5, 2.5)),
        ("is_finite", lax.is_finite, (np.inf,)),
    ],
)
def test_values_are_those_of_jax(name, operation, numbers):
    rows = OPERATIONS[name].rows
    assert rows is not None and rows.value is not None
    want = operation(*(jnp.asarray(number, jnp.float32) for number in numbers))
    assert float(rows.value({}, *numbers)) == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("reduce, name", [(jnp.sum, "reduce_sum"), (jnp.all, "reduce_and"), (jnp.any, "reduce_or")])
def test_neutral_numbers_add_nothing(reduce, name):
    values = np.asarray([True, False]) if name != "reduce_sum" else np.asarray([1.5, -3.0])
    for some in (values, values[:1]):
        more = np.append(some, np.full(3, OPERATIONS[name].rows.neutral, some.dtype))
        assert reduce(jnp.asarray(more)) == reduce(jnp.asarray(some))


# What names operations for a reason of its own: rows of defects, each with the operation that it is about.
NAMED = {"partitioner/defects.py: COVERED"}


def test_what_holds_of_operations_stands_in_the_table_alone():
    """A set of primitives in reports, in verification or among the partitioner's defects would be a second table."""
    known = set(OPERATIONS.names())
    files = [file for room in ("report", "partitioner", "verify") for file in sorted((ROOT / room).rglob("*.py"))]
    found = {
        f"{file.relative_to(ROOT).as_posix()}: {name}"
        for file in files
        for name in sets_of_names(ast.parse(file.read_text(encoding="utf-8")), known)
    }
    assert found == NAMED


def sets_of_names(tree: ast.Module, known: Collection[str]) -> list[str]:
    """The constants of a module that hold three or more names, all of them `known`."""
    return [
        ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
        for literal in ast.walk(node.value)
        if isinstance(literal, (ast.Set, ast.Tuple, ast.List))
        for words in [[e.value for e in literal.elts if isinstance(e, ast.Constant)]]
        if len(words) > 2 and set(known) >= set(words)
    ]


def test_a_second_table_is_seen():
    tree = ast.parse('A = frozenset({"reduce_and", "reduce_or", "reduce_xor"})\nB: tuple = ("dot", "add", "sub")\n')
    assert sets_of_names(tree, OPERATIONS.names()) == ["A"]
