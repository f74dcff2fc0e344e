"""Gradients of lookup tables by rows: only what a step touched is exchanged.

A boundary that looks rows up comes in; the same boundary with a delta per lookup comes out, whose gradients a scheme of
`splitjax.sync` adds up over the workers before the touched rows are written in place.
"""
