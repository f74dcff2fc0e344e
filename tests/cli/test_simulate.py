"""`splitjax simulate`: what it prints, and the files it writes."""

from __future__ import annotations

import json

import pytest

ROWS = "".join(
    f"2017-10-09 06:{minute:02}:03,{60 + 7 * minute},{1 + minute % 4},1,{'ab'[minute % 2]}\n" for minute in range(50)
)
PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n" + ROWS


@pytest.fixture
def trace(tmp_path):
    (tmp_path / "t.csv").write_text(PHILLY)
    return "simulate --trace t.csv --cluster 2x2"


def test_policies_side_by_side(run, trace, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, _ = run(f"{trace} --policy gang-srtf,gang-las --load 1.5 --seed 3 --json o.json --plot o.png")
    assert status == 0
    for part in (
        "50 jobs on 2x2 = 4 devices, load 1.50",
        "avg JCT",
        "gang-srtf",
        "gang-las",
        "relative to",
        "figures: o.json",
        "plot: o.png",
    ):
        assert part in out
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["load"] == pytest.approx(1.5) and list(found["policies"]) == ["gang-srtf", "gang-las"]
    figures = found["policies"]["gang-las"]
    assert {"avg_jct", "p99_jct", "makespan", "busy", "iteration_efficiency", "cost_efficiency", "bound"} <= set(
        figures
    ) and figures["bound"] > 1
    assert (tmp_path / "o.png").stat().st_size > 5000
    before = (tmp_path / "o.json").read_text()
    run(f"{trace} --policy gang-srtf,gang-las --load 1.5 --seed 3 --json o.json")
    assert (tmp_path / "o.json").read_text() == before


def test_links_take_time(run, tmp_path):
    profile = {
        "name": "wide",
        "forward_seconds": 0.1,
        "depths": [{"fraction": 1.0, "backward_seconds": 0.2, "gradient_bytes": 10**9}],
    }
    (tmp_path / "p.json").write_text(json.dumps([profile]))
    (tmp_path / "j.csv").write_text("name,arrival_seconds,num_workers,num_iterations,profile\nj,0,4,100,wide\n")
    times = []
    for options in ("", "--network-bandwidth 8gbit", "--node-bandwidth 8gbit"):
        assert (
            run(
                "simulate --trace j.csv --profiles p.json --cluster 2x2 --policy gang-fifo --restart-seconds 0 --json"
                f" o.json {options}"
            )[0]
            == 0
        )
        times.append(json.loads((tmp_path / "o.json").read_text())["policies"]["gang-fifo"]["makespan"])
    assert times == pytest.approx([30.0, 180.0, 30.0])  # 1.5 GB an iteration from each worker, between nodes


def test_the_traces_own_arrivals_and_a_part_of_it(run, trace, tmp_path):
    (tmp_path / "t.csv").write_text(PHILLY + "broken\n2017-10-09 06:59:00,60,64,1,a\n")
    status, out, _ = run(f"{trace} --skip-malformed --tags a --min-workers 2")
    assert (
        status == 0
        and "skipped 1 malformed row; the first, line 52: 1 cells under 5 columns" in out
        and "left out 1 jobs" in out
        and "12 jobs" in out
    )


def test_the_list_names_papers(run):
    status, out, _ = run("simulate --list")
    assert status == 0 and "gang-themis" in out and "NSDI'20" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--policy gang-srft", "did you mean 'gang-srtf'"),
        ("--policy ,", "no policy is named"),
        ("--cluster 2", "nodes x devices"),
        ("--load -1", "--load must be above 0"),
        ("--jobs 5", "takes a load"),
        ("--network-bandwidth fast", "fast"),
        ("--tags nobody", "no job of the trace is left"),
        ("--trace absent.csv", "cannot be read"),
        ("--restart-seconds -1", "times are finite"),
    ],
)
def test_mistakes_are_short_and_exit_with_2(run, trace, options, said):
    status, _, err = run(f"{trace} {options}")
    assert status == 2 and err.startswith("error: ") and said in err and "Traceback" not in err


def test_without_a_trace(run):
    status, _, err = run("simulate")
    assert status == 2 and "there is nothing to simulate" in err
