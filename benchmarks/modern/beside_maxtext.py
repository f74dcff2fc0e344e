"""MaxText's own program beside those of the page of large models.

    python -m benchmarks modern --only large --maxtext-python PATH

`PATH` is a Python that has the package `maxtext`, in an environment of its own. Its `train_compile` compiles the shapes
of the cases without an axis `data`, in which all programs store the same; ours and the program by hand stay as the page
has them. There is no goal: the two are not the same step, and their compilers are not of the same version.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks._common import table, write_stored
from benchmarks.modern import large

KEY = "maxtext"  # of what is stored in `modern_large.json`
DRIVER = pathlib.Path(__file__).with_name("maxtext_driver.py")
CASES = tuple(name for name, case in large.CASES.items() if "data" not in case.mesh and "experts" not in case.model)
TOPOLOGIES = {"v5p:4x4x4": ("v5p-128", 64), "v5e:16x16": ("v5e-256", 256)}  # as MaxText calls them, with their chips
# By MaxText's name of a size the name that a case has for it: what has to be the same.
SIZES = {
    "vocab_size": "vocab", "emb_dim": "width", "mlp_dim": "hidden", "num_decoder_layers": "layers",
    "num_query_heads": "heads", "num_kv_heads": "kv_heads", "head_dim": "head_dim", "max_target_length": "seq",
}  # fmt: skip
EXAMPLES = "global_batch_size_to_train_on"
SETTINGS = (
    *SIZES, EXAMPLES, "global_batch_size_to_load", "dtype", "weight_dtype", "grad_dtype", "mu_dtype", "opt_type",
    "adam_weight_decay", "gradient_clipping_threshold", "attention", "float32_qk_product", "float32_logits",
    "logits_dot_in_fp32", "cast_logits_to_fp32", "logits_via_embedding", "num_vocab_tiling", "remat_policy",
    "scan_layers", "shard_mode", "enable_dropout",
)  # fmt: skip
# By which options a program of MaxText's is brought nearer to our step: the first is what others are compared with.
NEAR, DEFAULT = "near ours", "by default"
OPTIONS: Mapping[str, Sequence[str]] = {
    NEAR: ("float32_logits=true", "gradient_clipping_threshold=0", "adam_weight_decay=0"),
    DEFAULT: (),
}
COUNTED_SINCE = "2026-11-29"  # the day from which on loops that count in twos are read as often as they run
TEXT = """
MaxText's `train_compile` compiles its own training step for the shapes of the cases without an axis `data`, in an
environment of its own. Vocabulary, layers, width, heads, MLP, length, examples of a batch, mesh and the number of
parameters are those of our step; this is checked. Its attention is `dot_product`, and a layer keeps nothing but its
input for the backward pass. *Near ours* has options besides that bring the two steps nearer to each other: scores of
attention are float32 as ours are, gradients are not clipped, and weights do not decay. *By default* has none of these:
scores are bfloat16, of which a device holds half as many bytes as of ours. Bytes are counted by `splitjax.report.hlo`.
Ours and the program by hand are those of the tables above. There is no goal.

These figures need not be MaxText's best. Started by hand, by its defaults for v5p and over a mesh of the same order,
the same shape was compiled to a program that sends less and holds clearly less than any program here, and so it was by
this benchmark's driver outside of this command. What makes the difference has not been found out; `XLA_FLAGS` alone
does not.

What differs, as far as the settings and the source of MaxText's package say:

- The compiler: its environment has another version of JAX and of libtpu than ours, so that a difference of memory may
  be the compiler's.
- The optimizer is `optax.adamw` with a schedule of the learning rate, ours `optax.adam` with a constant one. Both keep
  two moments in float32 for each weight.
- Attention: its queries are multiplied in groups with the keys and values of their group; ours repeats keys and values
  to the number of heads. Its mask is made of the sequences that are packed into an example, too, ours of positions
  alone.
- The loss: both make logits in bfloat16 and then float32. Its targets become one-hot rows as long as the vocabulary,
  and it has a term for the logits' normaliser, of weight zero; ours picks the logit of each target.
- The batch: its step takes six arrays of integers (tokens, positions and sequences, of inputs and of targets), ours
  two. Where there are fewer examples than devices, MaxText loads one for each device and trains on the first of them.
- Metrics: its step gives the norms of gradients and of weights, too, ours the loss alone.
- The mesh: MaxText has the two axes among ten more of size one, and orders devices by `mesh_utils`, as ours does.
""".strip()


class NoMaxTextError(Exception):
    """MaxText cannot be asked; the text says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A program of MaxText's of a case: with what it was made, and what it needs.

    - `variant`: which of `OPTIONS` it was given.
    - `arguments`: what `train_compile` was given. `settings`: its configuration then. `versions`: of packages."""

    name: str
    variant: str
    commit: str
    date: str
    versions: Mapping[str, str]
    arguments: Sequence[str]
    settings: Mapping[str, Any]
    parameters: int
    program: large.Program

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return f"{self.name}, {self.variant}"


def run(names: Sequence[str] | None, python: pathlib.Path, folder: pathlib.Path) -> int:
    """Compiles MaxText's programs of the cases `names` (None: all that it has) with `python`, and writes the page of
    `folder` with them after each; returns 2 where MaxText cannot be asked. All else on the page stays."""
    from benchmarks import machine

    file = folder / f"{large.PAGE}.json"
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"cases": {}}
    try:
        check(names or CASES, python, stored["cases"])
        for name, variant in itertools.product(names or CASES, OPTIONS):
            found = measure(name, variant, python, machine.this_commit(), machine.this_machine().date)
            if found.parameters != stored["cases"][name]["parameters"]:
                raise NoMaxTextError(f"MaxText's model has {found.parameters:,} parameters, another number than ours")
            kept = stored.setdefault(KEY, {"cases": {}})
            kept["cases"][found.key] = dataclasses.asdict(found)
            command = "python -m benchmarks modern --only large --maxtext-python PYTHON"
            kept["header"] = machine.header(machine.this_machine((*machine.PACKAGES, "libtpu")), command).rstrip()
            print("wrote", write_stored(large.PAGE, stored, large.page_lines, folder), flush=True)
    except NoMaxTextError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def check(names: Sequence[str], python: pathlib.Path, stored: Mapping[str, Any]) -> None:
    """Raises `NoMaxTextError` where a case has no program of MaxText's or none of ours in `stored`, or where `python`
    has no MaxText."""
    for name in names:
        if name not in CASES:
            raise NoMaxTextError(
                f"the case {name!r} is not compiled by MaxText\n  remedy: name one of {'; '.join(CASES)}"
            )
        if name not in stored:
            raise NoMaxTextError(
                f"the page has no program of ours for the case {name!r}\n  remedy: compile it first, without"
                " --maxtext-python"
            )
    remedy = "\n  remedy: give the Python (3.12 or later) of an environment that has the package maxtext"
    look = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('maxtext') else 3)"
    try:
        code = subprocess.run([str(python), "-P", "-c", look], check=False, capture_output=True).returncode
    except OSError as error:
        raise NoMaxTextError(f"{python} cannot be run: {error.strerror}{remedy}") from error
    if code:
        what = "has no package maxtext" if code == 3 else f"is no Python that MaxText needs (exit status {code})"
        raise NoMaxTextError(f"{python} {what}{remedy}")


def arguments(name: str, variant: str) -> list[str]:
    """What MaxText's `train_compile` is given for the case `name`. `variant`: one of `OPTIONS`."""
    case = large.CASES[name]
    topology, chips = TOPOLOGIES[case.topology]
    return [
        "run_name=splitjax", "model_name=llama3.1-8b", "hardware=tpu", "skip_jax_distributed_system=true",
        "enable_checkpointing=false", f"compile_topology={topology}", "compile_topology_num_slices=1",
        *(f"ici_{axis}_parallelism={size}" for axis, size in case.mesh.items()), "allow_split_physical_axes=true",
        f"per_device_batch_size={case.examples / chips:g}", f"max_target_length={case.model['seq']}",
        f"dtype={case.model['dtype']}", "scan_layers=true", "remat_policy=full", "attention=dot_product",
        *OPTIONS[variant],
    ]  # fmt: skip


def measure(name: str, variant: str, python: pathlib.Path, commit: str, date: str) -> Found:
    """Has `python` compile a program of MaxText's for the case `name`, and reads it. Raises `NoMaxTextError` where it
    fails or where its shape is another one."""
    case, given = large.CASES[name], arguments(name, variant)
    with tempfile.TemporaryDirectory() as where:
        folder = pathlib.Path(where)
        request = folder / "request.json"
        request.write_text(json.dumps({"arguments": given, "settings": SETTINGS}), encoding="utf-8")
        command = [str(python.absolute()), "-P", str(DRIVER), str(request), str(folder)]
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        if done.returncode:
            raise NoMaxTextError(f"MaxText did not compile {name!r}:\n{done.stderr[-4000:]}")
        answer = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        module = (folder / "module.hlo").read_bytes()
    settings = answer["settings"]
    wanted = {**{theirs: case.model[ours] for theirs, ours in SIZES.items()}, EXAMPLES: case.examples}
    if other := [f"{size} is {settings[size]}, not {want}" for size, want in wanted.items() if settings[size] != want]:
        raise NoMaxTextError(f"MaxText's shape of {name!r} is another one: {'; '.join(other)}")
    program = large.Program(
        sent_by(module, case.mesh),
        answer["argument"],
        answer["temp"],
        answer["output"] - answer["alias"],
        answer["peak"],
    )
    size = f"{_gigabytes(program.sent_bytes)} GB sent, {_gigabytes(program.memory)} GB held"
    print(f"{name}, MaxText's, {variant}: {size}", flush=True)
    return Found(name, variant, commit, date, answer["versions"], given, settings, answer["parameters"], program)


def sent_by(module: bytes, mesh: Mapping[str, int]) -> dict[str, int]:
    """What each device sends, by collective and axes, most first."""
    from splitjax.mesh import MeshShape
    from splitjax.report.hlo import read_collectives
    from splitjax.report.wire import read_module

    sent: collections.Counter[str] = collections.Counter()
    for each in read_collectives(read_module(module), MeshShape.of(mesh)):
        sent[f"{each.op} over {each.axis}"] += each.bytes
    return dict(sent.most_common())


def section(stored: Mapping[str, Any], cases: Mapping[str, large.Measured]) -> list[str]:
    """The section of the page. `stored`: of `modern_large.json`. `cases`: what the page has of ours and by hand."""
    if KEY not in stored:
        return []
    kept = {found.key: found for found in map(_read, stored[KEY]["cases"].values())}
    keys = [(name, f"{name}, {variant}") for name, variant in itertools.product(CASES, OPTIONS)]
    read: dict[str, list[Found]] = {}
    for name, key in keys:
        if key in kept:
            read.setdefault(name, []).append(kept[key])
    every = [found for each in read.values() for found in each]
    lines = ["## MaxText's own compile", "", stored[KEY]["header"], "", *TEXT.splitlines(), ""]
    for versions, names in _by_versions(every).items():
        lines += [f"MaxText's environment has {versions} ({'; '.join(names)}).", ""]
    lines += [" ".join(_said(found, cases[found.name]) for found in every), ""]
    if any(cases[name].date < COUNTED_SINCE for name in read):
        lines += [
            "Loops in which XLA hands the parts of a product round, and that count in twos, are counted as often as"
            " they run in MaxText's programs. Ours and the program by hand were read when such a loop was counted once:"
            " one that has any sends more than stands here.",
            "",
        ]
    titles = (
        "step", "program", "sent (GB)", "sent, of MaxText's", "memory (GB)", "memory, of MaxText's", "arguments (GB)",
        "temporary (GB)", "results (GB)", "peak (GB)",
    )  # fmt: skip
    first = next(iter(OPTIONS))
    lines += [f"In the table *of MaxText's* means of its program {first}, or of the first there is.", ""]
    lines += [*table(titles, (row for name, each in read.items() for row in _rows(each, cases[name]))), ""]
    titles = ("step", "collective", *(f"MaxText's, {variant} (GB)" for variant in OPTIONS))
    lines += ["What MaxText's programs send:", ""]
    lines += [*table(titles, (row for each in read.values() for row in _sent_rows(each))), ""]
    lines += ["Settings of MaxText's, as its configuration says them:", ""]
    settings = dict.fromkeys(name for found in every for name in found.settings)
    rows = ((f"`{name}`", *(str(found.settings.get(name, "")) for found in every)) for name in settings)
    lines += [*table(("setting", *(found.key for found in every)), rows), ""]
    for found in every:
        made = " ".join(("train_compile", *found.arguments))
        lines += [f"{found.key} ({found.date}, {found.commit}) is made by `{made}`.", ""]
    return lines


def _read(stored: Mapping[str, Any]) -> Found:
    return Found(**{**stored, "program": large.Program(**stored["program"])})


def _by_versions(read: Sequence[Found]) -> dict[str, list[str]]:
    """By packages and versions the cases that were compiled with them."""
    found: dict[str, list[str]] = {}
    for each in read:
        text = ", ".join(f"{package} {version}" for package, version in each.versions.items())
        found.setdefault(text, []).append(each.key)
    return found


def _programs(read: Sequence[Found], case: large.Measured) -> Iterator[tuple[str, large.Program]]:
    """The programs of a case with what the table calls them, MaxText's first."""
    for found in read:
        yield f"MaxText's, {found.variant}", found.program
    yield "ours", case.ours
    yield "by hand", case.by_hand
    limit = f"limited to {_gigabytes(case.limit)} GB"
    for which, program in (("ours", case.ours_limited), ("by hand", case.by_hand_limited)):
        if program is not None:
            yield f"{which}, {limit}", program


def _rows(read: Sequence[Found], case: large.Measured) -> Iterator[tuple[str, ...]]:
    theirs = read[0].program
    for which, each in _programs(read, case):
        yield (
            case.name, which, _gigabytes(each.sent_bytes), f"{each.sent_bytes / theirs.sent_bytes:.3f}",
            _gigabytes(each.memory), f"{each.memory / theirs.memory:.3f}", _gigabytes(each.arguments),
            _gigabytes(each.temporary), _gigabytes(each.results), _gigabytes(each.peak),
        )  # fmt: skip


def _sent_rows(read: Sequence[Found]) -> Iterator[tuple[str, ...]]:
    """What MaxText's programs of a case send, a column for each of `OPTIONS`."""
    by_variant = {found.variant: found.program.sent for found in read}
    for what in dict.fromkeys(what for sent in by_variant.values() for what in sent):
        sizes = (by_variant[name].get(what, 0) if name in by_variant else None for name in OPTIONS)
        yield (read[0].name, what, *("" if size is None else _gigabytes(size) for size in sizes))


def _said(found: Found, case: large.Measured) -> str:
    """A program of MaxText's in a sentence."""
    theirs, ours, by_hand = found.program, case.ours, case.by_hand
    return (
        f"Beside MaxText's program of {found.name}, {found.variant}, ours sends"
        f" {ours.sent_bytes / theirs.sent_bytes:.3f} of its bytes and the program by hand"
        f" {by_hand.sent_bytes / theirs.sent_bytes:.3f}; ours takes {ours.memory / theirs.memory:.3f} of its memory and"
        f" the program by hand {by_hand.memory / theirs.memory:.3f}."
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f}"
