"""`python -m benchmarks curves`: its comparisons fail where they should, its other orders change rounding alone, and a
cell runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.curves import main as curves
from benchmarks.curves import page
from benchmarks.curves.cases import Case
from benchmarks.curves.compare import AHEAD, difference, distance, equality, parts_at, spread, within
from benchmarks.curves.reorder import draw_orders, reorderable
from splitjax import data, models


def noisy(seed, scale, num_steps=200):
    """A falling loss with noise that grows to `scale`, as that of two runs that round differently."""
    steps = np.arange(num_steps)
    noise = np.random.default_rng(seed).normal(size=num_steps) * scale * np.minimum(1, np.exp((steps - 100) / 10))
    return 3 * np.exp(-steps / 60) + noise


CONTROLS = np.stack([noisy(seed, 1e-3) for seed in range(9)])


def test_differences_are_absolute_below_one_and_relative_above():
    assert difference([0.5, 1e-12], [0.5 + 1e-9, 0]) == pytest.approx(1e-9)
    assert difference([200.0], [100.0]) == 1.0
    assert difference([np.nan], [0.0]) == difference([0.0], [np.inf]) == float("inf")


def test_equality_looks_at_every_step_and_every_array():
    losses, arrays = np.linspace(3, 1, 200), {"a": np.ones((4, 4)), "b": np.zeros(3)}
    assert equality(losses, arrays, losses, arrays).within(0.0)
    moved = losses.copy()
    moved[137] += 4e-9
    assert not equality(moved, arrays, losses, arrays).within(1e-9)
    assert equality(moved, arrays, losses, arrays).within(1e-8)
    wrong = {**arrays, "b": np.array([0, 0, 2e-9])}
    compared = equality(losses, wrong, losses, arrays)
    assert compared.worst == "b" and not compared.within(1e-9)
    with pytest.raises(ValueError, match=r"\['b'\]"):
        equality(losses, {"a": arrays["a"]}, losses, arrays)
    with pytest.raises(ValueError, match="losses"):
        equality(losses[:-1], arrays, losses, arrays)


@pytest.mark.parametrize("seed", range(20, 40))
def test_a_run_like_the_others_is_within_their_spread(seed):
    assert within(noisy(seed, 1e-3), CONTROLS).ok


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda losses: losses * 1.01, 0),  # as large as the spread comes to be, but from the start
        (lambda losses: losses + np.where(np.arange(200) == 60, 0.02, 0), 60),  # one step
        (lambda losses: np.where(np.arange(200) < 150, losses, np.nan), 150),
        (lambda losses: losses + np.where(np.arange(200) >= 30, 1e-2, 0), 30),  # later ones would hide it
    ],
)
def test_a_run_that_leaves_the_spread_is_told_with_its_step(change, first):
    outcome = within(change(noisy(20, 1e-3)), CONTROLS)
    assert not outcome.ok and outcome.first_outside == first and outcome.ratio > 1


def test_the_spread_looks_back_and_a_few_steps_ahead():
    controls = np.ones((3, 100))
    controls[1, 50] = 1.5
    apart = spread(controls)
    assert (apart[50 - AHEAD :] == 0.5).all() and (apart[: 50 - AHEAD] < 1e-6).all() and (apart > 0).all()
    assert parts_at(controls) == 50 and parts_at(controls[::2]) == 100
    np.testing.assert_allclose(distance(np.array([1.0, 1.4, 3.0]), controls[:2, 49:52]), [0.0, 0.1, 2.0])


def test_other_orders_change_rounding_alone():
    """Of products, convolutions, plain sums and loops; the same terms are added, and in the order that is asked for."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, 8, 8, 5), (3, 3, 5, 7), (7, 64), (64, 64))
    ]
    arrays[-1] = arrays[-1] / 16

    def step(x, kernel, weight, recurrent):
        def loss(kernel, weight):
            y = jax.nn.relu(
                jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
            y = y.mean((1, 2)) @ weight
            y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ recurrent), None), y, length=3)
            return jnp.sum(y**2)

        value, grads = jax.value_and_grad(loss, (0, 1))(kernel, weight)
        return {"loss": value, "grads": grads}

    reordered, lengths = reorderable(step, *arrays)
    assert set(lengths) >= {5, 6, 7, 8, 64}  # channels, examples, features, pixels, the recurrent state
    want = jax.jit(step)(*arrays)
    found = [jax.jit(reordered)(draw_orders(lengths, seed), *arrays) for seed in range(3)]
    for got in found:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)
    first = [np.asarray(jax.tree.leaves(got["grads"])[0]) for got in (want, *found)]
    assert len({values.tobytes() for values in first}) == 4
    # An order that is none adds other terms.
    twice = {length: np.zeros(length, np.int32) for length in lengths}
    assert abs(jax.jit(reordered)(twice, *arrays)["loss"] - want["loss"]) > 1e-2


def test_a_cell_end_to_end(tmp_path, capsys, monkeypatch):
    def tiny(dtype):
        options = {"features": (32,), "input_shape": (8, 8, 1), "dropout": 0.1}
        return models.build("mlp", dtype=dtype.compute, param_dtype=dtype.params, **options)

    case = Case(
        "demo",
        "an MLP",
        tiny,
        lambda num_steps: optax.sgd(0.1),
        lambda folder: data.load_digits(image_size=None, channels=1),
    )
    monkeypatch.setattr(curves, "CASES", (case,))
    curves.main(
        ["--quick", "--rules", "fsdp", "--dtypes", "float64", "bf16", "--steps", "4", "--output", str(tmp_path)]
    )
    printed = capsys.readouterr().out
    assert "pass demo/float64" in printed
    assert "demo/bf16" in printed and "of the spread at step" in printed
    assert not list(tmp_path.iterdir())  # what is only a part of a run is printed


def _results():
    """What a run of one model would keep, with a rule set that misses in each dtype."""
    curve = noisy(20, 1e-3)
    runs = {"splitbrain": curve, "megatron": curve * 1.01}
    narrow = {
        "seed": 0, "one_device": CONTROLS.tolist(), "wrong": (curve * 1.01).tolist(),
        "runs": {
            rules: {"losses": losses.tolist(), "num_sharded": 3, "seconds": 1.0} for rules, losses in runs.items()
        },
    }  # fmt: skip
    exact = {
        "seed": 1, "first": 3.0, "last": 1.0, "tolerance": 1e-9,
        "control": {"loss": 1e-15, "state": 2e-15, "worst": "a"},
        "runs": {
            rules: {"loss": loss, "state": 1e-14, "worst": "a", "num_sharded": 3, "seconds": 1.0}
            for rules, loss in (("splitbrain", 3e-15), ("megatron", 2e-9))
        },
    }  # fmt: skip
    return {"lstm/float64": exact, "lstm/float32": narrow, "lstm/bf16": narrow}


def test_the_page_counts_what_misses_and_draws_every_model():
    results = json.loads(json.dumps(_results()))
    met = page.goals(results)
    assert [name for name, ok in met.items() if not ok] == [
        "lstm/float64/megatron",
        "lstm/float32/megatron",
        "lstm/bf16/megatron",
    ]
    text = "\n".join(page.page("- header", results))
    assert "**3 of 6 runs have the numbers of one device.**" in text
    assert "**2e-09**" in text and "## What misses" in text and "lstm (seed 1)" in text
    assert "The worst case is lstm/float32 under megatron: at step 0" in text
    pictures = page.pictures(results)
    assert list(pictures) == ["lstm"] and "curves-lstm.svg" in text
    assert "float32" in pictures["lstm"] and "bf16" in pictures["lstm"] and "megatron" in pictures["lstm"]
    assert pictures == page.pictures(results)


def test_the_page_shows_other_seeds_and_one_device_held_out():
    result = {
        "seed": 0,
        "one_device": CONTROLS.tolist(),
        "wrong": (CONTROLS[0] * 1.1).tolist(),
        "runs": {"fsdp": {"losses": noisy(20, 1e-3).tolist(), "num_sharded": 1, "seconds": 1.0}},
    }
    assert page.held_out(result) == pytest.approx(
        max(within(CONTROLS[k], np.delete(CONTROLS, k, 0)).ratio for k in range(9))
    )
    far = {**result, "one_device": [*CONTROLS[:8].tolist(), (CONTROLS[8] + 1).tolist()]}
    assert page.held_out(far) > 100
    text = "\n".join(
        page.page("- header", {"resnet/bf16": result}, {"resnet/bf16": {"3": {"fsdp": 0.32, "megatron": 1.2}}})
    )
    assert "1 of 2 runs are within" in text and "| resnet/bf16 | 3 | 0.32 | 1.20 |" in text
    assert "Other seeds" not in "\n".join(page.page("- header", {"resnet/bf16": result}))


def test_only_whole_runs_of_other_seeds_are_kept(capsys):
    for arguments in (
        ["--keep"],
        ["--keep", "--seed", "1", "--steps", "3"],
        ["--keep", "--seed", "1", "--dtypes", "float64"],
    ):
        with pytest.raises(SystemExit):
            curves.main(["--data-dir", "nowhere", *arguments])
        assert "--keep" in capsys.readouterr().err
