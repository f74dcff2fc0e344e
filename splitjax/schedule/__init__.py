"""Many training jobs on one cluster: jobs, traces, policies, and a simulator. Pure Python and numpy; nothing here
imports JAX.

After Kumar et al., "Partial backpropagation and JigSaw" (arXiv 2111.10672): work is placed at the granularity of
iterations, so that the holes that workers of unequal depth leave are filled with other jobs' tasks. `docs/scheduler.md`
tells what can be asked.
"""

from splitjax.display import registry
from splitjax.schedule import policies as policies
from splitjax.schedule.execution import engine as engine
from splitjax.schedule.execution.engine import Engine, Place, Program, StepOrder, WorkerTask
from splitjax.schedule.execution.executor import execute
from splitjax.schedule.execution.ray_engine import RayEngine, RayOptions
from splitjax.schedule.execution.records import Execution, ExecutionOptions, TaskRecord
from splitjax.schedule.execution.threads import ThreadEngine
from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.discipline import GroupState, Iteration, Rates, Task, discipline
from splitjax.schedule.model.generate import generate, offered_load, rescale
from splitjax.schedule.model.jobs import Depth, Job, JobProfile, Stages
from splitjax.schedule.model.links import exchange_seconds, over_links
from splitjax.schedule.model.policy import Assignment, Group, Member, Policy, View, get, names, register
from splitjax.schedule.model.profile_files import Throughputs, read_gavel, read_profiles, write_profiles
from splitjax.schedule.model.profile_table import profile_table
from splitjax.schedule.model.result import JobRecord, SimulationResult, Work
from splitjax.schedule.model.traces import Trace, read_jobs, read_muri, read_philly, read_trace
from splitjax.schedule.policies.gang import gang
from splitjax.schedule.simulation.compare import Comparison, compare
from splitjax.schedule.simulation.comparison_document import comparison_document
from splitjax.schedule.simulation.simulator import Options, simulate
from splitjax.schedule.simulation.timeline import result_document

__all__ = [
    "Assignment",
    "Cluster",
    "Comparison",
    "Depth",
    "Engine",
    "Execution",
    "ExecutionOptions",
    "Group",
    "GroupState",
    "Iteration",
    "Job",
    "JobProfile",
    "JobRecord",
    "Member",
    "Options",
    "Place",
    "Policy",
    "Program",
    "Rates",
    "RayEngine",
    "RayOptions",
    "SimulationResult",
    "Stages",
    "StepOrder",
    "Task",
    "TaskRecord",
    "ThreadEngine",
    "Throughputs",
    "Trace",
    "View",
    "Work",
    "WorkerTask",
    "compare",
    "discipline",
    "exchange_seconds",
    "execute",
    "gang",
    "generate",
    "get",
    "names",
    "offered_load",
    "over_links",
    "policies",
    "profile_table",
    "read_gavel",
    "read_jobs",
    "read_muri",
    "read_philly",
    "read_profiles",
    "read_trace",
    "register",
    "rescale",
    "simulate",
    "write_profiles",
]

registry.register(SimulationResult, result_document)
registry.register(Comparison, comparison_document)
