"""Whether a change of the code moves anything: plans and compiled programs of every combination, before and after.

The plans of the whole product of models, rule sets and options, and the compiled programs of a cover of it, are
recorded as canonical texts; two recordings are equal where the same decisions were taken and the same programs
compiled. What is kept in `benchmarks/results/corpus` are digests, for each release of JAX, so that a later checkout is
compared without running an earlier one again.
"""
