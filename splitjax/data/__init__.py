"""Loads real data and feeds training steps with it: official formats, batches and streams, augmentation, prefetching.

Files go in, a `Dataset` comes out of a loader, and out of that batches of numpy arrays, the same on every process and
in every run, so that a run on many devices can be compared with a run on one, number by number.
"""

from splitjax.data.augment import Augmentation, example_keys
from splitjax.data.batches import epoch_batches, padded_batches, shuffled_indices
from splitjax.data.cifar10 import load_cifar10
from splitjax.data.criteo import load_criteo
from splitjax.data.dataset import Dataset
from splitjax.data.digits import load_digits
from splitjax.data.fetching import fetch
from splitjax.data.idx import load_idx
from splitjax.data.images import Standardise, fit_images, standardise
from splitjax.data.loaders import BatchSampler, LoaderPosition, RowsOfBatches, StatefulIterator, resumable
from splitjax.data.negatives import ByCounts, LogUniform, Negatives
from splitjax.data.prefetching import Prefetch, prefetch
from splitjax.data.rows import FileRows
from splitjax.data.streams import Position, stream
from splitjax.data.text import load_text
from splitjax.data.vocabulary import Vocabulary

__all__ = [
    "Augmentation",
    "BatchSampler",
    "ByCounts",
    "Dataset",
    "FileRows",
    "LoaderPosition",
    "LogUniform",
    "Negatives",
    "Position",
    "Prefetch",
    "RowsOfBatches",
    "Standardise",
    "StatefulIterator",
    "Vocabulary",
    "epoch_batches",
    "example_keys",
    "fetch",
    "fit_images",
    "load_cifar10",
    "load_criteo",
    "load_digits",
    "load_idx",
    "load_text",
    "padded_batches",
    "prefetch",
    "resumable",
    "shuffled_indices",
    "standardise",
    "stream",
]
