"""Connects gradient boundaries that ask for microbatches with their evaluation (`microbatch.py`)."""

from __future__ import annotations


def boundary_hook(graph, mesh, plan, retrace, jaxpr):
    return None
