"""`splitjax profile`: what it prints, and the files it writes."""

from __future__ import annotations

import pytest

from splitjax.sync.analysis import Profile

SMALL = "profile --model mlp --features 16 --data digits --batch-size 32"


def test_profile_of_a_model_on_real_images(run, tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    status, out, _ = run(f"{SMALL} --num-workers 16 --batches 1 --json p.json --html p.html --plot p.svg")
    assert status == 0
    for part in ("mlp, ", "16 workers, 1 step of 32 examples", "params/dense1/kernel", "sum of 16", "profile: p.json", "page: p.html", "plot: p.svg"):
        assert part in out
    profile = Profile.load(tmp_path / "p.json")
    assert 0 < profile.tensor("params/dense1/kernel").density < 1  # black pixels, and units that are off
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>") and (tmp_path / "p.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("line", "said"),
    [(f"{SMALL} --num-workers 5", "does not divide among 5 workers"), (f"{SMALL} --batches 0", "--batches must be above 0"),
     (f"{SMALL} --batch-size 9999", "do not fill one batch")],
)  # fmt: skip
def test_mistakes_are_short_and_exit_with_2(run, line, said):
    pytest.importorskip("sklearn")
    status, _, err = run(line)
    assert status == 2 and err.startswith("error: ") and said in err and "remedy: " in err and "Traceback" not in err
