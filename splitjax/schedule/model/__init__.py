"""Holds what is scheduled, as values: clusters, jobs and their profiles, traces, what a policy sees and answers, and
how a group takes turns.

Files and parameters come in, checked; immutable values and pure functions over them come out, which policies, the
simulator and real execution share.
"""
