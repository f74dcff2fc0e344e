"""This room turns a plan into an executable: it says how a gradient boundary runs.

`gradient` is the boundary, `strategies` chooses its evaluation. Each sub-package is one way or one part of it:
`products`, `microbatch`, `turns`, `tables`, `partial`; docs/architecture.md says what each holds, and in which
direction they import.
"""
