"""Which gradients travel together, and that their numbers are those of one process."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import check, cross_entropy
from tensorflow import float16, float32

from kerasmgpu import buckets
from kerasmgpu.buckets import BUCKET_BYTES

HALF = BUCKET_BYTES // 8  # float32 values that fill half of a bucket


def filled(*gradients, parts=None):
    return buckets.fill(gradients, parts or [False] * len(gradients))


def zeros(*counts, dtype=float32):
    return [tf.zeros([count], dtype) for count in counts]


def test_small_ones_travel_together_the_last_weights_first():
    assert filled(*zeros(3, 4, 5)) == [[2, 1, 0]]
    assert filled(*zeros(HALF, HALF, HALF)) == [[2, 1], [0]]


def test_a_large_one_travels_alone_and_does_not_end_a_bucket():
    assert filled(*zeros(3, 2 * HALF + 1, 5)) == [[2, 0], [1]]


def test_what_does_not_fit_begins_a_bucket():
    assert filled(*zeros(HALF + 1, HALF, 1)) == [[2, 1], [0]]


def test_types_and_parts_of_weights_are_not_mixed():
    mixed = [*zeros(1, 1), *zeros(1, 1, dtype=float16)]
    assert filled(*mixed) == [[3, 2], [1, 0]]
    assert filled(*zeros(1, 1, 1), parts=[False, True, False]) == [[2, 0], [1]]


def test_what_cannot_be_joined_travels_alone():
    slices = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]), tf.constant([9, 2]))
    assert filled(*zeros(1), None, slices, *zeros(1)) == [[3, 0], [2], [1]]
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([2])])
    def trace(unknown, known):
        found.extend(filled(known, unknown, known))

    trace.get_concrete_function()
    assert found == [[2, 0], [1]]


def test_every_gradient_is_in_one_bucket():
    counts = np.random.default_rng(0).integers(1, HALF, 200)
    found = filled(*zeros(*counts))
    assert sorted(itertools.chain(*found)) == list(range(200))
    assert all(4 * sum(counts[bucket]) <= BUCKET_BYTES for bucket in found)
    assert len(found) < 70


def test_what_is_joined_can_be_cut():
    gradients = [tf.random.normal(shape) for shape in ([2, 3], [], [4], [1, 0])]
    doubled_ones = buckets.cut(2.0 * buckets.join(gradients), gradients)
    for gradient, doubled in zip(gradients, doubled_ones, strict=True):
        np.testing.assert_array_equal(2.0 * gradient, doubled)


class Unused(keras.layers.Layer):
    """Has a weight that nothing depends on: its gradient is None."""

    def build(self, input_shape):
        self.weight = self.add_weight(shape=(3,))

    def call(self, inputs):
        return inputs


def net():
    """Gradients of all kinds, and more than one bucket of small ones."""
    layers = keras.layers
    words = keras.Input((4,), dtype="int32", name="words")
    x = layers.Flatten()(layers.Embedding(50, 8)(words))
    for _ in range(3):
        x = x + layers.Dense(32, activation="tanh", dtype="float16")(x)
    x = layers.Dense(BUCKET_BYTES // 4 // 32 + 1, activation="tanh")(x)  # alone
    x = Unused()(layers.Dense(24, activation="tanh")(x))
    for _ in range(2):
        x = layers.Dense(180, activation="tanh")(x)
    model = keras.Model(words, layers.Dense(4)(x))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), cross_entropy())
    return model


@pytest.mark.world_size(3)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_gradients_of_all_kinds(jit_compile):
    generator = np.random.default_rng(3)
    words, labels = generator.integers(0, 50, (26, 4)), generator.integers(0, 4, 26)

    def build():
        model = net()
        model.jit_compile = jit_compile
        return model

    # Weights of float16 differ by a rounding now and then.
    check(build, words, labels, rtol=5e-3, atol=1e-4, batch_size=8, shuffle=False)
