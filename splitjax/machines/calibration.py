"""Holds what was measured of a machine, reads and writes it: how long operations of each kind and size take a device,
and collectives among each number of devices.

`splitjax calibrate` makes a `Calibration`, the time model asks it for seconds. A file has a checksum of its figures:
an edited or a damaged one is refused.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import hashlib
import json
import math
import os
from collections.abc import Sequence

from splitjax.codec import Codec, Wording
from splitjax.display import registry
from splitjax.errors import CalibrationError
from splitjax.machines.links import Link

FORMAT = 1


class OperationKind(enum.Enum):
    """Names kinds of operations that differ in what they take for their size, and what their size counts.

    - `PRODUCT`, `CONVOLUTION`: flops; `narrow` is the smallest dim of the product, or the fewest channels.
    - `WEIGHT_GRADIENT`: products over the leading dims of both operands, as the gradients of weights are; likewise.
    - `FILTER_GRADIENT`: of a convolution's filter, flops and channels likewise.
    - `SMALL_CONVOLUTION`: convolutions of images with fewer places than the filter has, flops and channels likewise.
    - `ELEMENTWISE`: bytes read and written by loops over elements that only move and add.
    - `COSTLY`: elements of exponentials, logarithms, divisions, roots and the like, beside what moves them.
    - `TRANSPOSE`: bytes read and written by a loop that reads elements in another order than it writes them.
    - `ROW_SUM`, `COLUMN_SUM`: elements that are reduced along the last dim, or along others alone.
    - `WINDOW`, `WINDOW_GRADIENT`: elements of the results times those of a window (pooling).
    - `GATHER`, `SCATTER`: elements that are looked up, or added to rows.
    - `RANDOM`: elements drawn. `SORT`: elements sorted, or summed up along a dim.
    - `NEW_MEMORY`: bytes that a call asks the system for, beyond what it takes to write them.
    - `WAITING`: seconds that processes compute between two collectives. None of them is at the second one when the
      others are: what the first to come waits then, beyond what the collective takes.
    """

    PRODUCT = "product"
    WEIGHT_GRADIENT = "weight_gradient"
    CONVOLUTION = "convolution"
    FILTER_GRADIENT = "filter_gradient"
    SMALL_CONVOLUTION = "small_convolution"
    ELEMENTWISE = "elementwise"
    COSTLY = "costly"
    TRANSPOSE = "transpose"
    ROW_SUM = "row_sum"
    COLUMN_SUM = "column_sum"
    WINDOW = "window"
    WINDOW_GRADIENT = "window_gradient"
    GATHER = "gather"
    SCATTER = "scatter"
    RANDOM = "random"
    SORT = "sort"
    NEW_MEMORY = "new_memory"
    WAITING = "waiting"

    @property
    def counts_flops(self) -> bool:
        """Whether sizes are flops."""
        kind = OperationKind
        return self in (
            kind.PRODUCT, kind.WEIGHT_GRADIENT, kind.CONVOLUTION, kind.FILTER_GRADIENT, kind.SMALL_CONVOLUTION,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Point:
    """Says what an operation took: its `size` and how `narrow` it is, as its kind counts them, and `seconds`."""

    narrow: int
    size: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Curve:
    """Says what operations of a kind take by their size.

    **Attributes:** `kind`: of operation. `dtype`: of its operands. `points`: as measured, ordered by `narrow`, then by
    size."""

    kind: OperationKind
    dtype: str
    points: tuple[Point, ...]

    def seconds(self, size: float, narrow: int = 0) -> float:
        """Returns what an operation of a `size` takes: between points by lines through logarithms, in size and in
        `narrow`. What is smaller than the smallest takes as long as that; what is larger goes at the rate of the
        largest."""
        by_narrow: dict[int, list[Point]] = {}
        for point in self.points:
            by_narrow.setdefault(point.narrow, []).append(point)
        widths = sorted(by_narrow)
        after = bisect.bisect_left(widths, narrow)
        if after == len(widths) or widths[after] == narrow or not after:
            return _along(by_narrow[widths[min(after, len(widths) - 1)]], size)
        low, high = widths[after - 1], widths[after]
        share = math.log(narrow / low) / math.log(high / low) if low > 0 else 1.0
        return _along(by_narrow[low], size) ** (1 - share) * _along(by_narrow[high], size) ** share


def _along(points: Sequence[Point], size: float) -> float:
    if size <= points[0].size:
        return points[0].seconds
    if size >= points[-1].size:
        return points[-1].seconds * size / points[-1].size
    after = bisect.bisect_left([point.size for point in points], size)
    low, high = points[after - 1], points[after]
    share = math.log(size / low.size) / math.log(high.size / low.size)
    return low.seconds ** (1 - share) * high.seconds**share


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """Says what a collective takes by what a device sends (by the ring formulas of `cost.ring`).

    **Attributes:** `op`: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `permute`. `participants`: the
    devices of a group. `between`: whether they are of several processes. `link`: a latency and a rate that fit what was
    measured. `points`: between processes that, as (bytes sent, seconds) in order; a message between two takes what a
    line through logarithms says. Empty within a process, and in files that have the fit alone."""

    op: str
    participants: int
    between: bool
    link: Link
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, sent_bytes: float, participants: int, num_messages: int) -> float:
        """Returns what it takes where each of `participants` devices sends `sent_bytes` in so many messages: of more
        devices than were measured latencies grow with the steps of a ring."""
        latency = self.link.latency_seconds
        steps = (participants - 1) / (self.participants - 1)
        if not self.points:
            return num_messages * steps * latency + sent_bytes / self.link.bytes_per_second
        whole = _along([Point(0, *point) for point in self.points], sent_bytes)
        return whole + max(num_messages * steps - 1, -1.0) * latency


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Holds what was measured of a machine.

    **Attributes:**

    - `date`: when, ISO 8601 in UTC. `platform`, `device`: JAX's names of its platform and its kind of device.
    - `versions`: (package, version) that it was measured with.
    - `num_processes`, `devices_per_process`: of the run that was measured. All devices of it were busy at once, so that
      seconds hold for steps that use all of them; virtual CPU devices share their cores.
    - `clock`: `wall`, or `processor`: processor time over the cores that the devices use, where other work on the
      machine would disturb the wall's.
    - `call_seconds`: of a call of a compiled program that does nothing, which predictions add to every step.
    - `node_seconds`: of the smallest kernel within a program. It is for readers: predictions do not use it, since the
      times of `curves` have it in them.
    - `curves`: of operations. `collectives`: of collectives.
    """

    date: str
    platform: str
    device: str
    versions: tuple[tuple[str, str], ...]
    num_processes: int
    devices_per_process: int
    clock: str
    call_seconds: float
    node_seconds: float
    curves: tuple[Curve, ...]
    collectives: tuple[CollectiveTime, ...]

    def seconds(self, kind: OperationKind, size: float, narrow: int = 0, dtype: str = "float32") -> float:
        """Returns what an operation takes; without a curve of its dtype, as one of those that there are. Raises
        `CalibrationError` for a kind that was not measured."""
        if size <= 0:
            return 0.0
        curves = self._curves(kind)
        if not curves:
            raise CalibrationError(
                f"operations of kind {kind.value} were not measured",
                value=[curve.kind.value for curve in self.curves],
                place="calibration",
                remedy="measure again with `splitjax calibrate`",
            )
        own = next((curve for curve in curves if curve.dtype == dtype), curves[0])
        return own.seconds(size, narrow)

    def new_memory_seconds(self, num_bytes: float) -> float:
        """Returns what a call takes to get so many bytes of memory; 0 where that was not measured."""
        curves = self._curves(OperationKind.NEW_MEMORY)
        return curves[0].seconds(num_bytes) if curves and num_bytes else 0.0

    def waiting_seconds(self, computed_seconds: float) -> float:
        """Returns what a process waits for others at a collective, where each has computed for so long since the last
        one; 0 where that was not measured. Waits grow from nothing to the first that was measured, and are not known
        to go on growing behind the last."""
        curves = self._curves(OperationKind.WAITING)
        if not curves:
            return 0.0
        first, last = curves[0].points[0], curves[0].points[-1]
        if computed_seconds <= first.size:
            return first.seconds * computed_seconds / first.size
        return curves[0].seconds(min(computed_seconds, last.size))

    def _curves(self, kind: OperationKind) -> list[Curve]:
        """Returns what was measured of a kind; of small convolutions, which calibrations may lack, those of others."""
        found = [curve for curve in self.curves if curve.kind is kind]
        if not found and kind is OperationKind.SMALL_CONVOLUTION:
            return self._curves(OperationKind.CONVOLUTION)
        return found

    def collective_seconds(
        self, op: str, participants: int, between: bool, sent_bytes: float, num_messages: int = 1
    ) -> float:
        """Returns what a collective takes in which each of `participants` devices sends `sent_bytes`, in so many
        messages (`num_messages`) one after the other.

        Of another number of participants than was measured it takes the nearest: latencies grow with the number of
        steps of a ring, rates stay. Without any of that kind and place, that of another kind: an all-reduce as a
        reduce-scatter and an all-gather do. Raises `CalibrationError` where nothing was measured."""
        if participants < 2:
            return 0.0
        known = [each for each in self.collectives if each.op == op and each.between == between]
        known = known or [each for each in self.collectives if each.between == between] or list(self.collectives)
        if not known:
            raise CalibrationError(
                "no collective was measured",
                value=self.devices_per_process * self.num_processes,
                place="calibration",
                remedy="run `splitjax calibrate` with several devices: `--devices 8`",
            )
        nearest = min(known, key=lambda each: abs(math.log(each.participants / participants)))
        return nearest.seconds(sent_bytes, participants, num_messages)

    def to_json(self) -> str:
        """Returns the calibration as JSON, with the checksum of its figures."""
        return _JSON.text(_Sealed(_digest(self), self))

    @staticmethod
    def from_json(text: str, origin: str = "") -> Calibration:
        """Returns the calibration of a `text` that `to_json` wrote; `origin` is what errors name, such as a file.
        Raises `CalibrationError` for anything else."""
        return _JSON.parse(text, origin).calibration

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration to the file `path`, whole or not at all. Raises `CalibrationError` where it cannot."""
        _JSON.save(_Sealed(_digest(self), self), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Calibration:
        """Reads the file `path`. Raises `CalibrationError` where it cannot be read, or is not what was written."""
        return _JSON.load(path).calibration

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)


@dataclasses.dataclass(frozen=True)
class _Sealed:
    """Is what a file holds: the figures, and the SHA-256 of their JSON."""

    sha256: str
    calibration: Calibration


def _digest(calibration: Calibration) -> str:
    values = _JSON.values(_Sealed("", calibration))["calibration"]
    for each in values["collectives"]:
        if not each["points"]:  # files from before there were points have none
            del each["points"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _check(sealed: _Sealed) -> None:
    remedy = "measure again with `splitjax calibrate`"
    if sealed.sha256 != _digest(sealed.calibration):
        raise CalibrationError(
            "the file is not what was written: its checksum does not fit its figures",
            value=sealed.sha256[:80],
            place="sha256",
            remedy=remedy,
        )
    for number, curve in enumerate(sealed.calibration.curves):
        order = [(point.narrow, point.size) for point in curve.points]
        if not order or order != sorted(order) or any(p.size <= 0 or p.seconds <= 0 for p in curve.points):
            raise CalibrationError(
                "a curve needs points in order, with sizes and seconds above 0",
                value=curve.kind.value,
                place=f"curves[{number}]",
                remedy=remedy,
            )
    for number, each in enumerate(sealed.calibration.collectives):
        if each.participants < 2 or each.link.latency_seconds < 0 or not each.link.bytes_per_second > 0:
            raise CalibrationError(
                "a collective needs two participants, a latency and a rate above 0",
                value=each.op,
                place=f"collectives[{number}]",
                remedy=remedy,
            )
        if list(each.points) != sorted(each.points) or any(not min(point) > 0 for point in each.points):
            raise CalibrationError(
                "the points of a collective come in order, with bytes and seconds above 0",
                value=each.op,
                place=f"collectives[{number}].points",
                remedy=remedy,
            )


_JSON: Codec[_Sealed] = Codec(
    _Sealed,
    CalibrationError,
    Wording.of_result("a calibration", "calibration"),
    format=FORMAT,
    finite=True,
    check=_check,
)
