"""Bad input: a clear error on every rank, within seconds, and no hang."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import classification, cross_entropy, dense_net, strategy

from kerasmgpu.collectives import topology

pytestmark = pytest.mark.world_size(2, timeout=60)


def build(hidden=16, optimizer="sgd"):
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dense(4),
        ]
    )
    model.compile(optimizer, cross_entropy())
    return model


def test_not_compiled():
    x, y = classification(8)
    with pytest.raises(ValueError, match="compile"):
        strategy().wrap(dense_net()).fit(x, y, verbose=0)


@pytest.mark.parametrize("thing", [None, "sgd", 3, tf.Module(), keras.layers.Dense(1)])
def test_neither_model_nor_optimizer(thing):
    with pytest.raises(TypeError, match=r"expected a Keras 3 model or optimizer"):
        strategy().wrap(thing)
    with pytest.raises(TypeError, match=r"expected a Keras 3 model or optimizer"):
        strategy().unwrap(thing)


def test_a_keras_2_object():
    legacy = type("SGD", (), {"__module__": "tf_keras.optimizers"})()
    with pytest.raises(TypeError, match="Keras 2"):
        strategy().wrap(legacy)


def test_models_that_differ_in_shape():
    x, y = classification(16)
    model = strategy().wrap(build(hidden=16 + topology().rank))
    with pytest.raises(RuntimeError, match=r"kernel.*\(8, 16\).*\(8, 17\)"):
        model.fit(x, y, verbose=0)


def test_models_that_differ_in_layers():
    x, y = classification(16)
    model = build()
    if topology().rank == 1:
        model.add(keras.layers.Dense(4))
        model.compile("sgd", cross_entropy())
    with pytest.raises(RuntimeError, match=r"rank 0 has .*; rank 1 has "):
        strategy().wrap(model).fit(x, y, verbose=0)


def test_optimizers_that_differ():
    x, y = classification(16)
    optimizer = "adam" if topology().rank else "sgd"
    with pytest.raises(RuntimeError, match=r"SGD.*Adam"):
        strategy().wrap(build(optimizer=optimizer)).fit(x, y, verbose=0)


def test_different_numbers_of_inputs():
    x, _ = classification(16)
    inputs = [keras.Input((8,)) for _ in range(topology().rank + 1)]
    joined = keras.layers.Concatenate()(inputs) if len(inputs) > 1 else inputs[0]
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile("sgd", "mse")
    data = [x] * len(inputs) if len(inputs) > 1 else x
    with pytest.raises(RuntimeError, match=r"\(8, 1\).*\(16, 1\)"):
        strategy().wrap(model).fit(data, x[:, :1], verbose=0)


@pytest.mark.parametrize("batch_size", [0, -4])
def test_batch_size_below_one(batch_size):
    x, y = classification(8)
    with pytest.raises(ValueError, match=f"batch_size={batch_size}"):
        strategy().wrap(build()).fit(x, y, batch_size=batch_size, verbose=0)


def test_own_arrays_with_a_batch_smaller_than_the_ranks():
    x, y = classification(8)
    with pytest.raises(ValueError, match="batch_size=1"):
        strategy(sharding="none").wrap(build()).fit(x, y, batch_size=1, verbose=0)


def test_data_without_rows():
    x, y = classification(8)
    empty = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).take(0)
    with pytest.raises((ValueError, RuntimeError)):
        strategy(sharding="none").wrap(build()).fit(
            empty.filter(lambda *_: True), verbose=0
        )


def test_data_that_differs_by_rank():
    x, y = classification(16)
    x = x + topology().rank
    with pytest.raises(RuntimeError, match=r"different data.*seed.*none"):
        strategy().wrap(build()).fit(x, y, verbose=0)


def test_a_later_batch_with_other_rows_on_one_rank():
    x, y = classification(8)

    def batches():
        yield x[:4], y[:4]
        rows = 4 + 2 * topology().rank
        yield x[:rows], y[:rows]

    signature = tuple(tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (x, y))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    with pytest.raises(RuntimeError, match="different data"):
        strategy().wrap(build()).fit(data, verbose=0)


def test_a_shuffle_that_differs_by_rank():
    x, y = classification(64)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.shuffle(64, seed=1 + topology().rank).batch(8)
    with pytest.raises(RuntimeError, match="Three ways out"):
        strategy().wrap(build()).fit(data, verbose=0)


@pytest.mark.parametrize("known", [True, False])
def test_more_batches_on_one_rank(known):
    x, y = classification(32)
    rows = 32 if topology().rank == 0 else 24
    data = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(8)
    if not known:
        data = data.filter(lambda *_: True)
    with pytest.raises(RuntimeError, match=r"Received|has ended|do not make the same"):
        strategy().wrap(build()).fit(data, verbose=0)


def test_calls_that_differ():
    x, y = classification(16)
    model = strategy().wrap(build())
    with pytest.raises(RuntimeError, match=r"Rank 0 calls fit.*rank 1 calls evaluate"):
        model.fit(x, y, verbose=0) if topology().rank == 0 else model.evaluate(x, y)
    with pytest.raises(RuntimeError, match=r"epochs=1.*epochs=2"):
        model.fit(x, y, verbose=0, epochs=1 + topology().rank)


def test_scalar_components():
    data = tf.data.Dataset.range(10)
    with pytest.raises(ValueError, match="batch"):
        strategy().wrap(build()).fit(data, verbose=0)


def test_wrapped_with_other_options():
    model = strategy().wrap(build())
    with pytest.raises(ValueError, match="unwrap"):
        strategy(sharding="none").wrap(model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_reduction": "average"}, "gradient_reduction='average'"),
        ({"gradient_compression": "int8"}, "gradient_compression='int8'"),
        ({"sharding": "rows"}, "sharding='rows'"),
        ({"stall_timeout_seconds": 0}, "stall_timeout_seconds=0"),
    ],
)
def test_options(options, words):
    with pytest.raises(ValueError, match=words):
        strategy(**options)


def test_learning_rate_rules():
    own = strategy()
    scale = own.scale_learning_rate
    assert scale(0.1, base_batch_size=64, batch_size=256) == pytest.approx(0.4)
    assert scale(0.1, base_batch_size=64, batch_size=256, rule="sqrt") == (
        pytest.approx(0.2)
    )
    assert scale(0.1, base_batch_size=64, batch_size=256, rule="none") == 0.1
    with pytest.raises(ValueError, match="rule='cubic'"):
        scale(0.1, base_batch_size=64, batch_size=256, rule="cubic")
    with pytest.raises(ValueError, match="batch_size=0"):
        scale(0.1, base_batch_size=64, batch_size=0)


def test_shard_of_something_else():
    with pytest.raises(TypeError, match=r"tf\.data\.Dataset"):
        strategy().shard(np.zeros(3))
