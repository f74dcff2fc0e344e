"""Exchanges over the links of a cluster."""

import dataclasses

import pytest

from splitjax.schedule import Cluster, Job, JobProfile, Options, Stages, exchange_seconds, over_links, simulate

GB = 1_000_000_000
SLOW = Cluster(2, 4, node_bytes_per_second=10 * GB, network_bytes_per_second=GB)
PROFILE = JobProfile.uniform("model", 3.0, gradient_bytes=GB)


def test_a_ring_over_the_links_that_the_workers_need():
    assert exchange_seconds(SLOW, 4, GB) == pytest.approx(0.15) and exchange_seconds(SLOW, 8, GB) == pytest.approx(1.75)
    assert exchange_seconds(SLOW, 1, GB) == 0 and exchange_seconds(Cluster(2, 4), 8, GB) == 0


def test_iterations_wait_for_the_longer_of_link_and_profile():
    jobs = [Job("within", 0, 4, 10, PROFILE), Job("across", 0, 8, 10, PROFILE), Job("alone", 0, 1, 10, PROFILE)]
    found = over_links(jobs, SLOW)
    assert [one.profile.exposed_seconds for one in found] == pytest.approx([0.15, 1.75, 0]) and found[2] is jobs[2]
    assert over_links(found, SLOW) == found and over_links(jobs, Cluster(2, 4)) == tuple(jobs)
    patient = dataclasses.replace(PROFILE, exposed_seconds=2.0, stages=Stages(network_seconds=0.5))
    (one,) = over_links([Job("patient", 0, 8, 10, patient)], SLOW)
    assert one.profile.exposed_seconds == 2.0 and one.profile.stages.network_seconds == 1.75


def test_exchanges_longer_than_computing_do_not_overlap():
    slower = Cluster(2, 4, node_bytes_per_second=10 * GB, network_bytes_per_second=GB / 4)
    jobs = [Job(name, 0, 8, 40, PROFILE) for name in "abc"]
    linked = over_links(jobs, slower)
    assert (
        linked[0].profile.stages == Stages(device_seconds=PROFILE.task_seconds(0), network_seconds=7.0)
        and over_links(linked, slower) == linked
    )
    result = simulate(jobs, slower, "interleave-fifo", Options(restart_seconds=0))
    # every device's link is busy with one job's gradients at a time
    assert result.makespan >= 3 * 40 * 7.0 * (1 - 1e-9)


@pytest.mark.parametrize("exact", [False, True])
def test_slow_links_make_jobs_longer_and_other_jobs_fill_the_wait(exact):
    options = Options(restart_seconds=0, exact=exact)
    jobs = [Job(name, 0, 8, 40, PROFILE) for name in "ab"]
    for policy, links, expected in (("gang-fifo", Cluster(2, 4), 240.0), ("gang-fifo", SLOW, 380.0)):
        assert simulate(jobs, links, policy, options).makespan == pytest.approx(expected)
    together = simulate(jobs, SLOW, "interleave-fifo", options).makespan
    assert 240.0 <= together < 0.8 * 380.0  # the wait of one is the other's time to compute
