"""Verifies a step (`step.verify`): under its plan against the same step on one device, at small sizes or those given.

A planned step goes in; both programs are built at sizes that one device holds, run on the same values in float64 and
compared, and where values differ the operation is looked for. A `Verification` comes out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax import _compat
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.errors import SplitjaxError, VerificationError
from splitjax.plan import Plan
from splitjax.planning.tables.sync_request import DENSE
from splitjax.primitives.walk import walk
from splitjax.step.boundary import is_boundary
from splitjax.step.options import OptionError
from splitjax.step.per_microbatch import is_per_microbatch
from splitjax.verify.comparing import TOLERANCE, compare, compared_value, differences_of, is_wrong
from splitjax.verify.dim_classes import Misfit, analyse
from splitjax.verify.locating import locate
from splitjax.verify.naming import class_names, tap_name
from splitjax.verify.programs import Pair, Variant, make_pair
from splitjax.verify.result import DimSize, Finding, Verification, VerifiedRun
from splitjax.verify.sizes import SizeChoice, choose_sizes, smallest
from splitjax.verify.taps import ResultTaps, Tap, Taps
from splitjax.verify.values import draw_values, nudged, whole_number_bound

SIZES: tuple[str, ...] = ("shrunken", "given", "both")
# How often sizes are chosen anew because the step as a whole does not take them.
_ATTEMPTS = 40
# What JAX and the functions that a step brings along (derivative rules) raise for sizes that they do not take.
_REFUSALS = (TypeError, ValueError, NotImplementedError, IndexError)
# How often numbers are drawn anew because the step jumps at them (ties of a maximum, say).
_DRAWS = 3
# A step that cannot be shrunk is verified as it is up to this size.
_MOST_BYTES = 1 << 30
_TAKEN_APART = (
    "verified without microbatches: what splitjax.per_microbatch marks has other numbers over the whole batch by design"
)


def verify_step(
    recipe: Recipe, mesh: jax.sharding.Mesh, entry: CompiledEntry, sizes: str = "shrunken", own_precision: bool = False
) -> Verification:
    """Compares every value of a step: see `ParallelStep.verify`.

    **Arguments:**

    - `recipe`: the step and its options.
    - `mesh`: the devices of the plan.
    - `entry`: the step's plan for these arguments, which may be `ShapeDtypeStruct`s.
    - `sizes`: `"shrunken"`, `"given"` or `"both"`.
    - `own_precision`: also compare in the precision of the step, which shows how much of a difference is rounding.

    Raises `OptionError` for sizes that are none of `SIZES`."""
    if sizes not in SIZES:
        raise OptionError(
            "verify has no such sizes",
            value=sizes,
            place=f"{recipe.name}.verify, sizes",
            remedy=f"use one of {', '.join(SIZES)}",
        )
    recipe, notes = _verifiable(recipe, entry)
    runs = []
    for chosen in ("shrunken", "given") if sizes == "both" else (sizes,):
        runs.append(_Run(recipe, mesh, entry, chosen, own_precision, list(notes)).verified())
    return Verification(recipe.name, str(entry.plan.mesh), entry.plan.rules, tuple(runs))


def _verifiable(recipe: Recipe, entry: CompiledEntry) -> tuple[Recipe, list[str]]:
    """Returns the recipe without the options that change numbers by design, and what is said about them."""
    notes: list[str] = []
    if recipe.backprop is not None:
        notes.append("partial backpropagation changes the numbers by design: the step is verified without it")
        recipe = dataclasses.replace(recipe, backprop=None)
    if entry.sparse is not None and (entry.sparse.rounded or any(sync.lazy for sync in entry.plan.syncs)):
        notes.append(
            "sync rounds values or leaves rows alone, which changes the numbers by design: tables are verified with "
            "sync='dense'"
        )
        recipe = dataclasses.replace(recipe, sync=DENSE, rules=dataclasses.replace(recipe.rules, sync="dense"))
    return recipe, notes


@dataclasses.dataclass(eq=False)
class _Run:
    """Makes a comparison at sizes of a kind: `verified()` plans, runs and compares."""

    recipe: Recipe
    mesh: jax.sharding.Mesh
    entry: CompiledEntry
    sizes: str
    own_precision: bool
    notes: list[str]
    seed: int = 0

    def verified(self) -> VerifiedRun:
        """Runs both programs and compares them. Raises `VerificationError` for a step that one device cannot run."""
        started = time.perf_counter()
        self.is_wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]  # added late
        self.analysis = analyse(self.entry.jaxpr, self.entry.matched)
        placed = next((op for op in self.analysis.flat.ops if op.primitive == "shard_map"), None)
        if placed is not None:
            raise VerificationError(
                "the step holds a shard_map of its own, which one device cannot run",
                place=placed.source,
                remedy="verify the step with the function that the shard_map stands for",
            )
        choice, variant, pair, values, references = self._compared()
        differences = differences_of(values, references)
        jumps = [0.0] * len(differences)
        while any(map(is_wrong, differences)):
            jumps = self._jumps(variant, pair, references)
            if self.sizes == "given" or self.seed == _DRAWS or not any(jump > TOLERANCE for jump in jumps):
                break
            self.seed += 1  # numbers at which the step jumps tell nothing: others may
            _, values, references = self._run(variant, lambda: ResultTaps(gradients_only=True), pair)
            differences = differences_of(values, references)
        own = self._own_differences(choice) if self.own_precision else [None] * len(differences)
        compared = tuple(
            compared_value(kind, name, value, difference, jump, mine)
            for (kind, name), value, difference, jump, mine in zip(
                self._names(pair), references, differences, jumps, own, strict=True
            )
        )
        findings = ()
        if not all(value.ok for value in compared):
            findings = self._located(variant)
        others = _other_constraints(self.entry.plan, pair.entry.plan)
        if others:
            self.notes.append(
                f"{others} of the plan's {len(self.entry.plan.constraints)} constraints are others at these sizes"
            )
        if any(not value.comparable for value in differences):
            self.notes.append("some values are not finite on one device either: they are not compared")
        if any("jumps by" in value.note for value in compared):
            self.notes.append("some values jump where the step is looked at, on one device, too: they are not compared")
        return VerifiedRun(
            self.sizes,
            self._dims(choice),
            compared,
            findings,
            time.perf_counter() - started,
            tuple(dict.fromkeys(self.notes)),
        )

    def _compared(self) -> tuple[SizeChoice | None, Variant, Pair, list[Any], list[Any]]:
        """Builds and runs both programs at the smallest sizes that the step takes."""
        if self.sizes == "given":
            return None, *self._pair_and_values(None)
        frozen: dict[int, str] = {}
        finite_tried = False
        for _ in range(_ATTEMPTS):
            choice = choose_sizes(self.analysis, self._num_constants, self.mesh.size, self._examples(), frozen)
            try:
                variant, pair, values, references = self._pair_and_values(choice)
            except Misfit as misfit:
                more = self._inside(misfit.site, choice)
                if not more:
                    break
                frozen |= dict.fromkeys(more, str(misfit))
                continue
            except (SplitjaxError, *_REFUSALS) as error:
                why = str(error).splitlines()[0]
                self.notes.append(f"widths stay as given, for the small step cannot be built: {why}")
                break
            rows = self._lookup_rows(choice)
            if finite_tried or not rows or all(_is_finite(value) for value in references):
                return choice, variant, pair, values, references
            finite_tried = True  # ids that the step makes itself may lie outside of the smaller tables
            frozen |= dict.fromkeys(rows, "rows are looked up by numbers that the step makes itself")
        examples = self._examples()
        everything = {
            label: "the step does not take other widths" for label in self.analysis.sizes if label not in examples
        }
        choice = choose_sizes(self.analysis, self._num_constants, self.mesh.size, examples, everything)
        try:
            return choice, *self._pair_and_values(choice)
        except (Misfit, SplitjaxError, *_REFUSALS) as error:
            num_bytes = 2 * (
                sum(leaf.num_bytes for leaf in self.entry.graph.leaves) + self.entry.graph.activation_bytes
            )
            if num_bytes > _MOST_BYTES:
                raise VerificationError(
                    f"the step cannot be shrunk ({error}), and one device would need some {num_bytes >> 20} MiB "
                    "at the given sizes",
                    place=f"{self.recipe.name}.verify",
                    remedy='call verify(..., sizes="given") if a device holds that much',
                ) from error
            self.notes.append(f"the sizes are those given, for the step does not take others: {error}")
            return None, *self._pair_and_values(None)

    def _pair_and_values(self, choice: SizeChoice | None) -> tuple[Variant, Pair, list[Any], list[Any]]:
        variant = self._variant(choice, float64=True)
        pair, values, references = self._run(variant, lambda: ResultTaps(gradients_only=True))
        return variant, pair, values, references

    def _variant(self, choice: SizeChoice | None, float64: bool) -> Variant:
        """Describes the step to compare at the sizes of `choice`: without microbatches where some of the loss is taken
        per microbatch, as that has other numbers than the whole batch on one device."""
        is_taken_apart = any(is_per_microbatch(visit.eqn) for visit in walk(self.entry.jaxpr))
        if is_taken_apart and max(_microbatches(self.entry.jaxpr), default=1) > 1 and _TAKEN_APART not in self.notes:
            self.notes.append(_TAKEN_APART)
        return Variant(self.entry, choice, float64, not is_taken_apart, self.is_wide)

    def _jumps(self, variant: Variant, pair: Pair, references: list[Any]) -> list[float]:
        """Measures by how much every value changes on one device, relative to its largest entry, when the inputs do in
        their last digits."""
        with jax.enable_x64(True):
            again = pair.reference(nudged(self._leaves(variant)))
        return [difference.relative for difference in differences_of(again, references)]

    def _run(
        self, variant: Variant, make_taps: Callable[[], Taps], pair: Pair | None = None
    ) -> tuple[Pair, list[Any], list[Any]]:
        with jax.enable_x64(variant.float64 or self.is_wide):
            pair = pair or make_pair(variant, self.recipe, self.mesh, make_taps)
            leaves = self._leaves(variant)
            return pair, pair.subject(leaves), pair.reference(leaves)

    def _leaves(self, variant: Variant) -> list[Any]:
        new = {} if variant.choice is None else variant.choice.new
        bound = whole_number_bound(self.analysis, new)
        given = self.entry.bound.leaves
        if self.mesh.is_multi_process:  # all processes draw alike
            given = [jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) for leaf in given]
        return draw_values(
            given, variant.types, self.entry.plan.leaves, bound, own_values=variant.choice is None, seed=self.seed
        )

    def _own_differences(self, choice: SizeChoice | None) -> list[float]:
        variant = self._variant(choice, float64=False)
        _, values, references = self._run(variant, lambda: ResultTaps(gradients_only=True))
        return [compare(a, b).relative for a, b in zip(values, references, strict=True)]

    def _located(self, variant: Variant) -> tuple[Finding, ...]:
        """Returns the operation where values begin to differ. Where its loop over microbatches does not take the taps,
        it is looked for without.
        """
        variants = [variant]
        if variant.microbatches and max(_microbatches(self.entry.jaxpr), default=1) > 1:
            variants.append(dataclasses.replace(variant, microbatches=False))
        for tried in variants:
            try:
                with jax.enable_x64(True):  # values are looked at iteration by iteration
                    finding = locate(
                        self.entry, functools.partial(self._run_tapped, tried), functools.partial(_record, tried)
                    )
            except SplitjaxError as error:  # what is tapped cannot be cut into microbatches or turns, say
                self.notes.append(f"the operation could not be looked for: {error.message}")
                continue
            if finding is not None:
                if tried is not variant:
                    self.notes.append("the operation was looked for without microbatches")
                return (finding,)
            self.notes.append(
                "no operation differs once all of them are looked at: XLA partitions the step otherwise then"
            )
        return ()

    def _run_tapped(self, variant: Variant, make_taps: Callable[[], Taps]) -> tuple[list[Tap], list[Any], list[Any]]:
        pair, values, references = self._run(variant, make_taps)
        count = len(pair.taps)
        return list(pair.taps), values[len(values) - count :], references[len(references) - count :]

    @property
    def _num_constants(self) -> int:
        return len(_compat.open_jaxpr(self.entry.jaxpr)[0].constvars)

    def _examples(self) -> dict[int, int]:
        """Returns the class of the example dim, with the smallest number of examples that every way to divide them
        divides.
        """
        unit = 2 * self.mesh.size * math.lcm(*_microbatches(self.entry.jaxpr), 1)
        if self.entry.plan.group_comm != "gather":  # turns divide each worker's examples once more
            unit *= self.mesh.size
        new_sizes: dict[int, int] = {}
        for value, argument in zip(self.analysis.flat.inputs, self.entry.bound.arguments, strict=True):
            if argument.is_batch and self.analysis.flat.shapes[value]:
                classes = self.analysis.dims[value][0]
                sizes = [self.analysis.sizes[label] for label in classes]
                new = [sizes[0] if len(sizes) > 1 else smallest(sizes[0], unit), *sizes[1:]] if sizes else []
                new_sizes |= dict(zip(classes, new, strict=True))
        return new_sizes

    def _inside(self, site: tuple[int, ...], choice: SizeChoice) -> list[int]:
        """Returns the changed classes of the operations at a site, or inside of the call that stands there."""
        flat, dims = self.analysis.flat, self.analysis.dims
        near = [op for op in flat.ops if op.site[: len(site)] == site or site[: len(op.site)] == op.site]
        labels = {label for op in near for value in (*op.inputs, *op.outputs) for dim in dims[value] for label in dim}
        return [label for label in labels if label in choice.new and label not in self._examples()]

    def _lookup_rows(self, choice: SizeChoice) -> list[int]:
        flat, dims = self.analysis.flat, self.analysis.dims
        return list(dict.fromkeys(
            label for op in flat.ops if op.primitive == "gather" for dim in dims[op.inputs[0]] for label in dim
            if label in choice.new and label not in self._examples()
        ))  # fmt: skip

    def _names(self, pair: Pair) -> list[tuple[str, str]]:
        """Returns kind and name of every compared value, in order."""
        paths, _ = jax.tree_util.tree_flatten_with_path(self.entry.result)
        state = {result: self.entry.plan.leaves[leaf].path for leaf, result in self.entry.matched.items()}
        names = [
            ("state", state[number])
            if number in state
            else ("result", jax.tree_util.keystr(path, simple=True, separator="/") or "result")
            for number, (path, _) in enumerate(paths)
        ]
        return [*names, *(tap_name(tap, self.entry) for tap in pair.taps)]

    def _dims(self, choice: SizeChoice | None) -> tuple[DimSize, ...]:
        if choice is None:
            return ()
        names = class_names(self.analysis, self.entry)
        kept = {it.label: it.why for it in choice.kept}
        order = [label for label in names if label in choice.new or label in kept]
        sizes = (
            DimSize(
                names[label],
                self.analysis.sizes[label],
                choice.new.get(label, self.analysis.sizes[label]),
                kept.get(label, ""),
            )
            for label in order
        )
        return tuple(dict.fromkeys(sizes))  # one line can have several dims of a kind


def _record(variant: Variant, taps: Taps) -> None:
    """Evaluates a step abstractly, for taps that take note."""
    jax.eval_shape(lambda leaves: variant.evaluate(leaves, taps), list(variant.types))


def _other_constraints(plan: Plan, small: Plan) -> int:
    """Counts a plan's constraints that the plan of the smaller step does not have. Sites differ between the two."""
    key = lambda constraint: (constraint.layer, constraint.operand, constraint.spec, constraint.why)
    return sum(
        (collections.Counter(map(key, plan.constraints)) - collections.Counter(map(key, small.constraints))).values()
    )


def _microbatches(jaxpr: Any) -> Sequence[int]:
    """Returns the numbers of microbatches that the step's boundaries ask for."""
    asked = [visit.eqn.params["microbatches"] for visit in walk(jaxpr) if is_boundary(visit.eqn)]
    return [number for number in asked if number]


def _is_finite(array: Any) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(np.all(np.isfinite(np.asarray(array))))
