"""Describes the loop of a recurrent layer that each device runs on its own examples.

Left to XLA, a loop whose weights are stored in parts adds the gradients of all workers up in every iteration. In a
`shard_map` over the workers they are added up once, behind it. `lower.microbatch.looped` finds such loops,
`lower.products.local_loop` evaluates them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from splitjax.primitives.walk import Site


@dataclasses.dataclass(frozen=True, eq=False)
class LocalLoop:
    """Says how the workers run a loop.

    - `site`: of the loop. `eqn`: its equation, traced with the examples of a worker.
    - `axes`: the mesh axes along which the workers lie, major first.
    - `operand_dims`, `result_dims`: by operand and by result the dim that holds examples; None for what is the same for
      all.
    - `stored`: by operand, for a weight that is stored over `axes`, the dims that these split with their axes. Each
      worker gathers it.
    """

    site: Site
    eqn: Any
    axes: tuple[str, ...]
    operand_dims: tuple[int | None, ...]
    result_dims: tuple[int | None, ...]
    stored: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]
