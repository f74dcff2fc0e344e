"""Predicted costs of a plan: collectives and memory."""

from splitjax.cost.collectives import predict_collectives
from splitjax.cost.memory import predict_memory

__all__ = ["predict_collectives", "predict_memory"]
