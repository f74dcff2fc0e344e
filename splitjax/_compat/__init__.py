"""The only place that branches on JAX's version or imports `jax.extend` and `jax._src` (supported: jax>=0.10.2,<0.13).

Everything else in splitjax sees jaxprs, equations and JAX's own state through what is listed here: `jaxprs`,
`equations`, `sources` (the user's lines), `pallas` (grids of kernels), `definition` (of a primitive), `meshes`, `runs`
(of several processes) and `compiled` (programs).
"""

from __future__ import annotations

from splitjax._compat.compiled import CPU_DROPS_BARRIERS as CPU_DROPS_BARRIERS
from splitjax._compat.compiled import is_compile_only as is_compile_only
from splitjax._compat.compiled import metadata_in_cache_key as metadata_in_cache_key
from splitjax._compat.compiled import serialized_modules as serialized_modules
from splitjax._compat.compiled import telling_programs as telling_programs
from splitjax._compat.definition import define_primitive as define_primitive
from splitjax._compat.equations import bind_equation as bind_equation
from splitjax._compat.equations import checkpoint_equation as checkpoint_equation
from splitjax._compat.equations import context_mesh as context_mesh
from splitjax._compat.equations import equation_context as equation_context
from splitjax._compat.equations import has_ordered_effects as has_ordered_effects
from splitjax._compat.equations import has_positional_bits as has_positional_bits
from splitjax._compat.equations import hidden_body as hidden_body
from splitjax._compat.equations import moved_equation as moved_equation
from splitjax._compat.equations import positional_bits as positional_bits
from splitjax._compat.equations import prune as prune
from splitjax._compat.equations import pullback as pullback
from splitjax._compat.equations import rebind as rebind
from splitjax._compat.equations import scan_counts as scan_counts
from splitjax._compat.equations import with_params as with_params
from splitjax._compat.jaxprs import JAXPR_TYPES as JAXPR_TYPES
from splitjax._compat.jaxprs import NO_EFFECTS as NO_EFFECTS
from splitjax._compat.jaxprs import ClosedJaxpr as ClosedJaxpr
from splitjax._compat.jaxprs import DropVar as DropVar
from splitjax._compat.jaxprs import Jaxpr as Jaxpr
from splitjax._compat.jaxprs import Literal as Literal
from splitjax._compat.jaxprs import Primitive as Primitive
from splitjax._compat.jaxprs import Var as Var
from splitjax._compat.jaxprs import argument_names as argument_names
from splitjax._compat.jaxprs import become as become
from splitjax._compat.jaxprs import build_jaxpr as build_jaxpr
from splitjax._compat.jaxprs import changed_jaxpr as changed_jaxpr
from splitjax._compat.jaxprs import close_jaxpr as close_jaxpr
from splitjax._compat.jaxprs import detach_consts as detach_consts
from splitjax._compat.jaxprs import drop_unused as drop_unused
from splitjax._compat.jaxprs import eval_jaxpr as eval_jaxpr
from splitjax._compat.jaxprs import function_file as function_file
from splitjax._compat.jaxprs import function_name as function_name
from splitjax._compat.jaxprs import is_abstract as is_abstract
from splitjax._compat.jaxprs import is_jaxpr as is_jaxpr
from splitjax._compat.jaxprs import jaxpr_effects as jaxpr_effects
from splitjax._compat.jaxprs import like_jaxpr as like_jaxpr
from splitjax._compat.jaxprs import named_evaluator as named_evaluator
from splitjax._compat.jaxprs import new_variable as new_variable
from splitjax._compat.jaxprs import open_jaxpr as open_jaxpr
from splitjax._compat.jaxprs import prune_jaxpr as prune_jaxpr
from splitjax._compat.jaxprs import trace as trace
from splitjax._compat.jaxprs import variable_of as variable_of
from splitjax._compat.jaxprs import with_argument_names as with_argument_names
from splitjax._compat.meshes import CONCRETE_ARRAY as CONCRETE_ARRAY
from splitjax._compat.meshes import as_weakly_typed as as_weakly_typed
from splitjax._compat.meshes import axes_of_size_one_are_no_types as axes_of_size_one_are_no_types
from splitjax._compat.meshes import forget_mesh as forget_mesh
from splitjax._compat.meshes import forget_meshes as forget_meshes
from splitjax._compat.meshes import outside_mesh as outside_mesh
from splitjax._compat.meshes import result_type as result_type
from splitjax._compat.meshes import vary_all as vary_all
from splitjax._compat.meshes import varying_axes as varying_axes
from splitjax._compat.pallas import PallasBlock as PallasBlock
from splitjax._compat.pallas import only_reads as only_reads
from splitjax._compat.pallas import pallas_grid as pallas_grid
from splitjax._compat.pallas import smaller_pallas_call as smaller_pallas_call
from splitjax._compat.runs import backend_started as backend_started
from splitjax._compat.runs import coordination_client as coordination_client
from splitjax._compat.runs import coordination_service as coordination_service
from splitjax._compat.runs import detected_cluster as detected_cluster
from splitjax._compat.runs import place_in_run as place_in_run
from splitjax._compat.sources import is_machinery as is_machinery
from splitjax._compat.sources import is_within_jax as is_within_jax
from splitjax._compat.sources import name_stack as name_stack
from splitjax._compat.sources import name_stacks as name_stacks
from splitjax._compat.sources import source_line as source_line
from splitjax._compat.sources import user_frame as user_frame
