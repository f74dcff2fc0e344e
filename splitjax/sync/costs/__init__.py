"""What synchronising a table costs: capacities, bytes and messages of every scheme, and which of them is cheapest.

Profiles of sparsity and links come in, numbers and an `Exchange` come out: all that planning needs to know of
synchronisation. Nothing here runs on a device; how a scheme runs stands in `splitjax.sync`, which the evaluation of a
step (`lower.tables`) asks for.
"""
