"""Finds the tables of a step whose gradients go by rows, and says how each is synchronised.

A `Graph`, a plan and what is asked for come in; a `SparseStep` comes out, whose boundaries have edited lookups. Rows
are pulled, summed and written by `lower.tables`.
"""
