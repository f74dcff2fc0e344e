"""One call of a step, taken apart.

Positional and keyword arguments come in; flat leaves with paths and roles, a hashable signature, the checked options,
and where each state comes back among the results go out. In runs of several processes it also makes global arrays of
what each process holds, and has all of them compare what they are about to run.
"""
