"""Trains a convolutional net on MNIST, on one process or on many.

    python examples/mnist.py
    kerasmgpu run -np 2 -- python examples/mnist.py

The same script, and the same result to within the noise of dropout.
"""

from __future__ import annotations

import argparse
import time

import keras
from data_source import add_data_arguments, load_mnist

import kerasmgpu


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
        ]
    )


class Throughput(keras.callbacks.Callback):
    """Images a second in the last epoch's training, without its first batch."""

    def __init__(self, num_images: int, batch_size: int) -> None:
        super().__init__()
        self.images_timed = num_images - batch_size
        self.began = self.ended = 0.0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.ended = time.perf_counter()
        if batch == 0:
            self.began = self.ended

    @property
    def images_per_second(self) -> float:
        seconds = self.ended - self.began
        return self.images_timed / seconds if seconds > 0 else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, help="default: 3, or 8 for few images")
    parser.add_argument("--batch-size", type=int, default=128, help="over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    add_data_arguments(parser)
    args = parser.parse_args()

    strategy = kerasmgpu.HorovodStrategy()
    keras.utils.set_random_seed(args.seed)
    train, test = load_mnist(strategy, args.data_dir, args.limit)
    epochs = args.epochs or (3 if len(train[0]) > 20_000 else 8)

    model = build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = strategy.wrap(model)
    throughput = Throughput(len(train[0]), args.batch_size)
    history = model.fit(
        *train,
        batch_size=args.batch_size,
        epochs=epochs,
        validation_data=test,
        validation_batch_size=1000,
        callbacks=[throughput],
        verbose=2,
    )
    if strategy.is_rank_zero:
        accuracy = history.history["val_accuracy"][-1]
        print(
            f"test accuracy {accuracy:.2%} after {epochs} epochs, "
            f"{throughput.images_per_second:.0f} images/s, ranks: {strategy.size}"
        )


if __name__ == "__main__":
    main()
