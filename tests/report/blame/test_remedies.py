"""What removes involuntary full rematerialisations: every change that is offered is compiled, and does what it says."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import splitjax
from splitjax.errors import TargetError, UnavailableError
from splitjax.rules import load_rules
from splitjax.rules.ruleset import parse_rules
from splitjax.step.options import OptionError
from tests.report.blame.moves import AXES, WARNING, uncached

P = PartitionSpec
SHAPES = {"up": jax.ShapeDtypeStruct((16, 64), jnp.float32), "down": jax.ShapeDtypeStruct((64, 16), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((64, 16), jnp.float32)


def step_with(*specs, rules="fsdp", **options):
    """A training step that constrains its hidden activations to one spec after the other."""
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)

    def step(params, batch):
        def loss(params):
            hidden = jnp.cos(batch @ params["up"])
            for spec in specs[:-1]:
                hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, spec))
            for spec in specs[-1:]:
                hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, spec))
            return jnp.mean((jnp.sin(hidden) @ params["down"]) ** 2)

        value, gradients = splitjax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return splitjax.parallelize(step, mesh=mesh, rules=rules, **options)


def warnings_of(step, capfd):
    """How often XLA warns of a step when it is compiled."""
    capfd.readouterr()
    with uncached():
        step.lower(SHAPES, BATCH).compile()
    return capfd.readouterr().err.count(WARNING)


def change(remedies, part):
    (found,) = [each for each in remedies.changes if part in each.name]
    return found


def test_layouts_and_lines_are_compared_as_compiled(capfd):
    step = step_with(P(None, "model"))
    remedies = step.remedies(SHAPES, BATCH)
    assert {each.layer for each in remedies.gathered} == {"up", "down"}
    assert warnings_of(step_with(P(None, "model")), capfd) == remedies.planned.num_rematerialised == 2
    seconds = [each.cost.seconds for each in remedies.changes if each.cost is not None]
    assert len(seconds) >= 4 and seconds == sorted(seconds)

    layout = change(remedies, "up: out split over model")
    fsdp = load_rules("fsdp")
    rules = dataclasses.replace(fsdp, rules=(*parse_rules(layout.code, "file").rules, *fsdp.rules))
    other = step_with(P(None, "model"), rules=rules)
    assert warnings_of(other, capfd) == layout.cost.num_rematerialised == 1 and len(layout.removes) == 1
    assert other.report(SHAPES, BATCH).total.compiled_bytes == layout.cost.sent_bytes < remedies.planned.sent_bytes

    (without,) = [each for each in remedies.changes if each.name.startswith("no sharding constraint")]
    assert without.removes == (0, 1) and without.cost.num_rematerialised == 0
    assert step_with().report(SHAPES, BATCH).total.compiled_bytes == without.cost.sent_bytes
    assert remedies.cheapest(0) is layout and remedies.cheapest(1) is without


def test_a_stop_removes_what_a_line_gathers(capfd):
    remedies = step_with(P(("data", "model"), None), P(None, "model"), rules="data_parallel").remedies(SHAPES, BATCH)
    stop = change(remedies, "stop at P('data', 'model')")
    written = step_with(P(("data", "model"), None), P("data", "model"), P(None, "model"), rules="data_parallel")
    assert len(stop.removes) == len(remedies.gathered)
    assert warnings_of(written, capfd) == stop.cost.num_rematerialised < remedies.planned.num_rematerialised
    assert written.report(SHAPES, BATCH).total.compiled_bytes == stop.cost.sent_bytes < remedies.planned.sent_bytes
    line = re.search(r"test_remedies.py:\d+", stop.name)[0]
    assert line in stop.code and "with_sharding_constraint(x, P('data', 'model'))" in stop.code


def test_it_prints_what_to_write():
    shown = str(step_with(P(None, "model")).remedies(SHAPES, BATCH))
    assert (
        "[[rule]]" in shown and "as it is" in shown and "array 2: no sharding constraint at test_remedies.py" in shown
    )


def test_most_limits_what_is_compiled():
    remedies = step_with(P(None, "model")).remedies(SHAPES, BATCH, most=1)
    assert len(remedies.changes) <= len(remedies.gathered) == 2


def test_nothing_is_compiled_where_nothing_is_gathered():
    remedies = step_with().remedies(SHAPES, BATCH)
    assert not remedies.gathered and not remedies.changes and "no array is gathered whole" in str(remedies)


def test_a_pinned_plan_keeps_its_layouts():
    pinned = step_with(P(None, "model"), plan=step_with(P(None, "model")).plan(SHAPES, BATCH))
    remedies = pinned.remedies(SHAPES, BATCH)
    assert any("pinned" in each.refused and each.cost is None for each in remedies.changes)
    assert any(each.removes == (0, 1) for each in remedies.changes)


def test_what_cannot_be_asked():
    step = step_with(P(None, "model"))
    with pytest.raises(OptionError, match="most"):
        step.remedies(SHAPES, BATCH, most=0)
    with pytest.raises(TargetError):
        step.remedies(SHAPES, BATCH, on="tpu:v9:2x4")
    with pytest.raises(UnavailableError, match="evaluation"):
        step.like(lambda params, batch: jnp.mean(batch @ params["up"])).remedies(SHAPES, BATCH)


def test_a_change_keeps_the_numbers():
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=leaf.shape).astype(np.float32) for name, leaf in SHAPES.items()}
    batch = rng.normal(size=BATCH.shape).astype(np.float32)
    losses = []
    for specs in ((P(None, "model"),), (P("data", "model"), P(None, "model")), ()):
        step = step_with(*specs)
        losses.append(float(step(step.place(params, example=(batch,)), batch)[1]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
