"""The boundary is `jax.value_and_grad`, bit for bit, in and around every transformation."""

from __future__ import annotations

import collections

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

from splitjax.errors import GradientError
from splitjax.lower.gradient import GradientTypeError, grad, value_and_grad
from splitjax.step.boundary import boundary_forward, boundary_of, expand, is_boundary

W = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
X = jnp.linspace(0.0, 2.0, 15).reshape(5, 3)


def assert_same(ours, theirs):
    """The same tree with bitwise the same arrays."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if isinstance(a, (jax.Array, np.ndarray)):
            assert a.dtype == b.dtype and a.shape == b.shape
            if a.dtype != jax.dtypes.float0:
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            assert a == b


def boundaries(closed):
    """All boundary equations of a jaxpr, outermost first."""
    found = []
    for eqn in closed.jaxpr.eqns if hasattr(closed, "jaxpr") else closed.eqns:
        if is_boundary(eqn):
            found.append(eqn)
        for value in eqn.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(one, "eqns"):
                    found.extend(boundaries(one))
    return found


def loss(w, x):
    return jnp.sum(jnp.sin(x @ w) ** 2)


@jax.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (x * 2, None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))


@jax.custom_jvp
def odd(x):
    return x


odd.defjvp(lambda primals, tangents: (primals[0], 3.0 * tangents[0]))

LOSSES = {
    "plain": loss,
    "custom_vjp": lambda w, x: jnp.sum(clipped(x @ w) ** 2),
    "custom_jvp": lambda w, x: jnp.sum(odd(x @ w) ** 2),
    "remat": lambda w, x: jax.checkpoint(loss)(w, x),
    "jit": lambda w, x: jax.jit(loss)(w, x),
    "scan": lambda w, x: jax.lax.scan(lambda c, row: (jnp.tanh(c + row @ w), None), jnp.zeros(4), x)[0].sum(),
    "cond": lambda w, x: jax.lax.cond(x.sum() > 0, lambda: (x @ w).sum(), lambda: w.sum()),
    "stop_gradient": lambda w, x: jnp.sum(jax.lax.stop_gradient(w)[0] * w),
    "relu softmax": lambda w, x: -jax.nn.log_softmax(jax.nn.relu(x @ w))[:, 0].mean(),
    "gather": lambda w, x: w[jnp.array([0, 2, 0])].sum() ** 2,
}


@pytest.mark.parametrize("name", LOSSES)
def test_same_bits_under_jit(name):
    fun = LOSSES[name]
    assert_same(jax.jit(value_and_grad(fun))(W, X), jax.jit(jax.value_and_grad(fun))(W, X))
    assert_same(jax.jit(grad(fun))(W, X), jax.jit(jax.grad(fun))(W, X))
    assert len(boundaries(jax.make_jaxpr(grad(fun))(W, X))) == 1


def test_without_a_tracer_it_is_jax():
    def branching(x):  # Python control flow on values: only possible outside a trace
        return x**3 if x > 0 else x

    assert_same(value_and_grad(branching)(2.0), jax.value_and_grad(branching)(2.0))
    assert_same(grad(lambda x: grad(branching)(x) * 2)(2.0), jnp.asarray(24.0))


@pytest.mark.parametrize("argnums", [0, 1, -1, -2, (0,), (0, 1), (1, 0), (-1, 0), np.int64(1)])
def test_argnums(argnums):
    fun = lambda w, x: jnp.sum(jnp.sin(x @ w) ** 2)
    assert_same(jax.jit(value_and_grad(fun, argnums))(W, X), jax.jit(jax.value_and_grad(fun, argnums))(W, X))


def test_aux_keeps_what_is_not_an_array():
    Metrics = collections.namedtuple("Metrics", "loss logits name nothing count host")

    def fun(w, x, flag, *, scale):
        assert flag is True and scale == 2
        y = x @ w * scale
        return y.mean(), Metrics(y.sum(), {"y": y, "argmax": y.argmax(-1)}, "run", None, 3, np.arange(2))

    captured = {}

    def step(transform):
        def run(w, x):
            (value, aux), g = transform(fun, has_aux=True)(w, x, True, scale=2)
            captured[transform] = (aux.name, aux.nothing, aux.count, type(aux.host))
            return value, aux.loss, aux.logits, g

        return jax.jit(run)(W, X)

    assert_same(step(value_and_grad), step(jax.value_and_grad))
    assert captured[value_and_grad] == captured[jax.value_and_grad] == ("run", None, 3, np.ndarray)
    assert_same(
        jax.jit(lambda w: grad(lambda w: (w.sum(), w), has_aux=True)(w))(W),
        jax.jit(lambda w: jax.grad(lambda w: (w.sum(), w), has_aux=True)(w))(W),
    )


def test_closed_over_tracers_become_operands():
    def step(transform):
        def run(w, x):
            hidden = jnp.cos(x)
            return transform(lambda w: jax.jit(lambda v: (hidden @ v).sum() * w.sum())(w))(w)

        return run

    closed = jax.make_jaxpr(step(value_and_grad))(W, X)
    (eqn,) = boundaries(closed)
    forward, positions = boundary_forward(eqn)
    assert len(eqn.invars) == 2 and positions == (1,) and not forward.consts
    assert eqn.params["names"] == ("captured", "w")
    assert_same(jax.jit(step(value_and_grad))(W, X), jax.jit(step(jax.value_and_grad))(W, X))


def test_the_equation_reads_as_documented():
    def fun(params, batch):
        return ((batch["x"] @ params["w"] + params["b"]) ** 2).mean(), {"a": params["b"], "s": "text"}

    params, batch = {"w": W, "b": jnp.ones(4)}, {"x": X, "n": 3}
    closed = jax.make_jaxpr(lambda p, b: value_and_grad(fun, has_aux=True, microbatches=2)(p, b)[1])(params, batch)
    (eqn,) = boundaries(closed)
    boundary = boundary_of(eqn.params)
    assert boundary.names == ("params['b']", "params['w']", "batch['n']", "batch['x']")
    assert boundary.positions == (0, 1) and boundary.microbatches == 2 and boundary.num_aux == 1
    assert boundary.label.startswith("fun at ") and "test_gradient.py" in boundary.label
    assert boundary.gradients == ((2, 0), (3, 1))
    for result, operand in boundary.gradients:
        assert eqn.outvars[result].aval.shape == eqn.invars[operand].aval.shape


def test_expand_differentiates_through_the_replacement():
    closed = jax.make_jaxpr(grad(loss))(W, X)
    (eqn,) = boundaries(closed)

    def doubled(forward, operands):
        value, *aux = jax.core.eval_jaxpr(getattr(forward, "jaxpr", forward), (), *operands)
        return [2 * value, *aux]

    value, g = expand(eqn.params, [W, X], doubled)
    expected = jax.value_and_grad(lambda w: 2 * loss(w, X))(W)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(g, expected[1], rtol=1e-6)


@pytest.mark.parametrize("jitted", [True, False])
def test_transformations_around_it(jitted):
    wrap = jax.jit if jitted else (lambda f: f)
    per_example = lambda g: jax.vmap(g(lambda w, x: jnp.sin(x @ w).sum()), (None, 0))
    batched_params = lambda g: jax.vmap(g(loss), (2, None), 1)
    cases = {
        "per example": (lambda g: per_example(g), (W, X)),
        "vmap over params": (batched_params, (jnp.stack([W, 2 * W], 2), X)),
        "vmap with axis name": (
            lambda g: jax.vmap(g(lambda w, x: jax.lax.psum((x @ w).sum() ** 2, "i")), (None, 0), axis_name="i"),
            (W, X),
        ),
        "jvp": (lambda g: lambda w, x: jax.jvp(lambda v: g(loss)(v, x), (w,), (w + 1,)), (W, X)),
        "forward over reverse": (lambda g: jax.jacfwd(g(loss)), (W, X)),
        "reverse over reverse": (lambda g: jax.jacrev(g(loss)), (W, X)),
        "nested": (lambda g: g(lambda w, x: (g(loss)(w, x) ** 2).sum()), (W, X)),
        "inner and outer data": (lambda g: g(lambda w, x: loss(w - 0.1 * g(loss)(w, x[:2]), x[2:])), (W, X)),
        "scan": (
            lambda g: lambda w, x: jax.lax.scan(lambda c, r: (c - 0.1 * g(loss)(c, r[None]), c.sum()), w, x),
            (W, X),
        ),
        "scan, differentiated": (
            lambda g: jax.grad(
                lambda w, x: jax.lax.scan(lambda c, r: (c - 0.1 * g(loss)(c, r[None]), None), w, x)[0].sum()
            ),
            (W, X),
        ),
        "while": (lambda g: lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: c - 0.1 * g(loss)(c, x), w), (W, X)),
        "cond": (lambda g: lambda w, x: jax.lax.cond(x.sum() > 0, lambda: g(loss)(w, x), lambda: w), (W, X)),
        "remat": (lambda g: jax.grad(lambda w, x: jax.checkpoint(g(loss))(w, x).sum()), (W, X)),
        "integer aux under jvp": (
            lambda g: (
                lambda w, x: jax.jvp(
                    lambda v: g(lambda v: (loss(v, x), (v @ v.T).argmax()), has_aux=True)(v)[0], (w,), (w,)
                )
            ),
            (W, X),
        ),
    }
    for name, (build, args) in cases.items():
        ours, theirs = wrap(build(grad))(*args), wrap(build(jax.grad))(*args)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs), name
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6, err_msg=name)


def test_keys_integers_and_empty_derivatives():
    def fun(w, n, key, flags):
        return (w * n * jax.random.bernoulli(key, 0.5, w.shape) * flags).sum()

    key, flags = jax.random.key(3), jnp.arange(4) > 1
    args = (W, 3, key, flags)
    assert_same(jax.jit(value_and_grad(fun))(*args), jax.jit(jax.value_and_grad(fun))(*args))
    legacy = (W, 3, jax.random.PRNGKey(3), flags)
    assert_same(jax.jit(value_and_grad(fun))(*legacy), jax.jit(jax.value_and_grad(fun))(*legacy))
    ints = lambda g: (
        lambda w, n, k, f: [
            jax.tree.map(lambda a: np.dtype(a.dtype) == jax.dtypes.float0 and a.shape, one)
            for one in g(fun, (1, 0, 3), allow_int=True)(w, n, k, f)[::2]
        ]
    )
    seen = []
    for g in (grad, jax.grad):
        jax.make_jaxpr(lambda *a, g=g: seen.append(ints(g)(*a)) or 0)(*args)
    assert seen[0] == seen[1] == [(), (4,)]


def test_python_scalars_and_numpy_arguments():
    fun = lambda a, w, x: (a * w * x).sum()
    ours, theirs = (
        jax.jit(lambda x, t=t: t(fun, (0, 1))(2.0, np.ones(3, np.float32), x))(X)
        for t in (value_and_grad, jax.value_and_grad)
    )
    assert_same(ours, theirs)


def test_holomorphic():
    z = jnp.array([1 + 2j, 0.5j])
    fun = lambda z: (z**3).sum()
    assert_same(
        jax.jit(value_and_grad(fun, holomorphic=True))(z), jax.jit(jax.value_and_grad(fun, holomorphic=True))(z)
    )
    real = lambda z: (jnp.abs(z) ** 2).sum()
    assert_same(jax.jit(grad(real))(z), jax.jit(jax.grad(real))(z))


def test_several_boundaries_in_one_step():
    def step(w, x):
        a, ga = value_and_grad(loss)(w, x)
        b, gb = value_and_grad(loss, argnums=1)(w - ga, x)
        return a, b, ga, gb

    assert len(boundaries(jax.make_jaxpr(step)(W, X))) == 2


def test_debug_prints_survive(capfd):
    def fun(w):
        jax.debug.print("sum {s}", s=w.sum())
        return (w**2).sum()

    jax.block_until_ready(jax.jit(grad(fun))(W))
    jax.effects_barrier()
    assert "sum" in capfd.readouterr().out
    jax.block_until_ready(jax.jit(jax.vmap(grad(fun)))(jnp.stack([W, W])))


class Dropper(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        return nn.Dropout(0.5, deterministic=False)(nn.relu(x))


def test_flax_with_state_and_dropout():
    model = Dropper()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def step(transform):
        def run(variables, x, key):
            def fun(params):
                y, state = model.apply(
                    {**variables, "params": params}, x, rngs={"dropout": key}, mutable=["batch_stats"]
                )
                return (y**2).mean(), state

            return transform(fun, has_aux=True)(freeze(variables["params"]))

        return jax.jit(run)(variables, X, jax.random.key(7))

    assert_same(step(value_and_grad), step(jax.value_and_grad))


def test_equinox_and_haiku():
    model = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    fun = lambda m, x: (jax.vmap(m)(x) ** 2).mean()
    assert_same(jax.jit(value_and_grad(fun))(model, X), jax.jit(jax.value_and_grad(fun))(model, X))
    net = hk.transform(lambda x: hk.nets.MLP([4, 2])(x, dropout_rate=0.5, rng=hk.next_rng_key()))
    params = net.init(jax.random.PRNGKey(0), X)
    fun = lambda p, x, key: (net.apply(p, key, x) ** 2).mean()
    args = (params, X, jax.random.PRNGKey(1))
    assert_same(jax.jit(value_and_grad(fun))(*args), jax.jit(jax.value_and_grad(fun))(*args))


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g(lambda w: w)(W),
        lambda g: g(lambda w: w.astype(int).sum())(W),
        lambda g: g(lambda w: (w.sum(), 1))(W),
        lambda g: g(lambda w: w.sum(), has_aux=True)(W),
        lambda g: g(lambda w, n: (w * n).sum(), argnums=1)(W, jnp.arange(4)),
        lambda g: g(lambda w: w.sum(), argnums=1)(W),
        lambda g: g(lambda w: w.sum(), argnums=(0, 2))(W, W),
        lambda g: g(lambda w: w.sum(), holomorphic=True)(W),
        lambda g: g(lambda w: (w * 1j).sum())(W),
        lambda g: g(lambda w, s: w.sum(), argnums=1)(W, "text"),
        lambda g: g(3)(W),
        lambda g: g(lambda w: "text")(W),
    ],
)
def test_errors_are_jax_errors_in_kind(call):
    for transform in (value_and_grad, grad):
        with pytest.raises(TypeError):
            jax.jit(lambda w, transform=transform: call(lambda f, **k: lambda *a: transform(f, **k)(w, *a[1:])))(W)
    with pytest.raises(TypeError):
        jax.jit(lambda w: call(lambda f, **k: lambda *a: jax.grad(f, **k)(w, *a[1:])))(W)


def test_errors_name_place_and_remedy():
    with pytest.raises(GradientTypeError, match=r"(?s)params\['n'\] of .*test_gradient.py.*remedy"):
        jax.jit(grad(lambda params: params["w"].sum()))({"n": jnp.arange(3), "w": W})
    for wrong in (0, -1, True, 1.5, "2"):
        with pytest.raises(GradientError, match="microbatches"):
            value_and_grad(loss, microbatches=wrong)
    with pytest.raises(NotImplementedError):
        value_and_grad(loss, reduce_axes=("batch",))


def test_signature_is_jax_signature():
    import inspect

    for ours, theirs in ((value_and_grad, jax.value_and_grad), (grad, jax.grad)):
        mine, its = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
        assert [*mine] == [*its, "microbatches"]
        assert all(mine[name].default == its[name].default for name in its)
