"""Runs a step with boundaries in microbatches, as the decorator will: traced at two batch sizes, boundaries
expanded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from splitjax import _compat
from splitjax.errors import Refusal
from splitjax.lower import gradient
from splitjax.lower.microbatch.accumulate import plain_bind
from splitjax.lower.microbatch.microbatch import Accumulation, local_examples, prepare
from splitjax.mesh import MeshShape
from splitjax.planning.workers import Workers
from splitjax.step.boundary import expand, is_boundary


def make_mesh(**axes):
    sizes = tuple(axes.values())
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract(tree, num=None):
    """The types of arrays without their shardings, which hold for the whole batch only; `num`: with so many
    examples."""
    shape = lambda a: a.shape if num is None else (num, *a.shape[1:])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(shape(a), a.dtype, weak_type=jax.typeof(a).weak_type), tree)


def build(step, params, batch, num, *, mesh=None, batch_axes=("data",), manual=None, bind=None, rest=()):
    """The step `step(params, batch, *rest)` as a jittable function of the same arguments, boundaries in `num`
    microbatches."""
    manual = batch_axes if manual is None else manual
    workers = Workers() if mesh is None else Workers(MeshShape.of(mesh), batch_axes, manual)
    total = jax.tree.leaves(batch)[0].shape[0]
    local = local_examples(total, num, workers)
    if isinstance(local, Refusal):
        raise local.error()
    closed, shape = _compat.trace(step, abstract(params), abstract(batch), *rest)
    small, _ = _compat.trace(step, abstract(params), abstract(batch, local), *rest)
    inner, consts = _compat.open_jaxpr(closed)
    local_jaxpr, _ = _compat.open_jaxpr(small)
    assert len(inner.eqns) == len(local_jaxpr.eqns)
    tree = jax.tree.structure(shape)

    def run(*args):
        env = dict(zip(inner.constvars, consts, strict=True)) | dict(
            zip(inner.invars, jax.tree.leaves(args), strict=True)
        )
        read = lambda a: a.val if isinstance(a, _compat.Literal) else env[a]
        for eqn, twin in zip(inner.eqns, local_jaxpr.eqns, strict=True):
            operands = [read(a) for a in eqn.invars]
            if is_boundary(eqn):
                dims = [_example_dim(a.aval, b.aval, total) for a, b in zip(eqn.invars, twin.invars, strict=True)]
                loop = Accumulation(dims, twin.params["forward"], num, workers)
                job = prepare(eqn.params, loop) if num > 1 or workers.axes else None
                if isinstance(job, Refusal):
                    raise job.error()
                if job is None:
                    results = expand(eqn.params, operands)
                else:
                    job = job.placed(mesh, bind or plain_bind, plain_bind)
                    results = job.results(operands, eqn.params["positions"], {}, ())
            else:
                results = _compat.bind_equation(eqn, operands)
            env.update(zip(eqn.outvars, results, strict=True))
        return jax.tree.unflatten(tree, [read(a) for a in inner.outvars])

    return run


def _example_dim(a, b, total):
    dims = [i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y and x == total]
    return dims[0] if dims else None


def step_of(fun, has_aux=False, argnums=0):
    """A step that only takes a gradient with respect to `params` (and what else `argnums` says)."""

    def step(params, batch, *rest):
        return gradient.value_and_grad(fun, argnums, has_aux=has_aux, microbatches=2)(params, batch, *rest)

    return step


def check(fun, params, batch, num=4, *, has_aux=False, argnums=0, rest=(), atol=1e-10, **where):
    """The loss, aux and gradients in microbatches equal those of the whole batch; returns the compiled function's
    results."""
    expected = jax.jit(jax.value_and_grad(fun, argnums, has_aux=has_aux))(params, batch, *rest)
    run = build(step_of(fun, has_aux, argnums), params, batch, num, rest=rest, **where)
    got = jax.jit(run)(params, batch, *rest)
    compare(got, expected, atol)
    return got


def compare(got, expected, atol=1e-10):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(a) == jnp.shape(b) and a.dtype == jnp.asarray(b).dtype, (a.dtype, jnp.asarray(b).dtype)
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), atol=atol, rtol=1e-9 if a.dtype == jnp.float64 else 1e-5
        )
