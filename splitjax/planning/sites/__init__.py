"""Decides what a layout means at each operation of a step: constraints where two layouts meet, exchanges of split
products, gradients that are summed into parts, remedies for what XLA's partitioner computes wrongly.

A `Graph`, the specs of its leaves and a mesh shape come in; values by site come out, put together as a `StepLayout`,
which lowering reads (`lower.products`).
"""
