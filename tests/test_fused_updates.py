"""TensorFlow's fused updates have Keras's numbers; what they cannot is left alone."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasmgpu.fused_updates import fused_update

FUSED = {
    "adam": lambda: keras.optimizers.Adam(0.01, beta_1=0.8, epsilon=1e-5),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
}


class OwnUpdate(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient)


def take_steps(optimizer, update, steps=5):
    variable = keras.Variable(np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4))
    optimizer.build([variable])
    for step in range(steps):
        gradient = tf.sin(variable.value * (step + 1))
        update(optimizer, gradient, variable, optimizer.learning_rate)
        optimizer.iterations.assign_add(1)
    return [variable.numpy(), *(v.numpy() for v in optimizer.variables)]


def plainly(optimizer, gradient, variable, learning_rate):
    optimizer.update_step(gradient, variable, learning_rate)


def fused(optimizer, gradient, variable, learning_rate):
    done = fused_update(optimizer, type(optimizer), gradient, variable, learning_rate)
    assert done


@pytest.mark.parametrize("name", FUSED)
def test_numbers_are_kerass(name):
    plain = take_steps(FUSED[name](), plainly)
    for expected, received in zip(plain, take_steps(FUSED[name](), fused), strict=True):
        np.testing.assert_allclose(received, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("optimizer", "gradient", "dtype"),
    [
        (keras.optimizers.RMSprop(), tf.ones([3, 4]), "float32"),
        (keras.optimizers.Adam(amsgrad=True), tf.ones([3, 4]), "float32"),
        (OwnUpdate(), tf.ones([3, 4]), "float32"),
        (
            keras.optimizers.Adam(),
            tf.IndexedSlices(tf.ones([1, 4]), tf.constant([0]), tf.constant([3, 4])),
            "float32",
        ),
        (keras.optimizers.Adam(), tf.ones([3, 4], tf.float16), "float16"),
    ],
    ids=["another", "amsgrad", "own", "sparse", "float16"],
)
def test_what_is_left_to_keras(optimizer, gradient, dtype):
    variable = keras.Variable(np.ones([3, 4], dtype), dtype=dtype)
    optimizer.build([variable])
    before = [v.numpy() for v in (variable, *optimizer.variables)]
    assert not fused_update(optimizer, type(optimizer), gradient, variable, 0.1)
    after = [v.numpy() for v in (variable, *optimizer.variables)]
    for received, expected in zip(after, before, strict=True):
        np.testing.assert_array_equal(received, expected)
