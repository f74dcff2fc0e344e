"""Convolutions that each device evaluates for itself: the numbers of one device, and the collectives that the plan has.

Without `lower.products.local_convolution` the first test fails in its `megatron` cases (the kernel's gradient is a
multiple of the right one), and the compile of `groups_of_four` under `fsdp` on eight devices ends the process.
"""

from __future__ import annotations

import jax
import jax.experimental.custom_partitioning
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.errors import PartitionerError

pytestmark = pytest.mark.usefixtures("programs_are_kept")
LAYOUT = ("NHWC", "HWIO", "NHWC")


def convolve(x, kernel, groups=1, **options):
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": LAYOUT, **options}
    return jax.lax.conv_general_dilated(x, kernel, feature_group_count=groups, **options)


def depthwise(p, x):
    return convolve(x, p["kernel"], 8)


def strided(p, x):
    return convolve(x, p["kernel"], 8, window_strides=(2, 2))


def grouped(p, x):
    return convolve(x, p["kernel"], 2)


def groups_of_four(p, x):
    return convolve(x, p["kernel"], 4)


def causal(p, x):
    sequence = x.reshape(x.shape[0], -1, x.shape[-1])
    options = {"window_strides": (1,), "padding": ((3, 0),), "dimension_numbers": ("NWC", "WIO", "NWC")}
    return convolve(sequence, p["kernel"], 8, **options)


def plain(p, x):
    return convolve(x, p["kernel"], window_strides=(1, 2))


def point(p, x):
    return convolve(x, p["kernel"])


def transposed(p, x):
    return convolve(x, p["kernel"], lhs_dilation=(2, 2), padding=((1, 2), (1, 2)))


def transposed_in_groups(p, x):
    return convolve(x, p["kernel"], 4, lhs_dilation=(2, 2), padding=((1, 2), (1, 2)))


def features_first(p, x):
    moved = jnp.moveaxis(x, -1, 1)
    return jnp.moveaxis(convolve(moved, p["kernel"], 4, dimension_numbers=("NCHW", "OIHW", "NCHW")), 1, -1)


def scanned(p, x):
    return jax.lax.scan(lambda carry, kernel: (jnp.tanh(convolve(carry, kernel, 8)), None), x, p["kernel"])[0]


def rematerialised(p, x):
    return jax.checkpoint(lambda x: jnp.tanh(convolve(jnp.tanh(convolve(x, p["kernel"], 8)), p["kernel"], 8)))(x)


def one_kernel_an_example(p, x):
    kernels = jnp.einsum("bhwc,co->bco", x, p["kernel"])[:, None]
    return jax.vmap(lambda image, kernel: convolve(image[None], kernel[None])[0])(x, kernels)


def between_dense(p, x):
    return jax.nn.relu(convolve(jax.nn.relu(x @ p["into"]), p["kernel"], 16)) @ p["back"]


SHAPES = {
    depthwise: (3, 3, 1, 8),
    strided: (3, 3, 1, 8),
    grouped: (3, 3, 4, 16),
    groups_of_four: (3, 3, 2, 24),
    causal: (4, 1, 8),
    plain: (3, 2, 8, 16),
    point: (1, 1, 8, 1),
    transposed: (3, 3, 8, 8),
    transposed_in_groups: (3, 3, 2, 8),
    features_first: (8, 2, 3, 3),
    scanned: (2, 3, 3, 1, 8),
    rematerialised: (3, 3, 1, 8),
    one_kernel_an_example: (8, 8),
    between_dense: (3, 3, 1, 16),
}


def example(operation):
    """A step's parameters and batch: the operation, then a dense layer wide enough for every rule set to split."""
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.normal(size=SHAPES[operation]) * 0.3)}
    if operation is between_dense:
        params |= {
            "into": jnp.asarray(rng.normal(size=(8, 16)) * 0.3),
            "back": jnp.asarray(rng.normal(size=(16, 8)) * 0.3),
        }
    images = jnp.asarray(rng.normal(size=(32, 4, 4, 8)))
    features = operation(params, images).shape[-1]
    params["head"] = jnp.asarray(rng.normal(size=(features, 256)) * 0.1)
    return params, {"image": images, "label": jnp.arange(32)}


def make_step(operation, boundary=True, microbatches=None):
    def step(state, batch):
        def loss(params):
            activations = jnp.tanh(operation(params, batch["image"]))
            logits = activations.reshape(activations.shape[0], -1, activations.shape[-1]).mean(1) @ params["head"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        differentiate = (
            splitjax.value_and_grad(loss, microbatches=microbatches) if boundary else jax.value_and_grad(loss)
        )
        value, gradients = differentiate(state["params"])
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, state["trace"], gradients)
        return {"params": jax.tree.map(lambda p, t: p - 0.5 * t, state["params"], trace), "trace": trace}, {
            "loss": value
        }

    return step


def errors(operation, mesh, rules, boundary=True, microbatches=None, **options):
    """By parameter: the largest error of its gradient, over the largest value of the gradient; and the parallel step's
    plan."""
    with jax.enable_x64(True):
        params, batch = example(operation)
        state = {"params": params, "trace": jax.tree.map(jnp.zeros_like, params)}
        step = make_step(operation, boundary, microbatches)
        want, _ = jax.jit(step)(state, batch)
        parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, **options)
        got, _ = parallel(parallel.place(state, example=(batch,)), batch)
        difference = lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
        return {name: difference(got["trace"][name], want["trace"][name]) for name in params}, parallel.plan(
            state, batch
        )


TWO_BY_FOUR = {"data": 2, "model": 4}


@pytest.mark.parametrize("boundary", [True, False], ids=["boundary", "plain"])
@pytest.mark.parametrize("operation", SHAPES, ids=lambda f: f.__name__)
def test_gradients_where_examples_are_whole_over_an_axis(operation, boundary):
    found, plan = errors(operation, TWO_BY_FOUR, "megatron", boundary)
    assert max(found.values()) < 1e-12, found
    name = "convolution" if operation in (plain, point, transposed) else "grouped-convolution"
    assert any(f"({name})" in note for note in plan.notes)


@pytest.mark.one_version
@pytest.mark.parametrize("rules", ["splitbrain", "fsdp", "data_parallel"])
@pytest.mark.parametrize(
    "operation", [depthwise, groups_of_four, transposed_in_groups, between_dense], ids=lambda f: f.__name__
)
def test_gradients_under_the_other_rule_sets(operation, rules):
    found, _ = errors(operation, TWO_BY_FOUR, rules)
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("operation", [depthwise, groups_of_four], ids=lambda f: f.__name__)
def test_eight_devices_along_one_axis(operation):
    found, _ = errors(operation, {"data": 1, "model": 8}, "fsdp")
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize(
    "options", [{"shard_state": True}, {"microbatches": 2}, {"group_comm": "modulo", "microbatches": 1}], ids=str
)
@pytest.mark.parametrize("rules", ["megatron", "splitbrain"])
def test_gradients_under_options(rules, options):
    if rules == "megatron" and "group_comm" in options:
        pytest.skip("nothing crosses under megatron")
    found, _ = errors(depthwise, TWO_BY_FOUR, rules, **options)
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("operation", [depthwise, plain], ids=lambda f: f.__name__)
def test_sharded_state_in_bfloat16(operation):
    """Sums of 16-bit floats inside a `shard_map` that leaves an axis to XLA end the process on CPU."""
    params, batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype != jnp.int32 else x, example(operation))
    state = {"params": params, "trace": jax.tree.map(jnp.zeros_like, params)}

    def step(state, batch):
        new, metrics = make_step(operation)(state, batch)
        return jax.tree.map(lambda x, old: x.astype(old.dtype), new, state), metrics

    parallel = splitjax.parallelize(step, mesh=TWO_BY_FOUR, rules="megatron", shard_state=True)
    _, got = parallel(parallel.place(state, example=(batch,)), batch)
    _, want = jax.jit(step)(state, batch)
    assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=2e-2)


@pytest.mark.parametrize("execution", ["branch", "program"])
def test_partial_backpropagation(execution):
    """Two workers of different depths: the same gradients whether a worker is one device, or four with the same
    examples."""

    def gradients(mesh, rules):
        request = splitjax.PartialBackprop(execution=execution, rotate=False)
        parallel = splitjax.parallelize(make_step(between_dense), mesh=mesh, rules=rules, backprop=request)
        got, _ = parallel(parallel.place(state, example=(batch,)), batch)
        return jax.tree.map(np.asarray, got["trace"]), parallel.plan(state, batch).partial.first

    with jax.enable_x64(True):
        params, batch = example(between_dense)
        state = {"params": params, "trace": jax.tree.map(jnp.zeros_like, params)}
        want, first = gradients({"data": 2}, "data_parallel")
        got, first_of_four = gradients(TWO_BY_FOUR, "megatron")
    assert first == first_of_four and len(set(first)) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13), got, want)


def columns(replicated_batch):
    rules = (
        splitjax.Rule(name="columns", path="**/kernel", shard=({"out": "model"},)),
        splitjax.Rule(name="rest", path="**", shard=()),
    )
    return splitjax.RuleSet("columns", rules=rules, replicated_batch=replicated_batch)


@pytest.mark.parametrize("replicated_batch", ["all", "data"])
@pytest.mark.parametrize(
    "operation", [depthwise, groups_of_four, plain, transposed, between_dense], ids=lambda f: f.__name__
)
def test_kernels_that_are_split_themselves(operation, replicated_batch):
    for boundary in (True, False):
        found, plan = errors(operation, TWO_BY_FOUR, columns(replicated_batch), boundary)
        assert max(found.values()) < 1e-12, found
        assert plan.spec("params/kernel") == jax.sharding.PartitionSpec(None, None, None, "model")


def test_the_input_of_a_split_kernel_has_the_cotangents_of_all_features():
    def step(params, batch):
        def loss(params):
            return jnp.mean(jnp.tanh(convolve(jnp.tanh(batch @ params["into"]), params["kernel"])) ** 2)

        gradients = splitjax.value_and_grad(loss)(params)[1]
        return jax.tree.map(lambda param, gradient: param - gradient, params, gradients), gradients

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = {"into": jnp.asarray(rng.normal(size=(8, 8))), "kernel": jnp.asarray(rng.normal(size=(3, 3, 8, 16)))}
        batch = jnp.asarray(rng.normal(size=(8, 4, 4, 8)))
        _, want = jax.jit(step)(params, batch)
        parallel = splitjax.parallelize(step, mesh=TWO_BY_FOUR, rules=columns("data"), donate=False, state_outnums=0)
        assert any("convolution" in note for note in parallel.plan(params, batch).notes)
        _, got = parallel(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13), got, want)


@pytest.mark.parametrize("mesh", [{"data": 2, "model": 2, "more": 2}, {"more": 2, "data": 4}], ids=str)
def test_an_axis_that_no_rule_uses(mesh):
    rules = splitjax.RuleSet(
        "own",
        rules=(
            splitjax.Rule(name="head", path="**/head", shard=({"out": "more"},)),
            splitjax.Rule(name="rest", path="**", shard=()),
        ),
        replicated_batch="data",
        allow_replicated=True,
    )
    found, _ = errors(depthwise, mesh, rules)
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("operation", [depthwise, between_dense], ids=lambda f: f.__name__)
@pytest.mark.parametrize("boundary", [True, False], ids=["boundary", "plain"])
def test_the_kernel_s_gradient_sends_what_is_planned(operation, boundary):
    """Channels that arrive split stay split: each device has the gradient of its own, which are put together once."""
    with jax.enable_x64(True):
        params, batch = example(operation)
        state = {"params": params, "trace": jax.tree.map(jnp.zeros_like, params)}
        parallel = splitjax.parallelize(make_step(operation, boundary), mesh=TWO_BY_FOUR, rules="megatron")
        report = parallel.report(state, batch)
    layer = next(leaf.layer for leaf in parallel.graph(state, batch).leaves if leaf.path == "params/kernel")
    ours = lambda collectives: [(one.op, one.axis, one.bytes) for one in collectives if one.layer == layer]
    planned = ours(parallel.plan(state, batch).collectives)
    kernel_bytes = params["kernel"].nbytes
    if operation is between_dense:
        assert planned == [("all_reduce", "data", kernel_bytes // 4), ("all_gather", "model", kernel_bytes * 3 // 4)]
    else:
        assert planned == [("all_reduce", "data", kernel_bytes)]
    assert not ours(report.unplanned)
    assert not ours(report.missing)


def test_no_device_gathers_the_batch():
    """XLA alone gathers all examples on every device for a batch-split grouped convolution (xla#47945)."""
    with jax.enable_x64(True):
        params, batch = example(grouped)
        state = {"params": params, "trace": jax.tree.map(jnp.zeros_like, params)}
        parallel = splitjax.parallelize(make_step(grouped), mesh={"data": 8}, rules="data_parallel")
        report = parallel.report(state, batch)
    assert [one for one in report.collectives if one.op == "all_gather"] == []


@jax.custom_vjp
def with_reverse_rule(x, kernel):
    return convolve(x, kernel, 8)


with_reverse_rule.defvjp(
    lambda x, kernel: jax.vjp(lambda *operands: convolve(*operands, 8), x, kernel),
    lambda pull, cotangent: jax.tree.map(lambda gradient: 3.0 * gradient, pull(cotangent)),
)


@jax.custom_jvp
def with_forward_rule(x, kernel):
    return convolve(x, kernel, 8)


@with_forward_rule.defjvp
def _(primals, tangents):
    result, tangent = jax.jvp(lambda *operands: convolve(*operands, 8), primals, tangents)
    return result, 3.0 * tangent


def reverse_rule(p, x):
    return with_reverse_rule(x, p["kernel"])


def forward_rule(p, x):
    return with_forward_rule(x, p["kernel"])


SHAPES |= {reverse_rule: (3, 3, 1, 8), forward_rule: (3, 3, 1, 8)}


@pytest.mark.parametrize("options", [{}, {"shard_state": True}, {"boundary": False}], ids=str)
@pytest.mark.parametrize("operation", [reverse_rule, forward_rule], ids=lambda f: f.__name__)
def test_inside_a_custom_derivative_rule(operation, options):
    """The rule stays what it is (it triples the gradient), and what it convolves runs whole. A gradient that plain JAX
    took has the rule's convolutions in the open."""
    found, plan = errors(operation, TWO_BY_FOUR, "megatron", **options)
    assert max(found.values()) < 1e-12, found
    assert any("inside a custom derivative rule" in note for note in plan.notes) == (options.get("boundary", True))


def test_inside_a_call_that_cannot_be_rebuilt_the_plan_is_refused():
    partitioned = jax.experimental.custom_partitioning.custom_partitioning(lambda x, kernel: convolve(x, kernel, 8))
    partitioned.def_partition(
        infer_sharding_from_operands=lambda mesh, shapes, result: result.sharding,
        partition=lambda mesh, shapes, result: (mesh, lambda x, kernel: convolve(x, kernel, 8), result.sharding, ()),
        sharding_rule="b h w c, i j o d -> b h w d",
    )
    SHAPES[hidden := lambda p, x: partitioned(x, p["kernel"])] = (3, 3, 1, 8)
    try:
        with jax.enable_x64(True):
            params, batch = example(hidden)

            def step(state, batch):
                return state, {"mean": hidden(state, batch["image"]).mean()}

            with pytest.raises(PartitionerError, match="inside a call that cannot be evaluated otherwise") as caught:
                splitjax.parallelize(
                    step,
                    mesh=TWO_BY_FOUR,
                    rules=splitjax.RuleSet(
                        "whole",
                        rules=(splitjax.Rule(name="all", path="**", shard=()),),
                        replicated_batch="data",
                        allow_replicated=True,
                    ),
                ).plan(params, batch)
    finally:
        del SHAPES[hidden]
    assert caught.value.value == "grouped-convolution"


@pytest.mark.parametrize("boundary", [True, False], ids=["boundary", "plain"])
def test_a_mapped_dim_that_leads_the_batch(boundary):
    """`vmap` over a dim behind the examples makes a batch of (mapped, example): the examples do not lead it, so XLA
    cannot keep them split, and splits what the row-split dense layer behind suggests."""

    def step(state, batch):
        def forward(p, x):
            for kernel, stride in (("first", 1), ("second", 2)):
                x = convolve(x, p[kernel], window_strides=(stride, stride))
            x = jnp.repeat(x, 2, 2)
            return (x.reshape(len(x), -1) @ p["dense"]) @ p["logits"]

        def loss(p):
            logits = jax.vmap(forward, (None, 1), 1)(p, batch["x"])
            return (jnp.sin(logits) ** 2).mean()

        value, gradients = (splitjax if boundary else jax).value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - g, state, gradients), value

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
        state = {
            "first": normal(3, 3, 2, 2),
            "second": normal(3, 3, 2, 2),
            "dense": normal(8, 2),
            "logits": normal(2, 3),
        }
        batch = {"x": normal(8, 2, 1, 4, 2)}
        step_on_mesh = splitjax.parallelize(step, mesh={"data": 1, "model": 8}, rules="splitbrain", donate=False)
        want, got = jax.jit(step)(state, batch), step_on_mesh(state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, want)


def test_ordinary_convolutions_are_left_to_xla_where_it_is_right():
    """With examples of their own and whole weights on all devices; not where weights are stored in parts."""

    def is_noted(rules, operation):
        with jax.enable_x64(True):
            params, batch = example(operation)
            state = {"params": params, "trace": jax.tree.map(jnp.zeros_like, params)}
            notes = splitjax.parallelize(make_step(operation), mesh=TWO_BY_FOUR, rules=rules).plan(state, batch).notes
        return any("convolution)" in note for note in notes)

    assert not is_noted("splitbrain", plain) and not is_noted("data_parallel", plain)
    assert is_noted("megatron", plain) and is_noted("splitbrain", depthwise)


def test_kernels_split_along_their_window():
    rules = splitjax.RuleSet("window", replicated_batch="data", rules=(
        splitjax.Rule(name="window", path="**/kernel", shard=({"width": "data"},)),
        splitjax.Rule(name="rest", path="**", shard=({"out": "model"}, {"in": "model"})),
    ))  # fmt: skip
    for boundary in (True, False):
        found, _ = errors(plain, TWO_BY_FOUR, rules, boundary)
        assert max(found.values()) < 1e-12, found


def test_one_device_is_left_alone():
    with jax.enable_x64(True):
        params, batch = example(depthwise)
        state = {"params": params, "trace": jax.tree.map(jnp.zeros_like, params)}
        plan = splitjax.parallelize(make_step(depthwise), mesh={"data": 1}, rules="data_parallel").plan(state, batch)
    assert not any("grouped-convolution" in note for note in plan.notes)


def test_a_pinned_plan_says_it_once():
    with jax.enable_x64(True):
        params, batch = example(depthwise)
        state = {"params": params, "trace": jax.tree.map(jnp.zeros_like, params)}
        plan = splitjax.parallelize(make_step(depthwise), mesh=TWO_BY_FOUR, rules="megatron").plan(state, batch)
        again = splitjax.parallelize(make_step(depthwise), mesh=TWO_BY_FOUR, plan=plan).plan(state, batch)
    assert again.notes == plan.notes
