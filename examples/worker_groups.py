"""Trains an AlexNet-like net whose dense layers the ranks of a group hold in parts.

    python examples/worker_groups.py --model-parallel-size 1
    kerasmgpu run -np 4 -- python examples/worker_groups.py

Four ranks make two groups of two. Convolutions, light in weights and heavy in
computation, are on every rank; dense layers, the reverse, are split within a group
(Krizhevsky 2014, arXiv 1404.5997). The groups share out the rows, and N ranks give what
one gives. Images are CIFAR-10's, where `--data-dir` has `cifar10_jpeg.npz` (see
`tfrecord_pipeline.py`), else small ones that are drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from data_source import add_data_arguments
from tfrecord_pipeline import cifar_images, drawn_images

import kerasmgpu
from kerasmgpu.layers import ShardedDense


def load(data_dir: str | None, split: str, limit: int | None) -> tuple:
    path = Path(data_dir or "") / "cifar10_jpeg.npz"
    has_data = data_dir is not None and path.is_file()
    images = (
        cifar_images(path, split, limit) if has_data else drawn_images(split, limit)
    )
    decoded = [(tf.io.decode_jpeg(jpeg).numpy(), label) for jpeg, label in images]
    x, y = zip(*decoded, strict=True)
    return np.array(x, "float32") / 255, np.array(y, "int64")


def build_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 5, strides=2, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            # A pair: the 512 units stay split between the two.
            ShardedDense(512, activation="relu", gather_output=False),
            ShardedDense(256, activation="relu", shard="input", input_is_split=True),
            ShardedDense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-parallel-size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128, help="over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FILE", help="a plain Keras model")
    add_data_arguments(parser)
    args = parser.parse_args()

    # First: layers that are made after it know of the groups.
    strategy = kerasmgpu.HorovodStrategy(model_parallel_size=args.model_parallel_size)
    keras.utils.set_random_seed(args.seed)
    train = load(args.data_dir, "train", args.limit)
    test = load(args.data_dir, "test", args.limit)

    model = build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = strategy.wrap(model)
    model.fit(*train, batch_size=args.batch_size, epochs=args.epochs, verbose=2)
    loss, accuracy = model.evaluate(*test, batch_size=1000, verbose=0)
    if args.save:
        model.save(args.save)  # on all ranks: parts are gathered
    held = sum(v.value.dtype.size * int(np.prod(v.shape)) for v in model.weights)
    if strategy.is_rank_zero:
        print(f"weights on this rank: {held} bytes")
        print(f"test loss {loss:.4f}, accuracy {accuracy:.2%}, ranks: {strategy.size}")


if __name__ == "__main__":
    main()
