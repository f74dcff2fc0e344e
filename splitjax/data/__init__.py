"""Real data for the demo, the benchmarks and the tests, read from official formats; nothing is downloaded."""

from splitjax.data.batches import Dataset, epoch_batches, padded_batches, shuffled_indices, standardise
from splitjax.data.cifar10 import load_cifar10
from splitjax.data.digits import load_digits

__all__ = [
    "Dataset",
    "epoch_batches",
    "load_cifar10",
    "load_digits",
    "padded_batches",
    "shuffled_indices",
    "standardise",
]
