"""Gives the closed forms of the ParaDL Oracle for the time of a step: the baseline of the time model.

Kahira et al. 2021, "An Oracle for Guiding Large-Scale Model/Hybrid Parallel Training of CNNs" (arXiv 2104.09075), for
one of the D/B iterations of an epoch: what a single device takes for the whole batch, measured, is divided evenly over
the devices, and collectives are rings of latency alpha and beta seconds a byte. Its accuracy of a prediction is
1 - |predicted - measured| / measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.machines.links import Link


def data_seconds(single_seconds: float, num_devices: int, weight_bytes: float, link: Link) -> float:
    """Returns what a step takes under data parallelism.

    **Arguments:** `single_seconds`: of a step of the whole batch on one device. `num_devices`: over which the batch is
    split. `weight_bytes`: of all parameters. `link`: alpha and beta of the ring."""
    return single_seconds / num_devices + 2 * _ring(num_devices, weight_bytes / num_devices, link)


def filter_seconds(single_seconds: float, num_devices: int, output_bytes: Sequence[float], link: Link) -> float:
    """Returns what a step takes under filter or channel parallelism, which splits layers and gathers what they make.

    **Arguments:** `output_bytes`: by split layer, the bytes of what it makes of the whole batch. The others are those
    of `data_seconds`."""
    sent = 3 * sum(_ring(num_devices, size / num_devices, link) for size in output_bytes)
    return single_seconds / num_devices + sent


def data_filter_seconds(
    single_seconds: float, sizes: tuple[int, int], weight_bytes: float, output_bytes: Sequence[float], link: Link
) -> float:
    """Returns what a step takes under data parallelism over p1 and filter parallelism over p2 devices, `sizes`: the
    other arguments are those of `data_seconds` and `filter_seconds`."""
    data, filters = sizes
    count = data * filters
    inside = 3 * sum(_ring(filters, size / count, link) for size in output_bytes)
    return single_seconds / count + inside + 2 * _ring(data, weight_bytes / count, link)


def accuracy(predicted: float, measured: float) -> float:
    """Returns the Oracle's accuracy of a prediction: 1 where it is what was `measured`."""
    return 1 - abs(predicted - measured) / measured


def _ring(num_devices: int, step_bytes: float, link: Link) -> float:
    return (num_devices - 1) * (link.latency_seconds + step_bytes / link.bytes_per_second)
