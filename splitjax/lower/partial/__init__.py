"""Partial backpropagation as programs: workers that differentiate one loss to different depths.

Depths come in as values (`splitjax.partial`); boundaries whose workers truncate their backward pass come out, as
branches of one program or as a program per worker, with sums over exactly those workers that contributed.
"""
