"""JAX's own kernels in a step: numbers by their interpreters, and programs by the compiler for TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask
from jax.sharding import AxisType, Mesh

import splitjax
from splitjax import jax_kernels

MESHES = {"data_parallel": {"data": 2}, "megatron": {"data": 2, "model": 2}}


def attention_step(attend, layout="bhsd", differentiate=splitjax.value_and_grad, **options):
    """A step of one attention layer whose heads are laid out as `layout` says; keys have the heads of their weights."""

    def loss_fn(params, x):
        q, k, v = (jnp.einsum(f"bsf,fhd->{layout}", x, params[name]) for name in ("q", "k", "v"))
        return (jnp.einsum(f"{layout},hdf->bsf", attend(q, k, v), params["out"]) ** 2).mean()

    def step(params, x):
        loss, gradients = differentiate(loss_fn, **options)(params, x)
        return jax.tree.map(lambda p, g: p - (0.1 * g).astype(p.dtype), params, gradients), loss

    return step


def attention_params(make, heads, shared, features, head_dim):
    of_keys = (features, shared, head_dim)
    return {
        "q": make((features, heads, head_dim)),
        "k": make(of_keys),
        "v": make(of_keys),
        "out": make((heads, head_dim, features)),
    }


def numbers(shape):
    return np.random.default_rng(len(shape) + shape[0]).normal(size=shape).astype("f") * 0.1


def reference(q, k, v, causal):
    """Attention over [batch, heads, positions, head_dim] by plain operations."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k)
    if causal:
        scores = jnp.where(jnp.tri(q.shape[2], k.shape[2], dtype=bool), scores, -1e30)
    return jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores), v)


def close(got, expected, rtol=2e-3):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("rules", [pytest.param("data_parallel", marks=pytest.mark.slow), "megatron"])
def test_splash_attention_with_shared_heads(rules):
    params, x = attention_params(numbers, 4, 2, 16, 128), numbers((2, 128, 16))
    mask = splash_attention_mask.CausalMask((128, 128))
    attend = lambda q, k, v: jax_kernels.splash_attention(q, k, v, mask=mask, interpret=True)
    expected = jax.jit(attention_step(lambda *qkv: reference(*qkv, True), differentiate=jax.value_and_grad))(params, x)
    step = splitjax.parallelize(attention_step(attend), mesh=MESHES[rules], rules=rules, donate=False)
    state = step.place(params, example=(x,))
    (note,) = [note for note in step.plan(state, x).notes if note.startswith("kernel splash_attention")]
    assert "b over data" in note and ("n over model" in note) == (rules == "megatron")
    close(step(state, x), expected)


@pytest.mark.slow
def test_flash_attention_by_the_interpreter_for_tpus():
    params, x = attention_params(numbers, 2, 2, 16, 128), numbers((2, 128, 16))
    segments = jax_kernels.SegmentIds(*[jnp.repeat(jnp.arange(2), 64)[None].repeat(2, 0)] * 2)

    def attend(q, k, v):
        return jax_kernels.flash_attention(q, k, v, jnp.zeros((2, 2, 128, 128)), segments, causal=True)

    def plain(q, k, v):
        own = [reference(*(x[:, :, part] for x in (q, k, v)), True) for part in (slice(64), slice(64, 128))]
        return jnp.concatenate(own, 2)

    expected = jax.jit(attention_step(plain, differentiate=jax.value_and_grad))(params, x)
    with pltpu.force_tpu_interpret_mode():
        step = splitjax.parallelize(attention_step(attend), mesh={"data": 2}, rules="data_parallel", donate=False)
        close(step(step.place(params, example=(x,)), x), expected)


@pytest.mark.parametrize("by_example", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_grouped_products(by_example):
    def step_of(multiply, differentiate):
        def loss_fn(params, batch):
            rows = batch["rows"] if by_example else batch["rows"].reshape(-1, 128)
            sizes = batch["sizes"] if by_example else batch["sizes"].sum(0)
            return (multiply(rows, params["w"], sizes) ** 2).mean()

        def step(params, batch):
            loss, gradients = differentiate(loss_fn)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

        return step

    def plain(rows, w, sizes):
        run = lambda rows_and_sizes: jax.lax.ragged_dot(rows_and_sizes[0], w, rows_and_sizes[1])
        return jax.lax.map(run, (rows, sizes)) if by_example else run((rows, sizes))

    params = {"w": numbers((2, 128, 256))}
    batch = {"rows": numbers((2, 128, 128)), "sizes": np.array([[40, 88], [100, 28]], np.int32)}
    rules = splitjax.RuleSet("columns", [splitjax.Rule("w", path="w", shard={2: "model"})], replicated_batch="data")
    kept = lambda rows, w, sizes: jax_kernels.gmm(rows, w, sizes, interpret=True)
    step = splitjax.parallelize(
        step_of(kept, splitjax.value_and_grad), mesh={"data": 2, "model": 2}, rules=rules, donate=False
    )
    state = step.place(params, example=(batch,))
    (note,) = [note for note in step.plan(state, batch).notes if note.startswith("kernel gmm")]
    assert "n over model" in note and ("b over data" in note) == by_example
    close(step(state, batch), jax.jit(step_of(plain, jax.value_and_grad))(params, batch))


def test_what_refuses_a_kernel_of_jax_names_what_keeps_it_whole():
    """A line with dims that only look alike would let devices multiply their rows by the sizes of all rows' groups."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    def multiply(rows, w, sizes):
        return jnp.stack([gmm(own, w, its_sizes, interpret=True) for own, its_sizes in zip(rows, sizes, strict=True)])

    params = {"w": jax.ShapeDtypeStruct((2, 128, 128), "float32")}
    batch = {"rows": jax.ShapeDtypeStruct((2, 128, 128), "float32"), "sizes": jax.ShapeDtypeStruct((2, 2), "int32")}

    def step(params, batch):
        loss_fn = lambda params: (multiply(batch["rows"], params["w"], batch["sizes"]) ** 2).mean()
        loss, gradients = splitjax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    with pytest.raises(splitjax.errors.UnknownPrimitiveError) as caught:
        splitjax.parallelize(step, mesh={"data": 2, "model": 2}, rules="fsdp").plan(params, batch)
    assert "splitjax.jax_kernels.gmm" in caught.value.remedy and "[examples, rows, k]" in caught.value.remedy
    assert "splitjax.kernel(" not in caught.value.remedy


@pytest.mark.parametrize("rules", MESHES)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_attention_of_jax_on_this_platform(rules, implementation):
    params, x = attention_params(numbers, 4, 2, 16, 8), numbers((4, 6, 16))

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    expected = jax.jit(attention_step(attend, "bshd", jax.value_and_grad))(params, x)
    step = splitjax.parallelize(attention_step(attend, "bshd"), mesh=MESHES[rules], rules=rules, donate=False)
    close(step(step.place(params, example=(x,)), x), expected, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [True, False])
def test_attention_of_cudnn(kept):
    half = lambda shape: jnp.asarray(numbers(shape), "bfloat16")
    params, x = attention_params(half, 4, 2, 64, 64), half((4, 128, 64))
    attend = lambda q, k, v: (
        jax_kernels.cudnn_attention(q, k, v, is_causal=True)
        if kept
        else jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    )
    plain = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    expected = jax.jit(attention_step(plain, "bshd", jax.value_and_grad))(params, x)
    step = splitjax.parallelize(
        attention_step(attend, "bshd"), mesh={"data": jax.device_count("gpu")}, rules="data_parallel", donate=False
    )
    close(step(step.place(params, example=(x,)), x), expected, rtol=5e-2)


def tpu_mesh(rules):
    from jax.experimental import topologies

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
    sizes = {"data_parallel": (8,), "megatron": (2, 4)}[rules]
    return Mesh(devices.reshape(sizes), ("data", "model")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.tpu_aot
@pytest.mark.parametrize("rules", MESHES)
@pytest.mark.parametrize(
    "how", ["boundary", *(pytest.param(how, marks=pytest.mark.slow) for how in ("plain", "microbatches", "splash"))]
)
def test_attention_compiles_for_a_tpu(rules, how):
    """A Mosaic kernel in a program for eight chips: every mesh axis is manual around it, and nothing is gathered."""
    half = lambda shape: jax.ShapeDtypeStruct(shape, "bfloat16")
    params, x = attention_params(half, 4, 4, 256, 128), half((16, 256, 256))
    attend = lambda q, k, v: (
        jax_kernels.splash_attention(q, k, v, mask=splash_attention_mask.CausalMask((256, 256)))
        if how == "splash"
        else jax_kernels.flash_attention(q, k, v, causal=True)
    )
    options = {"plain": {"differentiate": jax.value_and_grad}, "microbatches": {"microbatches": 2}}.get(how, {})
    step = splitjax.parallelize(attention_step(attend, **options), mesh=tpu_mesh(rules), rules=rules)
    text = step.lower(params, x).compile().as_text()
    assert text.count("tpu_custom_call") >= 3  # forward, and two kernels backward
    assert "all-gather" not in text


@pytest.mark.tpu_aot
@pytest.mark.slow
def test_grouped_products_compile_for_a_tpu():
    def step(params, batch):
        loss_fn = lambda params: (jax_kernels.gmm(batch["rows"], params["w"], batch["sizes"]) ** 2).mean()
        loss, gradients = splitjax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - (0.1 * g).astype(p.dtype), params, gradients), loss

    params = {"w": jax.ShapeDtypeStruct((2, 128, 512), "bfloat16")}
    batch = {
        "rows": jax.ShapeDtypeStruct((4, 256, 128), "bfloat16"),
        "sizes": jax.ShapeDtypeStruct((4, 2), "int32"),
    }
    rules = splitjax.RuleSet("columns", [splitjax.Rule("w", path="w", shard={2: "model"})], replicated_batch="data")
    compiled = splitjax.parallelize(step, mesh=tpu_mesh("megatron"), rules=rules).lower(params, batch).compile()
    assert compiled.as_text().count("tpu_custom_call") >= 2  # forward, and for the matrices: rows need no gradient
