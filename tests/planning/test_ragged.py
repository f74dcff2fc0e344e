"""Experts by ragged products: the plan lists no exchange of tokens that XLA does not make, and says what it gathers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax

EXPERTS, WIDTH, HIDDEN = 4, 16, 32


def loss(params, batch):
    tokens = batch["x"].reshape(-1, WIDTH)
    chosen = jnp.argmax(tokens @ params["gate"], -1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS)
    hidden = jax.nn.silu(jax.lax.ragged_dot(tokens[order], params["up"], sizes))
    out = jnp.zeros_like(tokens).at[order].set(jax.lax.ragged_dot(hidden, params["down"], sizes))
    return jnp.mean((out.reshape(batch["x"].shape) - batch["y"]) ** 2)


def residual(params, batch):
    x = jnp.tanh(batch["x"].reshape(-1, WIDTH) @ params["first"])
    gates = jax.nn.softmax(x @ params["gate"])
    chosen = jnp.argmax(gates, -1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS)
    hidden = jax.nn.silu(jax.lax.ragged_dot(x[order], params["up"], sizes))
    made = jax.lax.ragged_dot(hidden, params["down"], sizes)
    out = x + made[jnp.argsort(order)] * gates.max(-1, keepdims=True)
    return jnp.mean((out.reshape(batch["x"].shape) - batch["y"]) ** 2)


def train_residual(params, batch):
    value, grads = splitjax.value_and_grad(residual)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def train(params, batch):
    value, grads = splitjax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize(
    ("rules", "mesh", "said"),
    [
        ("transformer", {"data": 2, "expert": 4}, "its own rows with the weights of all experts"),
        ("data_parallel", {"data": 8}, "the tokens of all devices along data=8"),
    ],
)
def test_ragged_experts_exchange_no_tokens_and_say_what_is_gathered(rules, mesh, said):
    shapes = {"gate": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    batch = {name: np.ones((16, 4, WIDTH), np.float32) for name in ("x", "y")}
    plan = splitjax.parallelize(train, mesh=mesh, rules=rules).plan(params, batch)
    assert not [one for one in plan.collectives if one.op == "all_to_all"]
    notes = [note for note in plan.notes if "ragged_dot" in note]
    assert [note.split()[0] for note in notes] == ["up", "down"]
    assert all(said in note for note in notes)
    # Only where devices compute their own rows is it known what XLA makes of the sorting.
    assert any(each.purpose.kind.value.startswith("sorted") for each in plan.collectives) == (rules == "transformer")


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("transformer", {"data": 2, "expert": 4}),
        ("transformer", {"data": 2, "fsdp": 2, "expert": 2}),
        ("transformer", {"data": 2, "expert": 2, "tensor": 2}),
        ("fsdp", {"fsdp": 8}),
    ],
    ids=str,
)
def test_each_device_computes_its_own_rows_with_gathered_weights(rules, mesh):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        shapes = {"gate": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
        shapes["first"] = (WIDTH, WIDTH)
        params = {name: rng.normal(size=shape) / 4 for name, shape in shapes.items()}
        batch = {name: rng.normal(size=(16, 4, WIDTH)) for name in ("x", "y")}
        step = splitjax.parallelize(train_residual, mesh=mesh, rules=rules)
        plan, report = step.plan(params, batch), step.report(params, batch)
        sent = {"planned": {}, "compiled": {}}
        for op, within in (("all_gather", "stored"), ("reduce_scatter", "product")):
            sent["planned"][op] = sum(
                each.bytes for each in plan.collectives if each.op == op and each.purpose.leaf in ("up", "down")
            )
            sent["compiled"][op] = sum(
                each.compiled.bytes
                for each in report.collectives
                if each.compiled.op == op
                and any(f"splitjax:{within}:{name}" in each.compiled.op_name for name in ("up", "down"))
            )
        assert sent["planned"] == sent["compiled"] and min(sent["planned"].values()) > 0
        # A weight that is stored over two dims is gathered along one after the other, and so is its gradient summed.
        realised = [each for each in report.collectives if each.planned and each.planned.purpose.leaf in ("up", "down")]
        assert {each.op for each in realised} == {"all_gather", "reduce_scatter"}
        assert [each.differs for each in realised] == [""] * len(realised)
        assert not [each for each in report.missing if each.purpose.leaf in ("up", "down")]
        if "tensor" not in mesh:
            # Of all that is compiled the plan leaves out the numbers by which tokens are sorted, and the loss.
            compiled = sum(each.compiled.bytes for each in report.collectives)
            assert sum(each.bytes for each in plan.collectives) == pytest.approx(compiled, rel=0.01)
            of_tokens = [each for each in plan.collectives if each.purpose.kind.value.startswith("sorted")]
            assert [(each.op, each.purpose.phase) for each in of_tokens] == [
                ("all_gather", "forward"), ("all_reduce", "backward"),
            ] * 2  # fmt: skip
            assert not report.missing
        expected = jax.jit(train_residual)(params, batch)
        for mine, theirs in zip(jax.tree.leaves(step(params, batch)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)
        # No device computes the rows of others.
        assert plan.compute.over_ideal == 1
        assert report.compute.compiled <= 1.01 * EXPERTS * plan.compute.flops


def test_rows_that_are_sorted_of_the_batch_itself_have_no_cotangent():
    """No parameter reaches them. The cotangents of the results that are put back were planned for both."""
    shapes = {"gate": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    batch = {name: np.ones((16, 4, WIDTH), np.float32) for name in ("x", "y")}
    report = splitjax.parallelize(train, mesh={"data": 2, "expert": 4}, rules="transformer").report(params, batch)
    found = [
        (each.op, one.layer, one.purpose.phase)
        for each in report.collectives
        for one in each.realised
        if one.purpose.kind.value.startswith("sorted")
    ]
    assert found == [
        ("all_gather", "up", "forward"),
        ("all_gather", "down", "forward"),
        ("all_reduce", "down", "forward"),
        ("all_gather", "down", "backward"),
    ]
    assert not [one for one in report.missing if one.purpose.kind.value.startswith("sorted")]


@pytest.mark.parametrize("dtype", ["uint32", "uint64", "uint8", "int8"])
def test_group_sizes_may_be_of_any_integer_dtype(dtype):
    """Each of four devices has 60 of 240 rows: more in all than int8 counts, and fewer in each group than that."""

    def of_sizes(dtype):
        def loss(params, batch):
            chosen = batch["expert"]
            order = jnp.argsort(chosen)
            sizes = jnp.bincount(chosen, length=EXPERTS).astype(dtype)
            out = jax.lax.ragged_dot(batch["x"][order], params["up"], sizes)
            return jnp.mean((out[jnp.argsort(order)] - batch["y"]) ** 2)

        def step(params, batch):
            value, grads = splitjax.value_and_grad(loss)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {"up": rng.normal(size=(EXPERTS, WIDTH, HIDDEN))}
        batch = {"x": rng.normal(size=(240, WIDTH)), "y": rng.normal(size=(240, HIDDEN))}
        batch["expert"] = rng.choice(EXPERTS, 240, p=[0.35, 0.15, 0.2, 0.3]).astype(np.int32)
        expected = jax.jit(of_sizes("int32"))(params, batch)
        got = splitjax.parallelize(of_sizes(dtype), mesh={"data": 4}, rules="fsdp")(params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, expected)


@pytest.mark.parametrize(("rules", "told"), [("transformer", True), ("data_parallel", False)])
def test_steps_with_jaxs_own_gradient_are_told_of_the_one_that_divides_the_products(rules, told):
    """Stored weights are gathered inside of a boundary, and rows stay where they are; whole ones leave nothing to
    divide by."""

    def train(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = {"gate": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    batch = {name: np.ones((16, 4, WIDTH), np.float32) for name in ("x", "y")}
    mesh = {"data": 2, "fsdp": 2, "tensor": 2} if rules == "transformer" else {"data": 8}
    plan = splitjax.parallelize(train, mesh=mesh, rules=rules).plan(params, batch)
    notes = [note for note in plan.notes if "ragged_dot" in note]
    assert len(notes) == 2 and all(("splitjax.value_and_grad" in note) == told for note in notes)
    assert all("splitjax.jax_kernels.gmm" in note for note in notes)
