"""Trace files: what is read, and what is said of what cannot be read."""

from __future__ import annotations

import gzip

import pytest

from splitjax.errors import ScheduleError, TraceFileError
from splitjax.schedule import (
    Cluster,
    JobProfile,
    Stages,
    generate,
    offered_load,
    read_muri,
    read_philly,
    read_trace,
    rescale,
)

PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 06:13:33,100.0,4,400.0,b
2017-10-09 06:13:03,2951.0,1,2951.0,a
2017-10-09 06:14:03,0.1,16,1.6,a
"""
MURI = """job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,resource_time_0,resource_time_1,resource_time_2,priority
0,8,0,10956,gpt2,4,5095000,91000,437,0.6,419,49,0
1,8,1534000,1463,vgg16,16,281000,28000,214,82,75,66,1
2,2,1535000,7,vgg16,16,281000,28000,214,82,75,66,1
"""  # noqa: E501


@pytest.fixture
def write(tmp_path):
    def put(text, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return put


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_philly(write, name):
    trace = read_trace(write(PHILLY, name))
    assert [(job.arrival_seconds, job.num_workers, job.num_iterations, job.tag) for job in trace.jobs] == [
        (0, 1, 5902, "a"),
        (30, 4, 200, "b"),
        (60, 16, 1, "a"),
    ]
    assert trace.skipped == () and trace.jobs[1].exclusive_seconds == pytest.approx(100)
    assert [job.num_workers for job in trace.only(tags=["a"], min_workers=2).jobs] == [16]
    assert [job.num_workers for job in trace.only(max_workers=4).jobs] == [1, 4]
    own = read_philly(
        write(PHILLY, name), profile=lambda num_workers: JobProfile.uniform(str(num_workers), 0.1 * num_workers)
    ).jobs
    assert own[1].profile.name == "4" and own[1].num_iterations == 250


def test_muri(write):
    jobs = read_trace(write(MURI)).jobs
    first = jobs[0]
    assert (first.num_workers, first.num_iterations, first.tag) == (8, 10956, "gpt2")
    assert first.exclusive_seconds == pytest.approx(10956 * 0.437)  # not the column `duration`
    assert first.profile.stages == Stages(0.0, 0.0006, 0.419, 0.049) and first.profile.task_seconds(0) == pytest.approx(
        0.419
    )
    assert jobs[1].profile is jobs[2].profile and jobs[1].arrival_seconds == 1534
    plain = read_muri(write(MURI), stages=False, exposed_fraction=0.15).jobs[0].profile
    assert plain.stages is None and plain.task_seconds(0) == pytest.approx(0.85 * 0.437)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("2017-10-09 06:13:03,-1,1,0,a", "a duration of '-1'"),
        ("2017-10-09 06:13:03,5,0,0,a", "0 GPUs"),
        ("2017-10-09 06:13:03,5,1.5,0,a", "no number of num_gpus"),
        ("yesterday,5,1,0,a", "Invalid isoformat"),
        ("2017-10-09 06:13:03,5,1", "3 cells under 5 columns"),
        ("2017-10-09 06:13:03,nan,1,0,a", "a duration of 'nan'"),
    ],
)
def test_malformed_rows_are_told_with_their_line_and_skipped_only_if_asked(write, row, said):
    path = write(PHILLY + "\n" + row + "\n" + "2017-10-09 07:00:00,5,1,5,a\n")
    with pytest.raises(TraceFileError, match=f"a malformed row: .*{said}") as caught:
        read_trace(path)
    assert caught.value.place == f"{path}:6" and "skip" in caught.value.remedy and caught.value.value == row
    trace = read_trace(path, skip_malformed=True)
    assert len(trace.jobs) == 4 and [line for line, _ in trace.skipped] == [6] and said in trace.skipped[0][1]


@pytest.mark.parametrize(
    "row",
    [
        "x,8,0,10,m,4,1,1,437,1,1,1",
        "3,8,0,10,m,4,1,1,0,1,1,1,0",
        "3,8,-5,10,m,4,1,1,437,1,1,1,0",
        "3,8,0,0,m,4,1,1,437,1,1,1,0",
        "3,8,0,9,m,4,1,1,inf,1,1,1,0",
    ],
)
def test_malformed_rows_of_muri(write, row):
    with pytest.raises(TraceFileError, match="a malformed row") as caught:
        read_muri(write(MURI + row + "\n"))
    assert caught.value.place.endswith(":5")


def test_files_that_are_no_traces(write, tmp_path):
    with pytest.raises(TraceFileError, match="kind that is not known"):
        read_trace(write("a,b\n1,2\n"))
    with pytest.raises(TraceFileError, match="kind that is not known"):
        read_trace(write(""))
    with pytest.raises(TraceFileError, match="columns are missing"):
        read_muri(write(PHILLY))
    with pytest.raises(TraceFileError, match="cannot be read: No such file"):
        read_trace(tmp_path / "absent.csv")
    damaged = tmp_path / "cut.csv.gz"
    damaged.write_bytes(gzip.compress(PHILLY.encode())[:-12])
    with pytest.raises(TraceFileError, match="cut short"):
        read_trace(damaged)
    with pytest.raises(TraceFileError, match="is no text"):
        read_trace(write("") if not (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00") else tmp_path / "b.csv")


def test_profiles_for_the_jobs_of_a_trace(write):
    profiles = {"gpt2": JobProfile.uniform("gpt2", 0.1), "vgg16": JobProfile.uniform("vgg16", 0.2)}
    # in turn, by row
    assert [job.profile.name for job in read_trace(write(PHILLY), profiles=profiles).jobs] == ["vgg16", "gpt2", "gpt2"]
    philly = read_trace(write(PHILLY), profiles=profiles).jobs
    assert philly[0].num_iterations == round(2951 / 0.2) and philly[1].num_iterations == 1000
    muri = read_trace(write(MURI), profiles=profiles).jobs
    assert [job.profile for job in muri] == [profiles["gpt2"], profiles["vgg16"], profiles["vgg16"]] and muri[
        0
    ].num_iterations == 10956
    with pytest.raises(TraceFileError, match="no profile 'vgg16'; there are 'gpt2'"):
        read_trace(write(MURI), profiles={"gpt2": profiles["gpt2"]})
    with pytest.raises(TraceFileError, match="no profile to give"):
        read_trace(write(MURI), profiles={})


def test_jobs_of_ones_own(write):
    profiles = {"gpt2": JobProfile.uniform("gpt2", 0.1)}
    own = "name,arrival_seconds,num_workers,num_iterations,profile,tag\nb,7.5,2,30,gpt2,x\na,3,1,40,gpt2,\n"
    first, second = read_trace(write(own), profiles=profiles).jobs
    assert (first.name, first.arrival_seconds, first.num_workers, first.num_iterations, first.profile) == (
        "a",
        3,
        1,
        40,
        profiles["gpt2"],
    )
    assert second.tag == "x" and second.arrival_seconds == 7.5
    with pytest.raises(TraceFileError, match="none are given") as caught:
        read_trace(write(own))
    assert "--profiles" in caught.value.remedy
    for row, said in (
        ("a,1,1,1,gpt2,", "a second job 'a'"),
        ("c,1,1,1,bert,", "no profile 'bert'"),
        ("c,1,0,1,gpt2,", "a worker and an iteration"),
        ("c,x,1,1,gpt2,", "could not convert"),
    ):
        with pytest.raises(TraceFileError, match=said) as caught:
            read_trace(write(own + row + "\n"), profiles=profiles)
        assert caught.value.place.endswith(":4")
        assert len(read_trace(write(own + row + "\n"), profiles=profiles, skip_malformed=True).skipped) == 1


def test_drawn_jobs_ask_for_the_load_and_depend_on_the_seed_alone(write):
    sizes, cluster = read_trace(write(PHILLY)).jobs * 20, Cluster(1, 4)  # the job of 16 workers does not fit
    jobs = generate(sizes, cluster, load=1.5, seed=0)
    assert len(jobs) == 40 and offered_load(jobs, cluster) == pytest.approx(1.5) and jobs[0].arrival_seconds == 0
    assert jobs == generate(sizes, cluster, load=1.5, seed=0) != generate(sizes, cluster, load=1.5, seed=1)
    assert sorted(job.num_workers for job in jobs) == [1] * 20 + [4] * 20 and len({job.name for job in jobs}) == 40
    many = generate(sizes, cluster, load=0.7, seed=0, num_jobs=4000)
    assert len(many) == 4000 and offered_load(many, cluster) == pytest.approx(0.7)
    gaps = [later.arrival_seconds - job.arrival_seconds for job, later in zip(many, many[1:])]
    mean = sum(gaps) / len(gaps)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # exponential: exp(-1)
    stretched = rescale(sizes[:2], cluster, load=3.0)
    assert offered_load(stretched, cluster) == pytest.approx(3.0)
    for wrong in ({"load": 0.0}, {"load": 1.0, "num_jobs": 0}):
        with pytest.raises(ScheduleError, match="a load above 0"):
            generate(sizes, cluster, seed=0, **wrong)
    with pytest.raises(ScheduleError, match="different times"):
        rescale(sizes[:1], cluster, load=1.0)
