"""Lists primitives that have no dim rule on purpose, with the reason.

What reaches them sharded is an `UnknownPrimitiveError`, which a user settles with `register_dims`; nothing is
guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_MANUAL = "it works inside shard_map, whose body splitjax leaves alone"
_STATE = "it reads or writes mutable memory, so that its results depend on more than its operands"
_HOST = "it runs code that splitjax cannot see; register what it does to dims"
_TOKEN = "it orders side effects and has no dims"

_NAMES = {
    _MANUAL: """all_gather all_gather_invariant all_gather_reduced all_to_all axis_index pbroadcast pcast pmax pmin
        ppermute preduced psum psum2 psum_invariant pvary ragged_all_to_all reduce_scatter unreduced_psum
        unreduced_reduce_scatter""",
    _STATE: "get swap addupdate new_ref freeze empty_ref run_state run_scoped core_map",
    _HOST: "pure_callback io_callback ffi_call pallas_call call_exported call_tf",
    _TOKEN: "after_all",
}
NO_RULE: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _NAMES.items() for name in names.split()}
)
