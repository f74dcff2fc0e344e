"""Repeated blocks of a loss: which are found, where they are cut, and that computing them again keeps the numbers."""

from __future__ import annotations

import re

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax import _compat
from splitjax.errors import GradientError
from splitjax.plan import BlockRemat
from splitjax.primitives.calls import CallKind, kind_of
from splitjax.primitives.walk import boundaries, walk
from splitjax.step.boundary import expand
from splitjax.step.remat.blocks import makes_of, operand_path
from splitjax.step.remat.rematerialising import (
    POLICIES,
    RepeatedBlock,
    choices_of,
    rematerialised,
    repeated_blocks,
    resolved,
    why_not_again,
)

WIDTH, NUM_BLOCKS = 16, 3


def block(params, x):
    """A block with its norm first and a residual sum: between two of them lives one array."""
    h = (x - x.mean(-1, keepdims=True)) * params["scale"]
    return x + (jax.nn.gelu(h @ params["up"]) @ params["down"] + params["bias"])


def unrolled(params, batch):
    x = batch["x"] @ params["embed"]
    for number in range(NUM_BLOCKS):
        x = block(params[f"block{number}"], x)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def inlined(params, batch):
    return jax.jit(unrolled)(params, batch)


def unrolled_list(params, batch):
    x = batch["x"] @ params["embed"]
    for each in params["blocks"]:
        x = block(each, x)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def scanned(params, batch):
    x, sums = jax.lax.scan(lambda x, p: (block(p, x), x.sum()), batch["x"] @ params["embed"], params["blocks"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2) + 1e-3 * sums.sum()


def two_kinds(params, batch):
    x = batch["x"] @ params["embed"]
    x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
    for number in range(NUM_BLOCKS):
        x = block(params[f"block{number}"], x)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def penalised(params, batch):
    return unrolled(params, batch) + 1e-3 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


def averaged(params, batch):
    """What is made of several blocks together is read behind them."""
    x = batch["x"] @ params["embed"]
    for number in range(NUM_BLOCKS):
        x = block(params[f"block{number}"], x)
    x *= 1 + sum(params[f"block{number}"]["scale"] for number in range(NUM_BLOCKS)) / NUM_BLOCKS
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def penalised_one_by_one(params, batch):
    loss = unrolled(params, batch)
    for leaf in jax.tree.leaves(params):
        loss += 1e-3 * jnp.sum(leaf**2)
    return loss


def numbers(*shape):
    return np.random.default_rng(len(shape) + shape[0]).normal(size=shape) / 4


def block_params(*lead):
    return {
        "scale": numbers(*lead, WIDTH), "up": numbers(*lead, WIDTH, 4 * WIDTH),
        "down": numbers(*lead, 4 * WIDTH, WIDTH), "bias": numbers(*lead, WIDTH),
    }  # fmt: skip


def params_of(loss):
    params = {"embed": numbers(WIDTH, WIDTH), "head": numbers(WIDTH, 4)}
    if loss is unrolled_list:
        params["blocks"] = [block_params() for _ in range(NUM_BLOCKS)]
    if loss in (scanned, two_kinds):
        params["blocks"] = block_params(NUM_BLOCKS)
    if loss not in (scanned, unrolled_list):
        params |= {f"block{number}": block_params() for number in range(NUM_BLOCKS)}
    return params


BATCH = {"x": numbers(32, WIDTH), "y": numbers(32, 4)}


def step_of(loss):
    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def traced(loss):
    return jax.make_jaxpr(step_of(loss))(params_of(loss), BATCH)


def checkpoints(jaxpr):
    return [visit.eqn for visit in walk(jaxpr) if kind_of(visit.eqn) is CallKind.REMAT]


BLOCKS, LISTED, LOOP = map(RepeatedBlock, ("params/block*", "params/blocks/*", "params/blocks"))
# By loss: its blocks, and how many of them stand in it.
FOUND = {
    unrolled: ((BLOCKS,), NUM_BLOCKS),
    inlined: ((BLOCKS,), NUM_BLOCKS),
    unrolled_list: ((LISTED,), NUM_BLOCKS),
    penalised: ((BLOCKS,), NUM_BLOCKS),
    penalised_one_by_one: ((BLOCKS,), NUM_BLOCKS),
    averaged: ((BLOCKS,), NUM_BLOCKS),
    scanned: ((LOOP,), 1),
    two_kinds: ((LOOP, BLOCKS), 1 + NUM_BLOCKS),
}


@pytest.mark.parametrize("loss", FOUND, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("keeps", POLICIES)
def test_the_numbers_stay_and_each_block_is_computed_again(loss, keeps):
    with jax.enable_x64(True):
        before = traced(loss)
        blocks, number = FOUND[loss]
        assert repeated_blocks(before) == blocks and why_not_again(before) == ""
        after = rematerialised(before, (BlockRemat("*", keeps),))
        found = checkpoints(after)
        assert len(found) == number and not checkpoints(before)
        assert {eqn.params["policy"] for eqn in found} == {POLICIES[keeps]}
        leaves = jax.tree.leaves((params_of(loss), BATCH))
        expected = jax.jit(lambda *leaves: _compat.eval_jaxpr(before, (), *leaves))(*leaves)
        given = jax.jit(lambda *leaves: _compat.eval_jaxpr(after, (), *leaves))(*leaves)
        for one, other in zip(given, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-14)
    # What has blocks computed again says itself what it keeps.
    assert repeated_blocks(after) == () and "jax.checkpoint" in why_not_again(after)


@pytest.mark.parametrize("loss", [unrolled, penalised, penalised_one_by_one, averaged], ids=lambda loss: loss.__name__)
def test_blocks_are_cut_where_the_fewest_bytes_live(loss):
    after = rematerialised(traced(loss), (BlockRemat("*", "nothing_saveable"),))
    for eqn in checkpoints(after):
        # One array goes in beside the parameters, and one comes out: the residual stream.
        assert len(eqn.outvars) == 1 and eqn.outvars[0].aval.shape == (32, WIDTH)
        shapes = sorted(atom.aval.shape for atom in eqn.invars)
        assert shapes == sorted([(32, WIDTH), *(array.shape for array in block_params().values())])


def test_products_are_kept_or_not():
    """By the products of a step, forward and backward."""

    def num_products(keeps):
        jaxpr = rematerialised(traced(unrolled), () if keeps is None else (BlockRemat("params/block*", keeps),))
        (eqn,) = (visit.eqn for visit in boundaries(jaxpr))
        types = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
        differentiated = jax.make_jaxpr(lambda *operands: expand(eqn.params, operands))(*types)
        return sum(visit.eqn.primitive.name == "dot_general" for visit in walk(differentiated))

    with_none, with_dots, with_nothing = map(num_products, (None, "dots_saveable", "nothing_saveable"))
    # `up` of each block is needed again for the gradient of `down`; `down` itself makes nothing that is.
    assert with_dots == with_none and with_nothing == with_none + NUM_BLOCKS


def test_what_is_named_is_computed_again_and_nothing_else():
    before = traced(two_kinds)
    asked = (BlockRemat("params/block*", "dots_saveable"),)
    assert resolved(before, asked) == asked and len(checkpoints(rematerialised(before, asked))) == NUM_BLOCKS
    both = (BlockRemat("*", "nothing_saveable"), *asked)
    assert resolved(before, both) == (BlockRemat("params/blocks", "nothing_saveable"), *asked)
    assert rematerialised(before, ()) is before
    with pytest.raises(GradientError, match="no such repeated block") as caught:
        rematerialised(before, (BlockRemat("params/layer*", "dots_saveable"),))
    assert "params/blocks, params/block*" in caught.value.remedy and caught.value.value == "params/layer*"


def test_what_can_be_chosen():
    blocks, _ = FOUND[two_kinds]
    found = choices_of(blocks)
    assert len(found) == len(set(found)) == 8 and () not in found
    assert (BlockRemat("params/block*", "dots_saveable"),) in found
    # Of many kinds all keep alike.
    many = [RepeatedBlock(f"params/stage{number}/block*") for number in range(5)]
    assert [{each.keeps for each in remat} for remat in choices_of(many)] == [{keeps} for keeps in POLICIES]
    assert choices_of(()) == ()


def convolved(params, x):
    return x + jax.nn.relu(jax.lax.conv_general_dilated(x, params["w"], (1,), "SAME"))


def grouped(params, x):
    return x + jax.nn.relu(jax.lax.ragged_dot(x, params["w"], jnp.full(2, 4)))


def scaled(params, x):
    return jnp.sin(x * params["w"])


# By function: the weight of a block, its input, whether it has what `dots_saveable` keeps.
PRODUCTS = {convolved: ((4, 4, 3), (8, 4, 6), True), grouped: ((2, 4, 4), (8, 4), False), scaled: ((4,), (8, 4), False)}


@pytest.mark.parametrize("layer", PRODUCTS, ids=lambda layer: layer.__name__)
def test_products_are_a_choice_where_the_policy_keeps_any(layer, capsys):
    """Against what JAX itself keeps under both policies."""
    weight, examples, has_products = PRODUCTS[layer]

    def loss(params, x):
        return jnp.sum(layer(params["block1"], layer(params["block0"], x)))

    params, x = {f"block{number}": {"w": jnp.ones(weight)} for number in range(2)}, jnp.ones(examples)
    before = jax.make_jaxpr(step_of(loss))(params, x)
    assert repeated_blocks(before) == (RepeatedBlock("params/block*", has_products),)
    assert len(choices_of(repeated_blocks(before))) == (2 if has_products else 1)
    num_kept = []
    for policy in POLICIES.values():
        jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(layer, policy=policy), params["block0"], x)
        num_kept.append(len(capsys.readouterr().out.splitlines()))
    assert (num_kept[0] > num_kept[1] > 0) == has_products
    # Of many kinds all may keep products where one has any.
    many = [RepeatedBlock(f"params/stage{number}/block*", has_products and number == 0) for number in range(5)]
    assert len(choices_of(many)) == (2 if has_products else 1)


def nested(params, batch):
    """Blocks that begin with a scan over layers of their own."""
    x = batch["x"]
    for number in range(2):
        own = params[f"block{number}"]
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, own["inner"])
        x = x @ own["out"]
    return jnp.mean(x**2)


def test_a_loop_within_a_block_is_computed_again_with_it():
    params = {
        f"block{number}": {"inner": numbers(3, WIDTH, WIDTH), "out": numbers(WIDTH, WIDTH)} for number in range(2)
    }
    with jax.enable_x64(True):
        before = jax.make_jaxpr(step_of(nested))(params, BATCH)
        assert repeated_blocks(before) == (BLOCKS,)
        after = rematerialised(before, (BlockRemat("*", "nothing_saveable"),))
        assert len(checkpoints(after)) == 2
        leaves = jax.tree.leaves((params, BATCH))
        given, expected = (jax.jit(lambda *x, j=j: _compat.eval_jaxpr(j, (), *x))(*leaves) for j in (after, before))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14), given, expected)


def shared(params, batch):
    """Two blocks in turns, one of them twice: what is between its uses belongs to another."""
    x = batch["x"]
    for number in (0, 1, 0):
        x = block(params[f"block{number}"], x)
    return jnp.mean(x**2)


def printing(params, batch):
    x = batch["x"]
    for number in range(2):
        x = block(params[f"block{number}"], x)
        jax.debug.print("{}", x.sum())
    return jnp.mean(x**2)


def checkpointed(params, batch):
    x = batch["x"]
    for number in range(2):
        x = jax.checkpoint(block)(params[f"block{number}"], x)
    return jnp.mean(x**2)


def single(params, batch):
    return jnp.mean(block(params["block0"], batch["x"]) ** 2)


def called(params, batch):
    return jax.jit(printing)(params, batch)


IN_TURNS = r"params/block\* are not computed one after the other: their parameters are used in turns with others'"
REFUSED = {
    shared: IN_TURNS,
    printing: r"params/block\* have side effects",
    called: r"params/block\* have side effects",
    checkpointed: "jax.checkpoint says in the step what is kept",
    single: "no blocks that repeat",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_what_has_no_blocks_to_compute_again_says_why(loss):
    params = {f"block{number}": block_params() for number in range(1 if loss is single else 2)}
    before = jax.make_jaxpr(step_of(loss))(params, BATCH)
    assert repeated_blocks(before) == () and re.search(REFUSED[loss], why_not_again(before))
    with pytest.raises(GradientError, match=REFUSED[loss]):
        rematerialised(before, (BlockRemat("*", "dots_saveable"),))


def test_a_gradient_of_jax_itself_has_no_blocks():
    def step(params, batch):
        return jax.grad(unrolled)(params, batch)

    jaxpr = jax.make_jaxpr(step)(params_of(unrolled), BATCH)
    assert not list(boundaries(jaxpr)) and "splitjax.value_and_grad" in why_not_again(jaxpr)


def test_makes_of_blocks():
    array = ((4, 4), "float32")
    params = {
        "params/layer1/w": array, "params/layer2/w": array, "params/layer3/w": ((8, 4), "float32"),
        "params/stage1/conv1/w": array, "params/stage1/conv2/w": array,
        "params/stage2/conv1/w": array, "params/stage2/conv2/w": array, "params/head": array,
    }  # fmt: skip
    found = makes_of(params)
    assert found["params/layer1/w"] == ("params/layer*", "params/layer1") and "params/layer3/w" not in found
    # The outermost that repeats is the block.
    assert found["params/stage1/conv2/w"] == ("params/stage*", "params/stage1") and "params/head" not in found
    assert operand_path("params['block1']['attn'][0].w") == "params/block1/attn/0/w"


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_an_equation_around_others_is_that_of_jax_itself(prevent_cse):
    """In its parameters, and in what it means; it stands at the line of what is in it."""
    policy = POLICIES["nothing_saveable"]
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
    inner, _ = _compat.open_jaxpr(closed)
    checkpointed = jax.checkpoint(lambda x: jnp.sin(x) * 2, policy=policy, prevent_cse=prevent_cse)
    (expected,) = _compat.open_jaxpr(jax.make_jaxpr(checkpointed)(1.0))[0].eqns
    eqn = _compat.checkpoint_equation(
        inner.eqns[0], closed, inner.invars, inner.outvars, policy, prevent_cse=prevent_cse
    )
    differing = {name for name in expected.params if eqn.params[name] != expected.params[name]}
    assert eqn.primitive == expected.primitive and differing <= {"jaxpr"} and kind_of(eqn) is CallKind.REMAT
    assert eqn.source_info is inner.eqns[0].source_info and eqn.ctx is inner.eqns[0].ctx
    around = _compat.build_jaxpr(closed, inner.invars, inner.outvars, [eqn], ())
    value, gradient = jax.value_and_grad(lambda x: _compat.eval_jaxpr(around, (), x)[0])(0.5)
    np.testing.assert_allclose((value, gradient), (2 * np.sin(0.5), 2 * np.cos(0.5)), rtol=1e-6)
