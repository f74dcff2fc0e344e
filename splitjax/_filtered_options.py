"""Checks the options that the decorators of the NNX and Equinox frontends take, when they decorate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from splitjax.parallelize import parallelize as parallelize_arrays
from splitjax.step.positions import ArgumentRoles, make_options

# Options that the frontends read themselves: positions among the user's arguments, not among the arrays.
_NUMBERS = ("state_argnums", "batch_argnums", "static_argnums", "static_argnames")


def read_options(fn: Callable[..., Any], given: Mapping[str, Any]) -> tuple[ArgumentRoles, dict[str, Any]]:
    """Checks what a frontend's decorator was told, when it runs.

    **Arguments:**

    - `fn`: the step.
    - `given`: every option with its value (`splitjax.step.keywords.complete`).

    Returns the argument numbers, and the options for the plain step. Raises what a wrong value deserves, as
    `splitjax.parallelize` does."""
    keywords = {name: value for name, value in given.items() if name not in (*_NUMBERS, "state_outnums")}
    parallelize_arrays(fn, **keywords, state_argnums=(), batch_argnums=())
    options = make_options(
        fn,
        given["state_argnums"],
        given["batch_argnums"],
        given["static_argnums"],
        given["static_argnames"],
        None,
    )
    return options, keywords
