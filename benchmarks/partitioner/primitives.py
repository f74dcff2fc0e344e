"""Primitives that have a dim rule and that no program draws, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_OWN = "a link that tracing makes between equations; no program has it"
_PLACING = (
    "it says where an array goes, and computes nothing; layouts are drawn as shardings of arguments, and of gradients"
    " that are pinned"
)
_EFFECT = "it prints or orders, and computes nothing"
_CUDNN = "it needs an NVIDIA GPU and cuDNN"
_EQUINOX = "Equinox's own, a reduction to one flag over a vmap; reduce_or and reduce_and are drawn"
_OLD = "no function of the supported JAX releases makes it"
_NEW = "only the newest of the supported JAX releases make it"

_DEALING = (
    "splitjax makes it of a slice of a fused weight's columns, and lowers it itself (tests/planning/test_fused.py)"
)

NOT_DRAWN: Mapping[str, str] = MappingProxyType(
    dict.fromkeys("_branch _carry_back _carry_in _gradient _scan_in _scan_index _scan_out".split(), _OWN)
    | dict.fromkeys(
        "sharding_constraint reshard layout_constraint with_memory_space_constraint device_put inspect_sharding".split(),  # noqa: E501
        _PLACING,
    )
    | dict.fromkeys("create_token debug_callback debug_print".split(), _EFFECT)
    | {"splitjax_deal": _DEALING, "splitjax_copy": _DEALING}
    | dict.fromkeys(
        "dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fwd"
        " dot_product_attention_fwd_wrapper scaled_matmul scaled_matmul_wrapper".split(),
        _CUDNN,
    )
    | dict.fromkeys("unvmap_all unvmap_any unvmap_max".split(), _EQUINOX)
    | dict.fromkeys(
        "copy_p zeros_like tile rng_uniform empty2 stack unstack reciprocal random_gamma_grad eq_to".split(), _OLD
    )
    | dict.fromkeys("log2 polynomial one_minus_square".split(), _NEW)
    | {
        "pallas_call": "on CPU no program of the partitioner has it: the interpreter takes it apart",
        "splitjax_kernel": "splitjax's own: it runs on each device's part",
        "shard_map": "its body is partitioned by hand: XLA's partitioner leaves it alone",
        "to_edtype": "JAX's own conversion to dtypes such as those of keys: no program of numbers reaches it",
        "from_edtype": "JAX's own conversion from dtypes such as those of keys: no program of numbers reaches it",
        "xla_metadata_value": "it annotates, and computes nothing",
        "threefry2x32": "random_bits, which is lowered to it, is drawn",
        "random_seed": "random_wrap makes the keys of most programs; a few are made from seeds",
        "empty": "its values are not defined",
        "mulhi": "the CPU compiler of the supported releases cannot compile it, on one device either",
        "select_and_scatter": (
            "select_and_scatter_add, the derivative of pooling, is drawn; JAX makes the general form for no function of"
            " its own"
        ),
        "geqrf": "qr, which is made of it, is drawn",
        "householder_product": "qr, which is made of it, is drawn",
        "lu_pivots_to_permutation": "lu, which is lowered to it, is drawn",
        "schur": "drawn, where LAPACK has it",
    }
)
