"""Locks of plans: what they hold is compared with later plans, of the same release of JAX and of others."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
from splitjax import models
from splitjax.errors import PlanError
from splitjax.planning.plan_lock import LockedArray, LockedTable, PlanLock

LOCKS = pathlib.Path(__file__).parent / "locks"
CASES = {
    "mlp-splitbrain": ("mlp", "splitbrain", {"data": 2, "model": 4}, {}),
    "vgg11-splitbrain": ("vgg11", "splitbrain", {"data": 2, "model": 4}, {}),
    "transformer-megatron": ("transformer", "megatron", {"data": 2, "model": 4}, {"shard_state": True}),
    "transformer-fsdp": ("transformer", "fsdp", {"data": 8}, {}),
    "deepfm-embedding_owner": ("deepfm", "embedding_owner", {"data": 8}, {}),
}


def lock_of(name: str) -> PlanLock:
    model, rules, mesh, options = CASES[name]
    spec = models.build(model)
    init, step, _ = models.make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, **options)
    return PlanLock.of(parallel.plan(jax.eval_shape(init, jax.random.key(0)), spec.example(64)))


def small(rules="splitbrain", **options) -> PlanLock:
    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch["x"] @ w["a"]) @ w["b"]))(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules=rules, **options)
    return PlanLock.of(parallel.plan({"a": f32(16, 32), "b": f32(32, 8)}, {"x": f32(64, 16)}))


def test_a_lock_outlives_releases_of_jax():
    """The locks were written with JAX 0.10 and with JAX 0.12; whichever runs the test compares with both."""
    for name in CASES:
        now = lock_of(name)
        for release in ("0.10", "0.12"):
            stored = PlanLock.load(LOCKS / f"{name}-jax-{release}.lock")
            assert f"jax {release}" in stored.made_with
            assert (name, stored.changed_decisions(now)) == (name, ())


def test_it_is_read_back_as_it_was(tmp_path):
    lock = small()
    lock.save(tmp_path / "plan.lock")
    assert PlanLock.load(tmp_path / "plan.lock") == lock == PlanLock.from_json(lock.to_json())
    assert lock.changed_decisions(lock) == lock.changed_figures(lock) == ()


def test_other_decisions_are_told_with_both_sides():
    before, after = small(), small("megatron", shard_state=True)
    changes = before.changed_decisions(after)
    assert "rules: splitbrain -> megatron" in changes
    assert any(change.startswith("array b: ") and "->" in change for change in changes)
    assert any(change.startswith("array a: gradient") for change in changes)
    assert any(change.startswith("collective_bytes: ") and "%)" in change for change in before.changed_figures(after))


def test_arrays_that_came_and_went():
    lock = small()
    first, *rest = lock.arrays
    fewer = dataclasses.replace(lock, arrays=tuple(rest))
    assert lock.changed_decisions(fewer) == (f"array {first.path}: is no longer there",)
    assert fewer.changed_decisions(lock) == (f"array {first.path}: is new",)


def test_depths_and_lazy_updates_are_decisions():
    """They change the numbers: another assignment of the same depths is told."""
    none, spatial, temporal = (
        small(backprop=backprop)
        for backprop in (None, splitjax.PartialBackprop(), splitjax.PartialBackprop(assignment="temporal"))
    )
    assert none.changed_decisions(spatial)[-1] == "partial backpropagation: none -> some"
    assert "partial backpropagation: assignment spatial -> temporal" in spatial.changed_decisions(temporal)
    eager, lazy = (dataclasses.replace(none, tables=(LockedTable("a", "zen", each),)) for each in (False, True))
    assert eager.changed_decisions(lazy) == ("table a: lazy False -> True",)


def test_layouts_are_equal_however_they_are_written():
    lock = small()
    written = [
        dataclasses.replace(a, spec=tuple((x,) if isinstance(x, str) else x for x in a.spec)) for a in lock.arrays
    ]
    assert lock.changed_decisions(dataclasses.replace(lock, arrays=tuple(written))) == ()


def test_figures_that_move_are_no_change_of_a_decision():
    lock = small()
    more = dataclasses.replace(lock, figures=dataclasses.replace(lock.figures, collective_bytes=1, bound_bytes=None))
    assert lock.changed_decisions(more) == () and len(lock.changed_figures(more)) == 2


def test_what_is_no_lock_is_refused(tmp_path):
    lock = small()
    array = LockedArray("a", (1,), "float32", ())
    twice = dataclasses.replace(lock, arrays=(array, array))
    with pytest.raises(PlanError, match="twice") as found:
        PlanLock.from_json(twice.to_json())
    assert found.value.place == "arrays[1]"
    (tmp_path / "plan.lock").write_text("{}")
    with pytest.raises(PlanError, match="format"):
        PlanLock.load(tmp_path / "plan.lock")
