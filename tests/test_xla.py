"""`jit_compile=True` on 2 ranks: compiled around the reduce, the same numbers."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import (
    assert_ranks_agree,
    assert_same,
    classification,
    cross_entropy,
    dense_net,
    one_and_all,
    strategy,
    traced_nodes,
)

from kerasmgpu.collectives import topology

pytestmark = pytest.mark.world_size(2)


def compiled_functions(model):
    """Names of the functions that XLA compiles, and all operations inside them."""
    nodes, functions = traced_nodes(model)
    names = {n.attr["f"].func.name for n in nodes if n.attr["_XlaMustCompile"].b}
    names = {name for name in names if name in functions}
    return names, {node.op for name in names for node in functions[name].node_def}


def conv_net():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(4, kernel_regularizer="l2"),
        ]
    )


def masked_net():
    return keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            keras.layers.Embedding(16, 6, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(4),
        ]
    )


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_are_those_of_one_process_without_xla(name):
    x, y = classification(37, features=64)
    x = x.reshape(-1, 8, 8, 1)

    def train(model):
        wrapped = hasattr(model, "_kerasmgpu")
        model.compile(
            OPTIMIZERS[name](),
            cross_entropy(),
            metrics=["accuracy"],
            jit_compile=wrapped,
        )
        return model.fit(x, y, batch_size=8, epochs=3, verbose=0)

    results = one_and_all(conv_net, train)
    assert_same(*results)
    names, operations = compiled_functions(results[2])
    assert len(names) == (1 if name == "accumulating" else 2)
    assert "Conv2DBackpropFilter" in operations
    assert not any(op.startswith("Horovod") for op in operations)


def test_sparse_gradients_masks_and_weights():
    x = np.random.default_rng(3).integers(0, 16, (20, 8))
    y = np.random.default_rng(4).integers(0, 4, 20)
    weights = np.linspace(0.1, 2, 20)

    def train(model):
        wrapped = hasattr(model, "_kerasmgpu")
        model.compile(
            "sgd", cross_entropy(), weighted_metrics=["accuracy"], jit_compile=wrapped
        )
        return model.fit(x, y, batch_size=6, epochs=2, sample_weight=weights, verbose=0)

    results = one_and_all(masked_net, train)
    assert_same(*results)
    assert compiled_functions(results[2])[0]


def test_moving_statistics_and_random_states_move_on():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(4),
        ]
    )
    model.compile("adam", cross_entropy(), jit_compile=True)
    strategy().wrap(model)
    before = [v.numpy().copy() for v in model.non_trainable_variables]
    x, y = classification(16)
    model.fit(x, y, batch_size=8, verbose=0)
    assert compiled_functions(model)[0]
    for was, variable in zip(before, model.non_trainable_variables, strict=True):
        assert not np.array_equal(was, variable.numpy()), variable.path
    assert_ranks_agree(model)


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        return super().train_step(data)


class NotForXLA(keras.layers.Layer):
    def call(self, x):
        same = tf.numpy_function(lambda v: v, [x], tf.float32, stateful=False)
        return x + 0 * tf.stop_gradient(tf.ensure_shape(same, x.shape))


def net_with_a_layer_that_xla_refuses():
    inputs = keras.Input((8,))
    return keras.Model(inputs, dense_net()(NotForXLA()(inputs)))


def net_with_global_moments():
    inputs = keras.Input((8,))
    x = keras.layers.BatchNormalization(synchronized=True)(inputs)
    return keras.Model(inputs, keras.layers.Dense(4)(x))


@pytest.mark.parametrize(
    "build", [OwnStep, net_with_a_layer_that_xla_refuses, net_with_global_moments]
)
def test_what_cannot_be_compiled_runs_without_xla_with_one_warning(build):
    x, y = classification(16)
    model = build()
    model.compile("sgd", cross_entropy(), jit_compile=True)
    strategy().wrap(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(x, y, batch_size=8, verbose=0)
    said = [str(w.message) for w in caught if "without XLA" in str(w.message)]
    assert len(said) == (topology().rank == 0)
    assert not compiled_functions(model)[0]
    assert_ranks_agree(model)
