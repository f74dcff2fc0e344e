"""Predicted memory: a quick sum of terms for a layout (`terms`), and by lifetimes for a traced program (`lifetimes`).

The sum is what `Plan.memory` holds and what a change of a layout is compared by: it takes milliseconds, and is an upper
figure where arrays do not live at the same time. The lifetimes need the program that a plan lowers to.
"""

from splitjax.cost.memory.terms import (
    LeafBytes,
    bytes_by_leaf,
    flowing_memory,
    leaf_bytes,
    predict_memory,
    total_memory,
    use_bytes,
)

__all__ = ["LeafBytes", "bytes_by_leaf", "flowing_memory", "leaf_bytes", "predict_memory", "total_memory", "use_bytes"]
