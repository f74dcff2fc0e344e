"""Typed errors. Every mistake a user can make names the value, the place and the remedy.

All of them derive from `SplitjaxError`, and also from the builtin exception that fits best, so that
`except ValueError` in existing code keeps working.
"""

from __future__ import annotations

import dataclasses
from typing import Any


class SplitjaxError(Exception):
    """The base of all errors that splitjax raises on purpose.

    **Arguments:**

    - `message`: one sentence saying what is wrong.
    - `value`: the offending value, shown with `repr`.
    - `place`: where it stands: a parameter path, a file and line, an argument name.
    - `remedy`: what to do about it.
    """

    message: str
    # Whatever the user gave: a type would only stand in the way of who looks at it.
    value: Any
    place: str | None
    remedy: str | None

    def __init__(self, message: str, *, value: Any = None, place: str | None = None, remedy: str | None = None) -> None:
        self.message, self.value, self.place, self.remedy = message, value, place, remedy
        lines = [message]
        if value is not None:
            text = _shown(value)
            lines.append(f"  value:  {text if len(text) <= 400 else text[:397] + '...'}")
        if place:
            lines.append(f"  place:  {place}")
        if remedy:
            lines.append(f"  remedy: {remedy}")
        # What a document says may hold halves of surrogate pairs, which no terminal or file takes.
        super().__init__("\n".join(lines).encode("utf-8", "backslashreplace").decode())


def _shown(value: Any) -> str:
    """Returns the `repr` of a value, or its type where it has none: values of documents can be nested too deeply for
    it, or hold a whole number of more digits than Python writes."""
    try:
        return repr(value)
    except (RecursionError, ValueError):
        return f"<{type(value).__name__}>"


class MeshError(SplitjaxError, ValueError):
    """A mesh that does not fit the devices, or an axis that the mesh does not have."""


class TraceError(SplitjaxError, ValueError):
    """A training step that cannot be traced or analysed."""


class UnknownPrimitiveError(TraceError):
    """A primitive without dim rule lies on the path of a sharded dim."""


class RuleError(SplitjaxError, ValueError):
    """A rule or rule set that is malformed, or that does not do anything for this model."""


class PinError(RuleError):
    """An annotation, or the sharding of an array, that pins it where it cannot be, or against another pin or the user's
    own rule."""


class PlanError(SplitjaxError, ValueError):
    """A plan that does not fit the step, or that cannot be read."""


class PartitionerError(PlanError):
    """A plan under which XLA's partitioner would compute wrong numbers, and no other way to evaluate the operation is
    known."""


class StateError(SplitjaxError, ValueError):
    """The step's state does not come back, or comes back ambiguously or changed."""


class DonatedStateError(SplitjaxError, RuntimeError):
    """A state was used again after an earlier call consumed (donated) it."""


class BatchError(SplitjaxError, ValueError):
    """A batch whose example dim is missing, inconsistent, or does not divide."""


class GradientError(SplitjaxError, ValueError):
    """`splitjax.value_and_grad` or `splitjax.grad` used in a way that cannot be honoured."""


class MicrobatchError(GradientError):
    """A loss that cannot be accumulated over microbatches without changing its numbers."""


class ProcessError(SplitjaxError, RuntimeError):
    """The processes of one run disagree, or one of them did not come."""


class DataError(SplitjaxError, ValueError):
    """A data file that is missing, truncated or malformed."""


class TrainingError(SplitjaxError, RuntimeError):
    """A run that cannot start as asked, or whose numbers went wrong."""


class CheckpointError(SplitjaxError, RuntimeError):
    """A checkpoint that cannot be written, is damaged, or belongs to another model."""


class LaunchError(SplitjaxError, RuntimeError):
    """Processes that cannot be started, joined, or given a network of their own."""


class KernelError(SplitjaxError, ValueError):
    """An operand that a kernel does not take: its dtype, its rank or its shape."""


class UnavailableError(SplitjaxError, NotImplementedError):
    """A documented option whose implementation is not part of this version."""


class SyncError(SplitjaxError, ValueError):
    """A synchronisation scheme, or row-sparse values, that do not fit what they are used for."""


class ProfileError(SplitjaxError, ValueError):
    """A profile that cannot be measured, read, written or drawn."""


class PartialError(SplitjaxError, ValueError):
    """A step that cannot be differentiated partially as asked, or an option of `PartialBackprop` that is none of its
    documented values."""


class VerificationError(SplitjaxError, RuntimeError):
    """A step whose numbers on the mesh are not those of one device."""


class ScheduleError(SplitjaxError, ValueError):
    """A job, a cluster or a policy that cannot be, or a policy's decision that cannot be carried out."""


class SearchError(SplitjaxError, ValueError):
    """A search over discrete choices whose problem is malformed, or that asks for what it cannot have."""


class BudgetError(SplitjaxError, ValueError):
    """A budget of memory that is none, or that no layout of the step fits into."""


class TargetError(SplitjaxError, ValueError):
    """A target that is not known, or a mesh that does not fit it."""


class CompilerError(TargetError):
    """A target whose compiler is not installed, or that its compiler refuses."""


class CalibrationError(SplitjaxError, ValueError):
    """A calibration that cannot be read, written or used, or a machine that cannot be measured."""


class ExtensionError(SplitjaxError, ImportError):
    """Another package declares a scheme, a policy, a model, a rule set or a primitive, and it cannot be loaded."""


class TraceFileError(ScheduleError):
    """A trace of jobs that is missing or malformed; the place names file and line."""


@dataclasses.dataclass(frozen=True, eq=False)
class Refusal:
    """Says why something cannot be done, as a value. Whoever asked decides whether that is an error.

    **Attributes:** `message`, `value`, `place`, `remedy`: those of the error that it would be. `kind`: the type of that
    error. `cause`: the exception of the user's code behind it; None without such.
    """

    message: str
    value: Any = None
    place: str | None = None
    remedy: str | None = None
    kind: type[SplitjaxError] = MicrobatchError
    cause: BaseException | None = None

    @property
    def reason(self) -> str:
        """The message with the place, as a clause of another message."""
        return self.message + (f" ({self.place})" if self.place else "")

    def error(self) -> SplitjaxError:
        """Returns the typed error for a user who asked for what is refused."""
        error = self.kind(self.message, value=self.value, place=self.place, remedy=self.remedy)
        error.__cause__ = self.cause
        return error
