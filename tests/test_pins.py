"""What users say of where arrays live decides before shipped rules do: annotations of Flax Linen and NNX, shardings of
the arrays themselves. Numbers are those of one device, in float64."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import splitjax
from splitjax.errors import PinError, StateError
from splitjax.plan import Plan
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
TX = optax.adam(1e-2)
LOGICAL = (("embed", None), ("mlp", "model"), ("vocab", "model"))
INIT = nn.initializers.lecun_normal()


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def mesh_of(kind="auto"):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(KINDS[kind],) * 2)


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(8, 16)), "y": rng.normal(size=(8, 16))}


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-10)


def spec_of(array):
    """The entries of an array's sharding, without the whole dims at its end."""
    entries = list(array.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


class Net(nn.Module):
    """The first layer is split by rows and the second by columns, which no shipped set would do."""

    first: tuple = ("mlp", "embed")
    second: tuple = ("embed", "mlp")
    box: object = nn.with_logical_partitioning

    @nn.compact
    def __call__(self, x):
        first, second = self.box(INIT, self.first), self.box(INIT, self.second)
        x = nn.tanh(nn.Dense(32, kernel_init=first, param_dtype=jnp.float64)(x))
        return nn.Dense(16, kernel_init=second, param_dtype=jnp.float64)(x)


def linen(net):
    def init(key):
        params = net.init(key, batch_of()["x"])["params"]
        return {"params": params, "opt": TX.init(params)}

    def step(state, batch):
        loss_of = lambda params: jnp.mean((net.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)
        loss, grads = splitjax.value_and_grad(loss_of)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return init, step


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        make = lambda *size, names: nnx.Linear(
            *size, kernel_init=nnx.with_partitioning(INIT, names), param_dtype=jnp.float64, rngs=rngs
        )
        self.layers = nnx.List([make(16, 32, names=("model", None)), make(32, 16, names=(None, "model"))])

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def nnx_objects(key):
    model = NNXNet(nnx.Rngs(params=key))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def nnx_step(model, optimizer, batch):
    loss_of = lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    loss, grads = splitjax.nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def assert_round_trip(plan):
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("kind", KINDS)
def test_logical_names_of_linen_pin_and_state_follows_through_a_checkpoint(kind, tmp_path):
    init, linen_step = linen(Net())
    alone, losses = init(jax.random.key(0)), []
    for number in range(2):
        alone, loss = jax.jit(linen_step)(alone, batch_of(number))
        losses.append(loss)
    step = splitjax.parallelize(linen_step, mesh=mesh_of(kind), rules="megatron")
    with nn.logical_axis_rules(LOGICAL):
        state = step.init(init, jax.random.key(0), example=(batch_of(),))
        boxed = nn.logical_to_mesh(nn.get_partition_spec(state["params"]))
    assert boxed["Dense_0"]["kernel"] == P("model", None)  # by the user's own names, as they were
    assert state["params"]["Dense_0"]["kernel"].names == ("mlp", "embed")
    kernels = [state["params"][f"Dense_{n}"]["kernel"].value for n in (0, 1)]
    assert [spec_of(kernel) for kernel in kernels] == [("model",), (None, "model")]
    assert spec_of(state["opt"][0].mu["Dense_1"]["kernel"].value) == (None, "model")
    plan = step.plan(state, batch_of())
    by_path = {leaf.path: leaf for leaf in plan.leaves}
    kernel = by_path["params/Dense_0/kernel/value"]
    assert kernel.rule == "pinned by nn.with_logical_partitioning of params.Dense_0.kernel"
    assert "pinned by nn.with_logical_partitioning of" in str(plan)
    (note,) = [note for note in plan.notes if note.startswith(kernel.path)]
    assert "of 'megatron' would put it to P(None, 'model')" in note
    assert_round_trip(plan)
    state, loss = step(state, batch_of())  # outside of the rules
    assert_close(loss, losses[0])
    with Checkpoints(CheckpointOptions(str(tmp_path))) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        target = step.abstract_state(init, jax.random.key(0), example=(batch_of(),))
        state = checkpoints.restore(target).state
    state, loss = step(state, batch_of(1))
    assert_close(loss, losses[1])
    assert_close(state, alone)
    assert spec_of(state["params"]["Dense_0"]["kernel"].value) == ("model",)


def test_boxes_name_the_layout_where_their_names_do_not():
    for box, names in ((nn.with_logical_partitioning, ("embed", "mlp")), (nn.with_partitioning, (None, "tensor"))):
        init, linen_step = linen(Net(names, names[::-1], box))
        step = splitjax.parallelize(linen_step, mesh=mesh_of(), rules="megatron")
        state = step.init(init, jax.random.key(0), example=(batch_of(),))
        boxed = state["params"]["Dense_0"]["kernel"]
        assert spec_of(boxed.value) == (None, "model")  # by rule, or by what the role means
        read = boxed.get_partition_spec()
        read = nn.logical_to_mesh_axes(read, boxed.rules) if box is nn.with_logical_partitioning else read
        assert read == P(None, "model")
        assert type(boxed) is type(init(jax.random.key(0))["params"]["Dense_0"]["kernel"])
        step(state, batch_of())
    plan = splitjax.parallelize(linen(Net())[1], mesh=mesh_of()).plan(linen(Net())[0](jax.random.key(0)), batch_of())
    (note,) = [note for note in plan.notes if "names without meaning" in note]
    assert "'embed', 'mlp'" in note and "of params.Dense_0.kernel and 5 more" in note


@pytest.mark.parametrize("way", ["init", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_annotated_modules_of_nnx_train_as_their_optimizer_says(kind, way):
    alone, losses = nnx_objects, []
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        alone = nnx_objects(jax.random.key(0))
        losses = [nnx.jit(nnx_step)(*alone, batch_of(number)) for number in range(2)]
    mesh = mesh_of(kind)
    step = splitjax.nnx.parallelize(nnx_step, mesh=mesh, rules="megatron")
    if way == "init":
        model, optimizer = step.init(nnx_objects, jax.random.key(0), example=(batch_of(),))
    else:  # as NNX makes them itself: what is annotated is split, everything else whole on every device
        with jax.set_mesh(mesh):
            model, optimizer = nnx_objects(jax.random.key(0))
        assert spec_of(model.layers[0].bias.get_raw_value()) == ()
    for number, loss in enumerate(losses):
        assert_close(step(model, optimizer, batch_of(number)), loss)
    assert_close(nnx.state(model), nnx.state(alone[0]))
    assert_close(nnx.state(optimizer), nnx.state(alone[1]))
    moment = optimizer.opt_state[0].nu.layers[0].kernel
    assert spec_of(model.layers[0].kernel.get_raw_value()) == spec_of(moment.get_raw_value()) == ("model",)
    plan = step.plan(model, optimizer, batch_of())
    rules = {leaf.path: leaf.rule for leaf in plan.leaves}
    assert rules["model/layers/0/kernel"] == "pinned by nnx.with_partitioning of layers.0.kernel"
    assert_round_trip(plan)


def test_a_moment_has_a_sharding_of_its_own():
    def make(key):
        kernel = {"out_sharding": (None, "model"), "optimizer_sharding": ("data", "model")}
        model = nnx.Linear(16, 16, kernel_metadata=kernel, param_dtype=jnp.float64, rngs=nnx.Rngs(params=key))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    step = splitjax.nnx.parallelize(nnx_step, mesh=mesh_of(), rules="megatron")
    model, optimizer = step.init(make, jax.random.key(0), example=(batch_of(),))
    step(model, optimizer, batch_of())
    assert spec_of(model.kernel.get_raw_value()) == (None, "model")
    assert spec_of(optimizer.opt_state[0].mu.kernel.get_raw_value()) == ("data", "model")
    assert "pinned by out_sharding= of kernel" in str(step.plan(model, optimizer, batch_of()))


@pytest.mark.parametrize("kind", KINDS)
def test_three_axes_take_annotations_of_both_flaxes(kind):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(KINDS[kind],) * 3)
    init, linen_step = linen(Net())
    step = splitjax.parallelize(linen_step, mesh=mesh, rules="transformer")
    with nn.logical_axis_rules((("embed", "fsdp"), ("mlp", "tensor"))):
        state = step.init(init, jax.random.key(0), example=(batch_of(),))
    want = jax.jit(linen_step)(init(jax.random.key(0)), batch_of())
    got = step(state, batch_of())
    assert_close(got, want)
    assert spec_of(got[0]["params"]["Dense_0"]["kernel"].value) == ("tensor", "fsdp")
    step = splitjax.nnx.parallelize(nnx_step, mesh=mesh, rules="transformer")
    with pytest.raises(ValueError, match="mesh context"):  # NNX's own: this mesh has no axis of that name
        nnx_objects(jax.random.key(0))
    model, optimizer = step.init(nnx_objects, jax.random.key(0), example=(batch_of(),))
    (note,) = [note for note in step.plan(model, optimizer, batch_of()).notes if "names without meaning" in note]
    assert "'model' (nnx.with_partitioning of layers.0.kernel and" in note
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        alone = nnx_objects(jax.random.key(0))
        loss = nnx.jit(nnx_step)(*alone, batch_of())
    assert_close(step(model, optimizer, batch_of()), loss)
    assert_close(nnx.state(model), nnx.state(alone[0]))
    assert spec_of(model.layers[0].kernel.get_raw_value()) == (("data", "fsdp"), "tensor")


class HalfAnnotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(INIT, ("mlp", "embed"))
        x = nn.tanh(nn.Dense(64, kernel_init=init, param_dtype=jnp.float64)(x))
        return nn.Dense(16, kernel_init=INIT, param_dtype=jnp.float64)(x)


@pytest.mark.parametrize("kind", KINDS)
def test_three_axes_take_annotations_under_fsdp(kind):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(KINDS[kind],) * 3)
    init, linen_step = linen(HalfAnnotated())
    step = splitjax.parallelize(linen_step, mesh=mesh, rules="fsdp")
    with nn.logical_axis_rules((("embed", "fsdp"), ("mlp", "tensor"))):
        state = step.init(init, jax.random.key(0), example=(batch_of(),))
    got = step(state, batch_of())
    assert_close(got, jax.jit(linen_step)(init(jax.random.key(0)), batch_of()))
    assert spec_of(got[0]["params"]["Dense_0"]["kernel"].value) == ("tensor", "fsdp")
    assert spec_of(got[0]["params"]["Dense_1"]["kernel"]) != ()  # by the rule: what is pinned comes before it


# Arrays that lie somewhere.


def plain_state():
    keys = jax.random.split(jax.random.key(1), 2)
    params = {"v": jax.random.normal(keys[0], (32, 16)) / 4, "w": jax.random.normal(keys[1], (16, 32)) / 4}
    return {"params": params, "opt": TX.init(params)}


def plain_step(state, batch, forward=lambda params, x: jnp.tanh(x @ params["w"]) @ params["v"]):
    loss_of = lambda params: jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)
    loss, grads = splitjax.value_and_grad(loss_of)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def placed(mesh, w, v):
    """The state with its weights on the mesh, split over `w` and `v`, and moments like them."""
    where = {"w": NamedSharding(mesh, P(*w)), "v": NamedSharding(mesh, P(*v))}
    put = lambda path, leaf: jax.device_put(leaf, where.get(path[-1].key)) if len(leaf.shape) == 2 else leaf
    return jax.tree_util.tree_map_with_path(put, plain_state())


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_lie_on_the_mesh_pin_and_others_are_moved(kind):
    mesh, batch = mesh_of(kind), batch_of()
    want, loss = jax.jit(plain_step)(plain_state(), batch)
    step = splitjax.parallelize(plain_step, mesh=mesh, rules="megatron", donate=False)
    state = placed(mesh, ("model",), (None, "model"))
    plan = step.plan(state, batch)
    rules = {leaf.path: leaf.rule for leaf in plan.leaves}
    assert rules["params/w"] == "pinned by the sharding of the array params/w"
    assert any(note.startswith("params/w: pinned by the sharding") for note in plan.notes)
    got, its_loss = step(state, batch)
    assert_close((got, its_loss), (want, loss))
    assert spec_of(got["params"]["w"]) == spec_of(got["opt"][0].mu["w"]) == ("model",)
    # Where the rules agree, they are the reason; `place` moves what lies elsewhere; whole arrays pin nothing.
    agreeing = splitjax.parallelize(plain_step, mesh=mesh, rules="megatron")
    rules = {leaf.path: leaf.rule for leaf in agreeing.plan(placed(mesh, (None, "model"), ("model",)), batch).leaves}
    assert not any("pinned" in rule for rule in rules.values())
    assert spec_of(step.place(state, example=(batch,))["params"]["w"]) == ("model",)  # as that signature's plan has it
    fresh = splitjax.parallelize(plain_step, mesh=mesh, rules="megatron")
    assert spec_of(fresh.place(state, example=(batch,))["params"]["w"]) == (None, "model")
    whole = splitjax.parallelize(plain_step, mesh=mesh, rules="megatron")
    assert_close(whole(placed(mesh, (), ()), batch), (want, loss))


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_lie_whole_by_another_mesh_are_moved_when_the_step_is_called(kind):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(KINDS[kind],) * 3)
    want = jax.jit(plain_step)(plain_state(), batch_of())
    with jax.set_mesh(mesh_of(kind)):
        state, batch = plain_state(), batch_of()
        step = splitjax.parallelize(plain_step, mesh=mesh, rules="megatron", donate=False)
        assert state["params"]["w"].sharding.is_fully_replicated and state["params"]["w"].sharding.mesh != mesh
        assert_close(step(state, batch), want)
        assert_close(step(step.place(state, example=(batch,)), batch), want)
    backwards = jax.sharding.Mesh(mesh.devices.reshape(8)[::-1], ("all",))
    state = jax.device_put(plain_state(), NamedSharding(backwards, P()))
    assert_close(step(state, batch_of()), want)
    few = jax.sharding.Mesh(mesh.devices.reshape(8)[:4], ("some",))
    with pytest.raises(StateError, match="already lives"):
        step(jax.device_put(plain_state(), NamedSharding(few, P())), batch_of())


def test_states_with_random_keys_are_placed():
    def step(state, batch):
        new, loss = plain_step(state[0], batch)
        return (new, jax.random.split(state[1])[0]), loss

    step = splitjax.parallelize(step, mesh=mesh_of(), rules="megatron")
    placed_state = step.place((plain_state(), jax.random.key(3)), example=(batch_of(),))
    _, key = step(placed_state, batch_of())[0]
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.split(jax.random.key(3))[0])).all()


def test_what_is_pinned_is_not_stored_further():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    state = jax.tree.map(lambda leaf: jax.device_put(leaf), plain_state())
    state["params"]["w"] = jax.device_put(state["params"]["w"], NamedSharding(mesh, P(None, "tensor")))
    plan = splitjax.parallelize(plain_step, mesh=mesh, rules="transformer").plan(state, batch_of())
    spec = {leaf.path: leaf.spec for leaf in plan.leaves}
    assert spec["params/w"] == spec["opt/0/mu/w"] == (None, "tensor")
    assert spec["params/v"] == ("tensor", ("data", "fsdp"))


def test_a_step_under_explicit_axes_sees_its_arguments_where_they_are_pinned():
    mesh, batch, seen = mesh_of("explicit"), batch_of(), []

    def forward(params, x):
        seen.append(jax.typeof(params["w"]).sharding)
        hidden = jnp.tanh(jnp.dot(x, params["w"], out_sharding=P("data", None)))
        return jnp.dot(hidden, params["v"], out_sharding=P("data", "model"))

    explicit = lambda state, batch: plain_step(state, batch, forward)
    step = splitjax.parallelize(explicit, mesh=mesh, rules="data_parallel")
    got = step(placed(mesh, ("model",), (None, "model")), batch)
    assert_close(got, jax.jit(plain_step)(plain_state(), batch))
    assert seen[-1].spec == P("model", None)
    assert sum("pinned: float64" in note for note in step.plan(got[0], batch).notes) >= 2


# What cannot be.


def refusal(rules="megatron", mesh=None, state=None, step=plain_step):
    mesh = mesh or mesh_of()
    with pytest.raises(PinError) as caught:
        splitjax.parallelize(step, mesh=mesh, rules=rules).plan(state or placed(mesh, ("model",), ()), batch_of())
    return str(caught.value)


def test_a_pin_against_the_users_own_rule_names_both(tmp_path):
    own = splitjax.RuleSet("mine", (splitjax.Rule("columns", kind="dense", shard=[{"out": "model"}]),))
    file = tmp_path / "mine.toml"
    file.write_text('[[rule]]\nname = "columns"\nkind = "dense"\nshard = [{ out = "model" }]\n')
    for rules in (own, str(file)):
        text = refusal(rules)
        assert "the sharding of the array params/w" in text and "'columns' of your rule set 'mine'" in text
        assert "P('model')" in text and "P(None, 'model')" in text
    init, step = linen(Net())
    with nn.logical_axis_rules(LOGICAL):
        text = refusal(own, state=init(jax.random.key(0)), step=step)
    assert "nn.with_logical_partitioning of params.Dense_0.kernel" in text and "'columns'" in text
    # What the rule says too, and what no rule speaks of, is no contradiction.
    mesh = mesh_of()
    splitjax.parallelize(plain_step, mesh=mesh, rules=own).plan(placed(mesh, (None, "model"), ()), batch_of())


def test_a_pin_against_another_names_both():
    mesh = mesh_of()
    init, step = linen(Net())
    with nn.logical_axis_rules(LOGICAL):
        state = init(jax.random.key(0))
        kernel = state["params"]["Dense_0"]["kernel"]
        where = NamedSharding(mesh, P(None, "model"))
        state["params"]["Dense_0"]["kernel"] = kernel.replace_boxed(jax.device_put(kernel.value, where))
        text = refusal(mesh=mesh, state=state, step=step)
    assert "nn.with_logical_partitioning of params.Dense_0.kernel" in text and "the sharding of the array" in text


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("model", "model"), "would split it twice"),
        ((("data", "model"), None, None), "3 names"),
        ((None, "odd"), "does not divide by 4"),
    ],
)
def test_a_pin_that_cannot_be_says_why(names, problem):
    size = 30 if "odd" in names else 32
    names = tuple("model" if name == "odd" else name for name in names)
    params = {"w": nn.Partitioned(jnp.ones((16, size)), names=names), "v": jnp.ones((size, 16))}

    def step(state, batch):
        loss_of = lambda params: jnp.mean((batch["x"] @ nn.unbox(params)["w"] @ params["v"]) ** 2)
        loss, grads = splitjax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda a, b: a - b, state, grads), loss

    text = refusal(state=params, step=step)
    assert problem in text and "nn.with_partitioning of w" in text


def test_a_state_that_lies_elsewhere_after_the_plan_is_still_an_error():
    mesh, batch = mesh_of(), batch_of()
    step = splitjax.parallelize(plain_step, mesh=mesh, rules="megatron")
    step.init(plain_state, example=(batch,))
    with pytest.raises(StateError, match=r"step\.place"):
        step(placed(mesh, ("model",), (None, "model")), batch)


@pytest.mark.parametrize("num_examples", [16, 8])
def test_state_in_parts_goes_to_another_signature_and_another_step(num_examples):
    """Biases lie behind `tensor`, against the order of the mesh, as `shard_state` lays them."""
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    init = lambda key: {
        "w": jax.random.normal(key, (8, 16)),
        "b": jnp.zeros(16),
        "out": jax.random.normal(key, (16, 8)),
    }
    adam = optax.adam(0.1)

    def make(key):
        params = init(key)
        return {"params": params, "opt": adam.init(params)}

    def step(state, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch @ params["w"] + params["b"]) @ params["out"]) ** 2)

        value, grads = splitjax.value_and_grad(loss)(state["params"])
        updates, opt = adam.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    options = {"mesh": mesh, "rules": "megatron", "shard_state": True, "donate": False}
    parallel = splitjax.parallelize(step, **options)
    batch = jax.random.normal(jax.random.key(1), (8, 8))
    state = parallel.init(make, jax.random.key(0), example=(batch,))
    assert state["opt"][0].mu["b"].sharding.spec == P(("tensor", "data", "fsdp"))
    other = jax.random.normal(jax.random.key(2), (num_examples, 8))
    again = parallel if num_examples == 16 else splitjax.parallelize(step, **options)
    found = again(state, other)
    assert found[0]["opt"][0].mu["b"].sharding.spec == P(("tensor", "data", "fsdp"))
    expected = jax.jit(step)(jax.device_get(state), other)
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(np.asarray(two), np.asarray(one), rtol=2e-5, atol=2e-6)
