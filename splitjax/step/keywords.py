"""The options of the decorators, written once: their types, their defaults and the signature that `help` shows.

`splitjax.parallelize`, `splitjax.nnx.parallelize` and `splitjax.equinox.parallelize` take the same keywords. A type
checker reads them from `ParallelizeOptions`, so that a misspelt keyword or name is an error before anything runs, and
an editor completes both. At run time `complete` refuses an unknown keyword and fills in the defaults. What the values
may be beyond their types is checked by `splitjax.step.options`. Importing this module loads nothing else of splitjax.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    import os

    import jax

    from splitjax.auto_mesh import AutoMesh
    from splitjax.machines.calibration import Calibration
    from splitjax.machines.targets import Target
    from splitjax.mesh import MeshSizes
    from splitjax.partial.request import PartialBackprop
    from splitjax.plan import Plan
    from splitjax.roles import Role
    from splitjax.rules import RuleSet
    from splitjax.sync.costs.schemes import ByRows, SchemeCosts

# The rule sets in `sharding_rules/`. Rules of one's own come as a `RuleSet` or as the path of a TOML file.
RuleSetName: TypeAlias = Literal[
    "splitbrain", "splitbrain_fsdp", "megatron", "transformer", "fsdp", "data_parallel", "embedding_owner"
]
# What a mesh axis is for (`splitjax.roles.Role`).
RoleName: TypeAlias = Literal["data", "storage", "tensor", "expert", "sequence", "stage"]
# The schemes that `splitjax.sync` brings, and the choice among them. A scheme of one's own comes as a `Scheme`; by
# the name that it is registered with it runs too, but type checkers, which find misspelt names, know these names alone:
# `splitjax.sync.by_name(name)` gives the scheme.
SyncName: TypeAlias = Literal[
    "dense",
    "all_gather",
    "recursive_doubling",
    "blocks",
    "parameter_server",
    "hierarchical",
    "zen",
    "row_exchange",
    "auto",
]
GroupComm: TypeAlias = Literal["auto", "gather", "turns", "modulo"]
OnUnknown: TypeAlias = Literal["error", "gather"]
Uneven: TypeAlias = Literal["error", "pad"]
VerifyWhen: TypeAlias = Literal["first"]
VerifySizes: TypeAlias = Literal["shrunken", "given", "both"]
RematPolicy: TypeAlias = Literal["dots_saveable", "nothing_saveable"]
Positions: TypeAlias = int | Sequence[int]


class ParallelizeOptions(TypedDict, total=False):
    """The keywords of the decorators; `splitjax.parallelize` says what each means."""

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | MeshSizes | AutoMesh | Literal["auto"] | None
    roles: Mapping[str, RoleName | Role] | None
    rules: RuleSetName | str | os.PathLike[str] | RuleSet
    group_comm: GroupComm
    sync: SyncName | SchemeCosts | ByRows | Mapping[str, SyncName | SchemeCosts | ByRows]
    backprop: PartialBackprop | None
    shard_state: bool | Literal["auto"]
    microbatches: int | Literal["auto"] | None
    remat: RematPolicy | Literal["auto"] | Mapping[str, RematPolicy] | None
    donate: bool
    plan: Plan | str | os.PathLike[str] | None
    state_argnums: Positions | None
    batch_argnums: Positions | None
    state_outnums: Positions | None
    static_argnums: Positions
    static_argnames: str | Sequence[str]
    unknown: OnUnknown
    uneven: Uneven
    verify: VerifyWhen | None
    memory_budget: str | int | None
    target: str | os.PathLike[str] | Target | Calibration | None
    compile_best: int


# Of `splitjax.parallelize`; the others say in which they differ.
DEFAULTS: ParallelizeOptions = {
    "mesh": None,
    "roles": None,
    "rules": "splitbrain",
    "group_comm": "auto",
    "sync": "dense",
    "backprop": None,
    "shard_state": False,
    "microbatches": None,
    "remat": None,
    "donate": True,
    "plan": None,
    "state_argnums": (0,),
    "batch_argnums": (1,),
    "state_outnums": None,
    "static_argnums": (),
    "static_argnames": (),
    "unknown": "error",
    "uneven": "error",
    "verify": None,
    "memory_budget": None,
    "target": None,
    "compile_best": 0,
}


def complete(name: str, given: Mapping[str, Any], own: ParallelizeOptions | None = None) -> dict[str, Any]:
    """Returns every option with its value: the `given` ones, else those in which a decorator differs (`own`), else the
    defaults.

    The values are what the user wrote, and are not checked here. Raises `TypeError`, as Python does for an unknown
    keyword, that says of which decorator (`name`) and which option comes close."""
    for keyword in given:
        if keyword not in DEFAULTS:
            close = difflib.get_close_matches(keyword, DEFAULTS, n=1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}{hint}")
    return {**DEFAULTS, **(own or {}), **given}


def show_signature(decorator: Callable[..., Any], own: ParallelizeOptions | None = None) -> None:
    """Gives a decorator that takes `**options` the signature that `help`, `inspect` and Jupyter show: every option with
    its type and its default (`own`: those in which it differs from `DEFAULTS`)."""
    types = ParallelizeOptions.__annotations__
    parameters = [inspect.Parameter("fn", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)]
    for name, default in complete(decorator.__name__, {}, own).items():
        written = getattr(types[name], "__forward_arg__", types[name])
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=written))
    setattr(decorator, "__signature__", inspect.Signature(parameters))  # noqa: B010  # a function declares no such name
