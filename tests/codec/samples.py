"""A value of every kind of document, with all of its fields in use, and how its text is had.

The texts in `data` were written by splitjax 6c17a8a, before a single codec wrote all of them: what users saved then has
to load, and is written alike.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from splitjax.data.streams import Position
from splitjax.data.vocabulary import Vocabulary
from splitjax.mesh import MeshShape
from splitjax.partial.advice import Advice, AdviceRow, Recommendation, StageAdvice
from splitjax.plan import (
    Collective,
    Constraint,
    LayerPlan,
    LeafPlan,
    Memory,
    PartialPlan,
    Plan,
    Purpose,
    SegmentPlan,
    SyncPlan,
)
from splitjax.planning.carried import Carried, Seen
from splitjax.report.attribute import ReportedCollective
from splitjax.report.depths import ReportedDepth
from splitjax.report.hlo import CompiledCollective
from splitjax.report.target.value import CompilerRun, TargetCheck
from splitjax.report.value import CompiledMemory, Report, ReportMemory
from splitjax.runtime.checkpoint.carrying import taken_apart
from splitjax.runtime.checkpoint.description import Description
from splitjax.runtime.checkpoint.state_match import StateLeaf
from splitjax.schedule.model.jobs import Depth, JobProfile, Stages
from splitjax.sync.analysis import Figures, Profile, TensorProfile
from splitjax.sync.profile import Sparsity, Table
from splitjax.verify.result import ComparedValue, DimSize, Finding, Verification, VerifiedRun

DATA = pathlib.Path(__file__).parent / "data"

MESH = MeshShape((("data", 2), ("model", 4)))
TABLE_SYNC = SyncPlan(
    "params/table",
    "row_exchange",
    "data",
    64,
    1024,
    4096,
    "seen: density 0.1",
    True,
    {"wire_dtype": "bfloat16", "parts": [1, 2], "hot": None, "exact": True, "margin": 1.25},
    {"local": np.int64(8), "push": [4, 5], "union": 9},
)
PARTIAL = PartialPlan(
    "spatial", "count", True, 0, "branch", False, "global", "data", (1, 0), 0.75, "predicted",
    tuple(SegmentPlan((name,), 1, 0.5, 4, 0, 2) for name in "ab"), (3, 5),
)  # fmt: skip
PLAN = Plan(
    MESH,
    "splitbrain, \u00fc",
    "all",
    ("data",),
    (
        LeafPlan("params/a", (8, np.int32(16)), "float32", "param", True, (None, "model"), "hidden", "a note", 128),
        LeafPlan(
            "params/b", (16,), "float32", "param", True, (("data", "model"),), "follows params/a", gradient=(None,)
        ),
        LeafPlan("batch/x", (8, 8), "float32", "batch", False, ("data",), "batch"),
    ),
    (LayerPlan("a", "dense", ("params/a", "params/b"), ((None, "model"), (("data", "model"),)), "hidden", "noted"),),
    (Constraint((0, 3), -1, ("?", None, ("data",)), "a", "its output"),),
    ("foo at x.py:3",),
    Memory(1, 2, 3),
    (
        Collective("all_gather", "model", 64, "a", Purpose.told("crossing")),
        Collective("all_reduce", "data", 0, "", Purpose.told("the loss")),
    ),
    ("a note",),
    "modulo",
    (TABLE_SYNC, SyncPlan("params/other", "dense", "", 3, 0, 0, "it is tied")),
    PARTIAL,
)
BARE_PLAN = Plan(MeshShape((("data", 1),)), "r", "data", (), (), ())

COMPILED = CompiledCollective(
    "all_reduce", "other", 512, "float32", (4, 4), 3, 2, False, True, "jit(step)/dot", "f.py:1 (f)",
    ("f.py:1 (f)", "g.py:2 (g)"), "all-reduce.1", 2, 1, ((0, 1, 2), (3,)), 0.25, "cond:1",
)  # fmt: skip
REPORT = Report(
    "step",
    MESH,
    "splitbrain",
    "cpu",
    "0" * 64,
    ReportMemory(Memory(1, 2, 3), CompiledMemory(1, 2, 3, 1, None)),
    (
        ReportedCollective(COMPILED, "a", "backward", "a gradient", "hidden", "dataflow",
                           Collective("all_reduce", "data", 500, "a", Purpose.told("a gradient")), "its bytes",
                           "f.py:1 (f)"),
        ReportedCollective(CompiledCollective("all_gather", "model", 8, "int8", (), 4), "", "forward", ""),
    ),
    (Collective("reduce_scatter", "data", 2048, "b", Purpose.told("gradient of b")),),
    (ReportedDepth(0, "a", 1.0, 12), ReportedDepth(1, "b", 0.5, None)),
)  # fmt: skip
TARGET_CHECK = TargetCheck(
    "step", "tpu:v5e:2x4", MESH, "splitbrain", 2**33, 2**34, Memory(1, 2, 3, 4),
    (Collective("reduce_scatter", "data", 2048, "b", Purpose.told("gradient of b")),),
    CompilerRun("libtpu 1.0", 1.5, 2**33, {"xla_tpu_max_hbm_size_mib": 8192}), REPORT,
)  # fmt: skip
BARE_REPORT = Report("s", MESH, "r", "tpu", "d", ReportMemory(Memory(0, 0, 0), None), (), ())

ADVICE = Advice(
    "step", 2, 4, 3, "cpu", 1e-4, 1e6, 0.25,
    (StageAdvice("a", 64, 0.5, 2.0, 1e-3, True, 4096), StageAdvice("b", 32, 0.0, 1.0, 2e-3, False, 2048)),
    (
        AdviceRow("full", "everything", 1.0, 0.5, 0.5, 1024, 0.1, 4096.0, 4096.0, 0.25),
        AdviceRow("temporal", "in turn", 0.75, 0.4, 0.4, 768.5, 0.1, 1.0, 2.0, None, ("a", "b")),
        AdviceRow("spatial", "by worker", 0.75, 0.4, 0.4, 768.5, 0.1, 1.0, 2.0, math.inf, ("a", "b")),
    ),
    True,
    Recommendation("smaller batch", "full", ("because",), ("nothing",), "unless"),
    ("on a busy machine",),
)  # fmt: skip

FIGURES = Figures((0.5, 0.25), (0.5, 0.125), ((1, 0.375), (2, 0.5)), 0.75, 1.5)
DENSE_FIGURES = Figures((1.0, 1.0), (), ((1, 1.0), (2, 1.0)), 1.0, 1.0)
SPARSITY = Sparsity(
    Table(16, 4, 4, 2), 6.5, 8, ((1, 6.5), (2, 9.0)), 0.75, 1.5, 2.0, ((np.arange(3, dtype=np.int32),),)
)
PROFILE = Profile(
    "train_step",
    2,
    (8, 8),
    (
        TensorProfile("table", (16, 4), "float32", "loss at f.py:1", True, "tied", (FIGURES, FIGURES),
                      ((1.0, 0.5), (0.5, 1.0)), SPARSITY),
        TensorProfile("kernel", (4, 4), "bfloat16", "loss at f.py:1", False, "", (DENSE_FIGURES,),
                      ((1.0, 1.0), (1.0, 1.0))),
    ),
    ("measured by hand",),
)  # fmt: skip

JOB_PROFILE = JobProfile(
    "model", 0.125, (Depth(1.0, 0.25, 1024, 512, "first"), Depth(0.5, 1)), 0.1, 256, Stages(0.1, 0, 0.2, 0.3), 0.01
)

RUN = VerifiedRun(
    "shrunken",
    (DimSize("params/a[0]", 512, 4), DimSize("dot at f.py:1", 8, 8, "a reshape")),
    (
        ComparedValue("loss", "loss", (), 0.0, 0.0, True),
        ComparedValue("gradient", "a", (4, 8), math.inf, math.nan, False, 2.0, 1e-7, "differs"),
    ),
    (Finding("dot_general", "gradient", "lhs", "a", "f.py:1", "P('data')", 0.5, None, "wrong"),),
    1.5,
    ("a note",),
)  # fmt: skip
VERIFICATION = Verification("step", "data=2", "splitbrain", (RUN,))

VOCABULARY = Vocabulary(("<unk>", "<eos>", "\u00fcber", "a\nb"), "word")

CARRIED = Carried(
    {
        "x: float32[8]; 1 arrays of state; mesh data=2": Seen(
            (dataclasses.replace(TABLE_SYNC, capacities={"local": 8, "push": [4, 5]}),),
            {"params/table": np.arange(6, dtype=np.int32).reshape(1, 2, 3)},
            3,
            {"params/table": 1},
        ),
        "other": Seen(),
    },
    {"params/table": np.ones((2, 3), np.float32)},
    7,
)
LEAVES = (
    StateLeaf("params/a", (8, 16), "float32"),
    StateLeaf("key", (), "key<fry>", "threefry2x32"),
    StateLeaf("name", (), "str", value="adam"),
    StateLeaf("rate", (), "float32", value=math.nan),
    StateLeaf("is_on", (), "bool", value=True),
    StateLeaf("count", (), "int32", value=3),
)
EXTRA = {"position": {"epoch": 1, "batch": 2}, "list": [1, None, 2.5, "\u00fc"], "nested": {"a": {}}}


def plain_description() -> Description:
    return Description(3, LEAVES, EXTRA)


def carrying_description() -> Description:
    return Description(0, (), {}, taken_apart(CARRIED).entry)


def texts(write_vocabulary: Callable[[Vocabulary], str], write_profiles: Callable[[list[Any]], str]) -> dict[str, str]:
    """The text of every kind of document, by the name of its file in `data`."""
    import json

    return {
        "plan": PLAN.to_json(),
        "bare_plan": BARE_PLAN.to_json(),
        "report": REPORT.to_json(),
        "bare_report": BARE_REPORT.to_json(),
        "target_check": TARGET_CHECK.to_json(),
        "advice": ADVICE.to_json(),
        "profile": PROFILE.to_json(),
        "job_profile": json.dumps(JOB_PROFILE.to_json()),
        "job_profiles": write_profiles([JOB_PROFILE, JobProfile.uniform("even", 0.3, num_depths=2)]),
        "verification": VERIFICATION.to_json(),
        "vocabulary": write_vocabulary(VOCABULARY),
        "position": json.dumps(Position(3, 4).to_json()),
        "sparsity": json.dumps(SPARSITY.to_json()),
        "carried": json.dumps(CARRIED.to_json()),
        "checkpoint": plain_description().to_json(),
        "carrying_checkpoint": carrying_description().to_json(),
    }
