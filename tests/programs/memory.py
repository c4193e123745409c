"""Trains for STEPS steps on WIDTH inputs; prints what memory a process took.

    memory.py plain|wrapped WIDTH STEPS

As JSON: `peak` and `growth` (bytes; the latter from a fifth of the steps to the last),
`gradients` (bytes) and `rank`.
"""

import json
import resource
import sys

import keras
import numpy as np
import psutil

import kerasmgpu

kind, width, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
strategy = kerasmgpu.HorovodStrategy()
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((width,)),
        keras.layers.Dense(width, activation="relu"),
        keras.layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(1e-3), "mse")
if kind == "wrapped":
    strategy.wrap(model)
resident = []


class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        resident.append(psutil.Process().memory_info().rss)


rows = 8 * strategy.size
x = np.random.default_rng(0).random((rows * 50, width), dtype="float32")
model.fit(
    x, x[:, :1], batch_size=rows, epochs=steps // 50, callbacks=[Watch()], verbose=0
)
weights = sum(variable.numpy().nbytes for variable in model.trainable_variables)
print(
    json.dumps(
        {
            "rank": strategy.rank,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "growth": resident[-1] - resident[len(resident) // 5],
            "gradients": weights,
        }
    ),
    flush=True,
)
