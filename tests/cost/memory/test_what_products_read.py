"""What is stored for matrix products and convolutions on a TPU, in which type and how it lies, by what modules of
libtpu show."""

from __future__ import annotations

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import splitjax
from splitjax.cost.memory.compilers import TPU, TPU_V5E, compiler_of
from splitjax.cost.memory.joining import Domain, Kernel, joined
from splitjax.cost.memory.lifetimes import PlacedProgram, predict_timeline
from splitjax.cost.memory.tiles import Along, tiled_bytes
from splitjax.cost.time import predict_time
from tests.cost.memory.on_a_gpu import temporaries

V5E = "TPU v5 lite"


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def placed(function, *arguments, device_kind=""):
    jaxpr = jax.make_jaxpr(function)(*arguments)
    given = [None] * len(jax.tree.leaves(arguments))
    return PlacedProgram(
        jaxpr, given, [None] * len(jaxpr.jaxpr.outvars), {}, {"data": 1}, "tpu", device_kind=device_kind
    )


def stored(function, *arguments):
    """What is stored at some time, as (operation, shape, bytes)."""
    spans = predict_timeline(placed(function, *arguments)).spans
    return [(span.array.made_by, span.array.shape, span.array.num_bytes) for span in spans]


def test_heads_lie_with_their_positions_along_the_lanes():
    """ViT-L has `bf16[32,196,16,64]{1,3,2,0:T(8,128)(2,1)}`: batch and heads are batch dims of the product."""
    assert tiled_bytes((32, 196, 16, 64), 2, Along((1, 3))) == 2 * 32 * 16 * 64 * 256
    assert tiled_bytes((32, 196, 16, 64), 2, Along((2, 3))) == 2 * 32 * 196 * 16 * 128

    def scores(x, q, k):
        heads = lambda weight: jnp.einsum("btf,fhd->bthd", x, weight) + 1.0
        return jnp.max(jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k)), axis=(2, 3))

    found = stored(scores, f32(32, 196, 256), f32(256, 16, 64), f32(256, 16, 64))
    assert [size for _, shape, size in found if shape == (32, 196, 16, 64)] == [2 * 32 * 16 * 64 * 256] * 2


def test_a_product_with_one_dim_besides_its_batch_lies_as_others():
    """There are no two dims to lie along tiles, as with a single query: its scores lie along heads and keys."""
    rows = lambda x, w: jnp.sort(jnp.einsum("bf,bf->b", jnp.sin(x) @ w, x))
    sizes = [size for _, shape, size in stored(rows, f32(64, 128), f32(128, 128)) if shape == (64, 128)]
    assert sizes == [2 * 64 * 128]

    def one_query(q, k):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.sort(scores, axis=3).max(axis=(1, 2))

    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    found = stored(one_query, bf16(32, 1, 16, 128), bf16(32, 1024, 16, 128))
    assert [size for made, _, size in found if made == "dot_general"] == [2 * 32 * 16 * 1024]


def test_a_transposed_result_of_a_product_lies_as_the_product_writes_it():
    """`bf16[32,16,64,196]` of ViT-L, read as (examples, positions, heads, features) by the next product."""

    def heads(weights, values, projection):
        out = jnp.einsum("bhqk,bkhd->bhdq", weights, values)
        return jnp.einsum("bqhd,hdf->bqf", out.transpose(0, 3, 1, 2), projection).max(axis=1)

    found = stored(heads, f32(32, 16, 196, 196), f32(32, 196, 16, 64), f32(16, 64, 8))
    assert [size for _, shape, size in found if shape == (32, 196, 16, 64)] == [2 * 32 * 16 * 64 * 256]


def test_what_follows_a_product_through_several_loops_is_stored_once_in_two_bytes():
    """A bias and a scale behind a product, read by two: `bf16` at the end of the product's fusion, and no `f32`."""

    def shared(x, weight, bias, up, down):
        hidden = (x @ weight + bias) / 8.0
        return (hidden @ up).sum(axis=1), (hidden @ down).sum(axis=1)

    arguments = f32(512, 256), f32(256, 4096), f32(4096), f32(4096, 8), f32(4096, 8)
    assert [size for _, shape, size in stored(shared, *arguments) if shape == (512, 4096)] == [2 * 512 * 4096]


def test_a_row_is_costly_and_what_is_made_of_it_is_not():
    """The square root of a layer norm is that of a row: products compute the rest of the norm each for itself."""

    def norms(x, q, k, v):
        centered = jnp.sort(x, axis=0) - jnp.mean(x, axis=1, keepdims=True)
        normed = centered * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True) + 1e-6)
        return [jnp.max(normed @ each, axis=0) for each in (q, k, v)]

    weights = [f32(1024, 8)] * 3
    sizes = [size for _, shape, size in stored(norms, f32(4096, 1024), *weights) if shape == (4096, 1024)]
    assert sizes == [4 * 4096 * 1024], "what is sorted alone is stored"


def softmaxes(x, up, down, other):
    """A softmax in two bytes an element that two products read."""
    scores = x @ up
    weights = jax.nn.softmax(scores, axis=1).astype(jnp.bfloat16)
    return (weights @ down).sum(axis=1), (weights @ other).sum(axis=1)


@pytest.mark.parametrize(("device_kind", "copies"), [("", 1), ("TPU v5", 1), (V5E, 0)])
def test_a_narrow_softmax_is_stored_for_v5p_and_not_for_v5e(device_kind, copies):
    narrow = jax.ShapeDtypeStruct((1024, 8), jnp.bfloat16)
    arguments = f32(1024, 256), f32(256, 1024), narrow, narrow
    spans = predict_timeline(placed(softmaxes, *arguments, device_kind=device_kind)).spans
    narrow = [span for span in spans if span.array.num_bytes == 2 * 1024 * 1024]
    assert len(narrow) == copies


def test_the_kind_of_a_tpu_says_which_compiler():
    assert compiler_of("tpu", V5E) is TPU_V5E and compiler_of("tpu", "TPU v5") is TPU is compiler_of("tpu")
    assert compiler_of("cpu", V5E) is compiler_of("cpu")
    assert compiler_of("tpu", "tpu:v5e") is TPU_V5E is compiler_of("tpu", "TPU v5e")
    assert all(compiler_of("tpu", kind) is TPU for kind in ("tpu:v5p", "tpu:v6e", "TPU v6 lite"))


def test_a_slice_reads_what_is_stored():
    """Of logits that are stored in two types, the narrow gradient is read by a slice too: the logits are not."""

    def gradient(x, head):
        logits = x @ head
        narrow = (jax.nn.softmax(logits.astype(jnp.float32)) - 1.0).astype(jnp.bfloat16)
        first = narrow[:1, :1].astype(jnp.float32).sum()
        later = jnp.sort(jnp.sort(narrow.T @ x, axis=0) * (1.0 + first), axis=0)
        return later, narrow @ head.T

    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    spans = predict_timeline(placed(gradient, bf16(1024, 128), bf16(128, 8192))).spans
    ends = [(span.array.made_by, span.end) for span in spans if span.array.num_bytes == 2 * 1024 * 8192]
    assert sorted(made for made, _ in ends) == ["convert_element_type", "dot_general"]
    assert dict(ends)["dot_general"] <= dict(ends)["convert_element_type"]


class Rectified(nn.Module):
    """Convolutions with rectifiers, and pools behind the last."""

    num_layers: int = 3
    pools: bool = False

    @nn.compact
    def __call__(self, x):
        for _ in range(self.num_layers):
            x = nn.relu(nn.Conv(128, (3, 3))(x))
        if self.pools:
            batch, height, width, features = x.shape
            x = x.reshape(batch, height // 2, 2, width // 2, 2, features).max(axis=(2, 4))
        return jnp.square(x).sum()


def gradients(model, images):
    params = jax.eval_shape(model.init, jax.random.key(0), images)
    leaves, structure = jax.tree.flatten(params)
    flat = lambda x, *params: jax.tree.leaves(jax.grad(model.apply)(jax.tree.unflatten(structure, params), x))
    return flat, (images, *leaves)


def test_a_rectifier_is_stored_in_two_bytes_with_a_bit_for_its_gradient():
    """VGG-16 has `(u16[1024,16,128], bf16[1024,16,16,128])` behind a convolution, no `f32`: the comparison takes a bit
    an element, and the gradients in front of a convolution two bytes, which the sums of biases are computed with."""
    flat, arguments = gradients(Rectified(4), f32(256, 16, 16, 128))
    elements = 256 * 16 * 16 * 128
    sizes = [size for _, shape, size in stored(flat, *arguments) if shape == (256, 16, 16, 128)]
    assert set(sizes) == {elements // 8, 2 * elements} and sizes.count(elements // 8) == 3


def test_what_a_maximum_over_windows_is_compared_with_is_stored_repeated():
    """VGG-16 has `f32[1024,16,2,16,2,64]` twice in front of the gradient of a pool: the maximum, and its gradient."""
    images = f32(256, 16, 16, 128)
    flat, arguments = gradients(Rectified(2, pools=True), images)
    repeated = [size for _, shape, size in stored(flat, *arguments) if shape == (256, 8, 2, 8, 2, 128)]
    assert repeated == [4 * 256 * 16 * 16 * 128] * 2


@pytest.mark.parametrize("case", ["windows", "stacks", "positions"])
def test_what_moves_elements_repeats_nothing(case):
    """Windows of a Swin Transformer, two arrays side by side, and a position of a cache that is written."""
    if case == "windows":
        windows = lambda x: jnp.sort(x.reshape(8, 8, 7, 8, 7, 96), axis=0).transpose(0, 1, 3, 2, 4, 5) * 2.0
        arguments = (f32(8, 56, 56, 96),)
    elif case == "stacks":
        windows = lambda k, v: jnp.sort(jnp.stack([jnp.sin(k), jnp.cos(v)], axis=1), axis=0)
        arguments = (f32(8, 64, 16, 128), f32(8, 64, 16, 128))
    else:
        windows = lambda cache, new: jnp.sort(cache, axis=0).at[:, 3].set(new)
        arguments = (f32(8, 16, 64, 16, 128), f32(8, 64, 16, 128))
    assert "repeat" not in {made for made, _, _ in stored(windows, *arguments)}


@pytest.mark.parametrize("case", ["result", "compared", "reduced"])
def test_a_comparison_that_others_need_is_no_bits(case):
    """A mask that a step returns takes a byte an element; so is what it compares there, or the largest of a row."""

    def step(x, w, other):
        y = x @ w
        if case == "result":
            return y > 0
        if case == "compared":
            return y, jnp.where(y > 0, other, 0.0).sum()
        return (jnp.where(jnp.max(y, axis=1) > 0, other[:, 0], 0.0) @ other).sum()

    found = stored(step, f32(1024, 256), f32(256, 1024), f32(1024, 1024))
    assert all(size >= math.prod(shape) for made, shape, size in found if made == "gt")
    assert case != "result" or ("gt", (1024, 1024), 1024 * 1024) in found


def test_long_chains_behind_a_product_are_followed_once():
    """Thousands of additions, and doublings that each read the one before twice, are neither too deep nor too many."""

    def chains(x, w):
        y = x @ w
        for _ in range(40):
            y = y * y
        for _ in range(1500):
            y = y + 1.0
        return y @ w

    assert temporaries(chains, f32(8, 8), f32(8, 8), platform="tpu") > 0


def test_small_arrays_of_many_dims():
    spread = lambda x: jnp.sort(x + jnp.zeros((1, 1, 2, 4, 2)), axis=0)
    assert temporaries(spread, f32(1, 1, 2, 4, 2), platform="tpu") <= 2**14


@pytest.mark.parametrize(("features", "is_stored"), [(128, False), (96, True)])
def test_whole_tiles_that_are_put_together_are_read_where_they_are(features, is_stored):
    """The U-Net's skips of 128 features each are not put together for the convolution behind them."""

    def together(x, y, kernel):
        both = jnp.concatenate([jnp.sort(x, axis=0), jnp.sort(y, axis=0)], axis=3)
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(both, kernel, (1, 1), "SAME", dimension_numbers=dims).max(axis=(1, 2))

    half = f32(128, 16, 16, features)
    found = stored(together, half, half, f32(3, 3, 2 * features, 8))
    assert ("concatenate" in {made for made, _, _ in found}) == is_stored


def conv(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_a_product_waits_for_what_alone_reads_it():
    """`fusion.3` of `unet/zero/256`: the gradient of a skip is added to that of a group norm where it is made, although
    that is as large; its halves are read from the sum, and stored nowhere."""

    def gradients(x, y, kernel, other):
        normed = jnp.sort(conv(y, other), axis=1)
        both = conv(x, kernel) + normed * normed.sum(axis=(1, 2), keepdims=True)
        left, right = jnp.split(both, 2, axis=-1)
        return jnp.sin(left).max(axis=(1, 2)), jnp.cos(right).sum(axis=(1, 2))

    images, kernel = f32(32, 16, 16, 64), f32(3, 3, 64, 256)
    found = stored(gradients, images, images, kernel, kernel)
    whole = [made for made, shape, size in found if shape == (32, 16, 16, 256) and size == 4 * 32 * 16 * 16 * 256]
    assert sorted(whole) == ["add", "conv_general_dilated", "sort"], "of the first convolution the sum alone"
    assert not [made for made, *_ in found if "slice" in made or made == "split"]


def test_pieces_that_fill_no_tile_are_stored():
    def rotated(x, kernel):
        left, right = jnp.split(conv(x, kernel) + jnp.sort(x, axis=1), 2, axis=-1)
        return jnp.sort(left, axis=1), jnp.sort(right, axis=2)

    found = stored(rotated, f32(32, 16, 16, 128), f32(3, 3, 128, 128))
    assert [made for made, shape, _ in found if shape == (32, 16, 16, 64) and made == "split"]


def test_the_end_of_a_chain_behind_a_product_is_what_is_stored():
    """`multiply_select_fusion.5`, f32, of `llama_8b/transformer/64`: scores in two bytes an element are stored masked,
    in four; what only widens them is done again by each reader."""

    def softmax(q, k):
        masked = jnp.einsum("bqd,bkd->bqk", q, k).astype(jnp.float32) * 0.1 + 1.0
        return jnp.exp(masked - masked.max(axis=-1, keepdims=True)).sum(axis=-1)

    def widened(q, k):
        wide = jnp.einsum("bqd,bkd->bqk", q, k).astype(jnp.float32)
        return jnp.exp(wide - wide.max(axis=-1, keepdims=True)).sum(axis=-1)

    half = jax.ShapeDtypeStruct((4, 1024, 128), jnp.bfloat16)
    sizes = lambda function: [size for _, shape, size in stored(function, half, half) if shape[-2:] == (1024, 1024)]
    assert sizes(softmax) == [4 * 4 * 1024 * 1024]
    assert sizes(widened) == [2 * 4 * 1024 * 1024]
    # `fusion.659` of `mixture/fsdp/256`: of one example a device, the scores themselves, as they lie behind a view.
    heads = lambda q, k: softmax(q[0], k[0])
    of_one = lambda q, k: jax.vmap(softmax)(q, k)
    several = jax.ShapeDtypeStruct((1, 4, 1024, 128), jnp.bfloat16)
    found = [size for _, shape, size in stored(of_one, several, several) if shape[-2:] == (1024, 1024)]
    assert found == [2 * 4 * 1024 * 1024]
    assert [size for _, shape, size in stored(heads, several, several) if shape[-2:] == (1024, 1024)] == [
        4 * 4 * 1024 * 1024
    ]


def test_what_sums_besides_writes_elsewhere_than_it_reads():
    """`fusion.88` of `vgg16_imagenet/fsdp/256`, whose second result is a sum, is stored beside what it reads."""
    images, kernel = f32(32, 16, 16, 256), f32(3, 3, 256, 256)

    def alone(x, y, kernel):
        return jnp.sort(jnp.sort(conv(x, kernel), axis=1) * jnp.sort(y, axis=1), axis=2).max(axis=(1, 2))

    def with_sum(x, y, kernel):
        both = jnp.sort(conv(x, kernel), axis=1) * jnp.sort(y, axis=1)
        return jnp.sort(both, axis=2).max(axis=(1, 2)) + both.sum(axis=(1, 2))

    size = 4 * 32 * 16 * 16 * 256
    least = temporaries(alone, images, images, kernel, platform="tpu")
    assert temporaries(with_sum, images, images, kernel, platform="tpu") >= least + size


def test_gradients_of_stacked_weights_lie_as_the_weights():
    """`f32[32,8,4096,56]{2,3,1,0:T(8,128)}`: 56 columns are not filled up to 128 where the compiler need not."""

    def train(weights, x):
        def loss(weights):
            layer = lambda x, w: (jnp.tanh(jnp.einsum("ebd,edf->ebf", x, w)[..., :1] * x), None)
            return jax.lax.scan(layer, x, weights)[0].sum()

        return weights - 0.1 * jax.grad(loss)(weights)

    weights = f32(32, 8, 512, 56)
    found = [size for made, shape, size in stored(train, weights, f32(8, 16, 512)) if shape == weights.shape]
    assert found and set(found) == {4 * 32 * 8 * 512 * 56}


def test_a_comparison_is_joined_beside_what_else_follows_its_product():
    """So the product's own array is not stored; without the comparison's mark it is, as it has two readers."""
    product = Kernel(0, Domain(0, is_product=True), {}, (1,))
    follows = Kernel(1, Domain(100), {1: 400}, (2,))
    compares = Kernel(2, Domain(100), {1: 400}, (3,), is_beside=True)
    sizes = {1: 400, 2: 200, 3: 13}
    (together,) = joined([product, follows, compares], sizes, [2, 3])
    assert together.numbers == (0, 1, 2) and set(together.writes) == {2, 3}
    (together,) = joined(
        [product, dataclasses.replace(compares, number=1), dataclasses.replace(follows, number=2)], sizes, [2, 3]
    )
    assert set(together.writes) == {2, 3}
    alone = joined([product, follows, dataclasses.replace(compares, is_beside=False)], sizes, [2, 3])
    assert alone[0].writes == (1,)


def test_steps_are_joined_wherever_they_share_an_array():
    """Only what makes or shares an array with a step is looked at, the last first, and not too far back."""
    loop = lambda number, read, write: Kernel(number, Domain(100), {read: 400}, (write,))
    other = lambda number: Kernel(number, Domain(7), {1000 + number: 28}, (2000 + number,))
    sizes = {0: 400, 1: 400, 2: 400} | {1000 + k: 28 for k in range(500)} | {2000 + k: 28 for k in range(500)}
    near = [loop(0, 0, 1), *(other(k) for k in range(1, 300)), loop(300, 0, 2)]
    assert (0, 300) in [each.numbers for each in joined(near, sizes, [])]
    far = [loop(0, 0, 1), *(other(k) for k in range(1, 450)), loop(450, 0, 2)]
    assert (0, 450) not in [each.numbers for each in joined(far, sizes, [])]


@pytest.mark.parametrize("target", ["tpu:v5e:2x2", "tpu:v5p:2x2x1"])
def test_the_time_of_a_step_is_that_of_the_kind_of_its_machine(target, monkeypatch):
    """Whatever the kind of the mesh's own devices."""
    asked = []

    def predict(program, *arguments):
        asked.append(compiler_of(program.platform, program.device_kind))
        return predict_time(program, *arguments)

    monkeypatch.setattr("splitjax.compile.time.predict_time", predict)
    for kind in ("TPU v5", V5E):
        mesh = AbstractMesh((4,), ("data",), abstract_device=AbstractDevice(kind, 1, "tpu"))
        step = splitjax.parallelize(lambda state, batch: (state, batch["x"] @ state["w"]), mesh=mesh)
        step.time({"w": f32(64, 64)}, {"x": f32(64, 64)}, on=target)
    assert asked == [TPU_V5E if "v5e" in target else TPU] * 2


@pytest.mark.parametrize("given", ["mesh", "target"])
def test_the_memory_of_a_step_is_that_of_its_kind_of_tpu(given):
    def step(state, batch):
        return state, softmaxes(batch["x"], state["up"], state["down"], state["other"])

    narrow = jax.ShapeDtypeStruct((1024, 8), jnp.bfloat16)
    state = {"up": f32(256, 1024), "down": narrow, "other": narrow}
    batch = {"x": f32(4 * 1024, 256)}
    temporary = {}
    for kind, target in (("TPU v5", "tpu:v5p:2x2x1"), (V5E, "tpu:v5e:2x2")):
        mesh = AbstractMesh((4,), ("data",), abstract_device=AbstractDevice(kind, 1, "tpu"))
        where = {"mesh": mesh} if given == "mesh" else {"mesh": {"data": 4}, "target": target}
        decorated = splitjax.parallelize(step, rules="data_parallel", donate=False, **where)
        temporary[kind] = decorated.memory(state, batch).temporary_bytes
    assert temporary["TPU v5"] - temporary[V5E] >= 1.9 * 2**20


def test_a_stack_lies_as_the_loop_writes_it():
    """`f32[48,64,1024,400]{2,3,1,0}` of `gpt2_xl/megatron/128`: 400 features are not filled up to 512, as those of
    images of four dims would be."""

    def stacked(x):
        _, outs = jax.lax.scan(lambda carry, _: (jnp.sort(carry, axis=0),) * 2, x, None, length=4)
        return outs.max(axis=(0, 1, 2))

    sizes = [size for made, shape, size in stored(stacked, f32(16, 128, 400)) if shape == (4, 16, 128, 400)]
    assert sizes == [4 * 4 * 16 * 128 * 400]
