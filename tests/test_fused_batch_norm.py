"""The fused BatchNormalization has Keras's numbers and leaves no trace."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasmgpu
from kerasmgpu.layers.fused_batch_norm import fused_normalization

INPUTS = np.random.default_rng(1).normal(3.0, 2.0, (6, 5, 4, 3)).astype("float32")


def one_layer(**options):
    keras.utils.set_random_seed(3)
    layer = keras.layers.BatchNormalization(**options)
    inputs = keras.Input(INPUTS.shape[1:])
    model = keras.Model(inputs, layer(inputs))
    for weight in layer.weights:
        noise = np.random.default_rng(2).uniform(0.5, 1.5, weight.shape)
        weight.assign(noise)
    return model


def numbers(model, fused, training):
    """Outputs, gradients and moving statistics of a call, and the operations used."""
    x = tf.constant(INPUTS)
    operations = []

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=training)
            loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32) * 1.3))
        graph = tf.compat.v1.get_default_graph()
        operations.extend(op.type for op in graph.get_operations())
        sources = [x, *(w.value for w in model.trainable_weights)]
        return y, tape.gradient(loss, sources)

    if fused:
        with fused_normalization(model):
            y, gradients = step()
    else:
        y, gradients = step()
    statistics = [w.numpy() for w in model.non_trainable_weights]
    return [y, *gradients, *statistics], "FusedBatchNormV3" in operations


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.7, "epsilon": 0.02},
        {"scale": False},
        {"center": False},
        {"axis": 3, "trainable": False},
        {"dtype": "mixed_bfloat16"},
    ],
    ids=str,
)
def test_numbers_are_kerass(options, training):
    expected, was_fused = numbers(one_layer(**options), False, training)
    assert not was_fused
    received, was_fused = numbers(one_layer(**options), True, training)
    assert was_fused
    for one, other in zip(received, expected, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        loose = one.dtype == tf.bfloat16
        one, other = (np.asarray(tf.cast(value, tf.float32)) for value in (one, other))
        np.testing.assert_allclose(
            one, other, rtol=1e-2 if loose else 1e-5, atol=2e-2 if loose else 1e-5
        )


class OwnCall(keras.layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return super().call(inputs, training=training, mask=mask)


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.BatchNormalization(axis=1),
        keras.layers.BatchNormalization(epsilon=1e-6),
        keras.layers.BatchNormalization(dtype="float64"),
        keras.layers.BatchNormalization(synchronized=True),
        OwnCall(),
    ],
    ids=["axis", "epsilon", "float64", "synchronized", "own call"],
)
def test_what_is_left_to_keras(layer):
    model = keras.Sequential([keras.Input(INPUTS.shape[1:]), layer])
    _, was_fused = numbers(model, True, training=not getattr(layer, "synchronized", 0))
    assert not was_fused


def trained(fuse):
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input(INPUTS.shape[1:]),
            keras.layers.Conv2D(4, 2),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    if fuse is not None:
        kerasmgpu.HorovodStrategy(fuse_batch_norm=fuse).wrap(model)
    history = model.fit(
        INPUTS, np.ones(6), batch_size=4, epochs=4, verbose=0, shuffle=False
    )
    loss = model.evaluate(INPUTS, np.ones(6), verbose=0)
    return model, [*model.get_weights(), np.array(history.history["loss"]), loss]


def test_a_wrapped_model_trains_alike_and_saves_plainly(tmp_path):
    _, plain = trained(None)
    _, unfused = trained(False)
    model, fused = trained(True)
    for expected, same, close in zip(plain, unfused, fused, strict=True):
        np.testing.assert_array_equal(same, expected)
        np.testing.assert_allclose(close, expected, rtol=1e-4, atol=1e-5)
    assert all("call" not in vars(layer) for layer in model.layers)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.layers[1]) is keras.layers.BatchNormalization
    np.testing.assert_array_equal(loaded.get_weights()[2], model.get_weights()[2])
