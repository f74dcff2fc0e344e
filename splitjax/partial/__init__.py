"""Structured partial backpropagation: how far back each worker differentiates, and what that saves.

Pure values over a traced forward pass; `splitjax.lower` makes programs of them. Source: Kumar et al., "JigSaw:
scheduling deep learning jobs at the granularity of iterations with structured partial backpropagation" (arXiv
2111.10672).
"""

from splitjax.partial.advice import Advice
from splitjax.partial.request import Measured, PartialBackprop

__all__ = ["Advice", "Measured", "PartialBackprop"]
