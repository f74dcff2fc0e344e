"""No exception is control flow: what cannot be done is returned as a value (`errors.Refusal`), and raised for users.

An error may be caught to be raised again, with its place or as another type. To catch one of the package's own errors
and go on is to choose a branch by it, which stands below with its reason or nowhere.
"""

from __future__ import annotations

import ast
import builtins
import pathlib
from collections.abc import Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parents[1]

ENDS_A_COMMAND = "the command ends with the error as its text"
STRANGERS_CODE = "the user's step is traced at other sizes, and anything in it may refuse"
SHOWN = "the plan of a step is shown, also where the step refuses to be traced as it would run"
THROUGH_JAX = "what raises it runs inside of a trace of JAX, which hands no values back"
STORAGE = "storage and other processes fail while a run goes on, at any depth"
OLD_FILE = "the file is left aside, whatever is wrong with it"

# Where one of the package's own errors is caught and not raised again: how often, and why.
CAUGHT = {
    "choosing/choosing.py: _given": (
        1,
        "a rule set that a step does not take on a mesh is no candidate there, and why is shown",
    ),
    "choosing/trade_off.py: _points_on": (
        1,
        "a budget that nothing fits ends the row of a machine: less than that is not to be had there",
    ),
    "planning/explaining.py: _alternatives": (
        1,
        "a layout that the step cannot have is listed with the reason, beside those that it can have",
    ),
    "cli/__init__.py: main": (1, ENDS_A_COMMAND),
    "cli/plan.py: ShowPlan._checked": (
        1,
        "a compiler that is not here is told below the plan, which needs none, unless it was asked for",
    ),
    "compile/choosing/places.py: Places.priced": (
        1,
        "a mesh on which an annotation cannot be kept is no candidate, and why is shown",
    ),
    "compile/choosing/deciding.py: _decided": (
        1,
        "rules that do not go with the step's options are no candidate: the next ones are tried",
    ),
    "compile/choosing/deciding.py: _cheapest_changes.fitting": (
        1,
        "options that the step does not take with a layout are no change that an error can name",
    ),
    "compile/choosing/deciding.py: _as_compiled.compiled": (
        1,
        "a layout that its compiler refuses is no candidate: the next ones are tried, and why is shown",
    ),
    "compile/choosing/shared.py: SharedChoice.read": (
        1,
        "what process 0 left and cannot be read is chosen again, and compared before anything runs",
    ),
    "compile/choosing/kept.py: KeptChoice.read": (1, OLD_FILE),
    "compile/choosing/kept.py: KeptChoice.write": (1, STORAGE),
    "compile/memory.py: plan_memory": (1, SHOWN),
    "compile/remedies.py: step_remedies": (
        1,
        "a change that the step cannot have is listed with the reason, beside those that were compiled",
    ),
    "lower/partial/workers.py: DispatchedStep._captured": (1, THROUGH_JAX),
    "parallel_step.py: ParallelStep._call": (1, THROUGH_JAX),
    "runtime/checkpoint/carrying.py: put_together": (1, OLD_FILE),
    "runtime/checkpoint/checkpoints.py: Checkpoints.save": (1, STORAGE),
    "runtime/checkpoint/checkpoints.py: Checkpoints.__exit__": (1, STORAGE),
    "runtime/checkpoint/checkpoints.py: Checkpoints._finish": (1, STORAGE),
    "runtime/launch/peers.py: Peers.collect": (1, STORAGE),
    "runtime/training/ledger.py: _read": (1, OLD_FILE),
    "search/reducing.py: reduce_network": (1, "a limit is found out to be broken in the midst of a reduction"),
    "step/traced.py: _way_to_trace": (1, STRANGERS_CODE),
    "step/traced.py: resized_trace.resized": (1, STRANGERS_CODE),
    "verify/verifying.py: _Run._compared": (3, STRANGERS_CODE),
    "verify/verifying.py: _Run._located": (1, STRANGERS_CODE),
}


# Exceptions that are no errors for users (those derive from `SplitjaxError`): what each one ends, which hands no value
# back. A rule, a pass or a way that cannot do something returns a value instead.
NO_ERROR_FOR_USERS = {
    "compile/programs.py: SignatureChanged": "a call of jax.jit whose arguments are not those of its trace",
    "lower/partial/rows.py: Captured": "a trace of JAX, at the boundary behind which nothing is wanted",
    "report/protobuf.py: WireError": "the reading of bytes that are no message",
    "search/reducing.py: _Impossible": "a reduction that finds a limit broken in its midst",
    "verify/dim_classes.py: Misfit": "the rewriting of a user's step at sizes that do not fit it",
}


def own_errors(trees: Mapping[str, ast.AST]) -> set[str]:
    """Names of the exceptions that the package defines."""
    bases = {
        node.name: [ast.unparse(base).split(".")[-1] for base in node.bases]
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def is_error(name: str, seen: frozenset[str] = frozenset()) -> bool:
        builtin = getattr(builtins, name, None)
        if isinstance(builtin, type):
            return issubclass(builtin, BaseException)
        return name not in seen and any(is_error(base, seen | {name}) for base in bases.get(name, ()))

    return {name for name in bases if is_error(name)}


def caught(tree: ast.AST, errors: set[str], around: tuple[str, ...] = ()) -> Iterator[str]:
    """Qualified names of the functions that catch one of `errors` and do not raise at the handler's end."""
    for node in ast.iter_child_nodes(tree):
        inside = around
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*around, node.name)
        if isinstance(node, ast.ExceptHandler) and node.type is not None and not ends_with_an_error(node.body[-1]):
            types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if errors & {ast.unparse(kind).split(".")[-1] for kind in types}:
                yield ".".join(around)
        yield from caught(node, errors, inside)


def ends_with_an_error(last: ast.stmt) -> bool:
    """Whether the last statement of a handler raises, by itself or by a function that returns nothing."""
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return ast.unparse(last.value.func).endswith(("fail", "_fail"))
    return isinstance(last, ast.Raise)


def test_no_error_of_the_package_chooses_a_branch():
    files = {
        file.relative_to(ROOT / "splitjax").as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted((ROOT / "splitjax").rglob("*.py"))
    }
    errors, counts = own_errors(files), {}
    for file, tree in files.items():
        for name in caught(tree, errors):
            counts[f"{file}: {name}"] = counts.get(f"{file}: {name}", 0) + 1
    assert counts == {name: count for name, (count, _) in CAUGHT.items()}


def test_every_exception_is_an_error_for_users():
    """A class of exceptions that chooses a branch would be none: it is returned as a value."""
    files = {
        file.relative_to(ROOT / "splitjax").as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted((ROOT / "splitjax").rglob("*.py"))
    }
    assert other_exceptions(files) == set(NO_ERROR_FOR_USERS)


def test_every_error_for_users_has_a_remedy():
    files = {
        file.relative_to(ROOT / "splitjax").as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted((ROOT / "splitjax").rglob("*.py"))
    }
    for_users = own_errors(files) - {name.split()[-1] for name in other_exceptions(files)}
    assert [f"{file}:{line}" for file, tree in files.items() for line in without_remedy(tree, for_users)] == []


def without_remedy(tree: ast.AST, errors: set[str]) -> Iterator[int]:
    """Lines on which one of `errors` is made with a message and without a remedy. One that is made of another's fields
    (`**fields`) has what that has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] in errors:
            if not {"remedy", None} & {keyword.arg for keyword in node.keywords}:
                yield node.lineno


def test_an_error_without_remedy_is_seen():
    tree = ast.parse("raise MyError('no')\nraise MyError('no', remedy='do')\nraise MyError(**fields)\nOther('no')")
    assert list(without_remedy(tree, {"MyError"})) == [1]


def other_exceptions(files: Mapping[str, ast.AST]) -> set[str]:
    """The exceptions of the package that do not derive from `SplitjaxError`, by file and name."""
    errors = own_errors(files)
    classes = [
        (file, node, [ast.unparse(base).split(".")[-1] for base in node.bases])
        for file, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in errors
    ]
    for_users = {"SplitjaxError"}
    for _ in classes:
        for_users |= {node.name for _, node, bases in classes if for_users & set(bases)}
    return {f"{file}: {node.name}" for file, node, _ in classes if node.name not in for_users}


def test_an_exception_for_control_flow_is_seen():
    tree = ast.parse(
        "class SplitjaxError(Exception): ...\n"
        "class PlanError(SplitjaxError, ValueError): ...\n"
        "class Inner(PlanError): ...\n"
        "class Mixed(Exception): ...\n"
        "class Values: ...\n"
    )
    assert other_exceptions({"a.py": tree}) == {"a.py: Mixed"}


def test_what_is_caught_is_seen():
    tree = ast.parse(
        "class MyError(Base): ...\n"
        "class Base(ValueError): ...\n"
        "class A:\n"
        "    def branch(self):\n"
        "        try: f()\n"
        "        except (KeyError, errors.MyError): return None\n"
        "    def told(self):\n"
        "        try: f()\n"
        "        except MyError as error: raise Base() from error\n"
        "        except KeyError: pass\n"
    )
    errors = own_errors({"a": tree})
    assert errors == {"MyError", "Base"}
    assert list(caught(tree, errors)) == ["A.branch"]
