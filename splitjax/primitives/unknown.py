"""States which primitives have no dim rule on purpose, with the reason.

What reaches them sharded is an `UnknownPrimitiveError`, which a user settles with `register_primitive`; nothing is
guessed.
"""

from __future__ import annotations

from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS

OPERATIONS.state(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pcast pmax pmin ppermute
    preduced psum psum2 psum_invariant pvary ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter
    """,
    no_dims="it works inside shard_map, whose body splitjax leaves alone",
)
OPERATIONS.state(
    "get swap addupdate new_ref freeze empty_ref run_state run_scoped core_map",
    no_dims="it reads or writes mutable memory, so that its results depend on more than its operands",
)
OPERATIONS.state(
    "pure_callback io_callback ffi_call call_exported call_tf",
    no_dims="it runs code that splitjax cannot see; register what it does to dims",
)
OPERATIONS.state("ffi_call", Trait.FOREIGN)
OPERATIONS.state("after_all", no_dims="it orders side effects and has no dims")
OPERATIONS.state(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all pmax pmin ppermute psum psum2 psum_invariant
    ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter
    """,
    Trait.COLLECTIVE,
)
