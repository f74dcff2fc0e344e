"""Searches for the cheapest choice of values that fits the memory, and proves how much cheaper any could be.

A `CostNetwork` states the problem (`network`; `contest` reads those of ASPLOS'25), `solve` (`solving`) answers it with
a `Solution`. The room knows nothing of JAX, models or plans: the planner states its decisions in it.
"""
