"""The page on data: its example runs as it stands."""

import pathlib
import re

import numpy as np
import pytest

from splitjax import data

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "data.md"


def test_the_example_runs_and_resumes_at_the_sixth_batch():
    pytest.importorskip("sklearn")
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    scope: dict = {}
    exec(example, scope)
    assert scope["position"] == data.Position(0, 6)
    sixth = list(data.load_digits().train_stream(64, seed=0, num_epochs=1, augment=True))[5][1]
    np.testing.assert_array_equal(scope["batch"]["image"], sixth["image"])


def test_what_the_page_names_exists():
    named = set(re.findall(r"`(?:data\.)?((?:load|fetch|stream|prefetch|epoch|padded)_?\w*)\(?", PAGE.read_text()))
    assert {"load_cifar10", "load_idx", "load_text", "load_digits", "prefetch"} <= named
    assert not {name for name in named if not hasattr(data, name)}


def test_the_example_of_grain_goes_on_at_the_second_batch():
    grain = pytest.importorskip("grain")
    first, second = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "grain" in block
    ]
    scope: dict = {}
    exec(first, scope)
    order = grain.MapDataset.source(np.arange(1000)).shuffle(seed=0).repeat()
    np.testing.assert_array_equal(scope["batch"], [order[k] for k in range(64, 128)])
    exec(second, scope)
    np.testing.assert_array_equal(next(iter(scope["loader"])), [order[k] for k in range(32)])
