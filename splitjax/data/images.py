"""Turns stored images into what models read: standardised, and of the size and channels that a model has.

uint8 images go in, as files hold them; float32 images, or uint8 images of another size, come out.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from splitjax.data.batches import Batch, is_whole
from splitjax.errors import DataError


@dataclasses.dataclass(frozen=True)
class Standardise:
    """Transforms image batches: uint8 images become float32, `(image / 255 - mean) / std` in each channel.

    **Attributes:**

    - `mean`, `std`: of each channel, of pixels scaled to [0, 1].
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, batch: Batch) -> Batch:
        if "image" not in batch:  # labels that are read apart
            return batch
        return {**batch, "image": standardise(batch["image"], self.mean, self.std)}


def standardise(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Computes `(images / 255 - mean) / std`, with a `mean` and a `std` per channel: uint8[B, ..., C] -> float32."""
    scale = np.asarray([1 / (255 * s) for s in std], np.float32)
    shift = np.asarray([m / s for m, s in zip(mean, std, strict=True)], np.float32)
    # One image a row, and the constants repeated to its length: numpy's inner loop is as long as the last dim, which
    # with channels alone is 3, and 19 times as slow.
    num_values = math.prod(images.shape[1:])
    result = images.reshape(len(images), num_values).astype(np.float32)
    repeats = num_values // len(scale)
    result *= np.tile(scale, repeats)
    result -= np.tile(shift, repeats)
    return result.reshape(images.shape)


def fit_images(images: np.ndarray, image_size: int | None, channels: int | None) -> np.ndarray:
    """Enlarges images and repeats their channel: uint8[B, H, W, C] -> uint8[B, image_size, image_size, channels].

    **Arguments:**

    - `images`: uint8[B, H, W, C].
    - `image_size`: at least H and W. Each pixel becomes a square of pixels, as large as fits, and what then lacks is
      padded with 0 on all sides: 8 pixels fill 32 without padding, 28 pixels get 2 on each side. None: as they are.
    - `channels`: C, or any number for images of one channel, which is repeated. None: as they are.

    Raises `DataError` for a size below the images', and for channels that would have to be made up.
    """
    _, height, width, has_channels = images.shape
    if image_size is not None and (not is_whole(image_size) or image_size < max(height, width)):
        raise DataError(
            f"images of {height}x{width} pixels are only enlarged, not made smaller",
            value=image_size,
            place="argument 'image_size'",
            remedy=f"pass image_size={max(height, width)} or more, or None to leave them as they are",
        )
    if (
        channels is not None
        and channels != has_channels
        and (has_channels != 1 or not is_whole(channels) or channels < 1)
    ):
        raise DataError(
            f"images of {has_channels} channel(s) cannot be given this number of them",
            value=channels,
            place="argument 'channels'",
            remedy="pass channels=None to leave them as they are"
            if has_channels != 1
            else "pass a whole number above 0",
        )
    if image_size is not None and (height, width) != (image_size, image_size):
        factor = image_size // max(height, width)
        images = images.repeat(factor, axis=1).repeat(factor, axis=2)
        missing = [image_size - size for size in images.shape[1:3]]
        images = np.pad(images, ((0, 0), *((m // 2, m - m // 2) for m in missing), (0, 0)))
    return images.repeat(channels, axis=3) if channels is not None and channels != has_channels else images
