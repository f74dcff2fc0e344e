"""Predicted memory: a quick sum of terms for a layout (`terms`), and by lifetimes for a traced program (`lifetimes`).

The lifetimes are what the plan of a step tells; they need the program that the plan lowers to. The sum is what a change
of a layout is compared by: it takes milliseconds, and takes all arrays to live at the same time.
"""

from splitjax.cost.memory.terms import (
    LeafBytes,
    bytes_by_leaf,
    leaf_bytes,
    predict_memory,
    total_memory,
    use_bytes,
)

__all__ = ["LeafBytes", "bytes_by_leaf", "leaf_bytes", "predict_memory", "total_memory", "use_bytes"]
