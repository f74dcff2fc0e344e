"""Finds the steps: which modules of this folder have them, and all of them by name."""

from __future__ import annotations

import importlib

from benchmarks.modern.steps.case import ModernStep

# By subject. Each has `STEPS`; a module of the folder that is not here fails a test.
MODULES = (
    "decoders", "experts", "sequence", "encoders", "optimizers", "finetuning", "posttraining", "vision",
    "selfsupervised", "diffusion", "generative", "speech", "recommenders", "graphs", "physics", "control",
)  # fmt: skip


def every_step() -> tuple[ModernStep, ...]:
    """Returns all steps, in the order of their modules. Raises `ValueError` where two have one name."""
    found: dict[str, ModernStep] = {}
    for module in MODULES:
        for step in importlib.import_module(f"benchmarks.modern.steps.{module}").STEPS:
            if step.name in found:
                raise ValueError(f"two steps are called {step.name!r}, one of them in {module}")
            found[step.name] = step
    return tuple(found.values())
