"""Teaches splitjax operations of users: `register_primitive` for all that it asks about one, `register_dims` for dims
alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from splitjax import _compat
from splitjax.errors import TraceError
from splitjax.primitives.dims import DimMap, DimRule, Params, Shapes, from_notation, parse_notation
from splitjax.primitives.example_question import ExampleRule
from splitjax.primitives.operation import Examples, Linear, Linearity, OperationFacts, RowAction, RowFacts, Trait
from splitjax.primitives.table import OPERATIONS, STAND_FOR_MANY
from splitjax.primitives.weights import weights_of

Dims = str | Callable[[Shapes, Shapes, Params], str | DimMap]


def register_primitive(
    primitive: str | _compat.Primitive,
    *,
    dims: Dims | None = None,
    mixing: bool = False,
    examples: ExampleRule | Examples | None = None,
    along: str | Collection[str] = (),
    linear: bool | Linearity | Linear | None = None,
    elementwise: bool = False,
    rows: RowAction | RowFacts | None = None,
    traits: Collection[Trait] = (),
    size_params: Collection[str] = (),
    replace: bool = False,
) -> None:
    """Teaches splitjax all that its analyses ask about an operation, so that it works under every option.

    For most operations the `dims` are enough: what happens to the examples of a batch and to the rows of a table
    follows from them, and a product of activations with a parameter (two operands share a label that no result has) is
    a layer, which rules split as they split a dense one. An operation that is linear says so in addition if a dim that
    it contracts can hold examples, if it can meet a sum over the examples (such a sum is added up a microbatch at a
    time), or if rules split a weight along a dim that it contracts: only what is linear in each operand is then
    evaluated on parts that are added up, and all else is left to XLA's partitioner.

    **Arguments:**

    - `primitive`: the primitive, or its name; "pallas_call:my_kernel" or "ffi_call:my_target" for one of the operations
      that these primitives stand for.
    - `dims`: what it does to dims: a notation such as `"b i, i o -> b o"` (operands separated by commas, `->`, results
      separated by commas; `(h d)` is a dim made of factors; `_` links nothing; `...` stands for leading dims that pair
      up), or a function `(input_shapes, output_shapes, params) -> notation | DimMap`. It promises that dims with the
      same label run along each other: entry n of a result's dim is made of entry n of the operands', but for labels in
      `along`.
    - `mixing`: for a notation, whether the operation makes a new representation of its operand, as a dense layer does
      (a label that stands only among the operands implies it).
    - `examples`: what it does with the dim that holds examples. By default `Examples.BY_DIMS`; `Examples.MIXED` keeps
      it out of loops over microbatches; a function takes a `Question` and returns a `RuleOutcome`, or `Mixed` with the
      reason where microbatches cannot reproduce it.
    - `along`: labels of `dims` whose entries influence each other although results have them too: "f" for a
      normalisation `"b f -> b f"` over features. One name, or several separated by blanks or in a collection. Examples
      in such a dim are refused rather than taken apart.
    - `linear`: `Linearity.TOGETHER` for a sum or a move of its operands, `Linearity.EACH` for a product, or a `Linear`
      that names the operands; True for one operand. By default it is linear in none.
    - `elementwise`: whether each number of a result depends only on the numbers at its own place; `dims` are then
      `"... -> ..."` where they are not given, and not needed.
    - `rows`: what it does with the rows of a table whose gradients go by rows, for an operation of an optimizer. By
      default what the `dims` tell: rows are apart if all operands and the result have the label of the leading dim.
    - `traits`: what else holds of it, see `Trait`.
    - `size_params`: names of parameters that hold sizes, and so differ between a batch and a part of it.
    - `replace`: whether what is given replaces what is known of the operation already. What is not given stays.

    Raises `TraceError` for a notation that does not parse, for labels and operands that the notation does not have, for
    facts that contradict each other, and for a known operation without `replace`.
    """
    name = primitive if isinstance(primitive, str) else primitive.name
    known = OPERATIONS.get(name)
    if known is not None and known.dims is not None and not replace:
        raise _error("this primitive is known already", name, name, "pass replace=True to teach it anew")
    if dims is None and elementwise:
        dims = _elementwise_dims
    if dims is None and (known is None or known.dims is None):
        raise _error("nothing says what it does to dims", dims, name, 'pass dims="b i, i o -> b o"')
    labels = frozenset(along.split() if isinstance(along, str) else along)
    fact = _linear(linear, name)
    if isinstance(dims, str):
        _check_notation(dims, labels, fact, elementwise, name)
    if elementwise and labels:
        raise _error("an elementwise operation works along no dim", sorted(labels), name, "leave along out")
    given: dict[str, Any] = {}
    if dims is not None:
        given |= {"dims": _dim_rule(dims, mixing, name), "no_dims": ""}
    is_product = Trait.PRODUCT in traits or (isinstance(dims, str) and _contracts(dims))
    if examples is not None or known is None or known.examples is Examples.MIXED:
        given["examples"] = Examples.BY_DIMS if examples is None else examples
    if not (isinstance(given.get("examples", Examples.MIXED), Examples) or callable(given["examples"])):
        raise _error("what it does with examples is a function or an Examples", examples, name, "pass Examples.BY_DIMS")
    all_traits = frozenset(traits) | ({Trait.ELEMENTWISE} if elementwise else set())
    all_traits |= {Trait.PRODUCT} if is_product else set()
    if not all(isinstance(trait, Trait) for trait in all_traits):
        raise _error("a trait is a Trait", tuple(traits), name, "pass members of splitjax.primitives.operation.Trait")
    if isinstance(rows, RowAction):
        rows = RowFacts(rows)
    if rows is not None and rows.action is RowAction.ARRANGES and rows.keeps is None:
        raise _error("nothing says which rows it keeps", rows, name, "pass RowFacts(RowAction.ARRANGES, keeps=...)")
    optional = {"along": labels, "linear": fact, "rows": rows, "size_params": frozenset(size_params)}
    given |= {key: value for key, value in optional.items() if value}
    before = known or OperationFacts(name)
    rule, kept = given.get("dims", before.dims), before.traits
    if before.weights is not None and before.weights.follows is not None and dims is not None:
        given["weights"], kept = None, kept - {Trait.PRODUCT}  # they followed from dims that are taught anew
    if is_product and rule is not None and given.get("weights", before.weights) is None:
        # A kernel's parameters hold programs of its operands' sizes: a device cannot run it on parts of them.
        holds_sizes = bool(size_params) or bool(before.size_params) or name.partition(":")[0] in STAND_FOR_MANY
        given["weights"] = weights_of(rule, by_labels=not holds_sizes)
    OPERATIONS.teach(dataclasses.replace(before, name=name, **given, traits=all_traits | kept))


def register_dims(primitive: str | _compat.Primitive, rule: Dims, *, mixing: bool = False) -> None:
    """Teaches splitjax what a primitive does to dims: `register_primitive` with nothing else.

    **Arguments:**

    - `primitive`: the primitive's name, or the primitive itself.
    - `rule`: its `dims`, a notation such as `"b i, i o -> b o"` or a function, as in `register_primitive`.
    - `mixing`: for a notation, whether the operation combines values across a dim (a label that stands only among the
      operands implies it).

    Raises `TraceError` for a notation that does not parse. A later registration replaces an earlier one.
    """
    register_primitive(primitive, dims=rule, mixing=mixing, replace=True)


def _elementwise_dims(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels dims by position, for operands that broadcast."""
    rule = OPERATIONS["add"].dims
    assert rule is not None, "splitjax's own operations are stated"
    return rule(inputs, outputs, params)


def _dim_rule(dims: Dims, mixing: bool, name: str) -> DimRule:
    """Makes a dim rule of a notation, which is checked here and not at the first trace, or of a function."""
    if isinstance(dims, str):
        notation = dims
        return lambda inputs, outputs, _params: from_notation(notation, inputs, outputs, mixing)
    if not callable(dims):
        raise TraceError(
            "a dim rule is a notation or a function",
            value=dims,
            place=f"register_primitive({name!r})",
            remedy='write dims="b i, i o -> b o"',
        )
    rule = dims

    def call(inputs: Shapes, outputs: Shapes, params: Params, /) -> DimMap:
        answer = rule(inputs, outputs, params)
        return from_notation(answer, inputs, outputs, mixing) if isinstance(answer, str) else answer

    return call


def _linear(linear: bool | Linearity | Linear | None, name: str) -> Linear | None:
    """Reads what is said of linearity."""
    if linear is None or linear is False:
        return None
    if linear is True:
        return Linear(Linearity.TOGETHER, operands=(0,))
    if isinstance(linear, Linearity):
        return Linear(linear)
    if not isinstance(linear, Linear):
        raise _error("linear is True, a Linearity or a Linear", linear, name, "pass Linearity.EACH for a product")
    if linear.operands is not None and set(linear.operands) & set(linear.fixed):
        raise _error("an operand is both linear and fixed", linear, name, "name every operand once")
    return linear


def _contracts(notation: str) -> bool:
    """Returns whether two operands share a label that no result has: products are added up over it."""
    operands, results = ([_labels([tensor]) for tensor in side] for side in parse_notation(notation))
    shared = {label for k, own in enumerate(operands) for other in operands[:k] for label in own & other}
    return bool(shared.difference(*results, "_"))


def _labels(tensors: list[list[Any]]) -> set[str]:
    """Returns the labels of parsed operands or results."""
    dims = (dim for tensor in tensors for dim in tensor if dim is not Ellipsis)
    return {label for dim in dims for label in (dim if isinstance(dim, tuple) else (dim,))}


def _check_notation(notation: str, along: frozenset[str], linear: Linear | None, elementwise: bool, name: str) -> None:
    """Raises `TraceError` where a notation does not parse, or where other facts do not fit its labels and operands."""
    operands, results = parse_notation(notation)
    missing = along - _labels(operands)
    if missing:
        remedy = f"name labels of its operands: {', '.join(sorted(_labels(operands) - {'_'})) or 'it has none'}"
        raise _error(f"the notation has no label {sorted(missing)[0]!r}", notation, name, remedy)
    if linear is not None:
        named = {*(linear.operands or ()), *linear.fixed}
        beyond = sorted(position for position in named if not 0 <= position < len(operands))
        if beyond:
            remedy = f"name positions from 0 to {len(operands) - 1}"
            raise _error(f"the notation has no operand {beyond[0]}", notation, name, remedy)
        if linear.how is Linearity.PAIRED and len(operands) != len(results):
            raise _error("paired operands and results differ in number", notation, name, "pass Linearity.TOGETHER")
    if elementwise and _labels(operands) != _labels(results):
        remedy = "leave elementwise out: a label without a result is contracted, and one without an operand is new"
        raise _error("an elementwise operation has the same labels on both sides", notation, name, remedy)


def _error(message: str, value: object, name: str, remedy: str) -> TraceError:
    return TraceError(message, value=value, place=f"register_primitive({name!r})", remedy=remedy)
