"""The images of mnist: the four IDX files of a folder, or a stand-in of the same shape from a fixed stream.

The stand-in is not MNIST and its numbers do not compare with MNIST's. Each of ten classes has eight smooth prototypes;
an example is one of them, moved by up to two pixels either way, with noise over it. After 1000 batches of 100 labelled
images, Adam at 1e-3 leaves a linear model at an error of 0.43 and a perceptron of two hidden layers of 50 at 0.20.
"""

import gzip
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainable.config.seeds import stream

Pixels = NDArray[np.float32]
SIDE, CLASSES = 28, 10
TRAIN, TEST = 60_000, 10_000
PROTOTYPES = 8
_FILES = (
    ("train-images-idx3-ubyte", (TRAIN, SIDE, SIDE)),
    ("train-labels-idx1-ubyte", (TRAIN,)),
    ("t10k-images-idx3-ubyte", (TEST, SIDE, SIDE)),
    ("t10k-labels-idx1-ubyte", (TEST,)),
)


class Images(NamedTuple):
    """Pixels 0 ... 255 [N, 784] and classes [N], of training and of test. source: "mnist" or "stand-in"."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    source: str


def read_images(folder: str | None) -> Images:
    """The images of a folder, or the stand-in where none is given.

    Raises ValueError with what to do where a file is missing or is not MNIST's.
    """
    if folder is None:
        return stand_in()
    at = Path(folder).expanduser()
    train_images, train_labels, test_images, test_labels = (_read(at, name, shape) for name, shape in _FILES)
    if max(int(train_labels.max()), int(test_labels.max())) >= CLASSES:
        raise ValueError(f"mnist_folder={folder}: a label is above {CLASSES - 1}, so the files are not MNIST's.")
    return Images(train_images.flatten(1), train_labels.long(), test_images.flatten(1), test_labels.long(), "mnist")


def _read(folder: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    """One IDX file, gzipped or not: two zeros, type 8 (bytes), the number of axes, each one's length, the bytes."""
    there = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not there:
        raise ValueError(
            f"mnist_folder={folder} holds neither {name} nor {name}.gz. Put MNIST's four IDX files there, or leave "
            "mnist_folder out for the generated stand-in."
        )
    try:
        content = gzip.decompress(there[0].read_bytes()) if there[0].suffix == ".gz" else there[0].read_bytes()
    except (OSError, EOFError) as error:
        raise ValueError(f"{there[0]} cannot be unpacked ({error}). Fetch it again.") from None
    header = bytes((0, 0, 8, len(shape))) + np.array(shape, dtype=">u4").tobytes()
    if content[: len(header)] != header or len(content) != len(header) + int(np.prod(shape)):
        raise ValueError(
            f"{there[0]} is not MNIST's: {len(content)} bytes that begin {content[:4].hex(' ')}; expected "
            f"{len(header) + int(np.prod(shape))} that begin {header[:4].hex(' ')}. Fetch it again."
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=len(header)).reshape(shape).copy())


@cache  # made once for all conditions of a process: it takes longer than a short one, and is only read
def stand_in() -> Images:
    """Generated images of MNIST's shape; always the same ones."""
    rng = stream(0, "sandbox_data", 1)
    prototypes = _prototypes(rng)
    images, labels = _examples(prototypes, TRAIN + TEST, rng)
    return Images(images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:], source="stand-in")


def _prototypes(rng: np.random.Generator) -> Pixels:
    """[classes, prototypes, side, side] of smooth random strokes between 0 and 1."""
    coarse = rng.standard_normal((CLASSES, PROTOTYPES, 7, 7)).astype(np.float32)
    smooth = np.kron(coarse, np.ones((4, 4), dtype=np.float32))
    for axis in (-1, -2):
        smooth = np.mean([np.roll(smooth, shift, axis) for shift in range(-2, 3)], axis=0)
    return smooth.clip(0, 1)


def _examples(prototypes: Pixels, count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Images [count, 784] uint8 and classes [count]."""
    labels = rng.integers(CLASSES, size=count)
    versions = rng.integers(PROTOTYPES, size=count)
    moves = rng.integers(-2, 3, size=(count, 2))
    images = np.empty((count, SIDE, SIDE), dtype=np.uint8)
    for row, col in np.ndindex(5, 5):
        moved = np.flatnonzero((moves == (row - 2, col - 2)).all(1))
        clean = np.roll(prototypes, (row - 2, col - 2), (-2, -1))[labels[moved], versions[moved]]
        noisy = clean + 0.5 * rng.standard_normal(clean.shape, dtype=np.float32)
        images[moved] = (255 * np.clip(noisy, 0, 1)).astype(np.uint8)
    return torch.from_numpy(images).flatten(1), torch.from_numpy(labels)
