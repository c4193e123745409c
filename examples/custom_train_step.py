"""A `train_step` of one's own with two optimizers, on one process or on many.

    python examples/custom_train_step.py
    kerasmgpu run -np 2 -- python examples/custom_train_step.py

Nothing in `TwoPartModel` knows of ranks. It has no dropout, so N ranks give the same
loss and accuracy as one process.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
from data_source import add_data_arguments, load_mnist

import kerasmgpu


class TwoPartModel(keras.Model):
    """Convolutions trained by AdamW, and a head trained by SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential(
            [
                keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
                keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
                keras.layers.Flatten(),
            ]
        )
        self.head = keras.layers.Dense(10)

    def call(self, images: tf.Tensor) -> tf.Tensor:
        return self.head(self.body(images))

    def compile(
        self,
        body_optimizer: keras.optimizers.Optimizer,
        head_optimizer: keras.optimizers.Optimizer,
        **kwargs: object,
    ) -> None:
        super().compile(optimizer=None, **kwargs)
        self.body_optimizer = body_optimizer
        self.head_optimizer = head_optimizer

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = self.compute_loss(x, y, logits)
        parts = (self.body.trainable_variables, self.head.trainable_variables)
        body_gradients, head_gradients = tape.gradient(loss, parts)
        self.body_optimizer.apply(body_gradients, parts[0])
        self.head_optimizer.apply(head_gradients, parts[1])
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return self.compute_metrics(x, y, logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128, help="over all ranks")
    add_data_arguments(parser)
    args = parser.parse_args()

    strategy = kerasmgpu.HorovodStrategy()
    keras.utils.set_random_seed(0)
    train, test = load_mnist(strategy, args.data_dir, args.limit)

    model = strategy.wrap(TwoPartModel())
    model.compile(
        body_optimizer=keras.optimizers.AdamW(2e-3),
        head_optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(*train, batch_size=args.batch_size, epochs=args.epochs, verbose=2)
    loss, accuracy = model.evaluate(*test, batch_size=1000, verbose=0)

    # Collectives are called on every rank; only the printing is rank 0's.
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    same = np.array_equal(
        strategy.all_reduce(weights, "min"), strategy.all_reduce(weights, "max")
    )
    if strategy.is_rank_zero:
        print(f"test loss {loss:.4f}, test accuracy {accuracy:.2%}")
        print(f"ranks: {strategy.size}; all hold the same weights: {same}")


if __name__ == "__main__":
    main()
