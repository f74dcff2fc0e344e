"""Chooses the rules of a step by predicted seconds, within a budget of memory, by `splitjax.search`."""

from splitjax.auto_mesh import AutoMesh, mesh_asked_for, mesh_shapes
from splitjax.choosing.axis_orders import other_orders
from splitjax.choosing.candidate import Answer, Candidate, CompiledFigures, Refused, Variable
from splitjax.choosing.choice import MICROBATCHES, REMAT, Choice
from splitjax.choosing.choosing import choose_mesh, choose_rules, over_budget, rank
from splitjax.choosing.domain import num_experts
from splitjax.choosing.layering import Pricing, StepUnderRules, laid_out
from splitjax.choosing.order import in_turn, may_fit
from splitjax.choosing.prices import Prices
from splitjax.choosing.trade_off import Point, TradeOff, trade_off

__all__ = [
    "MICROBATCHES",
    "REMAT",
    "Answer",
    "AutoMesh",
    "Candidate",
    "Choice",
    "CompiledFigures",
    "Point",
    "Prices",
    "Pricing",
    "Refused",
    "StepUnderRules",
    "TradeOff",
    "Variable",
    "choose_mesh",
    "choose_rules",
    "in_turn",
    "laid_out",
    "may_fit",
    "mesh_asked_for",
    "mesh_shapes",
    "num_experts",
    "other_orders",
    "over_budget",
    "rank",
    "trade_off",
]
