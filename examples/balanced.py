"""One slow rank: equal rows beside rows by measured speed (`sharding="balanced"`).

    kerasmgpu run -np 2 -- python examples/balanced.py

The last rank sleeps 3 ms a row in every step, the others 1 ms a row: it is three times
slower. The script trains with equal shares and with balanced ones, and prints the
median time of a step of each, from the third epoch on, when shares have settled.
"""

import argparse
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import kerasmgpu

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64, help="rows over all ranks")
parser.add_argument("--steps", type=int, default=10, help="steps an epoch")
args = parser.parse_args()

SETTLED_AFTER_EPOCHS = 2
strategy = kerasmgpu.HorovodStrategy()
seconds_per_row = 0.003 if strategy.rank == strategy.size - 1 else 0.001


class Slow(keras.layers.Layer):
    """Passes its input on after a sleep that is proportional to the rows."""

    def call(self, x, training=False):
        def sleep(values):
            time.sleep(seconds_per_row * len(values))
            return values

        if not training:
            return x
        return tf.ensure_shape(tf.py_function(sleep, [x], x.dtype), x.shape)


class StepTimes(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seconds = []
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch >= SETTLED_AFTER_EPOCHS:
            self.seconds.append(time.perf_counter() - self.began)


def median_step_seconds(sharding):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), Slow(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model = kerasmgpu.HorovodStrategy(sharding=sharding).wrap(model)
    rows = args.batch_size * args.steps
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype("float32")
    times = StepTimes()
    model.fit(
        *(x, x.sum(1, keepdims=True)),
        batch_size=args.batch_size,
        epochs=max(args.epochs, SETTLED_AFTER_EPOCHS + 1),
        callbacks=[times],
        verbose=0,
    )
    return statistics.median(times.seconds)


equal, balanced = median_step_seconds("batch"), median_step_seconds("balanced")
if strategy.is_rank_zero:
    print(
        f"a step: {equal * 1000:.1f} ms with equal rows, {balanced * 1000:.1f} ms "
        f"balanced: {balanced / equal:.0%}"
    )
