"""States the traits of operations that no rule brings with it."""

from __future__ import annotations

from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS

OPERATIONS.state("concatenate slice dynamic_slice pad split", Trait.RESIZES)
OPERATIONS.state("stack unstack concatenate split", Trait.ARRANGES)
OPERATIONS.state(
    "dot_general conv_general_dilated ragged_dot_general scaled_matmul scaled_matmul_wrapper", Trait.PRODUCT
)
OPERATIONS.state("gather", Trait.LOOKUP)
OPERATIONS.state("scatter-add scatter_add", Trait.ADDS_ROWS)
OPERATIONS.state(
    """
    conj copy_p cumsum device_put imag name pvary real reduce_window_sum sharding_constraint stop_gradient tile
    """,
    Trait.COUNTED,
)
OPERATIONS.state("random_bits threefry2x32 random_gamma rng_bit_generator rng_uniform", Trait.DRAWS)
