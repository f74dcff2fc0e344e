"""States which operations are elementwise: every analysis takes dims, examples and rows of these as they are."""

from __future__ import annotations

from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS

OPERATIONS.state(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor from_edtype ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi
    ne neg nextafter not one_minus_square or polygamma polynomial population_count pow random_fold_in random_gamma
    random_gamma_grad real reciprocal reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh threefry2x32 to_edtype xor
    zeros_like zeta
    """,
    Trait.ELEMENTWISE,
)
OPERATIONS.state(
    """
    copy copy_p device_put layout_constraint name reshard sharding_constraint stop_gradient with_memory_space_constraint
    xla_metadata_value
    """,
    Trait.ELEMENTWISE,
    Trait.IDENTITY,
)

ELEMENTWISE: frozenset[str] = OPERATIONS.with_trait(Trait.ELEMENTWISE)
