"""Plans a step: leaf specs, constraints, group communication, schemes of tables, who differentiates what.

A traced step (`Graph`), rules, a mesh shape, what is asked for and what the first steps observed come in; values that
the `Plan` writes down come out, so that a decision can be printed, compared, pinned and resumed without running
anything. What lowering evaluates are values of this room; how gradient boundaries can run it is told
(`ways.WayChooser`).
"""
