"""What a run that met a fault has to be: the undisturbed run bit for bit, with nothing lost that was saved."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from benchmarks.faults.run import Recipe
from splitjax.runtime.checkpoint import folder as folders
from splitjax.runtime.checkpoint import integrity
from splitjax.runtime.checkpoint.description import Description

# What differs between any two runs.
TIMES = (
    "seconds",
    "examples_per_second",
    "step_seconds_p50",
    "step_seconds_p99",
    "slowest_rank",
    "slowest_own_seconds",
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault and what became of the run.

    - `kind`, `moment`: what was done, and when.
    - `last_step`: the last one in the metrics when it struck; None where it struck a run that stood still.
    - `saving_step`: of the save that was in progress then, if one was.
    - `resumed_step`: the checkpoint that the run went on from; None if it went on without.
    - `end_seconds`: from the fault until it was answered: the attempt was over, or the fault reported. `limit_seconds`:
      stated for it.
    - `again_seconds`: from the fault to the first step after it.
    - `problems`: everything that is not as required; empty for a fault that was survived.
    - `key`: names it in its part.
    - `count`: how often it was injected, where one line stands for many moments.
    """

    kind: str
    moment: str
    interval: int
    last_step: int | None = None
    saving_step: int | None = None
    resumed_step: int | None = None
    end_seconds: float | None = None
    limit_seconds: float | None = None
    again_seconds: float | None = None
    note: str = ""
    problems: tuple[str, ...] = ()
    count: int = 1
    key: str = ""

    @property
    def lost_steps(self) -> int | None:
        """Steps whose work was lost."""
        if self.last_step is None or self.resumed_step is None:
            return None
        return max(0, self.last_step - self.resumed_step)

    @property
    def steps_of_save(self) -> int:
        """How many of them were done while a save was being written."""
        if self.saving_step is None or self.last_step is None or (self.resumed_step or 0) >= self.saving_step:
            return 0
        return max(0, self.last_step - self.saving_step)

    @property
    def survived(self) -> bool:
        return not self.problems


def own_problems(fault: Fault) -> list[str]:
    """What the figures of a fault themselves break: the time until its end, one interval between checkpoints."""
    found = []
    if fault.end_seconds is not None and fault.limit_seconds is not None and fault.end_seconds > fault.limit_seconds:
        found.append(f"answered after {fault.end_seconds:.1f} s, stated are {fault.limit_seconds:g} s")
    if fault.lost_steps is not None and fault.lost_steps - fault.steps_of_save > fault.interval:
        found.append(
            f"{fault.lost_steps} steps lost, {fault.steps_of_save} of them in a save; the interval is {fault.interval}"
        )
    return found


def with_problems(fault: Fault, problems: Sequence[str]) -> Fault:
    return dataclasses.replace(fault, problems=(*fault.problems, *own_problems(fault), *problems))


def curve(metrics: pathlib.Path) -> list[dict[str, Any]]:
    """Every line of the metrics, without times. Raises `ValueError` for a line that is none."""
    lines = metrics.read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]


def arrays(checkpoint: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its path, keys as their bits; whoever saved it, in whatever layout."""
    handler, folder = ocp.PyTreeCheckpointHandler(), epath.Path(checkpoint / folders.STATE)
    wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(folder).tree)
    found = handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=wanted))
    leaves = jax.tree_util.tree_flatten_with_path(found)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def compare(recipe: Recipe, undisturbed: Recipe) -> list[str]:
    """How a finished run differs from the undisturbed one: lines of the metrics, arrays and data position of the last
    checkpoint."""
    try:
        ours, theirs = curve(recipe.metrics), curve(undisturbed.metrics)
    except (OSError, ValueError) as error:
        return [f"the metrics cannot be read: {error}"]
    problems = []
    steps = [row["step"] for row in ours]
    if steps != list(range(1, recipe.num_steps + 1)):
        problems.append(f"the metrics have {len(steps)} lines, not one for each of {recipe.num_steps} steps")
    elif ours != theirs:
        step = next(a["step"] for a, b in zip(ours, theirs) if a != b)
        problems.append(f"the metrics differ from step {step} on")
    paths = [one.checkpoints / str(recipe.num_steps) for one in (recipe, undisturbed)]
    if damage := integrity.find_damage(paths[0]) if paths[0].is_dir() else "missing":
        return [*problems, f"the last checkpoint: {damage}"]
    problems += differences(*map(arrays, paths))
    positions = [Description.read(path / folders.DESCRIPTION).extra["position"] for path in paths]
    if positions[0] != positions[1]:
        problems.append(f"the data position is {positions[0]}, not {positions[1]}")
    return problems


def differences(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> list[str]:
    """Arrays that are not the same bit for bit."""
    if ours.keys() != theirs.keys():
        return [f"the states have other arrays: {sorted(ours.keys() ^ theirs.keys())}"]
    changed = [path for path in ours if _bits(ours[path]) != _bits(theirs[path])]
    return [f"{len(changed)} of {len(ours)} arrays differ, the first {changed[0]}"] if changed else []


def _bits(array: np.ndarray) -> tuple[Any, ...]:
    return array.shape, array.dtype.str, array.tobytes()


def lost(recipe: Recipe, before: Collection[int]) -> list[str]:
    """Which of the checkpoints that were complete before are not there any more, or not good."""
    found = []
    for step in sorted(before):
        path = recipe.checkpoints / str(step)
        damage = integrity.find_damage(path) if path.is_dir() else "missing"
        if damage is not None:
            found.append(f"the checkpoint of step {step} was complete and is lost: {damage}")
    return found
