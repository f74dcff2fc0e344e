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
OPERATIONS.state("gather dynamic_slice", Trait.TAKES)
OPERATIONS.state(
    """
    scatter scatter-add scatter_add scatter-sub scatter_sub scatter-mul scatter_mul scatter-min scatter_min scatter-max
    scatter_max dynamic_update_slice
    """,
    Trait.WRITES,
)
OPERATIONS.state(
    """
    reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin
    """,
    Trait.REDUCES,
)
OPERATIONS.state("reduce_and reduce_or reduce_xor", Trait.BITWISE)
OPERATIONS.state("sort top_k approx_top_k cumsum cumprod cummax cummin cumlogsumexp rev", Trait.SCANS)
OPERATIONS.state(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min conv_general_dilated", Trait.WINDOWS
)
OPERATIONS.state("bitcast_convert_type nextafter", Trait.BITS)
OPERATIONS.state("pallas_call ffi_call custom_linear_solve pure_callback io_callback", Trait.SIZED)
OPERATIONS.state(
    """
    conj copy_p cumsum device_put imag name pvary real reduce_window_sum sharding_constraint stop_gradient tile
    """,
    Trait.COUNTED,
)
OPERATIONS.state("random_bits threefry2x32 random_gamma rng_bit_generator rng_uniform", Trait.DRAWS)
