"""`splitjax profile`: what it prints, and the files it writes."""

from __future__ import annotations

import json

import pytest

from splitjax.schedule import read_profiles
from splitjax.sync.analysis import Profile

SMALL = "profile --model mlp --features 16 --data digits --batch-size 32"


def test_profile_of_a_model_on_real_images(run, tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    status, out, _ = run(f"{SMALL} --num-workers 16 --batches 1 --json p.json --html p.html --plot p.svg")
    assert status == 0
    for part in (
        "mlp, ",
        "16 workers, 1 step of 32 examples",
        "params/dense1/kernel",
        "sum of 16",
        "profile: p.json",
        "page: p.html",
        "plot: p.svg",
    ):
        assert part in out
    profile = Profile.load(tmp_path / "p.json")
    assert 0 < profile.tensor("params/dense1/kernel").density < 1  # black pixels, and units that are off
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>") and (
        tmp_path / "p.svg"
    ).stat().st_size > 1000


def test_profile_of_a_job_that_is_simulated(run, tmp_path):
    pytest.importorskip("sklearn")
    status, out, _ = run(
        f"{SMALL} --job --num-workers 4 --bandwidth 1gbit --latency-seconds 0.001 --optimizer sgd --name mine --stages"
        " --json p.json"
    )
    assert status == 0
    for part in ("mine: one iteration of a worker", "params/dense1", "100.0 %", "of 4 workers", "profile: p.json"):
        assert part in out
    profile = read_profiles(tmp_path / "p.json")["mine"]
    sent = 2 * 3 / 4 * profile.depths[0].gradient_bytes
    assert (
        profile.exposed_seconds == pytest.approx(8 * sent / 1e9 + 6e-3)
        and profile.stages.cpu_seconds > 0
        and len(profile.depths) == 2
    )
    (tmp_path / "j.csv").write_text(
        "name,arrival_seconds,num_workers,num_iterations,profile\na,0,4,500,mine\nb,0,2,500,mine\n"
    )
    status, out, _ = run(
        "simulate --trace j.csv --profiles p.json --cluster 1x4 --policy gang-fifo,jigsaw-fifo --json o.json"
    )
    assert status == 0 and "2 jobs on 1x4" in out
    found = json.loads((tmp_path / "o.json").read_text())
    assert (
        found["profiles"] == "p.json" and found["policies"]["gang-fifo"]["makespan"] > 500 * profile.iteration_seconds
    )


@pytest.mark.parametrize(
    "more",
    ["--num-workers 4 --batches 1", pytest.param("--job --num-workers 2 --batches 1", marks=pytest.mark.slow)],
)
def test_profile_of_a_sampled_softmax(run, tmp_path, more):
    # Its training batches bring drawn words, which the data set alone does not have.
    (tmp_path / "corpus.txt").write_text(
        "\n".join(" ".join(f"word{(7 * line + 3 * place) % 300}" for place in range(9)) for line in range(200))
    )
    status, out, err = run(
        "profile --model lstm --embedding-width 4 --hidden-width 8 --negatives 4 --data text --data-dir corpus.txt"
        " --seq-len 8 --batch-size 8 --json p.json " + more
    )
    assert status == 0, err
    assert "profile: p.json" in out
    if "--job" in more:
        assert read_profiles(tmp_path / "p.json")["lstm"].iteration_seconds > 0
    else:
        words = Profile.load(tmp_path / "p.json").tensor("params/softmax/embedding")
        assert 0 < words.density < 1  # labels and drawn words, not all of the vocabulary


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{SMALL} --job --html p.html", "a job's profile is a table and JSON"),
        (f"{SMALL} --bandwidth 1gbit", "--bandwidth belongs to a job's profile"),
        (f"{SMALL} --job --latency-seconds 1", "give --bandwidth too"),
        (f"{SMALL} --num-workers 5", "does not divide among 5 workers"),
        (f"{SMALL} --batches 0", "--batches must be above 0"),
        (f"{SMALL} --batch-size 9999", "do not fill one batch"),
    ],
)
def test_mistakes_are_short_and_exit_with_2(run, line, said):
    pytest.importorskip("sklearn")
    status, _, err = run(line)
    assert status == 2 and err.startswith("error: ") and said in err and "remedy: " in err and "Traceback" not in err
