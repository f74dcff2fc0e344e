"""Says what groups of jobs get done with the devices that they have, and shares devices out to them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def group_throughput(width: NDArray[np.float64], load: NDArray[np.float64], size: NDArray[np.float64]) -> float:
    """Gives the throughput in full-speed workers of groups of so many workers, demand and devices."""
    return float((width * np.minimum(1.0, size / np.maximum(load, 1e-9))).sum())


def shared_devices(loads: list[float], widths: list[int], num_devices: int) -> list[int]:
    """Shares devices out to groups in proportion to their load, each at least one, no more than it has workers."""
    if not loads:
        return []
    exact = np.minimum(np.array(loads) * (num_devices / sum(loads)), widths)
    sizes = np.maximum(1, np.floor(exact + 1e-9)).astype(np.int64)
    for index in np.argsort(-(exact - sizes), kind="stable").tolist():
        if sizes.sum() < num_devices and sizes[index] < widths[index]:
            sizes[index] += 1
    while sizes.sum() > num_devices:
        sizes[int(np.argmax(sizes - exact))] -= 1
    return sizes.tolist()
