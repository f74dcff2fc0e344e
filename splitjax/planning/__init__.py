"""Graph x rules x mesh -> `Plan`: leaf specs, constraints, group communication, schemes of tables, who differentiates
what.

What is asked for and what the first steps observed come in; values that the plan writes down come out, so that a
decision can be printed, compared, pinned and resumed without running anything.
"""
