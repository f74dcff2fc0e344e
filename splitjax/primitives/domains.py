"""States which operations are not defined at all numbers, or grow beyond all numbers: what stands in the padding of an
operand is replaced there, as a value that is not finite would reach the rest through a product with zero."""

from __future__ import annotations

from splitjax.primitives.operation import Domain
from splitjax.primitives.table import OPERATIONS


def _of_divisor(_position: int, number: float) -> bool:
    return number != 0


def _positive(_position: int, number: float) -> bool:
    return number > 0


def _zero_to_one(_position: int, number: float) -> bool:
    """Is not all of their domain, but what stands in padding is mostly zero or one."""
    return 0 <= number <= 1


def _of_power(position: int, number: float) -> bool:
    """Zero to the power of zero is one, with a derivative that is not finite."""
    return 0 <= number <= 1 and (position == 0 or number > 0)


OPERATIONS.state("div rem", domain=Domain((1,), _of_divisor))
OPERATIONS.state("reciprocal", domain=Domain((0,), _of_divisor))
OPERATIONS.state("log log2 rsqrt", domain=Domain((0,), _positive))
OPERATIONS.state("exp exp2 expm1 log1p sqrt cbrt integer_pow abs", domain=Domain((0,), _zero_to_one))
OPERATIONS.state("pow", domain=Domain((0, 1), _of_power))
OPERATIONS.state(
    """
    tan sinh cosh asin acos atanh erf_inv lgamma digamma bessel_i0e bessel_i1e
    """,
    domain=Domain((0,)),
)
OPERATIONS.state("atan2 igamma igammac polygamma zeta", domain=Domain((0, 1)))
