"""Decides what a step leaves to be chosen, when its first call is planned (`deciding`)."""

from splitjax.compile.choosing.deciding import build_chosen, mesh_not_chosen
from splitjax.compile.choosing.places import Decided, nameable_mesh

__all__ = ["Decided", "build_chosen", "mesh_not_chosen", "nameable_mesh"]
