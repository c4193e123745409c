"""N ranks = one process: what a loss divides by."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from ranks import check, classification, cross_entropy, dense_net

pytestmark = pytest.mark.world_size(2)


def build_with(loss, **options):
    def build():
        model = dense_net()
        model.compile(
            keras.optimizers.SGD(0.02), loss, weighted_metrics=["accuracy"], **options
        )
        return model

    return build


@pytest.mark.parametrize(
    "reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(reduction, weighted):
    x, y = classification(29)
    weights = np.linspace(0.1, 3.0, 29).astype("float32") if weighted else None
    check(
        build_with(cross_entropy(reduction=reduction)),
        x,
        y,
        batch_size=8,
        sample_weight=weights,
        validation_data=(x[:11], y[:11], np.arange(11.0)),
    )


def test_class_weight():
    x, y = classification(29)
    weights = {0: 0.5, 1: 2.0, 2: 1.0, 3: 3.0}
    check(build_with(cross_entropy()), x, y, batch_size=8, class_weight=weights)


def test_scalar_loss_function():
    x, y = classification(32)

    def loss(y_true, y_pred):
        one_hot = tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), 4)
        return tf.reduce_mean(tf.square(one_hot - y_pred))

    check(build_with(loss), x, y, batch_size=8)


def test_scalar_loss_function_with_a_short_batch():
    x, y = classification(29)

    def loss(y_true, y_pred):
        one_hot = tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), 4)
        return tf.reduce_mean(tf.square(one_hot - y_pred))

    check(build_with(loss), x, y, batch_size=8)


def test_ignored_class():
    """Labels that do not count are spread unevenly over the ranks."""
    x, y = classification(29)
    y = y.copy()
    y[:6] = -1
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)

    def build():
        model = dense_net()
        model.compile(keras.optimizers.SGD(0.02), loss)
        return model

    check(build, x, y, batch_size=8, shuffle=False)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_masked_sequences(reduction):
    generator = np.random.default_rng(4)
    x = generator.integers(1, 12, size=(21, 6))
    for row, length in enumerate(generator.integers(1, 7, 21)):
        x[row, length:] = 0  # padding
    y = generator.integers(0, 3, size=(21, 6))

    def build():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(12, 5, mask_zero=True),
                layers.Dense(3),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.05),
            cross_entropy(reduction=reduction),
            weighted_metrics=["accuracy"],
        )
        return model

    check(build, x, y, batch_size=4, validation_data=(x[:7], y[:7]), atol=1e-5)
