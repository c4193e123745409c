"""One process, two devices: dropout's numbers, and branches that run side by side.

    python two_devices.py FOLDER

Prints, as JSON, the greatest difference to a model on one device, and the seconds in
which products of both branches ran at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import kerasmgpu

strategy = kerasmgpu.HorovodStrategy(devices_per_rank=2)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow.tsl.profiler.protobuf import xplane_pb2  # noqa: E402

L = keras.layers
WIDTH = 512


def branch(name: str) -> keras.Model:
    layers = [L.Dense(WIDTH, activation="relu"), L.Dropout(0.3, seed=1), L.Dense(WIDTH)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers], name=name)


def trained(place, callbacks=()):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((WIDTH,))
    both = [place(branch(f"on_{i}"), i)(inputs) for i in (0, 1)]
    model = keras.Model(inputs, L.Dense(1)(L.add(both)))
    model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), "mse")
    if place is not unplaced:
        strategy.wrap(model)
    x = np.random.default_rng(0).normal(size=(1024, WIDTH)).astype("float32")
    model.fit(x, x[:, :1], batch_size=512, epochs=4, verbose=0, callbacks=callbacks)
    return model.get_weights()


def unplaced(layer, index):
    return layer


def seconds_side_by_side(folder: Path) -> float:
    """How long a product of one branch and one of the other ran at the same time."""
    spans: dict[str, list[tuple[int, int]]] = {"on_0": [], "on_1": []}
    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            for line in plane.lines:
                for event in line.events:
                    name = plane.event_metadata[event.metadata_id].name
                    start = line.timestamp_ns * 1000 + event.offset_ps
                    for key, found in spans.items():
                        if key in name and "MatMul" in name.rpartition(":")[2]:
                            found.append((start, start + event.duration_ps))
    return (
        sum(
            max(0, min(a[1], b[1]) - max(a[0], b[0]))
            for a in spans["on_0"]
            for b in spans["on_1"]
        )
        / 1e12
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    plain = trained(unplaced)
    with tf.profiler.experimental.Profile(str(folder)):
        placed = trained(kerasmgpu.layers.OnDevice)
    pairs = zip(plain, placed, strict=True)  # the states of seed generators, too
    differences = [np.abs(a - b).max() for a, b in pairs]
    result = {
        "difference": float(max(differences)),
        "seconds_side_by_side": seconds_side_by_side(folder),
    }
    print(json.dumps(result))
