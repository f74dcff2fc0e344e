"""Says which line of the user's caused an equation or a call, and what scopes it stands in."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

# Frames of these packages are machinery between a user's line and the operation it caused.
_INSTALLED = tuple(
    f"-packages/{name}/" for name in ("jax", "jaxlib", "flax", "haiku", "equinox", "optax", "chex", "jaxtyping")
)
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # of the package
# Of splitjax itself only the models are what a user may want to see the lines of.
_OWN_MODELS = _HERE + "models" + os.sep


def is_machinery(file_name: str) -> bool:
    """Returns whether the source file `file_name` stands between a user's line and the operation it caused."""
    if file_name.startswith("<") and not file_name.startswith("<ipython"):
        return True
    own = file_name.startswith(_HERE) and not file_name.startswith(_OWN_MODELS)
    return own or any(part in file_name for part in _INSTALLED)


def source_line(eqn: Any) -> str:
    """Returns `file:line (function)` of the user's line that caused `eqn`; empty where only machinery is on record (JAX
    traces some of its own functions once and keeps the result)."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in traceback.frames if traceback is not None else ():
        if not is_machinery(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""


def is_within_jax(eqn: Any, functions: Collection[str]) -> bool:
    """Returns whether one of these `functions` of JAX, by name, caused `eqn` for the user's line."""
    traceback = getattr(eqn.source_info, "traceback", None)
    for frame in traceback.frames if traceback is not None else ():
        if not is_machinery(frame.file_name):
            return False
        if frame.function_name.rpartition(".")[2] in functions and "-packages/jax/" in frame.file_name:
            return True
    return False


def name_stack(eqn: Any) -> str:
    """Returns the `jax.named_scope` path of `eqn`, such as `VGG/Conv_0`; empty where there is none (Flax NNX)."""
    return str(getattr(eqn.source_info, "name_stack", ""))


def name_stacks(eqns: Sequence[Any]) -> list[str]:
    """Returns what `name_stack` says of each of `eqns`. Equations share stacks, each of which is asked once."""
    stacks = [getattr(eqn.source_info, "name_stack", "") for eqn in eqns]
    by_identity = {id(stack): stack for stack in stacks}
    names = {key: str(stack) for key, stack in by_identity.items()}
    return [names[id(stack)] for stack in stacks]


def user_frame() -> str:
    """`file:line` of the innermost Python frame that belongs to the user; empty when there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_machinery(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
