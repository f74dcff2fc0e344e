"""This room evaluates the traced step under its plan: split products, their collectives, and what XLA's partitioner is
not asked about.

A jaxpr and a plan come in; a function that evaluates the jaxpr equation by equation comes out, with constraints at
their sites and products with split weights as `shard_map`s whose collectives, forward and backward, are the planned
ones.
"""
