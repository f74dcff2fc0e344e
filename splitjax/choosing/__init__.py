"""Chooses the rules of a step by predicted seconds, within a budget of memory, by `splitjax.search`."""

from splitjax.auto_mesh import AutoMesh, mesh_asked_for, mesh_shapes
from splitjax.choosing.choice import Answer, Candidate, Choice, Refused, Variable
from splitjax.choosing.choosing import choose_mesh, choose_rules, over_budget, rank
from splitjax.choosing.domain import num_experts
from splitjax.choosing.layering import Pricing
from splitjax.choosing.prices import Prices
from splitjax.choosing.trade_off import Point, TradeOff, trade_off

__all__ = [
    "Answer",
    "AutoMesh",
    "Candidate",
    "Choice",
    "Point",
    "Prices",
    "Pricing",
    "Refused",
    "TradeOff",
    "Variable",
    "choose_mesh",
    "choose_rules",
    "mesh_asked_for",
    "mesh_shapes",
    "num_experts",
    "over_budget",
    "rank",
    "trade_off",
]
