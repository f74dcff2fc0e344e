"""States in which operands operations are linear: these may meet a sum over examples before all of it is known.

Their results on the contributions of the microbatches add up to the result on the whole sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from splitjax.primitives.operation import Linear, Linearity
from splitjax.primitives.table import OPERATIONS

NOT_LINEAR = "it is not linear in a total over the batch, which is known only after all microbatches"


def _keeps_sums(params: Mapping[str, Any], dtype_in: Any, _dtype_out: Any) -> str | None:
    """Refuses a conversion that rounds to whole numbers: the sum of what is rounded is not the rounded sum."""
    new = np.dtype(params["new_dtype"])
    if jnp.issubdtype(new, np.inexact) or (jnp.issubdtype(dtype_in, np.integer) and jnp.issubdtype(new, np.integer)):
        return None
    return NOT_LINEAR


def _divides_exactly(_params: Mapping[str, Any], _dtype_in: Any, dtype_out: Any) -> str | None:
    """Refuses a division of whole numbers, which rounds."""
    return None if jnp.issubdtype(dtype_out, np.inexact) else NOT_LINEAR


def _fills_with_sums(params: Mapping[str, Any], _dtype_in: Any, dtype_out: Any) -> str | None:
    """Refuses a gather that fills in a number that counts: it would be added once a microbatch.

    Zero adds up to itself, and NaN, which is the default of floats.
    """
    if "FILL" not in str(params["mode"]):
        return None
    fill = params["fill_value"]
    adds_up = bool(jnp.issubdtype(dtype_out, np.inexact)) if fill is None else bool(fill == 0) or bool(fill != fill)
    return None if adds_up else "it fills in values that would be added once a microbatch"


OPERATIONS.state(
    """
    add sub add_any concatenate stack pad neg reshape squeeze transpose broadcast_in_dim reduce_sum cumsum
    real imag conj copy copy_p rev slice name sharding_constraint stop_gradient pvary split unstack tile device_put
    reduce_window_sum _scan_in _scan_out _carry_in _carry_back _branch _gradient
    """,
    linear=Linear(Linearity.TOGETHER),
)
OPERATIONS.state("mul dot_general conv_general_dilated", linear=Linear(Linearity.EACH))
OPERATIONS.state("optimization_barrier", linear=Linear(Linearity.PAIRED))
OPERATIONS.state("convert_element_type", linear=Linear(Linearity.TOGETHER, holds=_keeps_sums))
OPERATIONS.state("div", linear=Linear(Linearity.TOGETHER, operands=(0,), holds=_divides_exactly))
# The other operands choose entries.
OPERATIONS.state("select_n", linear=Linear(Linearity.TOGETHER, fixed=(0,)))
OPERATIONS.state("dynamic_slice", linear=Linear(Linearity.TOGETHER, operands=(0,)))
OPERATIONS.state("gather", linear=Linear(Linearity.TOGETHER, operands=(0,), holds=_fills_with_sums))
OPERATIONS.state("dynamic_update_slice", linear=Linear(Linearity.TOGETHER, operands=(0, 1)))
OPERATIONS.state("scatter scatter-add scatter_add", linear=Linear(Linearity.TOGETHER, operands=(0, 2)))
