"""Axes have roles: every shipped rule set on meshes of three axes, by the names that people use, and by roles that they
say. Numbers are those of one device in float64, and what is predicted is what is compiled."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.errors import MeshError, RuleError, UnavailableError
from splitjax.plan import Plan
from splitjax.roles import MeshRoles, Role, read_roles
from tests.steps import attention_case, conv_case, largest_difference, linen_case, train

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
# By rule set, meshes whose roles it knows.
MESHES = {
    "transformer": (CUBE, {"replica": 2, "data": 2, "model": 2}, {"fsdp": 2, "ep": 2, "tp": 2}),
    "megatron": (CUBE, {"replica": 2, "data": 2, "model": 2}),
    "splitbrain": ({"replica": 2, "data": 2, "model": 2}, {"data": 2, "tensor": 2, "tp": 2}),
    "splitbrain_fsdp": (CUBE, {"replica": 2, "data": 2, "model": 2}),
    "fsdp": (CUBE, {"fsdp": 8}),
    "embedding_owner": (CUBE, {"fsdp": 8}),
    "data_parallel": (CUBE, {"x": 8}),
}


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


class Dense(nn.Module):
    """Three dense layers."""

    @nn.compact
    def __call__(self, x, train=True):
        for width in (64, 64):
            x = nn.relu(nn.Dense(width, param_dtype=jnp.float64)(x))
        return nn.Dense(8, param_dtype=jnp.float64)(x)


class Bag(nn.Module):
    """The mean of looked-up rows, and a dense layer."""

    @nn.compact
    def __call__(self, ids, train=True):
        x = nn.Embed(64, 32, param_dtype=jnp.float64)(ids).mean(axis=1)
        return nn.Dense(16, param_dtype=jnp.float64)(x)


class Experts(nn.Module):
    """An embedding, and four experts of two layers each among which tokens are dealt out by capacity."""

    @nn.compact
    def __call__(self, ids, train=True):
        normal = nn.initializers.normal(0.1)
        x = nn.Embed(64, 32, param_dtype=jnp.float64)(ids)
        gate = jax.nn.softmax(nn.Dense(4, use_bias=False, param_dtype=jnp.float64, name="gate")(x))
        up = self.param("up", normal, (4, 32, 64), jnp.float64)
        down = self.param("down", normal, (4, 64, 32), jnp.float64)
        dealt = jnp.einsum("bte,btd->ebtd", gate, x)
        out = jnp.einsum("ebth,ehd->ebtd", nn.relu(jnp.einsum("ebtd,edh->ebth", dealt, up)), down)
        return nn.Dense(16, param_dtype=jnp.float64, name="head")(x + out.sum(0))


def case_of(name):
    rng, adam = np.random.default_rng(3), optax.adam(1e-2)
    if name == "transformer":
        return attention_case(adam, steps=2)
    if name == "cnn":
        return conv_case(adam, steps=2, dtype=np.float64, batch_norm=False)
    shape = (16, 12) if name == "experts" else (16,)
    labels = [rng.integers(0, 8, shape) for _ in range(2)]
    if name == "mlp":
        return linen_case(Dense(), [rng.normal(size=(16, 32)) for _ in range(2)], labels, adam)
    ids = [rng.integers(0, 64, (16, 12)) for _ in range(2)]
    return linen_case(Bag() if name == "embedding" else Experts(), ids, labels, adam)


WANTED = {}


def one_device(name):
    """The case, with the state and the losses of one device."""
    if name not in WANTED:
        case = case_of(name)
        WANTED[name] = case, *train(jax.jit(case.step), case.init(jax.random.key(0)), case.batches)
    return WANTED[name]


def cells():
    models = {"embedding_owner": ("embedding",), "splitbrain_fsdp": ("cnn",)}
    slow = pytest.mark.slow
    for rules, meshes in MESHES.items():
        for number, mesh in enumerate(meshes):
            for model in models.get(rules, ("transformer", "mlp", "cnn", "embedding")):
                if "ep" in mesh:
                    continue
                first = number == 0 and (model == "transformer" or rules in ("transformer", *models))
                name = f"{rules}-{'x'.join(mesh)}-{model}"
                # A rule set with the transformer on every version of JAX, and further models on one.
                further = () if model == "transformer" or rules in models else pytest.mark.one_version
                yield pytest.param(rules, mesh, model, id=name, marks=further if first else slow)
    yield pytest.param("transformer", MESHES["transformer"][2], "experts", id="transformer-experts")
    # Nothing but experts' own axis to store the rest over.
    yield pytest.param("transformer", {"ep": 4, "tp": 2}, "experts", id="transformer-experts-alone")
    yield pytest.param("transformer", {"ep": 4, "tp": 2}, "mlp", id="transformer-mlp-over-expert", marks=slow)


@pytest.mark.parametrize(("rules", "mesh", "model"), list(cells()))
def test_numbers_are_those_of_one_device(rules, mesh, model):
    case, state, losses = one_device(model)
    step = splitjax.parallelize(case.step, mesh=mesh, rules=rules, donate=False)
    found, own = train(step, case.init(jax.random.key(0)), case.batches)
    assert np.max(np.abs(np.subtract(own, losses))) < 1e-10
    assert largest_difference(found, state) < 1e-10


def plan_of(rules, mesh, model="transformer", roles=None):
    case = case_of(model)
    step = splitjax.parallelize(case.step, mesh=mesh, rules=rules, roles=roles)
    return step.plan(jax.eval_shape(case.init, jax.random.key(0)), case.batches[0])


def test_transformer_lays_out_weights_as_large_models_do():
    plan = plan_of("transformer", CUBE)
    block = "params/MultiHeadDotProductAttention_0"
    assert plan.batch_axes == ("data", "fsdp") and plan.leaf("batch/x").spec[0] == plan.batch_axes
    assert "examples lie over data x fsdp" in " ".join(str(plan).split())
    assert plan.leaf("params/Embed_0/embedding").spec == ("tensor", ("data", "fsdp"))
    assert plan.leaf(f"{block}/query/kernel").spec == (("data", "fsdp"), "tensor", None)
    assert plan.leaf(f"{block}/out/kernel").spec == ("tensor", None, ("data", "fsdp"))
    assert plan.leaf("params/Dense_0/kernel").spec == (("data", "fsdp"), "tensor")
    assert plan.leaf("params/Dense_1/kernel").spec == ("tensor", ("data", "fsdp"))
    assert plan.leaf("params/Dense_0/bias").spec == ("tensor",) and not any(plan.leaf("params/Dense_1/bias").spec)
    experts = plan_of("transformer", {"fsdp": 2, "ep": 2, "tp": 2}, "experts")
    assert experts.batch_axes == ("fsdp", "ep")
    assert experts.leaf("params/up").spec == ("ep", "fsdp", "tp")
    assert experts.leaf("params/down").spec == ("ep", "tp", "fsdp")
    assert experts.leaf("params/head/kernel").spec == (("fsdp", "ep"), "tp")


def test_what_is_no_expert_is_stored_over_the_experts_axis_and_computed_on_all_devices():
    plan = plan_of("transformer", {"ep": 4, "tp": 2}, "mlp")
    assert plan.batch_axes == ("ep",) and plan.leaf("batch/x").spec[0] == "ep"
    assert plan.leaf("params/Dense_0/kernel").spec == ("ep", "tp")
    gathered = [one for one in plan.collectives if one.op == "all_gather" and one.axis == "ep"]
    assert {one.layer for one in gathered} == {f"params/Dense_{number}" for number in range(3)}
    assert not [one for one in plan.collectives if one.op == "all_to_all"]
    assert all("gather the weight" in one.why for one in plan.constraints)


@pytest.mark.parametrize(
    ("rules", "model"), [("transformer", "mlp"), ("transformer", "embedding"), ("fsdp", "mlp"), ("megatron", "mlp")]
)
def test_what_is_predicted_is_compiled(rules, model):
    case = case_of(model)
    step = splitjax.parallelize(case.step, mesh=CUBE, rules=rules)
    report = step.report(jax.eval_shape(case.init, jax.random.key(0)), case.batches[0])
    unplanned = sum(collective.bytes for collective in report.unplanned)
    assert not report.missing
    assert report.total.compiled_bytes - unplanned == report.total.predicted_bytes
    assert max((collective.bytes for collective in report.unplanned), default=0) <= 16 * 8  # scalars of examples


def test_what_is_said_goes_before_the_name():
    assert MeshRoles.of(("data", "x"), {"x": Role.TENSOR}).by_axis == (("data", Role.DATA), ("x", Role.TENSOR))
    assert MeshRoles.of(("model",), {"model": Role.STORAGE}).having(Role.STORAGE) == ("model",)
    roles = MeshRoles.of(("replica", "data", "tp", "x"), {})
    assert roles.resolve(("data", "tensor", "x", "storage")) == ("replica", "data", "tp", "x")
    assert roles.resolve(("model",)) == () and roles.role("x") is None and roles.store(("tp", "data"))
    with pytest.raises(MeshError, match="no axis 'y'"):
        roles.resolve(("y",))


def test_a_plan_keeps_what_was_said():
    plan = plan_of("megatron", {"data": 4, "x": 2}, "mlp", roles={"x": "tensor"})
    named = plan_of("megatron", {"data": 4, "tp": 2}, "mlp")
    kernel = "params/Dense_0/kernel"
    assert plan.leaf(kernel).spec == (None, "x") and named.leaf(kernel).spec == (None, "tp")
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.mesh.roles.role("x") is Role.TENSOR and '["x", 2, "tensor"]' in plan.to_json()
    assert '["tp", 2]' in named.to_json() and "x=2 (tensor)" in str(plan)
    # A role that the name tells already says nothing new.
    assert plan_of("megatron", {"data": 4, "tp": 2}, "mlp", roles={"tp": "tensor"}) == named


def test_errors_name_axis_and_remedy():
    for said, words in (
        ({"x": "tensors"}, "did you mean 'tensor'"),
        ({"x": "fsdp"}, "did you mean 'storage'"),
        (["x"], "maps mesh axes"),
    ):
        with pytest.raises(MeshError, match=words):
            read_roles(said, "parallelize(step), roles")
    with pytest.raises(MeshError, match="axis 'y' that the mesh lacks"):
        plan_of("megatron", {"data": 4, "tp": 2}, "mlp", roles={"y": "tensor"})
    with pytest.raises(MeshError, match="nobody knows what the mesh axis 'x' is for") as caught:
        plan_of("megatron", {"data": 4, "x": 2}, "mlp")
    assert "roles={'x': 'tensor'}" in str(caught.value)
    for axis in ("sequence", "cp", "stage"):
        with pytest.raises(UnavailableError, match=f"the axis {axis!r} has the role"):
            plan_of("megatron", {"data": 4, axis: 2}, "mlp")
    with pytest.raises(RuleError, match="every parameter whole on each of the fsdp=2") as caught:
        plan_of("splitbrain", {"data": 2, "fsdp": 2, "model": 2}, "mlp")
    # Not embedding_owner, and not splitbrain_fsdp: the step has neither a table nor a convolution.
    assert "of the shipped rule sets 'fsdp', 'megatron', 'transformer' would use 'fsdp'" in str(caught.value)


def test_own_sets_name_axes_or_roles():
    def own(store, tensor):
        return splitjax.RuleSet(
            "own",
            (splitjax.Rule("dense", kind="dense", shard={"out": tensor}, store=store, ties="hard"),),
            replicated_batch="data",
        )

    by_role = plan_of(own("storage", "tensor"), {"data": 2, "fsdp": 2, "model": 2}, "mlp")
    by_name = plan_of(own("fsdp", "model"), {"data": 2, "fsdp": 2, "model": 2}, "mlp")
    assert by_role == by_name and by_role.leaf("params/Dense_0/kernel").spec == ("fsdp", "model")
    # An axis that a rule names needs no role.
    assert plan_of(own("data", "x"), {"data": 4, "x": 2}, "mlp").leaf("params/Dense_0/kernel").spec == ("data", "x")
    with pytest.raises(RuleError, match="store is a mesh axis or a role"):
        splitjax.Rule("dense", store=[1])


def test_storage_needs_the_batch():
    both = splitjax.Rule("both", shard={"out": "tensor"}, store="storage")
    with pytest.raises(RuleError, match="only where the devices of the first share"):
        splitjax.RuleSet("own", (both,))
    rules = splitjax.RuleSet("own", (both,), replicated_batch=["data"])
    with pytest.raises(RuleError, match="stores weights over fsdp, and the batch does not lie over it"):
        plan_of(rules, {"fsdp": 2, "tensor": 4}, "mlp")
    (finding,) = (
        entry for entry in splitjax.rules.lint(rules, mesh={"fsdp": 2, "tensor": 4}) if entry.check == "roles"
    )
    assert finding.severity == "error" and "replicated_batch" in finding.remedy


def test_what_fits_nowhere_is_not_stored_and_says_so():
    rule = splitjax.Rule("dense", kind="dense", shard={"out": "tensor"}, store="storage", ties="hard")
    rules = splitjax.RuleSet("own", (rule,), replicated_batch="data")
    plan = plan_of(rules, {"fsdp": 2, "tensor": 4}, "cnn")
    head = plan.leaf("params/Dense_2/kernel")  # 32 x 10: its columns do not divide by 4
    assert head.spec == ("fsdp", None) and "does not divide by tensor=4" in head.note
    rule = splitjax.Rule("all", shard={"in": "tensor"}, store="storage")
    rules = splitjax.RuleSet("own", (rule,), replicated_batch="data")
    note = plan_of(rules, {"fsdp": 4, "tensor": 2}, "cnn").leaf("params/Dense_2/kernel").note
    assert "not stored over fsdp=4" in note
