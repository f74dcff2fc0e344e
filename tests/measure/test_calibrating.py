"""Measuring a machine: fits by hand, the timer, and every operation in small."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from splitjax.errors import CalibrationError
from splitjax.machines.calibration import Calibration, OperationKind
from splitjax.measure.calibrating import calibrate
from splitjax.measure.calibrating.collectives import _ALONE, _made_and_read, _powers, _turns, fit
from splitjax.measure.calibrating.operations import probes
from splitjax.measure.calibrating.timing import _MOST_WAITING, Timer, _one_by_one, turns_alone, typical
from splitjax.measure.calibrating.waiting import Wait, rising_waits
from tests.processes import run_processes


def test_a_line_is_found_again():
    link = fit([(sent, 1e-4 + sent / 2e9) for sent in (1e3, 1e5, 1e7)])
    assert link.latency_seconds == pytest.approx(1e-4) and link.bytes_per_second == pytest.approx(2e9)
    # Small messages take what they take, whatever large ones do.
    bent = fit([(1e3, 2e-4), (1e5, 2.2e-4), (1e6, 2e-3), (4e6, 4e-3)])
    assert bent.latency_seconds + 1e3 / bent.bytes_per_second == pytest.approx(2e-4)
    assert bent.latency_seconds + 4e6 / bent.bytes_per_second == pytest.approx(4e-3, rel=0.3)
    # As measured behind 1 Gb/s, where other work delayed the smallest message: it made the rate endless.
    delayed = fit([(1024.0, 2.056e-3), (65536.0, 5.05e-4), (1048576.0, 1.19e-2), (4194304.0, 5.19e-2)])
    assert delayed.latency_seconds < 6e-4 and 5e7 < delayed.bytes_per_second < 1.5e8
    # A slope that noise made negative is none.
    assert fit([(1e3, 2e-5), (1e6, 1e-5)]).bytes_per_second == pytest.approx(1e15)


def test_no_wait_is_shorter_than_one_after_less_computing():
    measured = [(1e-2, 1e-3), (1e-3, 3e-4), (3e-3, 1e-4), (1e-4, -2e-5)]
    curve = rising_waits([Wait(computed, waited, 1e-4) for computed, waited in measured])
    assert [(point.size, pytest.approx(point.seconds)) for point in curve.points] == [
        (1e-4, 1e-9), (1e-3, 2e-4), (3e-3, 2e-4), (1e-2, 1e-3)
    ]  # fmt: skip
    # What was measured with a wide spread gives way: as measured once, behind long computing, where others were busy.
    unsure = rising_waits([Wait(1e-3, 1.6e-3, 1e-4), Wait(1e-2, 2e-3, 1e-4), Wait(3e-2, -5e-3, 5e-3)])
    assert [point.seconds for point in unsure.points] == pytest.approx([1.6e-3, 2e-3, 2e-3], rel=0.01)


@pytest.mark.one_version
def test_processes_measure_what_they_wait_for_each_other():
    worker = pathlib.Path(__file__).parent / "waiting_worker.py"
    found = [json.loads(output.splitlines()[-1]) for output in run_processes(worker, num=2, devices=1)]
    # Each process waits otherwise: all have what the first one measured.
    assert found[0] == found[1]
    (short, short_wait), (long, long_wait) = found[0]
    assert short < long and 0 < short_wait <= long_wait


def test_groups_are_powers_of_two_that_divide():
    assert (_powers(1), _powers(2), _powers(6), _powers(8)) == ([], [2], [2, 6], [2, 4, 8])


def test_every_kind_of_operation_is_measured():
    found = list(probes())
    # Neither memory that a call asks for nor waiting is an operation of a program.
    kinds = set(OperationKind) - {OperationKind.NEW_MEMORY, OperationKind.WAITING}
    assert {probe.kind for probe in found} == kinds
    for probe in found:
        (result,) = jax.tree.leaves(jax.eval_shape(probe.turn, *probe.arrays))
        assert result.size > 0
    assert {probe.kind for probe in probes(most_elements=1 << 14, most_flops=2.0**21)} == kinds
    products = [probe for probe in found if probe.kind is OperationKind.PRODUCT]
    for probe in products:
        assert probe.narrow == min(*probe.arrays[0].shape, probe.arrays[1].shape[1])


def test_convolutions_are_measured_at_every_width_of_a_network():
    # Between 16 and 64 channels, and between 64 and 256, rates were guessed: off by half for 32 channels.
    found = list(probes())
    for kind in (OperationKind.CONVOLUTION, OperationKind.FILTER_GRADIENT):
        widths = sorted({probe.narrow for probe in found if probe.kind is kind and probe.narrow >= 16})
        assert widths[0] == 16 and widths[-1] == 256
        assert all(after == 2 * before for before, after in zip(widths, widths[1:], strict=False))
    # One size of each width told narrow images from small ones by chance, and with it which split is better.
    small = [probe for probe in found if probe.kind is OperationKind.SMALL_CONVOLUTION]
    for narrow in {probe.narrow for probe in small}:
        sizes = [probe.size for probe in small if probe.narrow == narrow]
        assert len(set(sizes)) == len(sizes) >= 2
    for probe in small:
        channels = [array.shape[-2:] for array in probe.arrays]
        assert probe.narrow == min(channels[1])


def test_other_work_does_not_make_turns_free():
    # Turns take 3 ms and a call 1 ms; other work fell into a call without turns, and into one with them.
    assert turns_alone([(4.0, 1.0), (4.0, 9.0), (4.0, 9.0), (8.0, 1.0)]) == 3.0
    assert typical([5.0, 1.0, 1.1, 9.0, 2.0, 1.2, 7.0]) == 1.2 and typical([7.0]) == 7.0


def test_a_filters_gradient_is_timed_as_a_step_computes_it():
    # In a loop XLA's CPU compiler has no library compute it, and it takes about a hundred times as long.
    timer = Timer(tuple(jax.devices()[:1]), "processor", enough_seconds=5e-3, rounds=3)
    forward, gradient = (
        next(probe for probe in probes() if probe.kind is kind and probe.narrow == 16 and probe.size > 5e7)
        for kind in (OperationKind.CONVOLUTION, OperationKind.FILTER_GRADIENT)
    )
    assert forward.size == gradient.size and not forward.in_loop and not gradient.in_loop
    taken = [timer.seconds(each.turn, each.arrays, cold=False, in_loop=each.in_loop) for each in (forward, gradient)]
    assert taken[1] < 12 * taken[0]


def test_turns_of_all_devices_are_timed():
    timer = Timer(tuple(jax.devices()), "processor", enough_seconds=5e-3, rounds=6)
    # The arrays are each turn's own: what it costs to hand an array from a turn to the next is a large part of a small
    # product of rows of a large array, and none of what is compared.
    large, small = (
        timer.seconds(lambda x, y: x @ y, (jax.ShapeDtypeStruct((size, size), jnp.float32),) * 2, cold=False)
        for size in (512, 128)
    )
    assert large > 8 * small > 0  # sixty-four times the work
    large, small = (
        timer.seconds(
            lambda x, y: x @ y, (jax.ShapeDtypeStruct((size, size), jnp.float32),) * 2, cold=False, in_loop=False
        )
        for size in (512, 128)
    )
    assert large > 8 * small > 0
    size = len(jax.devices())
    turn, sent = _turns(size)["all_gather"]
    message = (jax.ShapeDtypeStruct((size,), jnp.float32),)
    assert timer.seconds(turn, message, timer.mesh(size)) > 0 and sent(4 * size) == 4 * size * (size - 1)


def test_large_results_take_the_system_longer_than_their_writing():
    # glibc gives blocks above 32 MiB back at once: each call's pages are made again. Smaller blocks are kept.
    timer = Timer(tuple(jax.devices()[:1]), "processor", rounds=5)
    large, small = timer.new_memory_seconds(160 << 20), timer.new_memory_seconds(4 << 20)
    assert large > 10 * small > 0


def test_calls_without_a_loop_keep_the_last_result_alone():
    # Results of all calls at once were gigabytes where other work made many calls necessary.
    mesh = Timer(tuple(jax.devices()[:1])).mesh()
    one = jax.ShapeDtypeStruct((8,), jnp.float32)
    turns = _one_by_one(lambda x: x * 0.5, one, [jnp.ones((1, 1, 8))], 1, mesh)
    last = turns.run(3 * _MOST_WAITING)
    assert isinstance(last, jax.Array) and last.shape == (1, 8) and float(last[0, 0]) == 0.5
    assert turns.without(2).shape == (1, 8) and turns.num_turns >= 4


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"])
def test_what_is_taken_off_a_collective_has_its_shape(op):
    mesh, size = jax.sharding.Mesh(jax.devices(), ("group",)), 8
    for turn in (_turns(size)[op][0], _ALONE[op](size)):
        whole = jax.shard_map(
            _made_and_read(turn), mesh=mesh, in_specs=jax.P("group"), out_specs=jax.P("group"), check_vma=False
        )
        shape = jax.eval_shape(whole, jax.ShapeDtypeStruct((size * 64,), jnp.float32)).shape
        assert shape == (size * {"all_gather": 512, "reduce_scatter": 8}.get(op, 64),)


def test_another_clock_is_refused():
    with pytest.raises(CalibrationError, match="wall or processor"):
        calibrate("sun")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_machine_is_measured(tmp_path):
    lines: list[str] = []
    found = calibrate("processor", quick=True, told=lines.append)
    # any step can be predicted; processes that wait there is but one of
    assert {curve.kind for curve in found.curves} == set(OperationKind) - {OperationKind.WAITING}
    assert {each.participants for each in found.collectives} == {2, 4, 8}
    assert found.num_processes == 1 and found.devices_per_process == len(jax.devices())
    assert found.seconds(OperationKind.PRODUCT, 1e9, 128) > found.seconds(OperationKind.PRODUCT, 1e6, 128)
    found.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == found and lines
