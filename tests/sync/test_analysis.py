"""Profiles as values: counts on packed masks, JSON, and what is shown of them."""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np
import pytest

from splitjax.errors import ProfileError
from splitjax.sync import masks
from splitjax.sync.analysis import Profile, StepMasks, Tensor, analyse_step, collect


def profile_of(num_workers=4, steps=2, blocks=3):
    random = np.random.default_rng(0)
    tensors = [Tensor("params/[table]<b>", (13, 2), "float32", "loss at f.py:1", True, "it is tied", 4)]
    tensors += [
        Tensor(f"params/block_{i}/kernel", (3, 3), "bfloat16", "loss at f.py:1", False, "", 2) for i in range(blocks)
    ]
    found = []
    for tensor in tensors:
        made = []
        for _ in range(steps):
            dense = [random.random(tensor.num_units) < (0.4 if tensor.is_table else 2.0) for _ in range(num_workers)]
            numbers = tuple(int(one.sum()) * (2 if tensor.is_table else 1) for one in dense)
            made.append(analyse_step(tensor, StepMasks(tuple(masks.pack(one) for one in dense), numbers)))
        found.append(collect(tensor, made))
    return Profile("train_step", num_workers, (8,) * steps, tuple(found), ("measured by hand",))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1000])
@pytest.mark.parametrize("num_ranges", [1, 3, 8])
def test_counts_on_masks(size, num_ranges):
    dense = np.random.default_rng(size).random((num_ranges, size)) < 0.3
    packed = masks.pack(dense)
    assert [masks.count(mask) for mask in packed] == list(dense.sum(axis=1))
    assert np.array_equal(masks.units_of(packed[0]), np.flatnonzero(dense[0]))
    assert np.array_equal(masks.full(size), masks.pack(np.ones(size, bool)))
    width = -(-size // num_ranges)
    for unit, mask in zip(dense, packed, strict=True):
        most = max(unit[i * width : (i + 1) * width].sum() for i in range(num_ranges))
        assert masks.skewness(mask, size, num_ranges) == (
            pytest.approx(most * num_ranges / unit.sum()) if unit.any() else None
        )


def test_groups_of_workers_that_are_no_power_of_two():
    dense = np.eye(6, 10, dtype=bool)
    assert masks.union_counts(masks.pack(dense)) == ((1, 1.0), (2, 2.0), (4, 4.0), (6, 6.0))
    assert masks.mean_overlap(masks.overlaps(masks.pack(dense[:1]))) is None
    assert masks.mean_overlap(masks.overlaps(masks.pack(dense))) == 0.0


def test_json_is_read_back_and_saved_whole(tmp_path):
    profile = profile_of()
    assert Profile.from_json(profile.to_json()) == profile
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    data = json.loads(profile.to_json())
    assert data["tensors"][0]["means"]["row_density"] == profile.tables[0].row_density
    for text in ("{}", "[]", "no", profile.to_json().replace('"format": 1', '"format": 9')):
        with pytest.raises(ProfileError, match="not the JSON of a profile"):
            Profile.from_json(text)
    with pytest.raises(ProfileError, match="cannot be written"):
        profile.save(tmp_path / "absent" / "profile.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        Profile.load(tmp_path / "absent.json")


@pytest.mark.parametrize("numbers", [[1, 2, 2, 4], [1, 4, 2], [1, 2, 3, 4], [0, 1, 2, 4]], ids=str)
def test_sums_are_of_the_numbers_of_workers_that_profiling_groups(numbers):
    """Each is a column: a profile of a few kilobytes with thousands of them was megabytes of text."""
    data = json.loads(profile_of().to_json())
    for tensor in data["tensors"]:
        for step in tensor["steps"]:
            step["unions"] = [[number, 1.0] for number in numbers]
    with pytest.raises(ProfileError, match="rising numbers|of 1 among them"):
        Profile.from_json(json.dumps(data))


def test_unknown_names_and_numbers_are_errors():
    profile = profile_of()
    with pytest.raises(ProfileError, match=r"no such tensor(.|\n)*block_0"):
        profile.tensor("params/block")
    with pytest.raises(ProfileError, match="1, 2, 4"):
        profile.tensors[0].densification(3)


def test_text_shows_every_tensor_and_folds_equal_blocks():
    profile = profile_of()
    text = str(profile)
    table = profile.tables[0]
    assert (
        "4 workers, 2 steps of 8 examples" in text
        and "3 x params/block_*/kernel" in text
        and "it is tied" in text
        and "measured by hand" in text
    )
    line = next(line for line in text.splitlines() if line.startswith("params/[table]<b>"))
    assert (
        f"{100 * table.density:.3g} %" in line
        and f"{table.overlap:.3g}" in line
        and line.endswith(f"{table.densification(4):.3g}")
    )
    assert "sum of 2" in text and repr(profile).startswith("<Profile of train_step: 4 gradients, 1 of tables")
    assert "20 tensors without zeros" in str(profile_of(blocks=20))
    assert "overlap" in str(dataclasses.replace(profile, tensors=()))  # a step without gradients to show prints


def test_html_escapes_names_and_draws_overlaps():
    html = profile_of()._repr_html_()
    assert "params/[table]&lt;b&gt;" in html and "<b>" not in html
    assert html.count('title="workers ') == 16


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    figure = profile_of().plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes()[:4] == b"\x89PNG"
    titles = [axes.get_title() for axes in figure.axes]
    assert "densification" in titles and "skewness" in titles and any("overlap" in title for title in titles)
    for profile in (profile_of(num_workers=1), profile_of(num_workers=16, steps=1, blocks=20)):
        profile.plot().canvas.draw()
    for path in (tmp_path / "absent" / "profile.png", tmp_path / "profile.abc"):
        with pytest.raises(ProfileError, match="cannot be written"):
            profile_of().plot(path)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ProfileError, match=r"pip install 'splitjax\[demo\]'"):
        profile_of().plot()
