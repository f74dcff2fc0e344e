"""Compares, before a program first runs, what the processes of a run are about to do.

A plan, a traced program as text and digests of host values come in; nothing comes out, or a `ProcessError` that names
the first difference. Processes meet in the key-value store of JAX's coordination service, without a device, so that a
difference is an error and not a collective that never ends.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from splitjax import _compat
from splitjax.errors import ProcessError
from splitjax.plan import Plan
from splitjax.step.processes import value_digest

# Processes reach their first step at different times: data may load, disks differ. A process that takes longer than
# that is not coming.
TIMEOUT_SECONDS = 300.0
# Longer than any compilation.
_COMPILE_SECONDS = 7 * 24 * 3600.0
# Between two looks at what process 0 has decided.
_POLL_SECONDS = 0.05
# The coordination service refuses messages above 4 MB.
_PACKED_LIMIT = 2_000_000
_UNPACKED_LIMIT = 64 << 20
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^{}]*)\}\)|\{('[^{}:]*)\}")

Items = Sequence[tuple[str, str]]  # what is compared, with its digest


class CoordinationClient(Protocol):
    """Names what is used of the client of JAX's coordination service (`_compat.coordination_client`)."""

    def key_value_set(self, key: str, value: str) -> None:
        """Stores `value` under `key`; raises the runtime's own error where the key is taken."""
        ...

    def key_value_dir_get(self, key: str) -> Sequence[tuple[str, str]]:
        """Returns the (key, value) pairs below the folder `key`."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Returns the value of `key`; waits for it for at most `timeout_in_ms` milliseconds."""
        ...

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Waits until all processes have come to `barrier_id`, at most `timeout_in_ms` milliseconds."""
        ...


def program_text(jaxpr: _compat.ClosedJaxpr) -> str:
    """Returns a closed `jaxpr` as text, with digests of the values that it closes over. What differs between two
    processes that traced the same step (addresses of functions, the order of sets) is left out."""
    text = _SET.sub(lambda match: ",".join(sorted((match[1] or match[2]).split(", "))), _ADDRESS.sub("0x", str(jaxpr)))
    _, consts = _compat.open_jaxpr(jaxpr)
    values = (f"constant {value_digest(np.asarray(const))}" for const in consts if _is_host_value(const))
    return "\n".join((text, *values))


def _is_host_value(const: object) -> bool:
    """Returns whether a constant is an array whose whole value this process has; keys of random numbers are none."""
    if not isinstance(const, jax.Array):
        return isinstance(const, np.ndarray)
    return const.is_fully_addressable and not jnp.issubdtype(const.dtype, jax.dtypes.extended)


def agree(name: str, plan: Plan, program: str, values: Items, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Compares what this process is about to do with what the other processes of the run are.

    **Arguments:**

    - `name`: of the step; processes meet under it.
    - `plan`: this process's plan. `program`: its traced step, as text (`program_text`).
    - `values`: (name, digest) of its host values (`processes.host_digests`).
    - `timeout_seconds`: how long the other processes may take to come here.

    **Returns** where they met, for `wait_for_compiled`. In a run of one process nothing is done, and it is empty.

    Raises `ProcessError`, in every process, that names the first difference, or the processes that did not come in
    time."""
    client: CoordinationClient | None = _compat.coordination_client()
    if client is None or jax.process_count() == 1:
        return ""
    items = [("plan", plan.digest[:16]), ("program", _digest(program)), *values]
    texts = {"plan": plan.to_json(), "program": program}
    place = f"first call of {name} in process {jax.process_index()}"
    meeting = _Meeting(client, name, place, timeout_seconds)
    return meeting.compare(items, texts, lambda folder, what: _detail(client, folder, what, plan, program))


def agree_on_choice(name: str, choice: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Compares what this process chose as mesh and rules of a step with what the other processes of the run did, before
    anything runs on that mesh: on different ones they would wait for each other forever.

    **Arguments:** `name`: of the step. `choice`: the mesh and the rules, as text. `timeout_seconds`: as for `agree`.

    Raises `ProcessError`, in every process, where they differ, or where some process did not come in time."""
    client: CoordinationClient | None = _compat.coordination_client()
    if client is None or jax.process_count() == 1:
        return
    place = f"choice of mesh and rules of {name} in process {jax.process_index()}"
    meeting = _Meeting(client, f"{name}/choice", place, timeout_seconds)
    meeting.compare(
        [("choice", _digest(choice))],
        {"choice": choice},
        lambda folder, _: _first_line(_unpacked(client.blocking_key_value_get(f"{folder}choice", 10_000)), choice),
    )


def come_to_decision(name: str, subject: str) -> str:
    """Says that this process has come to where process 0 decides something for all processes of the run; waits for
    nobody.

    **Arguments:** `name`: of the step. `subject`: what is decided about, the same in all processes.

    **Returns** where the decision will be: of several about the same, the n-th for the n-th call in each process."""
    client: CoordinationClient | None = _compat.coordination_client()
    assert client is not None, "a process that is alone in its run decides itself"
    return _publish(client, f"{name}/decided/{subject}", jax.process_index(), "is here")


def leave_decision(folder: str, text: str) -> None:
    """Leaves what process 0 decided for the others.

    **Arguments:** `folder`: where (`come_to_decision`). `text`: the decision; empty for none."""
    client: CoordinationClient | None = _compat.coordination_client()
    assert client is not None, "a process that is alone in its run decides itself"
    client.key_value_set(f"{folder}decision", _packed(text))


def wait_for_decision(folder: str, name: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Waits for what process 0 decides, in another process.

    **Arguments:** `folder`: where it will be (`come_to_decision`). `name`: of the step. `timeout_seconds`: how long
    process 0 may take to come here; once it is here, it may take as long as it does.

    **Returns** the decision; empty where process 0 has none, or went on to compare what all chose (`agree_on_choice`)
    and never came here, as it was asked for something else.

    Raises `ProcessError` where process 0 did not come in time, or is gone."""
    client: CoordinationClient | None = _compat.coordination_client()
    assert client is not None, "a process that is alone in its run decides itself"
    rank = jax.process_index()
    place = f"choice of mesh and rules of {name} in process {rank}"
    ends = time.monotonic() + timeout_seconds
    while True:
        # In this order: where process 0 is ahead, it has been here before, or never will be.
        is_ahead = _first_is_ahead(client, f"splitjax/{name}/choice/", rank)
        is_here = any(key.endswith("/0") for key, _ in client.key_value_dir_get(f"{folder}items/"))
        if is_here or is_ahead:
            break
        if time.monotonic() > ends:
            raise ProcessError(
                f"process 0 came to no choice of mesh or rules for this step within {timeout_seconds:g} s",
                value=name,
                place=place,
                remedy="every process must call the same steps in the same order, as process 0 chooses for all of them;"
                " or say mesh and rules yourself",
            )
        time.sleep(_POLL_SECONDS)
    if not is_here:
        return ""
    try:
        return _unpacked(client.blocking_key_value_get(f"{folder}decision", round(_COMPILE_SECONDS * 1000)))
    except Exception as error:  # the runtime's own type differs by version
        raise ProcessError(
            f"process 0 did not end its choice of mesh and rules: {str(error).splitlines()[0][:300]}",
            place=place,
            remedy="see how process 0 ended",
        ) from error


def _first_is_ahead(client: CoordinationClient, folder: str, rank: int) -> bool:
    """Returns whether process 0 waits in a meeting below `folder` to which process `rank` has not come yet."""
    keys = [key.rsplit("/", 3) for key, _ in client.key_value_dir_get(folder)]
    came = {process: {number for _, number, _, who in keys if who == process} for process in ("0", str(rank))}
    return bool(came["0"] - came[str(rank)])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """Is where the processes of a run compare what they are about to do. `client`: of the coordination service. `name`:
    under which they meet. `place`: of errors. `timeout_seconds`: how long the others may take."""

    client: CoordinationClient
    name: str
    place: str
    timeout_seconds: float

    def compare(self, items: Items, texts: Mapping[str, str], detail: Callable[[str, str], str]) -> str:
        """Compares `items`, and returns the folder in which the processes met.

        **Arguments:** `texts`: by name of an item, what process 0 lets the others read of it. `detail`: the end of the
        sentence about an item that differs, by the folder and its name.

        Raises `ProcessError` for the first difference, and where not all come in time."""
        rank, client, place = jax.process_index(), self.client, self.place
        folder = _publish(client, self.name, rank, json.dumps(items))
        for what, text in texts.items() if rank == 0 else ():
            client.key_value_set(f"{folder}{what}", _packed(text))
        try:
            client.wait_at_barrier(f"{folder}all", round(self.timeout_seconds * 1000))
        except Exception as error:  # the runtime's own type differs by version
            raise ProcessError(
                f"not every process came to this call within {self.timeout_seconds:g} s:"
                f" {str(error).splitlines()[0][:300]}",
                place=place,
                remedy="every process must call the same steps in the same order; see what the others do or wait for",
            ) from error
        items_of = _items_of(client.key_value_dir_get(f"{folder}items/"), place)
        for process in sorted(items_of):
            what = _first_difference(items_of[0], items_of[process])
            if what is not None:
                end = detail(folder, what) if rank == process else ""
                raise ProcessError(_sentence(what, process) + end, value=what, place=place, remedy=_remedy(what))
        return folder


def wait_for_compiled(meeting: str, name: str, program: str) -> None:
    """Waits, before a program first runs, until every process has compiled it.

    Collectives of a program wait for each other only so long: gloo, on CPUs, gives up after 30 s. A process that
    compiles for longer than the others would be their end.

    **Arguments:** `meeting`: where they met (`agree`). `name`: of the step. `program`: which of its programs.

    Raises `ProcessError` where a process is gone. There is no deadline: whoever watches the run has one."""
    client: CoordinationClient | None = _compat.coordination_client()
    assert client is not None, "a process that is alone in its run has nobody to meet"
    try:
        client.wait_at_barrier(f"{meeting}compiled/{program}", round(_COMPILE_SECONDS * 1000))
    except Exception as error:  # the runtime's own type differs by version
        raise ProcessError(
            f"not every process compiled this program: {str(error).splitlines()[0][:300]}",
            place=f"first run of {name} in process {jax.process_index()}",
            remedy="see how the other processes ended",
        ) from error


def _items_of(entries: Sequence[tuple[str, str]], place: str) -> dict[int, Items]:
    """Returns what each process published, by its number. Raises `ProcessError` for what no process of splitjax writes:
    the coordination service asks nobody who writes to it."""
    try:
        items_of = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in entries}
        if 0 in items_of and all({type(name) for name, _ in items} <= {str} for items in items_of.values()):
            return items_of
        problem: Exception | None = None
    except (ValueError, TypeError, RecursionError) as error:
        problem = error
    raise ProcessError(
        "what the processes of this run say they are about to do cannot be read",
        value=[key for key, _ in entries],
        place=place,
        remedy="see who else reaches the coordinator's port (SECURITY.md), and run again",
    ) from problem


def _publish(client: CoordinationClient, name: str, rank: int, text: str) -> str:
    """Writes this process's entry into the first folder of that name that it has not used, and returns the folder:
    processes that build the same programs in the same order meet in the same ones."""
    for number in itertools.count():
        folder = f"splitjax/{name}/{number}/"
        try:
            client.key_value_set(f"{folder}items/{rank}", text)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error) and "already exists" not in str(error):
                raise
        else:
            return folder
    raise AssertionError("unreachable")


def _first_difference(first: Items, second: Items) -> str | None:
    """Returns the name of the first item in which two processes differ; None where they agree."""
    if [tuple(item) for item in first] == [tuple(item) for item in second]:
        return None
    in_first, in_second = dict(first), dict(second)
    for what in (*in_first, *(name for name in in_second if name not in in_first)):
        if in_first.get(what) != in_second.get(what):
            return what
    return "order of the arguments"


def _packed(text: str) -> str:
    """Returns a text as the coordination service takes it, compressed; empty where that is too long for a message."""
    packed = base64.b85encode(zlib.compress(text.encode())).decode()
    return packed if len(packed) <= _PACKED_LIMIT else ""


def _detail(client: CoordinationClient, folder: str, what: str, plan: Plan, program: str) -> str:
    """Describes the first difference from process 0's plan or program, as the end of a sentence."""
    text = _unpacked(client.blocking_key_value_get(f"{folder}{what}", 10_000)) if what in ("plan", "program") else ""
    if not text:
        return ""
    if what == "plan":
        return "".join(f": {difference}" for difference in Plan.from_json(text).diff(plan)[:1])
    return _first_line(text, program)


def _unpacked(packed: str) -> str:
    """Returns a text that `_packed` gave; empty for anything else."""
    try:
        return zlib.decompressobj().decompress(base64.b85decode(packed), _UNPACKED_LIMIT).decode()
    except (ValueError, zlib.error):
        return ""


def _first_line(first: str, own: str) -> str:
    """Returns in which line process 0's text and this process's `own` differ, as the end of a sentence; empty where the
    former is not known."""
    if not first:
        return ""
    pairs = itertools.zip_longest(first.splitlines(), own.splitlines(), fillvalue="nothing")
    there, here = next(pair for pair in pairs if pair[0] != pair[1])
    return f": {there.strip()[:200]!r} there, {here.strip()[:200]!r} here"


def _sentence(what: str, process: int) -> str:
    if what == "choice":
        return f"process {process} chose another mesh or other rules for this step than process 0"
    if what in ("plan", "program"):
        return f"process {process} made another {what} of this step than process 0"
    return f"process {process} passes another value of {what!r} than process 0"


def _remedy(what: str) -> str:
    if what == "choice":
        return (
            "give every process the same step, options and versions, so that process 0 chooses for all of them; or say"
            " mesh and rules yourself"
        )
    if what == "plan":
        return "give every process the same mesh, rules, model and versions"
    if what == "program":
        return (
            "trace the same code with the same constants everywhere: no branch on the process, no unseeded randomness,"
            " no clock"
        )
    return (
        "an array that is not global must be the same in every process: seed alike, pass the whole batch everywhere, or"
        " make each process's own examples its part with splitjax.global_batch(local_batch)"
    )
