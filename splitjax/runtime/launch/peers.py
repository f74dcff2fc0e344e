"""Sends short messages between the processes of a run, through JAX's coordination service. Every wait has an end.

Messages, not barriers: a process that failed says so and what happened, and the others need not wait for the timeout.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from splitjax import _compat
from splitjax.errors import CheckpointError
from splitjax.runtime.launch.whereabouts import StepRecorder

# Keeps the messages of two uses in one run apart; all processes make them in the same order.
_numbers = itertools.count()


class Peers:
    """Speaks with the other processes of this run; alone in a run, nothing is sent.

    **Arguments:** `purpose`: goes into the keys of the messages.

    `rank` is this process's number, `count` how many processes there are.
    """

    def __init__(self, purpose: str):
        self.rank: int = jax.process_index()
        self.count: int = jax.process_count()
        self._prefix = f"splitjax/{purpose}/{next(_numbers)}"
        self._client = _compat.coordination_client() if self.count > 1 else None
        self._recorder = StepRecorder.open()
        self._topics = itertools.count()
        self._answered: list[str] = []

    @property
    def is_first(self) -> bool:
        """Returns whether this is process 0, which decides for all."""
        return self.rank == 0

    def new_topic(self) -> str:
        """Returns a name for an exchange of messages; called equally often, in the same order, by all processes."""
        return f"{self._prefix}/{next(self._topics)}"

    def announce(self, topic: str, value: Any) -> None:
        """Sends the JSON `value` on a `topic` to all; called by the first process."""
        if self._client is not None:
            self._client.key_value_set(f"{topic}/first", json.dumps(value))
            self._answered.append(f"{topic}/")

    def hear(self, topic: str, deadline: float) -> Any:
        """Returns the value that the first process announced on a `topic`; called by the other processes. Raises
        `CheckpointError` at the `deadline`, by `time.monotonic`."""
        return self._get(f"{topic}/first", deadline, 0)

    def report(self, topic: str, value: Any) -> None:
        """Sends the JSON `value` on a `topic` to the first process; called by the others."""
        if self._client is not None:
            self._client.key_value_set(f"{topic}/{self.rank}", json.dumps(value))

    def collect(self, topic: str, deadline: float) -> list[Any]:
        """Returns what the other processes reported on a `topic`, by rank, from 1; called by the first process. For a
        process that did not until the `deadline` a `CheckpointError` stands in the list."""
        reports: list[Any] = []
        for rank in range(1, self.count):
            try:
                reports.append(self._get(f"{topic}/{rank}", deadline, rank))
            except CheckpointError as error:
                reports.append(error)
        if self._client is not None and not any(isinstance(value, CheckpointError) for value in reports):
            # Whoever reports on this topic has heard all earlier ones: the service need not keep them.
            for old in self._answered:
                self._client.key_value_delete(old)
            self._answered = [f"{topic}/"]
        return reports

    def decide(self, topic: str, make: Callable[[], Any], timeout_seconds: float) -> Any:
        """Returns what `make` returns in the first process (a JSON value) in all processes, or raises the error that it
        raises there. The others wait `timeout_seconds` for it, by the `topic`.
        `OSError`s become `CheckpointError`s."""
        if not self.is_first:
            answer = self.hear(topic, time.monotonic() + timeout_seconds)
            keys = set(answer) if isinstance(answer, dict) else set()
            if not (keys >= {"value"} or keys >= {"message", "place", "remedy"}):
                raise CheckpointError(
                    "process 0 is said to have answered with what is no answer of splitjax",
                    value=answer,
                    place=topic,
                    remedy="see who else reaches the coordinator's port (SECURITY.md), and run again",
                )
            if "message" in answer:
                raise CheckpointError(answer["message"], place=answer["place"], remedy=answer["remedy"])
            return answer["value"]
        try:
            try:
                value = make()
            except OSError as error:
                raise CheckpointError(
                    str(error.strerror or error), place=error.filename, remedy="see the cause above"
                ) from error
        except Exception as error:
            fields = {name: getattr(error, name, None) for name in ("place", "remedy")}
            self.announce(topic, {"message": getattr(error, "message", str(error)), **fields})
            raise
        self.announce(topic, {"value": value})
        return value

    def agree(self, topic: str, problem: str | None, timeout_seconds: float) -> str | None:
        """Returns the problems that the processes have, as one text, in all of them; None if nobody has any.

        **Arguments:** `topic`: of the messages. `problem`: of this process, if any. `timeout_seconds`: for the wait.
        """
        deadline = time.monotonic() + timeout_seconds
        if not self.is_first:
            self.report(topic, problem)
            return self.hear(topic, deadline)
        problem = "; ".join(of_any([problem, *self.collect(topic, deadline)])) or None
        self.announce(topic, problem)
        return problem

    def _get(self, key: str, deadline: float, rank: int) -> Any:
        assert self._client is not None, "a process that is alone in its run hears nobody"
        milliseconds = max(1, int(1000 * (deadline - time.monotonic())))
        # Where a run stands still whoever watches it wants to know for whom; threads that save hold up nobody.
        told = threading.current_thread() is threading.main_thread()
        try:
            if told:
                self._recorder.waits_for(rank)
            return json.loads(self._client.blocking_key_value_get(key, milliseconds))
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            message = f"process {rank} " + (
                "did not answer in time" if "DEADLINE" in reason else f"cannot be reached: {reason}"
            )
            raise CheckpointError(
                message,
                remedy="see whether it still runs; a larger timeout_seconds if its storage is only slow",
            ) from error
        except (ValueError, RecursionError) as error:  # the service asks nobody who writes to it
            raise CheckpointError(
                f"process {rank} is said to have answered with what is no answer of splitjax",
                place=key,
                remedy="see who else reaches the coordinator's port (SECURITY.md), and run again",
            ) from error
        finally:
            if told:
                self._recorder.waits_for(None)


def of_any(reports: Sequence[str | CheckpointError | None]) -> list[str]:
    """Returns the problems among the `reports` of the processes, by rank, saying whose they are where there are
    several."""
    problems = []
    for rank, report in enumerate(reports):
        if isinstance(report, CheckpointError):
            problems.append(report.message)
        elif report is not None:
            problems.append(f"process {rank}: {report}" if len(reports) > 1 else report)
    return problems
