"""Holds what a verification gives: an immutable value that prints, serialises and raises.

What was compared goes in; a table, JSON text or an error comes out, as the user asks.
"""

from __future__ import annotations

import dataclasses

from splitjax.codec import Codec, Form, Wording, fields_of
from splitjax.display import registry
from splitjax.errors import VerificationError

FORMAT: int = 1


@dataclasses.dataclass(frozen=True)
class DimSize:
    """Describes a class of dims that are of equal size.

    - `name`: a parameter and its dim, or an operation, that has it. `given`: its size in the step; `used`: in the
      programs compared.
    - `why`: why it was not shrunk; empty if it was, or if it is the smallest already.
    """

    name: str
    given: int
    used: int
    why: str = ""


@dataclasses.dataclass(frozen=True)
class ComparedValue:
    """Compares a value of the step under its plan with the same on one device, in float64.

    - `kind`: `loss`, `auxiliary`, `gradient`, `state` or `result`. `name`: a path. `shape`: in the programs compared.
    - `absolute`: the largest difference of an entry; `relative`: the same over the largest magnitude on one device.
    - `ratio`: what every entry is multiplied by, where that is one number other than 1.
    - `own_relative`: `relative` with both programs in the step's own precision: rounding, where `ok`. None if that was
      not asked for.
    - `note`: what else there is to say: copies that differ between devices, values that are not finite.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    absolute: float
    relative: float
    ok: bool
    ratio: float | None = None
    own_relative: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Describes the first operation whose value differs from one device's.

    - `operation`: the primitive. `what`: `value`, or `gradient` for what the backward pass makes of it. `operand`: of a
      gradient, which.
    - `layer`, `source` (`file:line`), `layout`: where it stands, and how its operands lie on the mesh.
    - `ratio`: as `ComparedValue.ratio`. `relative`: the difference.
    - `text`: all of it as a sentence.
    """

    operation: str
    what: str
    operand: str
    layer: str
    source: str
    layout: str
    relative: float
    ratio: float | None
    text: str


@dataclasses.dataclass(frozen=True)
class VerifiedRun:
    """Holds a comparison of all values at sizes of a kind.

    - `sizes`: `shrunken` or `given`.
    - `dims`: the classes of dims, with their sizes.
    - `values`: all that was compared.
    - `findings`: the operations where wrong values begin.
    - `seconds`: planning, compiling and running all programs.
    - `notes`: what else there is to say.
    """

    sizes: str
    dims: tuple[DimSize, ...]
    values: tuple[ComparedValue, ...]
    findings: tuple[Finding, ...]
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True where every value is that of one device but for rounding."""
        return all(value.ok for value in self.values)

    @property
    def wrong(self) -> tuple[ComparedValue, ...]:
        """The values that are not."""
        return tuple(value for value in self.values if not value.ok)


@dataclasses.dataclass(frozen=True)
class Verification:
    """Holds the comparison of a step under its plan with the same step on one device. Prints as tables.

    - `step`, `mesh`, `rules`: what was compared, in words.
    - `runs`: a comparison for each kind of sizes that was asked for.
    """

    step: str
    mesh: str
    rules: str
    runs: tuple[VerifiedRun, ...]

    @property
    def ok(self) -> bool:
        """True where all values agree at all sizes that were asked for."""
        return all(run.ok for run in self.runs)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The operations where wrong values begin."""
        return tuple(finding for run in self.runs for finding in run.findings)

    @property
    def seconds(self) -> float:
        """The time that all of it took."""
        return sum(run.seconds for run in self.runs)

    def raise_if_wrong(self) -> Verification:
        """Returns itself. Raises `VerificationError` if a value differs from one device's by more than rounding."""
        for run in self.runs:
            if run.ok:
                continue
            worst = max(run.wrong, key=lambda value: value.relative)
            place = "; ".join(finding.text for finding in run.findings) or f"{self.step} under rules={self.rules!r}"
            raise VerificationError(
                f"the step computes other numbers on {self.mesh} than on one device: {len(run.wrong)} of "
                f"{len(run.values)} values differ in "
                f"float64, the {worst.kind} of {worst.name} most",
                value=_difference_text(worst),
                place=place,
                remedy=(
                    "use rules that do not split the layer named, or constrain its operands with"
                    " jax.lax.with_sharding_constraint; if it is splitjax that is wrong, report it with"
                    " str(step.verify(...)) (docs/verify.md)"
                ),
            )
        return self

    def to_json(self) -> str:
        """Returns all of it as JSON text, in the format number `FORMAT`."""
        return _JSON.text(self)

    def __str__(self) -> str:
        return registry.show(self)

    def __repr__(self) -> str:
        return f"<Verification of {self.step} on {self.mesh}: {'ok' if self.ok else f'{len(self.findings)} findings'}>"

    def _repr_html_(self) -> str:
        return registry.html(self)


_JSON = Codec(
    Verification,
    VerificationError,
    Wording.of_result("a verification", "verification"),
    format=FORMAT,
    forms={
        Verification: Form(
            lambda verification: {
                "ok": verification.ok,
                "seconds": verification.seconds,
                **fields_of(verification),
            },
            unread=("ok", "seconds"),
        )
    },
    end="",
)


def _difference_text(value: ComparedValue) -> str:
    if value.ratio is not None:
        return f"{value.name}: {value.ratio:.6g} times one device's"
    return f"{value.name}: off by {value.absolute:.3g}, {value.relative:.3g} of its largest entry"
