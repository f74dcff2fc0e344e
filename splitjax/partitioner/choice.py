"""Refuses to plan for the partitioner that JAX had before Shardy.

The number of devices and JAX's configuration come in; nothing comes out, or an error. It exists because GSPMD, which a
user gets who turns Shardy off, computes some programs wrongly that Shardy computes rightly, and ends the process for
others (the row `gspmd` of the table). No condition is known that would tell these programs from the rest.
"""

from __future__ import annotations

import jax

from splitjax.errors import PartitionerError
from splitjax.partitioner.defects import defect_named


def check_partitioner(num_devices: int, place: str) -> None:
    """Raises `PartitionerError` where JAX would partition a program with GSPMD.

    **Arguments:** `num_devices`: of the mesh; a single device partitions nothing. `place`: what the error calls the
    step."""
    # A JAX that has no such option any more has no GSPMD either.
    if num_devices == 1 or getattr(jax.config, "jax_use_shardy_partitioner", True):
        return
    row = defect_named("gspmd")
    raise PartitionerError(
        f"XLA's partitioner computes {row.operation} wrongly if {row.condition}: {row.consequence}",
        value=row.name,
        place=place,
        remedy='leave Shardy on: jax.config.update("jax_use_shardy_partitioner", True), or take'
        " JAX_USE_SHARDY_PARTITIONER out of the environment",
    )
