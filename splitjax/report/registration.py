"""Registers how splitjax's values look: which document shows a plan, a report, a prediction, a profile, an advice, a
search's answer, a choice of rules or a mesh, a comparison of machines, a check of one.

`import splitjax` calls `register_documents`. Types are given by name and documents are made by functions that import
their makers when they are first called, so that registering loads neither.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from splitjax.display import registry
from splitjax.display.document import Document

if TYPE_CHECKING:
    from splitjax.choosing.choice import Choice
    from splitjax.choosing.trade_off import TradeOff
    from splitjax.cost.memory.lifetimes import ProgramMemory
    from splitjax.cost.time.prediction import StepTime
    from splitjax.machines.calibration import Calibration
    from splitjax.partial.advice import Advice
    from splitjax.plan import Explanation, Plan
    from splitjax.report.blame.remedies import Remedies
    from splitjax.report.memory.value import MemoryTimelines
    from splitjax.report.target.value import TargetCheck
    from splitjax.report.value import Report
    from splitjax.search.solving import Solution
    from splitjax.sync.analysis import Profile


def register_documents() -> None:
    """Registers the documents of these values, and the pictures of profiles, advices and memory timelines."""
    registry.register("splitjax.plan.Plan", _plan)
    registry.register("splitjax.report.value.Report", _report)
    registry.register("splitjax.sync.analysis.Profile", _profile, draw=_draw_profile)
    registry.register("splitjax.partial.advice.Advice", _advice, draw=_draw_advice)
    registry.register("splitjax._plan_explained.Explanation", _explanation)
    registry.register("splitjax.cost.time.prediction.StepTime", _time)
    registry.register("splitjax.cost.memory.lifetimes.ProgramMemory", _memory)
    registry.register("splitjax.report.memory.value.MemoryTimelines", _timelines, draw=_draw_timelines)
    registry.register("splitjax.report.target.value.TargetCheck", _target_check)
    registry.register("splitjax.machines.calibration.Calibration", _calibration)
    registry.register("splitjax.report.blame.remedies.Remedies", _remedies)
    registry.register("splitjax.search.solving.Solution", _solution)
    registry.register("splitjax.choosing.choice.Choice", _choice)
    registry.register("splitjax.choosing.trade_off.TradeOff", _trade_off)


def _plan(plan: Plan) -> Document:
    from splitjax.report.plan.document import plan_document

    return plan_document(plan)


def _report(report: Report) -> Document:
    from splitjax.report.report_document import report_document

    return report_document(report)


def _remedies(remedies: Remedies) -> Document:
    from splitjax.report.blame.document import remedies_document

    return remedies_document(remedies)


def _profile(profile: Profile) -> Document:
    from splitjax.report.profile.document import profile_document

    return profile_document(profile)


def _draw_profile(profile: Profile, path: str | os.PathLike[str] | None) -> Any:
    from splitjax.report.profile.plot import draw_profile

    return draw_profile(profile, path)


def _advice(advice: Advice) -> Document:
    from splitjax.report.advice.document import advice_document

    return advice_document(advice)


def _draw_advice(advice: Advice, path: str | os.PathLike[str] | None) -> Any:
    from splitjax.report.advice.plot import draw_advice

    return draw_advice(advice, path)


def _explanation(explanation: Explanation) -> Document:
    from splitjax.report.prediction.explanation import explanation_document

    return explanation_document(explanation)


def _time(time: StepTime) -> Document:
    from splitjax.report.prediction.document import time_document

    return time_document(time)


def _memory(memory: ProgramMemory) -> Document:
    from splitjax.report.prediction.document import memory_document

    return memory_document(memory)


def _timelines(timelines: MemoryTimelines) -> Document:
    from splitjax.report.memory.document import timelines_document

    return timelines_document(timelines)


def _draw_timelines(timelines: MemoryTimelines, path: str | os.PathLike[str] | None) -> str:
    from splitjax.report.memory.picture import draw_timelines

    return draw_timelines(timelines, path)


def _target_check(check: TargetCheck) -> Document:
    from splitjax.report.target.document import target_document

    return target_document(check)


def _calibration(calibration: Calibration) -> Document:
    from splitjax.report.prediction.document import calibration_document

    return calibration_document(calibration)


def _solution(solution: Solution) -> Document:
    from splitjax.report.prediction.solution import solution_document

    return solution_document(solution)


def _choice(choice: Choice) -> Document:
    from splitjax.report.prediction.choice import choice_document

    return choice_document(choice)


def _trade_off(compared: TradeOff) -> Document:
    from splitjax.report.prediction.trade_off import trade_off_document

    return trade_off_document(compared)
