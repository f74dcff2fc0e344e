"""Finds what is made of activations whose parts lie on several devices: reductions, picks of rows, joined columns."""
