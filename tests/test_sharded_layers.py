"""Layers that a group holds in parts = one process with the plain layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import SEED, assert_same_values, classification, cross_entropy

import kerasmgpu
from kerasmgpu import layers as ours
from kerasmgpu.collectives import all_gather_object, groups
from kerasmgpu.errors import CollectiveError, InvalidArgumentError
from kerasmgpu.shards import axis_of, gathered, sharded_variables, whole_of
from kerasmgpu.state import optimizers_of

K = keras.optimizers
M = {"model_parallel_size": 2}


def dense_net(sharded):
    """Every way to split a Dense layer, in a row."""
    L2 = keras.regularizers.L2
    layers, Dense = keras.layers, keras.layers.Dense

    def dense(units, activation=None, regularizer=None, **ways):
        options = {"activation": activation, "kernel_regularizer": regularizer}
        if not sharded:
            return Dense(units, **options)
        return ours.ShardedDense(units, **options, **ways)

    return keras.Sequential(
        [
            keras.Input((8,)),
            dense(12, "tanh", L2(0.01)),
            layers.Dense(6, "tanh"),
            dense(10, "relu", gather_output=False),
            dense(6, "tanh", L2(0.02), shard="input", input_is_split=True),
            dense(8, shard="input"),
            layers.BatchNormalization(synchronized=True),
            dense(4),
        ]
    )


def wholes(model):
    """On rank 0: weights and optimizer state, whole; nothing elsewhere."""
    optimizers = optimizers_of(model)
    with gathered(sharded_variables(model, optimizers).values()):
        if groups().rank != 0:
            return None
        variables = [*model.variables, *(v for o in optimizers for v in o.variables)]
        return [v.numpy() if axis_of(v) is None else whole_of(v) for v in variables]


def train_both(build, compile_options, x, y, **fit):
    """A plain model, and one with sharded layers on all ranks, trained alike."""
    results = []
    for sharded in (False, True):
        keras.utils.set_random_seed(SEED)
        if sharded:
            strategy = kerasmgpu.HorovodStrategy(**M)
        model = build(sharded)
        model.compile(**compile_options())
        if sharded:
            model = strategy.wrap(model)
        fit = {"batch_size": 8, "epochs": 2, "verbose": 0, **fit}
        results.append((model, model.fit(x, y, **fit).history))
    return results


def assert_both_same(results, rtol=1e-4, atol=3e-6):
    (one, one_history), (ranked, history) = results
    mine = wholes(ranked)
    if mine is not None:
        plain = [*one.variables, *(v for o in optimizers_of(one) for v in o.variables)]
        assert_same_values([v.numpy() for v in plain], mine, rtol, atol, "variable")
    for (key, values), got in zip(one_history.items(), history.values(), strict=True):
        np.testing.assert_allclose(got, values, rtol=rtol, atol=atol, err_msg=key)
    # What is held alike is bit-equal on all ranks, parts on those of one position.
    alike = [v.numpy().tobytes() for v in ranked.weights if axis_of(v) is None]
    parts = [v.numpy().tobytes() for v in ranked.weights if axis_of(v) is not None]
    everyone = all_gather_object((groups().position, alike, parts))
    assert all(theirs[1] == alike for theirs in everyone)
    assert all(p == parts for at, _, p in everyone if at == groups().position)


OPTIMIZERS = {
    "momentum": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "adam_global_clipnorm": lambda: K.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.05, epsilon=1e-4
    ),
    "clipnorm_loss_scale": lambda: K.LossScaleOptimizer(
        K.SGD(0.1, clipnorm=0.05, momentum=0.5)
    ),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense(name):
    x, y = classification(29)

    def options():
        return {
            "optimizer": OPTIMIZERS[name](),
            "loss": cross_entropy(),
            "metrics": ["accuracy"],
        }

    assert_both_same(
        train_both(dense_net, options, x, y, validation_data=(x[:11], y[:11]))
    )


@pytest.mark.world_size(4)
def test_dense_in_two_groups():
    x, y = classification(29)
    results = train_both(
        dense_net,
        lambda: {
            "optimizer": K.Adam(0.01, epsilon=1e-4, global_clipnorm=0.1),
            "loss": cross_entropy(),
        },
        x,
        y,
    )
    assert_both_same(results)
    (one, _), (ranked, _) = results
    expected = one.predict(x, verbose=0)
    np.testing.assert_allclose(
        ranked.predict(x, batch_size=7, verbose=0), expected, rtol=1e-4, atol=1e-5
    )


def image_net(sharded):
    layers = keras.layers
    conv = ours.ShardedConv2D if sharded else layers.Conv2D
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            conv(4, 3, activation="relu", kernel_regularizer="l2"),
            conv(6, 2, strides=2, padding="same", use_bias=False),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )


def word_net(sharded):
    """A mask, and a last layer that stays split."""
    layers = keras.layers
    embedding = ours.ShardedEmbedding if sharded else layers.Embedding
    last = {"gather_output": False} if sharded else {}
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            embedding(10, 6, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(8, "tanh"),
            (ours.ShardedDense if sharded else layers.Dense)(4, **last),
        ]
    )


@pytest.mark.world_size(2)
def test_convolutions():
    _, y = classification(21)
    x = np.random.default_rng(2).normal(size=(21, 5, 5, 2)).astype("float32")
    results = train_both(
        image_net,
        lambda: {"optimizer": K.SGD(0.05, momentum=0.9), "loss": cross_entropy()},
        x,
        y,
    )
    assert_both_same(results)


@pytest.mark.world_size(4)
def test_words_and_split_logits():
    _, y = classification(21)
    x = np.random.default_rng(2).integers(0, 10, size=(21, 3))
    kinds = iter([cross_entropy, ours.ShardedSoftmaxCrossEntropy])
    results = train_both(
        word_net,
        lambda: {
            "optimizer": K.Adam(0.01, epsilon=1e-4, clipnorm=0.05),
            "loss": next(kinds)(),
            "metrics": ["accuracy"],
        },
        x,
        y,
        validation_data=(x[:7], y[:7]),
    )
    assert_both_same(results)
    (one, _), (ranked, _) = results
    expected = one.predict(x, verbose=0)
    np.testing.assert_allclose(
        ranked.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="x < y"):
        ranked.predict(x + 10, verbose=0)


@pytest.mark.world_size(2)
def test_each_rank_holds_half():
    x, y = classification(8)
    (one, _), (ranked, _) = train_both(
        dense_net, lambda: {"optimizer": "adam", "loss": cross_entropy()}, x, y
    )
    for mine, plain in zip(
        [*ranked.variables, *ranked.optimizer.variables],
        [*one.variables, *one.optimizer.variables],
        strict=True,
    ):
        size = 1 if axis_of(mine) is None else 2
        assert np.prod(mine.shape) * size == np.prod(plain.shape)
    assert sum(axis_of(v) is not None for v in ranked.optimizer.variables) == 2 * 8


@pytest.mark.world_size(2)
def test_files_cross_over(tmp_path_factory):
    folder = all_gather_object(str(tmp_path_factory.mktemp("files")))[0]
    x, y = classification(16)

    def options():
        return {"optimizer": K.Adam(0.01), "loss": cross_entropy()}

    checkpoint = kerasmgpu.callbacks.RankZeroCheckpoint(
        f"{folder}/during.keras", monitor="loss", save_best_only=True
    )
    _, (ranked, _) = train_both(dense_net, options, x, y)
    ranked.fit(x, y, epochs=1, verbose=0, callbacks=[checkpoint])
    ranked.save(f"{folder}/whole.keras")
    ranked.save_weights(f"{folder}/whole.weights.h5")
    expected, state = ranked.predict(x, verbose=0), wholes(ranked)
    all_gather_object(None)  # rank 0 has written
    for name in ("whole.keras", "during.keras"):
        plain = keras.models.load_model(f"{folder}/{name}")
        assert type(plain.layers[0]) is keras.layers.Dense
        np.testing.assert_allclose(
            plain.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-6
        )
        if state is not None:
            optimizer = [v.numpy() for v in plain.optimizer.variables]
            assert_same_values(optimizer, state[-len(optimizer) :], 0, 0, "optimizer")
    plain = dense_net(False)
    plain.load_weights(f"{folder}/whole.weights.h5")
    # And back: from a plain file into parts.
    plain.layers[0].kernel.assign(plain.layers[0].kernel * 0.5)
    everyone = all_gather_object(plain.get_weights())
    plain.set_weights(everyone[0])
    if groups().rank == 0:
        plain.save_weights(f"{folder}/plain.weights.h5")
    all_gather_object(None)
    ranked.load_weights(f"{folder}/plain.weights.h5")
    np.testing.assert_allclose(
        ranked.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-4, atol=1e-6
    )


@pytest.mark.world_size(2)
def test_bad_input():
    strategy = kerasmgpu.HorovodStrategy(**M)
    with pytest.raises(InvalidArgumentError, match=r"nearest are 4 and 6.*units=5"):
        ours.ShardedDense(5)
    with pytest.raises(InvalidArgumentError, match="element by element"):
        ours.ShardedDense(4, "softmax", gather_output=False)
    with pytest.raises(InvalidArgumentError, match="kernel_constraint"):
        ours.ShardedDense(4, kernel_constraint="max_norm")
    x, y = classification(8)
    model = dense_net(True)
    with pytest.raises(CollectiveError, match="not wrapped"):
        model(x)
    model.compile(K.Lamb(), cross_entropy())
    strategy.wrap(model)
    with pytest.raises(InvalidArgumentError, match="Received: Lamb"):
        model.fit(x, y, verbose=0)
    model.compile("sgd", cross_entropy())
    with pytest.raises(InvalidArgumentError, match="RankZeroCheckpoint"):
        model.fit(x, y, callbacks=[keras.callbacks.ModelCheckpoint("m.keras")])
    split = keras.Sequential(
        [keras.Input((8,)), ours.ShardedDense(4, gather_output=False)]
    )
    split.compile("sgd", cross_entropy())
    with pytest.raises(InvalidArgumentError, match="expected whole outputs"):
        strategy.wrap(split)
    model.compile("sgd", ours.ShardedSoftmaxCrossEntropy())
    with pytest.raises(InvalidArgumentError, match="output that is whole"):
        model.fit(x, y, verbose=0)
    with pytest.raises(InvalidArgumentError, match=r"nearest are 2 and 4.*filters=3"):
        ours.ShardedConv2D(3, 1)
    with pytest.raises(InvalidArgumentError, match="without weights"):
        ours.ShardedEmbedding(4, 2, weights=np.zeros((4, 2)))
