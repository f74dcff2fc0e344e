"""The decorator: a step and its options in, a `ParallelStep` out.

It is light on purpose: `import splitjax` comes through here, and what traces, plans and compiles
(`splitjax.parallel_step`, the table of contents of that) is loaded when the first step is decorated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, overload

from splitjax.step.keywords import ParallelizeOptions, complete, show_signature

if TYPE_CHECKING:
    from splitjax.parallel_step import ParallelStep as ParallelStep

P = ParamSpec("P")
R = TypeVar("R")


@overload
def parallelize(fn: Callable[P, R], **options: Unpack[ParallelizeOptions]) -> ParallelStep[P, R]: ...


@overload
def parallelize(
    fn: None = None, **options: Unpack[ParallelizeOptions]
) -> Callable[[Callable[P, R]], ParallelStep[P, R]]: ...


def parallelize(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Turns a training step written for the global batch into one that trains on many devices, with the same numbers.

    Bare (`@parallelize`), called (`@parallelize(mesh={"data": 2, "model": 4})`), or as a function
    (`parallelize(step)`).

    **Arguments:**

    - `fn`: the step. It takes states, batches and other arguments and returns its new states among its results.
    - `mesh`: `{"axis": size}`, where one size may be -1, a `jax.sharding.Mesh` with axes of any type, an `AbstractMesh`
      to plan and lower for, or None for all devices on the axis `data` (docs/meshes.md). `"auto"`, or an
      `splitjax.AutoMesh`, chooses the sizes of its axes by predicted seconds when the first call is planned; later
      calls keep them (docs/choosing.md).
    - `roles`: what axes of the mesh are for whose names do not tell it: `{"x": "tensor"}`, with `"data"`, `"storage"`,
      `"tensor"`, `"expert"`, `"sequence"` or `"stage"` (docs/meshes.md).
    - `rules`: the name of a rule set, the path of a TOML file, or a `RuleSet`. It gives every parameter its sharding.
      `"auto"` chooses them by predicted seconds, when the first call is planned; later calls keep them
      (docs/choosing.md).
    - `donate`: whether a call consumes its states (their memory is reused for the new ones).
    - `plan`: a `Plan` or its JSON file, pinned: layouts come from it, and how tables are synchronised if it says so; a
      step that it does not fit is an error.
    - `state_argnums`: positions of the states, any pytrees. They are found again among the results by structure.
    - `batch_argnums`: positions of the batches: pytrees of arrays whose leading dim is the example dim. Everything else
      (keys, step numbers) is replicated.
    - `state_outnums`: positions of the states among the results, where structure does not tell.
    - `static_argnums`, `static_argnames`: as in `jax.jit`.
    - `unknown`: `"error"`, or `"gather"` to replicate around primitives that have no dim rule.
    - `uneven`: `"error"`, or `"pad"` to store parameters whose sizes do not divide with zeros behind them, up to the
      next size that does, and to show the step, evaluations and checkpoints what they are without (docs/meshes.md). It
      does not change the numbers.
    - `group_comm`: how examples cross from replicated into split layers: `"gather"`, `"turns"`, `"modulo"`, or
      `"auto"`, which chooses between the first and the last by predicted memory.
    - `shard_state`: also split optimizer state and summed gradients of parameters that are whole over some axes over
      these axes; the parameters stay whole (ZeRO stages 1 and 2; docs/sharded_state.md). `"auto"` chooses it by
      predicted seconds and the budget, alone or with rules and mesh (docs/choosing.md). A pinned plan decides for
      itself.
    - `microbatches`: in how many parts a device takes the gradients of its examples, for less memory, where
      `splitjax.value_and_grad` is not told; None for whole. It does not change the numbers. `"auto"` takes the fewest
      with which the step is within `memory_budget`, alone or with rules and mesh (docs/choosing.md).
    - `remat`: what repeated blocks of the loss, and the bodies of its scans over layers, keep for the backward pass,
      which computes the rest of them again, for less memory: `"dots_saveable"` for products of matrices and
      convolutions, but not for ragged products, `"nothing_saveable"`, as `jax.checkpoint_policies` has them, or
      `{"params/block*": "dots_saveable"}` by name; None for what the step says itself. It does not change the numbers.
      `"auto"` takes what is predicted to be fastest within `memory_budget`, alone or with rules and mesh
      (docs/choosing.md).
    - `sync`: how gradients of tables with row lookups are exchanged: `"dense"`, a scheme of `splitjax.sync` or its
      name, `"auto"`, or `{parameter pattern: one of these}`; with `splitjax.sync.ByRows(scheme, lazy=True)` also where
      that changes the numbers. The first three steps are observed, then the step is compiled once more
      (docs/sparse.md).
    - `backprop`: a `splitjax.PartialBackprop`: each worker differentiates the last layers only, to a depth of its own.
      It changes the numbers (docs/partial_backpropagation.md).
    - `verify`: `"first"` compares the step with one device, at small sizes, before the first call of each signature
      (`ParallelStep.verify`), and raises `VerificationError` where its numbers differ. It takes some seconds.
    - `memory_budget`: what a device may need, `"16GiB"` or bytes, beside an option that is `"auto"`: `rules`, `mesh`,
      `shard_state`, `remat` or `microbatches`. A layout is chosen only if the upper bound of the memory of its plan is
      within, and a `BudgetError` says so where none is, with what would change that.
    - `target`: the machine that the step is for, such as `"tpu:v5e:4x4"`, where it is not the one that JAX sees: rules
      and mesh are chosen by its published figures, the memory that plans tell is that of its compiler, and the step is
      planned and lowered for its devices, and does not run without them (docs/planning.md). A file that `splitjax
      calibrate` wrote, or a `Calibration`, stands for the machine that was measured: rules and mesh are chosen by it.
    - `compile_best`: how many layouts at most are compiled ahead of time, by the compiler of the machine that `target`
      names, before one is chosen; 0 for none. The one that is predicted to be fastest comes first, and the next one
      only where its compiler says that it does not fit, or that it sends so much more than planned that the next one
      may be faster (docs/choosing.md).

    **Returns** a `ParallelStep`, called like the step itself.

    Raises typed errors (`splitjax.errors`) that name value, place and remedy; see docs/troubleshooting.md.
    """
    given = complete("parallelize", options)
    if fn is None:
        return functools.partial(parallelize, **options)
    from splitjax.compile.recipes import make_recipe  # what it takes to run a step is loaded when one is decorated
    from splitjax.parallel_step import ParallelStep

    return ParallelStep(make_recipe(fn, given), given["mesh"], decorate=functools.partial(parallelize, **options))


show_signature(parallelize)


def __getattr__(name: str) -> Any:
    if name == "ParallelStep":
        from splitjax.parallel_step import ParallelStep

        return ParallelStep
    raise AttributeError(f"module 'splitjax.parallelize' has no attribute {name!r}")
