"""Makes compiled programs of a planned step, and keeps what lives between calls.

A step's signature comes in (`splitjax.step`), its `Plan` (`splitjax.planning`) and the evaluators of `splitjax.lower`;
an `Entry` with `jax.jit` programs under the plan's shardings comes out. It is a room of its own because executables and
sessions outlive one call, and everything below it does not.
"""
