"""The picture of a plan: it is well-formed, its bars have the plan's proportions, and names cannot break it."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.report.plan.picture import plan_svg

SVG = "{http://www.w3.org/2000/svg}"


def step(state, batch):
    def loss_fn(params):
        hidden = jnp.tanh(batch @ params["first"]["kernel"])
        return (hidden @ params["second"]["kernel"]).mean()

    loss, grads = splitjax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


@pytest.fixture(scope="module")
def plan():
    state = {
        "first": {"kernel": jax.ShapeDtypeStruct((16, 64), jnp.float32)},
        "second": {"kernel": jax.ShapeDtypeStruct((64, 8), jnp.float32)},
    }
    parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron")
    return parallel.plan(state, jax.ShapeDtypeStruct((8, 16), jnp.float32))


def rows_of(svg):
    """By the y of a row: its texts, and the widths of its bars by class."""
    rows = {}
    for item in ET.fromstring(svg):
        if item.tag == f"{SVG}text":
            rows.setdefault(int(item.get("y")) - 15, ([], {}))[0].append(item.text)
        elif item.tag == f"{SVG}rect" and item.get("height") == "13":
            rows.setdefault(int(item.get("y")) - 4, ([], {}))[1][item.get("class")] = float(item.get("width"))
    return {tuple(texts): bars for texts, bars in rows.values() if len(texts) == 2}


def test_bars_have_the_proportions_of_the_plan(plan):
    rows = {texts[0]: (texts[1], bars) for texts, bars in rows_of(plan_svg(plan)).items()}
    first, second = rows["first"], rows["second"]
    assert first[0] == "1.0 KiB of 4.0 KiB" and second[0] == "512 B of 2.0 KiB"
    assert first[1]["split"] / first[1]["away"] == pytest.approx(1 / 4)
    assert second[1]["away"] / first[1]["away"] == pytest.approx(1 / 2)
    assert "whole" not in first[1]
    held = rows["state of each device"]
    assert held[0] == "1.5 KiB, 75.0 % saved"
    assert held[1]["split"] / rows["state on one device"][1]["whole"] == pytest.approx(1 / 4)


def test_a_layer_that_stays_whole_is_drawn_whole():
    state = {
        "first": {"kernel": jax.ShapeDtypeStruct((16, 64), jnp.float32)},
        "second": {"kernel": jax.ShapeDtypeStruct((64, 8), jnp.float32)},
    }
    parallel = splitjax.parallelize(step, mesh={"data": 8}, rules="data_parallel")
    rows = {t[0]: (t[1], bars) for t, bars in rows_of(plan_svg(parallel.plan(state, jnp.zeros((8, 16))))).items()}
    assert rows["first"][0] == "4.0 KiB"
    assert rows["first"][1]["whole"] == rows["first"][1]["away"] and "split" not in rows["first"][1]
    assert rows["state of each device"][0] == "6.0 KiB"


def test_names_cannot_break_it(plan):
    evil = "<script>&\"'" + "x" * 60
    layers = tuple(dataclasses.replace(layer, name=evil + str(i)) for i, layer in enumerate(plan.layers))
    svg = plan_svg(dataclasses.replace(plan, layers=layers, rules="<b>&"))
    assert "<script>" not in svg and "<b>" not in svg
    assert "rules <b>&" in ET.fromstring(svg).get("aria-label")
    assert plan_svg(dataclasses.replace(plan, layers=(), leaves=())).count("<svg") == 1


def test_words_are_seen_on_any_page(plan):
    """A reader's system may be dark where the page is white: the picture brings its own page."""
    svg = plan_svg(plan)
    assert svg.count(".page{fill:") == 2 and svg.index('class="page"') < svg.index("<text")
