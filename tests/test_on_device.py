"""`OnDevice`: 2 ranks with 2 devices each give what one process with one device gives.

"One process" is an unwrapped model without `OnDevice`, as in `ranks.py`.
"""

from __future__ import annotations

import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from rank_jobs import on_a_rank
from ranks import (
    SEED,
    assert_same,
    assert_same_values,
    classification,
    cross_entropy,
    strategy,
    traced_nodes,
)

from kerasmgpu.collectives import broadcast_object, topology
from kerasmgpu.layers import OnDevice, on_device

L = keras.layers
pytestmark = pytest.mark.world_size(2)


@pytest.fixture(autouse=True)
def two_devices():
    if on_a_rank():
        strategy(devices_per_rank=2)  # before TensorFlow starts


def plainly(layer, index):
    return layer


def dense_branch(units, name=None):
    first = L.Dense(units, activation="relu", kernel_regularizer="l2")
    return keras.Sequential([first, L.Dense(6)], name=name)


def functional(place):
    inputs = keras.Input((8,))
    built = keras.Sequential(
        [keras.Input((8,)), L.Dense(5, activation="tanh"), L.Dense(6)], name="on_1_c"
    )
    shared = place(L.Dense(8, activation="tanh", name="on_1_a"), 1)
    branches = [
        place(dense_branch(7, "on_0"), 0)(inputs),
        place(dense_branch(9, "on_1_b"), 1)(shared(inputs)),
        place(built, 1)(shared(shared(inputs))),
    ]
    return keras.Model(inputs, L.Dense(4, name="head")(L.Concatenate()(branches)))


def sequential(place):
    return keras.Sequential(
        [
            L.Reshape((2, 2, 2)),
            place(L.Conv2D(6, 2, padding="same"), 1),
            place(L.BatchNormalization(synchronized=True), 1),
            L.Flatten(),
            place(L.Dense(9, activation="relu", activity_regularizer="l2"), 1),
            L.Dense(4),
        ]
    )


class Subclassed(keras.Model):
    def __init__(self, place=plainly, **options):
        super().__init__(**options)
        self.first = dense_branch(7)
        self.second = place(dense_branch(9), 1)
        self.head = L.Dense(4)

    def call(self, x):
        return self.head(L.add([self.first(x), self.second(x)]))


def mixed(place):
    inputs = keras.Input((8,), dtype="float32")
    half = "mixed_bfloat16"
    right = place(L.Dense(6, activation="relu", dtype=half), 1)(inputs)
    left = L.Dense(6, activation="relu", dtype=half)(inputs)
    return keras.Model(inputs, L.Dense(4, dtype="float32")(L.add([left, right])))


def recurrent(place):
    return keras.Sequential(
        [L.Reshape((4, 2)), place(L.GRU(6), 1), place(L.Dense(4), 0)]
    )


def embedding(place):
    return keras.Sequential(
        [
            L.Lambda(lambda x: tf.cast(tf.abs(x) * 3, "int32") % 7),
            place(L.Embedding(7, 5), 1),
            place(L.GlobalAveragePooling1D(), 1),
            L.Dense(4),
        ]
    )


K = keras.optimizers
CASES = {
    "functional, Adam": (functional, lambda: K.Adam(0.01, epsilon=1e-4), {}),
    "functional, clipped": (
        functional,
        lambda: K.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.1),
        {},
    ),
    "subclassed, RMSprop, eager": (
        Subclassed,
        lambda: K.RMSprop(0.01, epsilon=1e-3),
        {"run_eagerly": True},
    ),
    "sequential": (sequential, lambda: K.SGD(0.1, momentum=0.9), {}),
    "subclassed, accumulated": (
        Subclassed,
        lambda: K.AdamW(
            0.01, epsilon=1e-4, gradient_accumulation_steps=2, use_ema=True
        ),
        {},
    ),
    "several steps, loss scale": (
        functional,
        lambda: K.LossScaleOptimizer(K.SGD(0.1)),
        {"steps_per_execution": 3},
    ),
    "functional, in pieces": (functional, lambda: K.SGD(0.1), {}),
    "recurrent": (recurrent, lambda: K.SGD(0.1), {}),
    "embedding": (embedding, lambda: K.SGD(0.1), {}),
    "mixed precision": (mixed, lambda: K.SGD(0.1), {}),
}


def fit_both(case, **fit):
    make, optimizer, options = CASES[case]
    x, y = classification(27)
    results = []
    for place in (plainly, OnDevice):
        keras.utils.set_random_seed(SEED)
        model = make(place)
        model.compile(optimizer(), cross_entropy(), metrics=["accuracy"], **options)
        if place is OnDevice:
            pieces = 2 if "in pieces" in case else None
            strategy(devices_per_rank=2, micro_batch_size=pieces).wrap(model)
        fit = {"batch_size": 8, "epochs": 2, "verbose": 0, **fit}
        results += [model, model.fit(x, y, validation_data=(x[:9], y[:9]), **fit)]
    return results


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_one_process(case):
    results = fit_both(case)
    loose = {"rtol": 2e-2, "atol": 2e-2} if case == "mixed precision" else {}
    assert_same(*results, **loose)
    one, _, ranked, _ = results
    x, _ = classification(27)
    np.testing.assert_allclose(
        ranked.predict(x, verbose=0),
        one.predict(x, verbose=0),
        **(loose or {"rtol": 1e-4, "atol": 1e-5}),
    )


def device_of(name):
    """What the names above say; "" is wherever TensorFlow likes."""
    return "CPU:1" if "on_1" in name else "CPU:0" if "on_0" in name else ""


def test_weights_slots_and_both_passes_are_on_the_device():
    ranked = fit_both("functional, Adam", epochs=1)[2]
    adam = ranked.optimizer
    for weight in ranked.weights:
        index = adam._get_variable_index(weight)
        for variable in (weight, adam._momentums[index], adam._velocities[index]):
            expected = device_of(weight.path) or "CPU:0"
            assert variable.value.device.endswith(expected), variable.path
    products = [node for node in traced_nodes(ranked)[0] if node.op == "MatMul"]
    assert len(products) == 10 + 17  # forward, backward
    for node in products:
        assert node.device[-5:] == device_of(node.name), node.name


@pytest.mark.parametrize("case", ["functional, Adam", "sequential"])
def test_files_are_plain_and_cross_over(case, tmp_path):
    one, _, ranked, _ = fit_both(case, epochs=1)
    folder = broadcast_object(str(tmp_path))
    path, weights = f"{folder}/m.keras", f"{folder}/m.weights.h5"
    x, y = classification(27)
    ranked.save(path)
    ranked.save_weights(weights)
    ranked.export(f"{folder}/exported")
    strategy(devices_per_rank=2).barrier()
    with zipfile.ZipFile(path) as archive:
        text = archive.read("config.json").decode()
    assert "kerasmgpu" not in text
    assert "OnDevice" not in text
    loaded = keras.models.load_model(path)
    classes = [type(layer) for layer in loaded._flatten_layers()]
    assert classes == [type(layer) for layer in one._flatten_layers()]
    for layer in loaded._flatten_layers():
        assert "_kerasmgpu_device" not in vars(layer)
    assert_same_values(ranked.get_weights(), loaded.get_weights(), 0, 0, "weights")
    exported = tf.saved_model.load(f"{folder}/exported")
    np.testing.assert_allclose(
        exported.serve(x), loaded.predict(x, verbose=0), 1e-4, 1e-5
    )
    # Both go on alike, the plain one by itself.
    results = [m.fit(x, y, batch_size=8, verbose=0) for m in (loaded, ranked)]
    assert_same(loaded, results[0], ranked, results[1])
    for model in (one, ranked):
        model.load_weights(weights)
    assert_same_values(one.get_weights(), ranked.get_weights(), 0, 0, "loaded")
    strategy(devices_per_rank=2).barrier()


@pytest.mark.parametrize("index", [2, -1, True, "1"])
def test_an_index_that_does_not_exist(index):
    with pytest.raises(ValueError, match=r"there are 2 \(0 to 1\).*devices_per_rank"):
        OnDevice(L.Dense(1), index)


def test_what_cannot_be_put_on_a_device():
    with pytest.raises(TypeError, match=r"Expected a keras.Layer.*Received: builtins"):
        OnDevice("dense", 1)
    layer = OnDevice(L.Dense(1), 1)
    assert OnDevice(layer, 1) is layer
    with pytest.raises(ValueError, match="Put a layer on each of them"):
        OnDevice(layer, 0)


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_a_number_of_devices_that_is_refused(number):
    with pytest.raises(ValueError, match="devices_per_rank to be a positive whole"):
        strategy(devices_per_rank=number)


def test_another_number_is_refused_on_all_ranks():
    with pytest.raises(ValueError, match=r"expected devices_per_rank=2.*Received.*=3"):
        strategy(devices_per_rank=3)
    with pytest.raises(ValueError, match=r"Received, by rank: \[2, 1\]"):
        strategy(devices_per_rank=2 - topology().rank)


def test_graph_names_that_are_alike():
    scopes = {"m/dense": "CPU:1", "m/part/dense": "CPU:2", "m/part": "CPU:3"}
    for name, device in (
        ("gradient_tape/m/dense/MatMul/MatMul_1", "CPU:1"),
        ("step/gradient_tape/m/part/dense/ReluGrad", "CPU:2"),
        ("gradient_tape/m/part/other/mul", "CPU:3"),
        ("gradient_tape/m/dense_1/MatMul", None),
        ("m/dense/MatMul", None),
    ):
        assert on_device._device_of_gradient(name, scopes) == device
