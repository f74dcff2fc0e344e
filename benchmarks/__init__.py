"""Measurements: one module a claim, run by `python -m benchmarks NAME`, its figures on a page under `benchmarks/results/`.

A benchmark is a module here with a function `main(argv: list[str] | None) -> int` and a docstring whose first line says what
it measures; being here registers it.
"""
