"""Shares options among commands: how a mesh is written, which models and optimizers can be named, what is checked."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from splitjax.errors import MeshError, SplitjaxError
from splitjax.mesh import MeshShape

ModelName = Literal[
    "vgg11",
    "vgg16",
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "mlp",
    "transformer",
    "lstm",
    "deepfm",
    "dlrm",
]
Library = Literal["linen", "nnx"]
GroupComm = Literal["auto", "gather", "turns", "modulo"]
OptimizerName = Literal["adam", "momentum", "adafactor", "adagrad"]
MeshText = Annotated[str, tyro.conf.arg(metavar="AXIS=SIZE,...")]


class OptionValueError(SplitjaxError, ValueError):
    """Says that an option of a command has a value that it cannot have."""


def check_positive(**options: float | None) -> None:
    """Raises `OptionValueError` for the first of the numbers `options`, by name, that is not above 0; None is no number
    and passes."""
    for name, value in options.items():
        if value is not None and not value > 0:
            flag = f"--{name.replace('_', '-')}"
            raise OptionValueError(f"{flag} must be above 0", value=value, place=flag, remedy="give a larger number")


def parse_mesh(text: str) -> MeshShape:
    """Returns the shape of the mesh that `text`, such as `data=2,model=4`, writes. Raises `MeshError` for anything
    else."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if not equals or not axis or not size.strip().isdecimal():
            raise MeshError(
                "a mesh is written as its axes with their sizes",
                value=text,
                place="--mesh",
                remedy="write it as data=2,model=4",
            )
        if axis.strip() in axes:
            raise MeshError(
                f"the mesh names its axis {axis.strip()!r} twice",
                value=text,
                place="--mesh",
                remedy="name every axis once",
            )
        axes[axis.strip()] = int(size)
    return MeshShape.of(axes)


@dataclasses.dataclass(frozen=True)
class Traceback:
    """The option that every command has."""

    traceback: bool = dataclasses.field(default=False, kw_only=True)
    """Show the Python traceback of an error too."""
