"""A step under its plan against the same step on one device (docs/verify.md)."""

from splitjax.verify.result import ComparedValue, DimSize, Finding, Verification, VerifiedRun
from splitjax.verify.verifying import verify_step

__all__ = ["ComparedValue", "DimSize", "Finding", "Verification", "VerifiedRun", "verify_step"]
