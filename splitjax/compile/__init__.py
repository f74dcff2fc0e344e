"""From a planned step to compiled programs, and what is kept between calls.

A step's signature comes in (`splitjax.step`), its `Plan` (`splitjax.planning`) and the evaluators of `splitjax.lower`;
an `Entry` with `jax.jit` programs under the plan's shardings comes out. It is a room of its own because executables and
sessions outlive one call, and everything below it does not.
"""
