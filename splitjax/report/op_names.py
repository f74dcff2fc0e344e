"""Reads what the name of a compiled operation says: the scopes that splitjax and JAX wrote into it.

JAX names an operation after the functions, transformations and modules around it (`jit(f)/jvp(Net)/a/dot_general`);
splitjax adds scopes of its own around what it sends (`lower.products.groups.scope`). A name goes in, its parts come
out.
"""

from __future__ import annotations

import re

from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS

_SCOPE = re.compile(r"splitjax:(?:enter|product|stored|layer|saved):([^/()]+)")
_PRODUCT = "splitjax:product:"  # a product with its collectives written out
_ENTERS = re.compile(r"splitjax:enter:[^/()]+")
_ROWS = re.compile(r"splitjax:(rows|fallback|summed|handed):([^/()]+)")
_AGAIN = "splitjax:again"  # see `sync.owner`
_STORED = re.compile(r"splitjax:stored:([^/()]+)")
_SHARES = re.compile(r"splitjax:shares:([^/()]+)")
_SAVED = "splitjax:saved:"
_WRAPPED = re.compile(r"(\w+)\((.*)\)")


def primitive(op_name: str) -> str:
    """Returns the operation in `op_name`: its last part."""
    return op_name.rsplit("/", 1)[-1]


def is_product(op_name: str) -> bool:
    """Returns whether `op_name` names a product or a convolution, registered ones among them: what a call into a
    library, which does not say what it computes, stands for."""
    return primitive(op_name) in OPERATIONS.with_trait(Trait.PRODUCT)


def name_parts(op_name: str) -> tuple[str, ...]:
    """Returns the parts of `op_name`, an operation's name, without what transformations wrap around them:
    `jit(f)/jvp(Net)/a/dot_general` -> `Net, a, dot_general`."""
    parts = []
    for part in op_name.split("/"):
        while match := _WRAPPED.fullmatch(part):
            part = "" if match.group(1) == "jit" else match.group(2)
        if part:
            parts.append(part)
    return tuple(parts)


def layer_scopes(op_name: str) -> tuple[str, ...]:
    """Returns the layers (with dots for slashes) whose scopes of splitjax are in `op_name`, the innermost last."""
    return tuple(_SCOPE.findall(op_name))


def stored_scope(op_name: str) -> str:
    """Returns the layer (with dots for slashes) whose stored weight the operation `op_name` gathers; empty for any
    other operation."""
    scope = _STORED.search(op_name)
    return scope.group(1) if scope else ""


def shares_scope(op_name: str) -> str:
    """Returns the batch (with dots for slashes) whose examples the operation `op_name` brings to the devices that share
    their turn of a loop; empty for any other operation."""
    scope = _SHARES.search(op_name)
    return scope.group(1) if scope else ""


def is_of_saved(op_name: str) -> bool:
    """Tells whether the operation `op_name` brings together what devices kept in parts for a rematerialised layer."""
    return _SAVED in op_name


def gradient_scope(op_name: str) -> tuple[str, str] | None:
    """Returns (what is sent, parameter with dots for slashes) of an exchange of gradients that splitjax wrote out; None
    for any other operation.

    What is sent: `rows` of a table or, where capacities did not suffice, all of them (`fallback`); a gradient that is
    `summed` over the workers that computed it, or that sum `handed` to others."""
    scope = _ROWS.search(op_name)
    if scope is None:
        return None
    return "fallback" if _AGAIN in op_name else scope.group(1), scope.group(2)


def is_crossing(op_name: str) -> bool:
    """Tells whether the operation `op_name` is an exchange of activations, or of their cotangents, that splitjax wrote
    out."""
    return _ENTERS.search(op_name) is not None


def is_written_product(op_name: str) -> bool:
    """Tells whether the operation `op_name` belongs to a product whose collectives splitjax wrote out."""
    return _PRODUCT in op_name


def is_derivative(op_name: str) -> bool:
    """Tells whether the operation `op_name` belongs to the backward pass of a differentiated function."""
    return "transpose(" in op_name


def is_differentiated(op_name: str) -> bool:
    """Tells whether the operation `op_name` belongs to a function that is differentiated, in either pass."""
    return "jvp(" in op_name
