"""Names the libraries that a process which is started ahead may import, and says which of them this one has."""

from __future__ import annotations

import sys

# What workers may have imported, in this order, and a process that is started ahead then imports too: libraries of
# which it is known that importing them touches no device and starts no thread. A worker says by a bit for each which of
# them it has. `jax` and `splitjax` stand for what every worker has.
AHEAD: tuple[str, ...] = (
    "jax",
    "splitjax",
    "jax.experimental.multihost_utils",
    "optax",
    "orbax.checkpoint",
    "flax.linen",
    "flax.nnx",
    "equinox",
    "rich.console",
    "sklearn.datasets",
    "splitjax.parallel_step",
    "splitjax.planning.passes",
    "splitjax.compile.step_programs",
    "splitjax.runtime.checkpoint.checkpoints",
    "splitjax.runtime.checkpoint.state_io",
    "splitjax.runtime.training.loop",
    "splitjax.data",
    "splitjax.models",
    "splitjax.equinox",
    "splitjax.nnx",
    "splitjax.cli",
    "splitjax.cli._train_parts",
)


def imported_bits() -> int:
    """Returns which of `AHEAD` this process has imported, the first as the lowest bit."""
    return sum(1 << number for number, name in enumerate(AHEAD) if name in sys.modules)


def modules_of(bits: int) -> tuple[str, ...]:
    """Returns the names that `bits`, of `imported_bits`, mean."""
    return tuple(name for number, name in enumerate(AHEAD) if bits >> number & 1)
