"""Trains a net of two branches, each on a device of its own, on MNIST.

    python examples/two_branches.py
    kerasmgpu run -np 2 -- python examples/two_branches.py

Every rank owns two devices: two GPUs, or two parts of its CPU. One branch looks at fine
strokes, the other at coarse ones; they run at the same time. Ranks share out the rows,
as ever, and the net has no dropout, so N ranks give what one gives.
"""

from __future__ import annotations

import argparse

import keras
from data_source import add_data_arguments, load_mnist

import kerasmgpu
from kerasmgpu.layers import OnDevice


def branch(kernel_size: int, name: str) -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Conv2D(16, kernel_size, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, kernel_size, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
        ],
        name=name,
    )


def build_model() -> keras.Model:
    images = keras.Input((28, 28, 1))
    fine = OnDevice(branch(3, "fine"), 0)(images)
    coarse = OnDevice(branch(7, "coarse"), 1)(images)
    outputs = keras.layers.Dense(10)(keras.layers.Concatenate()([fine, coarse]))
    return keras.Model(images, outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128, help="over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FILE", help="a plain Keras model")
    add_data_arguments(parser)
    args = parser.parse_args()

    strategy = kerasmgpu.HorovodStrategy(devices_per_rank=2)
    keras.utils.set_random_seed(args.seed)
    train, test = load_mnist(strategy, args.data_dir, args.limit)

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
        model.save(args.save)
    if strategy.is_rank_zero:
        where = [model.get_layer(n).weights[0].value.device for n in ("fine", "coarse")]
        print(f"fine on {where[0][-5:]}, coarse on {where[1][-5:]}")
        print(f"test loss {loss:.4f}, accuracy {accuracy:.2%}, ranks: {strategy.size}")


if __name__ == "__main__":
    main()
