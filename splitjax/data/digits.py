"""Loads real handwritten digits without a download: scikit-learn's 8x8 images, enlarged for models of 32x32 images.

Nothing goes in but how large the images are to be; a `Dataset` comes out, on which small models train in seconds.

Source: the test set of "Optical recognition of handwritten digits" (Alpaydin and Kaynak 1998, UCI), 1,797 images of
8x8 pixels valued 0 to 16, which every scikit-learn installation holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from splitjax.data.augment import Augmentation
from splitjax.data.batches import shuffled_indices
from splitjax.data.dataset import Dataset
from splitjax.data.images import Standardise, fit_images
from splitjax.errors import DataError

# Of all 1,797 images, in pixels scaled to [0, 1]. Constants, so that the numbers do not depend on the split.
MEAN: float = 0.3053
STD: float = 0.3759


def load_digits(
    *, seed: int = 0, test_fraction: float = 0.2, image_size: int | None = 32, channels: int = 3
) -> Dataset:
    """Loads the digits as images of 32x32 pixels and 3 equal channels, or as many as are asked for.

    **Arguments:**

    - `seed`: decides which images are for testing.
    - `test_fraction`: their share, in (0, 1).
    - `image_size`, `channels`: as of `fit_images`; None leaves them at 8x8.

    **Returns:** a `Dataset`, in memory: train uint8[1438, 32, 32, 3] and test uint8[359, 32, 32, 3] by default.

    Raises `DataError` if scikit-learn is not installed, for a share that leaves a split empty, and what `fit_images`
    raises.
    """
    grey, targets = _load_bundled()
    pixels = np.rint(grey * (255 / 16)).astype(np.uint8)
    images = fit_images(pixels[..., None], image_size, channels)
    labels = targets.astype(np.int32)

    num = len(labels)
    is_share = isinstance(test_fraction, (int, float)) and 0 < test_fraction < 1
    num_test = round(num * test_fraction) if is_share else 0
    if not 0 < num_test < num:
        raise DataError(
            f"this share of {num} digits leaves a split empty",
            value=test_fraction,
            place="load_digits, argument 'test_fraction'",
            remedy="pass a number between 0 and 1, such as 0.2",
        )
    order = shuffled_indices(num, seed=seed, epoch=0)
    test, train = order[:num_test], order[num_test:]
    return Dataset(
        name="digits",
        train={"image": images[train], "label": labels[train]},
        test={"image": images[test], "label": labels[test]},
        class_names=tuple("0123456789"),
        transform=Standardise((MEAN,) * images.shape[-1], (STD,) * images.shape[-1]),
        augmentation=Augmentation(crop_padding=max(1, images.shape[1] // 8), flip=False),
    )


def _load_bundled() -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's images float[1797, 8, 8], from 0 to 16, and their labels int[1797]."""
    # Imported here: scikit-learn is an extra, and slow to import.
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed",
            value=str(error),
            place="splitjax.data.load_digits",
            remedy="pip install 'splitjax[demo]'",
        ) from error
    digits: Any = datasets.load_digits()  # scikit-learn has no types
    return digits.images, digits.target
