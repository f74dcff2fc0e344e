"""Other people's training steps under splitjax: one decorator, the losses of one device.

    python -m benchmarks strangers --sources DIR          (or: python benchmarks/strangers/main.py --sources DIR)

Every step is read from a checkout of the public repository that it comes from and is run as its authors wrote it,
without its own jit: three steps on one device, then three steps under `splitjax.parallelize` for each rule set on eight
virtual CPU devices. A stranger passes where both rule sets plan and run it, and every loss agrees with one device to
1e-4. Models are made narrow through the examples' own configuration, batches are synthetic, and packages that only
bring data are replaced by empty stand-ins (`benchmarks/strangers/adapters/base.py`).

The checkouts go under DIR by these names; the commits are the ones that the adapters were written for:

    DIR/flax        https://github.com/google/flax                  18f8f311c275d57f46d95e41b15aa97b454754c0
    DIR/dm-haiku    https://github.com/google-deepmind/dm-haiku     f4d858a5cbb29140855d68f81f5fd625e078a5ae
    DIR/equinox     https://github.com/patrick-kidger/equinox       9336d820b2ef66b360fc6cb3611b3da5cefbb14d
    DIR/optax       https://github.com/google-deepmind/optax        2edbcbe2390da13983b92cbef94ac0460ecde1c5
    DIR/jax         https://github.com/jax-ml/jax                   cec06d116c05f0d52adfceee3d3b730fdbcb0ce5

They need flax, optax, dm-haiku, equinox, einops, ml_collections and clu. `--baseline` checks loading and the run on one
device alone; `--control` shards the batch with the framework's own jit instead, to check the comparison itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # Run as a file, this folder would be searched first, and a module here could hide a package of the same name.
    here = pathlib.Path(__file__).resolve().parent
    sys.path[:] = [str(ROOT), *(one for one in sys.path if pathlib.Path(one or ".").resolve() != here)]

NUM_STEPS = 3
NUM_DEVICES = 8
NEEDED = 20
NEEDED_PER_FRAMEWORK = {"flax-linen": 4, "flax-nnx": 4, "haiku": 4, "equinox": 4, "optax": 4}
NEEDED_FEATURES = ("batch_norm", "dropout", "scan", "TrainState")
PACKAGES = ("splitjax", "jax", "jaxlib", "flax", "optax", "dm-haiku", "equinox", "numpy")


def main(argv: list[str] | None = None) -> int:
    """Run the strangers and write the page; return the exit code."""
    options = _options(argv)
    if options.worker:
        return _work(options)
    from benchmarks.strangers.adapters import ALL

    chosen = [stranger for stranger in ALL if not options.only or any(part in stranger.name for part in options.only)]
    missing = sorted({stranger.checkout for stranger in chosen if not (options.sources / stranger.checkout).is_dir()})
    for checkout in missing:
        print(
            f"missing checkout: {options.sources / checkout} (python benchmarks/strangers/main.py --help names its"
            " source)"
        )
    if options.list:
        for stranger in chosen:
            print(f"{stranger.name:32} {stranger.checkout}/{stranger.source:60} {' '.join(sorted(stranger.features))}")
        return 0
    records = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for record in pool.map(lambda stranger: _in_subprocess(stranger, options), chosen):
            records.append(record)
            print(_line(record), flush=True)
            if options.verbose:
                for run in (record.get("baseline", {}), *record["runs"].values()):
                    print(run.get("traceback", ""), end="", flush=True)
    counts = _counts(records)
    complete = not options.only and not options.baseline and not options.control
    if complete or options.output:
        from benchmarks.strangers.adapters import page

        folder = options.output or ROOT / "benchmarks" / "results"
        environment = _environment(options)
        page.write(
            {"environment": environment, "counts": counts, "missing_checkouts": missing, "strangers": records}, folder
        )
        print(f"wrote {folder / 'strangers.md'}")
    shortfalls = _shortfalls(counts)
    split = (
        ""
        if options.baseline or options.control
        else f", {counts['split']} of them with arrays split over the model axis"
    )
    print(f"{counts['passed']} of {len(records)} pass{split}")
    if complete:
        for shortfall in shortfalls:
            print(shortfall)
        return 1 if shortfalls else 0
    return 0 if counts["passed"] == len(records) else 1


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "strangers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sources", type=pathlib.Path, required=True, help="folder with the checkouts")
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of names")
    parser.add_argument("--mesh", default="2x4", help="data x model")
    parser.add_argument("--rules", nargs="*", default=["splitbrain", "megatron"])
    parser.add_argument("--baseline", action="store_true", help="load and run on one device, nothing else")
    parser.add_argument("--control", action="store_true", help="instead of the rule sets: jit with a sharded batch")
    parser.add_argument("--timeout", type=int, default=1200, help="seconds a stranger")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="print the tracebacks of what fails")
    parser.add_argument("--list", action="store_true", help="name the strangers")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the page, by default benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _in_subprocess(stranger: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Run one stranger in a fresh process and return its record, whatever happens to that process."""
    record = {
        "name": stranger.name,
        "framework": stranger.framework,
        "source": f"{stranger.checkout}/{stranger.source}",
        "features": sorted(stranger.features),
        "runs": {},
    }
    if not stranger.path(options.sources).is_file():
        return record | {"ok": False, "reason": f"not in the checkout: {record['source']}"}
    environment = dict(os.environ, JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
    flags = environment.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={NUM_DEVICES}".strip()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "record.json"
        command = [
            sys.executable,
            str(pathlib.Path(__file__).resolve()),
            "--sources",
            str(options.sources.resolve()),
            "--worker",
            stranger.name,
            "--record",
            str(file),
            "--mesh",
            options.mesh,
            "--rules",
            *options.rules,
        ]
        command += ["--baseline"] * options.baseline + ["--control"] * options.control  # fmt: skip
        start = time.perf_counter()
        try:
            process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder,
                                     timeout=options.timeout)  # fmt: skip
            last = (process.stderr.strip().splitlines() or ["no message"])[-1]
            code = process.returncode
            failure = f"the process ended with {signal.Signals(-code).name if code < 0 else code}: {last[:300]}"
        except subprocess.TimeoutExpired:
            failure = f"no result after {options.timeout} s"
        record["seconds"] = round(time.perf_counter() - start, 1)
        if file.exists():
            record |= json.loads(file.read_text())
    wanted = [] if options.baseline else ["control"] if options.control else options.rules
    baseline = record.get("baseline", {"ok": False, "reason": failure})
    runs = record["runs"]
    if baseline["ok"]:
        failed = [f"{name}: {runs[name]['reason'] if name in runs else failure}" for name in wanted
                  if not runs.get(name, {}).get("ok")]  # fmt: skip
    else:
        failed = [f"one device: {baseline['reason']}"]
    return record | {"ok": not failed, "reason": "; ".join(failed)}


def _work(options: argparse.Namespace) -> int:
    """Run one stranger here, writing the record anew after each run so that a crash keeps what was done."""
    from benchmarks.strangers.adapters import ALL, running

    (stranger,) = [stranger for stranger in ALL if stranger.name == options.worker]
    record: dict[str, Any] = {"runs": {}}
    kept: dict[str, Any] = {}

    def write() -> None:
        options.record.write_text(json.dumps(record))

    def baseline() -> dict[str, Any]:
        kept["loaded"] = stranger.load(options.sources)
        kept["reference"] = run = running.single_device(kept["loaded"], NUM_STEPS)
        losses = [[float(array) for array in step if array.ndim == 0] for step in run.losses]
        numbers = sum(len(step) for step in run.losses)
        finite = all(map(running.is_finite, run.losses)) and numbers >= NUM_STEPS
        moved = running.moved(kept["loaded"], run)
        reason = "" if finite and moved else "no finite loss" if not finite else "the step leaves its state unchanged"
        return {"ok": not reason, "reason": reason, "losses": losses, "num_leaves": len(run.leaves)}

    def against(run: Any) -> dict[str, Any]:
        found = running.compare(kept["reference"], run)
        if not found["ok"] and not options.control:  # is it the compiler, whoever shards?
            control = running.compare(kept["reference"], running.data_parallel(kept["loaded"], NUM_STEPS))
            found["reason"] += (
                "" if control["ok"] else f"; without splitjax, jit with a sharded batch: {control['reason']}"
            )
        return found

    record["baseline"] = running.attempt(baseline)
    write()
    if options.baseline or not record["baseline"]["ok"]:
        return 0
    if options.control:
        record["runs"]["control"] = running.attempt(lambda: against(running.data_parallel(kept["loaded"], NUM_STEPS)))
        write()
        return 0
    mesh = dict(zip(("data", "model"), map(int, options.mesh.split("x")), strict=True))
    for rules in options.rules:
        record["runs"][rules] = running.attempt(
            lambda rules=rules: against(running.parallelized(kept["loaded"], mesh, rules, NUM_STEPS))
        )
        write()
    return 0


def _line(record: dict[str, Any]) -> str:
    runs = " ".join(f"{name}={_short(run)}" for name, run in record["runs"].items())
    verdict = "pass" if record["ok"] else "FAIL"
    return f"{verdict} {record['name']:32} {record.get('seconds', 0):6.1f} s  {runs}  {record['reason']}".rstrip()


def _short(run: dict[str, Any]) -> str:
    if "loss_difference" not in run:
        return "error"
    return f"loss {run['loss_difference']:.0e} state {run['state_difference']:.0e} sharded {run['num_sharded']}"


def _counts(records: list[dict[str, Any]]) -> dict[str, Any]:
    frameworks = sorted({record["framework"] for record in records})
    of = {name: [record for record in records if record["framework"] == name] for name in frameworks}
    passed = [record for record in records if record["ok"]]
    return {
        "passed": len(passed),
        "split": sum(all(run["num_sharded"] for run in record["runs"].values()) for record in passed),
        "total": len(records),
        "per_framework": {name: [sum(record["ok"] for record in group), len(group)] for name, group in of.items()},
        "features": sorted({feature for record in passed for feature in record["features"]}),
    }


def _shortfalls(counts: dict[str, Any]) -> list[str]:
    found = [] if counts["passed"] >= NEEDED else [f"{counts['passed']} pass, {NEEDED} are needed"]
    for framework, needed in NEEDED_PER_FRAMEWORK.items():
        passed = counts["per_framework"].get(framework, (0, 0))[0]
        if passed < needed:
            found.append(f"{framework}: {passed} pass, {needed} are needed")
    return found + [f"none with {name} passes" for name in NEEDED_FEATURES if name not in counts["features"]]


def _environment(options: argparse.Namespace) -> dict[str, Any]:
    flag = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()  # as the strangers ran
    from benchmarks import machine
    from benchmarks.strangers.adapters import ALL

    here = machine.this_machine(PACKAGES)
    return {
        "machine": dataclasses.asdict(here),
        "header": machine.header(here, "python -m benchmarks strangers --sources DIR"),
        "commits": {name: _commit(options.sources / name) for name in sorted({stranger.checkout for stranger in ALL})},
        "mesh": options.mesh,
        "rules": options.rules,
        "num_steps": NUM_STEPS,
    }


def _commit(checkout: pathlib.Path) -> str:
    """Return the checkout's commit: from git, or from a file named COMMIT where it is not a git checkout."""
    if (checkout / ".git").exists():
        done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
        return done.stdout.strip() or "unknown"
    file = checkout / "COMMIT"
    return file.read_text().strip() if file.is_file() else "unknown"


if __name__ == "__main__":
    sys.exit(main())
