"""Chooses the rules of a step by predicted seconds, within a budget of memory, by `splitjax.search`."""

from splitjax.choosing.choice import Candidate, Choice, Variable
from splitjax.choosing.choosing import choose_mesh, choose_rules, mesh_shapes, over_budget, rank_rules
from splitjax.choosing.prices import Prices

__all__ = [
    "Candidate",
    "Choice",
    "Prices",
    "Variable",
    "choose_mesh",
    "choose_rules",
    "mesh_shapes",
    "over_budget",
    "rank_rules",
]
