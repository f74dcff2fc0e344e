"""Changes training images at random: shifted crops, flips, cutout; the same on every process and in every run.

A batch of stored images and the keys of its examples go in, the changed batch comes out.

What happens to an example depends on the seed, the epoch and the example's number in the data set alone: not on the
process that reads it, its place in the batch, or what was drawn before. So the bits are not drawn from a stream but
computed from these numbers, by integers only, with the function of the SplitMix64 generator: Steele, Lea and Flood
2014, "Fast splittable pseudorandom number generators" (OOPSLA), figure 15, with the constants of its variant 13
(`mix64` in Vigna's splitmix64.c, https://prng.di.unimi.it/splitmix64.c).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from splitjax.data.batches import Batch, check_whole

# (a batch of stored examples, their keys uint64[B]) -> the batch, changed
Augment: TypeAlias = Callable[[Batch, np.ndarray], Batch]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def random_bits(keys: np.ndarray, number: np.ndarray | int) -> np.ndarray:
    """Returns the draw `number` (0 is the first) of the SplitMix64 generators whose states are `keys`.

    `keys` is uint64[...], `number` an int or int[...] that broadcasts against it; the result is uint64 of their shape.
    """
    numbers = np.asarray(number, np.uint64) + np.ones(1, np.uint64)  # arrays wrap around, where scalars warn
    bits = np.asarray(keys, np.uint64) + numbers * _GAMMA
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX2
    return bits ^ (bits >> np.uint64(31))


def example_keys(indices: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Returns uint64[B]: a key for each of the examples `indices`, int[B], by `seed` and `epoch`.

    Raises `DataError` for a negative seed or epoch.
    """
    check_whole(seed=seed, epoch=epoch)
    # Three words: with two, the state of (seed, epoch) is the one that the shuffling starts from.
    state = np.random.SeedSequence([int(seed), int(epoch), 1]).generate_state(1, np.uint64)
    return random_bits(state, np.asarray(indices))


def random_below(keys: np.ndarray, number: int, limit: int) -> np.ndarray:
    """Returns the draw `number` of each of `keys`, uint64[B], as int64[B] in [0, limit).

    `limit` is far below 2**32, so that no value is favoured noticeably.
    """
    return ((random_bits(keys, number) >> np.uint64(32)) * np.uint64(limit) >> np.uint64(32)).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Crops, flips and cuts holes into uint8 images at random; called with a batch and the keys of its examples.

    **Attributes:**

    - `crop_padding`: each image is padded with this many zeros on every side, and a part of the original size is cut
      out, anywhere: 4 for CIFAR-10 (He et al. 2015, arXiv 1512.03385, section 4.2). 0: no crops.
    - `flip`: mirror left and right, every other image at random. Not for digits or letters.
    - `cutout`: side of a square of zeros, centred anywhere in the image (DeVries and Taylor 2017, arXiv 1708.04552,
      where 16 is the side for CIFAR-10). 0: none.

    Raises `DataError` for a negative padding or side.
    """

    crop_padding: int = 4
    flip: bool = True
    cutout: int = 0

    def __post_init__(self) -> None:
        check_whole(crop_padding=self.crop_padding, cutout=self.cutout)

    def __call__(self, batch: Batch, keys: np.ndarray) -> Batch:
        if "image" not in batch:  # labels that are read apart
            return batch
        images = batch["image"]
        if self.crop_padding:
            limit = 2 * self.crop_padding + 1
            images = _crop(images, self.crop_padding, random_below(keys, 0, limit), random_below(keys, 1, limit))
        if self.flip:
            images = _flip(images, np.flatnonzero(random_below(keys, 2, 2)))
        if self.cutout:
            _, height, width, _ = images.shape
            images = _cut_out(images, self.cutout, random_below(keys, 3, height), random_below(keys, 4, width))
        return {**batch, "image": images}


def _crop(images: np.ndarray, padding: int, top: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Returns the parts of the padded images that start at (top, left), int[B] each; of the images' size."""
    num, height, width, channels = images.shape
    padded = np.zeros((num, height + 2 * padding, (width + 2 * padding) * channels), np.uint8)
    padded[:, padding : padding + height, padding * channels : (padding + width) * channels] = images.reshape(
        num, height, -1
    )
    # All parts of all images as one array that shares their memory; picking from it copies whole rows of pixels.
    image, row, _ = padded.strides
    shape = (num, 2 * padding + 1, 2 * padding + 1, height, width * channels)
    parts = np.lib.stride_tricks.as_strided(padded, shape, (image, row, channels, row, 1), writeable=False)
    return parts[np.arange(num), top, left].reshape(images.shape)


def _flip(images: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns the images with those of the numbers `chosen` mirrored left and right."""
    result, mirrored = images.copy(), images[chosen]
    for channel in range(images.shape[-1]):  # four times as fast as all channels at once, 3 values at a time
        mirrored[..., channel] = images[chosen, :, ::-1, channel]
    result[chosen] = mirrored
    return result


def _cut_out(images: np.ndarray, side: int, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Returns the images with a square of zeros around (row, column), int[B] each."""

    def inside(centre: np.ndarray, size: int) -> np.ndarray:
        start = centre[:, None] - side // 2
        return (np.arange(size) >= start) & (np.arange(size) < start + side)

    hole = inside(row, images.shape[1])[:, :, None] & inside(column, images.shape[2])[:, None, :]
    return np.where(hole[..., None], np.uint8(0), images)
