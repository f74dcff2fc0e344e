"""`splitjax verify`: its table, its file, and its exit status."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
from splitjax.cli import _models
from tests.verify.lying import lie, taught

SMALL = "verify --model mlp --mesh data=2,model=4 --batch-size 32"


def test_a_right_model_exits_with_0(run, tmp_path):
    status, out, _ = run(f"{SMALL} --json verify.json --html verify.html --own-precision")
    assert status == 0
    for part in (
        "mlp (linen",
        "the same numbers as on one device",
        "shrunken sizes, float64",
        "own precision",
        "params/dense1/bias",
        "batch/image",
    ):
        assert part in out.replace("\n  ", " ")
    read = json.loads((tmp_path / "verify.json").read_text())
    assert read["ok"] and read["runs"][0]["sizes"] == "shrunken"
    assert "<title>splitjax verify</title>" in (tmp_path / "verify.html").read_text()


def test_a_wrong_model_exits_with_1_and_names_the_operation(run, monkeypatch):
    @splitjax.parallelize(mesh={"data": 8}, rules="data_parallel")
    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda w: (lie(batch @ w) ** 2).mean())(state)
        return optax.apply_updates(state, -0.1 * grads), loss

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    wrong = _models.Planned(step, (shape(32, 8), shape(16, 32)), 256)
    monkeypatch.setattr(_models, "planned_step", lambda *args, **options: wrong)
    with taught():
        status, out, _ = run(SMALL)
    assert status == 1 and out.endswith("OTHER NUMBERS THAN ON ONE DEVICE\n") and "found  the value of lying" in out


@pytest.mark.parametrize("line", ["verify --sizes small", "verify --mesh data:2", f"{SMALL} --json missing/v.json"])
def test_mistakes_exit_with_2(run, line):
    status, _, err = run(line)
    assert status == 2 and err
