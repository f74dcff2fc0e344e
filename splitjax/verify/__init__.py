"""Compares a step under its plan with the same step on one device, number by number (docs/verify.md).

A planned step and the types of its arguments go in; a `Verification` comes out, which says what agrees, and names the
operation where numbers go wrong. XLA's partitioner and splitjax's own rewrites may both be wrong: this is how to know.
"""

from splitjax.display import registry
from splitjax.verify.document import verification_document
from splitjax.verify.result import ComparedValue, DimSize, Finding, Verification, VerifiedRun
from splitjax.verify.verifying import verify_step

__all__ = ["ComparedValue", "DimSize", "Finding", "Verification", "VerifiedRun", "verify_step"]

registry.register(Verification, verification_document)
