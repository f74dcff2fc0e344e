"""Measurements: one module a claim, run by `python -m benchmarks NAME`, its figures on a page under
`benchmarks/results/`.

A benchmark is a module here with a function `main(argv: list[str] | None) -> int`, or a package here that has this
function in its module `main` or in itself, and a docstring whose first paragraph says what it measures; being here
registers it.
"""
