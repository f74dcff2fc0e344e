"""The parsers of splitjax: everything that reads a file or a text that a stranger may have written."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks.fuzz import seeds
from benchmarks.fuzz.parser import Parser
from splitjax import errors
from splitjax.cli._options import OptionValueError
from splitjax.cli._train_options import expand_config
from splitjax.codec import Codec
from splitjax.data._archive import read_members, read_sums
from splitjax.data._cifar_pickle import read_pickle
from splitjax.data.cifar10 import load_cifar10, open_records
from splitjax.data.criteo import load_criteo
from splitjax.data.idx import load_idx, read_idx
from splitjax.data.streams import Position
from splitjax.data.text import load_text
from splitjax.data.vocabulary import Vocabulary
from splitjax.machines.calibration import Calibration
from splitjax.machines.targets import parse_target
from splitjax.partial.advice import Advice
from splitjax.plan import Plan
from splitjax.planning.plan_lock import PlanLock
from splitjax.report.memory.assignment import read_assignment
from splitjax.report.protobuf import WireError
from splitjax.report.target.value import TargetCheck
from splitjax.report.value import Report
from splitjax.report.wire import read_module
from splitjax.rules.ruleset import load_rules
from splitjax.runtime.checkpoint import integrity
from splitjax.runtime.checkpoint.carrying import put_together, targets
from splitjax.runtime.checkpoint.description import Description
from splitjax.runtime.training.ledger import _JSON as LEDGER
from splitjax.runtime.training.ledger import summarise
from splitjax.runtime.training.metrics import JsonLines, Table, read_metrics
from splitjax.schedule.model.jobs import JobColumns, JobProfile
from splitjax.schedule.model.profile_files import profiles_text, read_gavel, read_profiles
from splitjax.schedule.model.traces import read_trace
from splitjax.search.contest import read_problem
from splitjax.sync.analysis import Profile
from splitjax.verify.result import _JSON as VERIFICATION


class RoundTripError(Exception):
    """Says that a document that was read is not read back from what it is written as."""


def _same(first: object, second: object) -> None:
    if first != second:
        raise RoundTripError(f"{str(first)[:200]} became {str(second)[:200]}")


def _of_class(kind: Any) -> Callable[[pathlib.Path], object]:
    """Reads a document by its class, shows it, and reads again what it is written as."""

    def read(path: pathlib.Path) -> None:
        document = kind.from_json(path.read_bytes().decode("utf-8", "surrogateescape"))
        str(document)
        text = document.to_json()
        _same(text, kind.from_json(text).to_json())

    return read


def _by_codec(codec: Codec[Any], use: Callable[[Any], object] = str) -> Callable[[pathlib.Path], object]:
    def read(path: pathlib.Path) -> None:
        document = codec.load(path)
        use(document)
        text = codec.text(document)
        _same(text, codec.text(codec.parse(text)))

    return read


def _vocabulary(path: pathlib.Path) -> None:
    vocabulary = Vocabulary.load(path)
    vocabulary.decode(vocabulary.encode("a b\n"))
    _same(vocabulary, Vocabulary.from_json(json.loads(json.dumps(vocabulary.to_json()))))


def _position(path: pathlib.Path) -> None:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # the position is a value inside other documents
        return
    Position.from_json(value)


def _checkpoint(path: pathlib.Path) -> None:
    description = Description.read(path)
    text = description.to_json()
    path.with_name("again").write_text(text)
    _same(text, Description.read(path.with_name("again")).to_json())
    parts = targets(description.carried, ())
    if description.carried is not None:
        put_together(description.carried, parts.arrays)


def _manifest(path: pathlib.Path) -> None:
    path.with_name("state").mkdir(exist_ok=True)
    path.with_name("state").joinpath("x").write_bytes(b"abc")
    about = integrity.read_about(path.parent)
    if about is not None:
        str(about.get("metrics"))
    str(integrity.find_damage(path.parent, only="state/x"))
    str(integrity.find_damage(path.parent))


def _rules(path: pathlib.Path) -> None:
    rules = load_rules(path)
    str(rules)
    for rule in rules.rules:
        str((rule.matchers, rule.axes, rule.per_array))


def _trace(path: pathlib.Path) -> None:
    profiles = {"model": JobProfile.uniform("model", 0.1), "even": JobProfile.uniform("even", 0.3, num_depths=2)}
    for given, lenient in ((None, False), (profiles, True)):
        try:
            trace = read_trace(path, profiles=given, skip_malformed=lenient)
        except errors.TraceFileError:
            continue
        JobColumns.of(trace.jobs)
        str((trace.skipped, [job.device_seconds for job in trace.jobs]))


def _job_profiles(path: pathlib.Path) -> None:
    read = read_profiles(path)
    text = profiles_text(list(read.values()))
    path.with_name("again").write_text(text)
    _same(text, profiles_text(list(read_profiles(path.with_name("again")).values())))


def _gavel(path: pathlib.Path) -> None:
    table = read_gavel(path)
    for kind, rates in table.alone.items():
        for job in rates:
            try:
                table.profile(kind, job)
            except errors.ScheduleError:
                continue


def _idx(path: pathlib.Path) -> None:
    packed = path.read_bytes()[:2] == b"\x1f\x8b"
    name = path.with_name("array.gz" if packed else "array")
    name.write_bytes(path.read_bytes())
    read_idx(name)


def _images(path: pathlib.Path) -> None:
    """Takes the input for images, and makes labels that fit or not."""
    contents = path.read_bytes()
    end = ".gz" if contents[:2] == b"\x1f\x8b" else ""
    folder = path.with_name("set")
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte{end}").write_bytes(contents)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x02\x01\x03")
    data = load_idx(folder)
    data.train["image"][:1]


def _members(path: pathlib.Path) -> None:
    for _, data in read_members(path, {"batches/test_batch.bin"}, max_bytes=1 << 30):
        len(data)


def _target(path: pathlib.Path) -> None:
    target = parse_target(path.read_bytes().decode("utf-8", "surrogateescape"))
    _same(target, parse_target(str(target)))


def _sums(path: pathlib.Path) -> None:
    read_sums(path.parent)


def _metrics(path: pathlib.Path) -> None:
    path.with_name("m.jsonl").write_bytes(path.read_bytes())
    path.with_name("m.csv").write_bytes(path.read_bytes())
    JsonLines(path.with_name("m.jsonl"), 2).close()
    Table(path.with_name("m.csv"), ["step", "loss"], 2).close()
    for file in path.parent.glob("*.damaged-*"):
        file.unlink()
    read_metrics(path.with_name("m.jsonl"))


_JSON = ("json", "json", "deep")
_LINES = ("lines", "bytes")

PARSERS: dict[str, Parser] = {
    parser.name: parser
    for parser in (
        Parser("rules", errors.RuleError, _rules, seeds.rule_sets, ("toml", "lines", "deep"), 100, file_name="x.toml"),
        Parser(
            "options",
            OptionValueError,
            lambda path: expand_config(["--config", str(path)]),
            lambda: [seeds.OPTIONS],
            ("toml", "lines", "deep"),
            100,
        ),
        Parser(
            "plan",
            errors.PlanError,
            _of_class(Plan),
            seeds.documents("plan", "bare_plan", "real_plan", "real_plan_partial"),
            _JSON,
            100,
        ),
        Parser("lock", errors.PlanError, _of_class(PlanLock), seeds.locks, _JSON, 100),
        Parser(
            "report",
            errors.PlanError,
            _of_class(Report),
            seeds.documents("report", "bare_report", "real_report"),
            _JSON,
            100,
        ),
        Parser("check", errors.PlanError, _of_class(TargetCheck), seeds.documents("target_check"), _JSON, 100),
        Parser(
            "verification",
            errors.VerificationError,
            _by_codec(VERIFICATION),
            seeds.documents("verification"),
            _JSON,
            100,
        ),
        Parser(
            "profile", errors.ProfileError, _of_class(Profile), seeds.documents("profile", "real_profile"), _JSON, 100
        ),
        Parser("advice", errors.PartialError, _of_class(Advice), seeds.documents("advice", "real_advice"), _JSON, 100),
        Parser(
            "calibration", errors.CalibrationError, _of_class(Calibration), seeds.documents("calibration"), _JSON, 100
        ),
        Parser("target", errors.TargetError, _target, lambda: list(seeds.TARGETS), _LINES, 100),
        Parser("vocabulary", errors.DataError, _vocabulary, seeds.documents("vocabulary"), _JSON, 100),
        Parser("position", errors.DataError, _position, seeds.documents("position"), _JSON, 100),
        Parser(
            "ledger",
            errors.DataError,
            _by_codec(LEDGER, lambda it: summarise(it.attempts)),
            seeds.documents("goodput"),
            _JSON,
            100,
        ),
        Parser(
            "metrics",
            errors.DataError,
            _metrics,
            lambda: [seeds.METRICS, b"step,loss\n1,2.5\n2,1.0\n"],
            (*_LINES, "deep"),
            100,
        ),
        Parser(
            "job profiles",
            errors.ScheduleError,
            _job_profiles,
            lambda: seeds.with_packed(*seeds.documents("job_profile", "job_profiles")()),
            ("packed json", "packed json", "packed deep"),
            60,
            4 << 20,
        ),
        Parser(
            "throughputs",
            errors.TraceFileError,
            _gavel,
            lambda: seeds.with_packed(json.dumps(seeds.GAVEL).encode()),
            ("packed json", "packed json", "packed deep"),
            60,
            4 << 20,
        ),
        Parser(
            "traces",
            errors.ScheduleError,
            _trace,
            lambda: seeds.with_packed(*(text.encode() for text in (seeds.PHILLY, seeds.MURI, seeds.JOBS))),
            ("packed lines", "packed lines", "packed bytes"),
            60,
            4 << 20,
        ),
        Parser(
            "contest",
            errors.SearchError,
            read_problem,
            lambda: seeds.with_packed(json.dumps(seeds.CONTEST).encode()),
            ("packed json", "packed json", "packed deep"),
            60,
            4 << 20,
        ),
        Parser(
            "manifest",
            errors.CheckpointError,
            _manifest,
            seeds.manifests,
            ("sealed", "sealed", "json"),
            100,
            4 << 20,
            file_name="manifest.json",
        ),
        Parser(
            "checkpoint",
            errors.CheckpointError,
            _checkpoint,
            seeds.documents("checkpoint", "carrying_checkpoint", "real_checkpoint"),
            _JSON,
            100,
        ),
        Parser("idx", errors.DataError, _idx, seeds.idx_files, ("packed bytes",), 60, 4 << 20),
        Parser("images", errors.DataError, _images, seeds.idx_files, ("packed bytes",), 60, 4 << 20),
        Parser(
            "cifar records",
            errors.DataError,
            lambda path: open_records([path])[0][:1],
            seeds.cifar_records,
            ("bytes",),
            8,
        ),
        Parser(
            "cifar pickle",
            errors.DataError,
            lambda path: read_pickle(path.read_bytes(), str(path)),
            seeds.cifar_pickles,
            ("pickle", "pickle", "bytes"),
            100,
        ),
        Parser("cifar archive", errors.DataError, load_cifar10, seeds.cifar_archive, ("tar",), 60, 4 << 20),
        Parser("archive", errors.DataError, _members, seeds.archives, ("tar",), 60, 4 << 20),
        Parser("checksums", errors.DataError, _sums, seeds.sums, _LINES, 100, file_name="SHA256SUMS"),
        Parser(
            "criteo text",
            errors.DataError,
            load_criteo,
            seeds.criteo_lines,
            ("packed lines", "packed bytes"),
            60,
            12 << 20,
        ),
        Parser("criteo arrays", errors.DataError, load_criteo, seeds.criteo_arrays, ("arrays",), 60, 5 << 20),
        Parser(
            "text",
            errors.DataError,
            lambda path: load_text(path, seq_len=4),
            lambda: ["a b ü\n\nc d a b\r\n".encode() * 9],
            _LINES,
            200,
        ),
        Parser(
            "hlo", WireError, lambda path: read_module(path.read_bytes()), seeds.modules, ("wire", "wire", "bytes"), 100
        ),
        Parser(
            "buffer assignment",
            WireError,
            lambda path: read_assignment(path.read_bytes()),
            seeds.assignments,
            ("wire", "wire", "bytes"),
            100,
        ),
    )
}
