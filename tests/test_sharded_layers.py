"""Layers that a group holds in parts = one process with the plain layers."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import psutil
import pytest
from ranks import assert_same_values, classification, cross_entropy
from sharded import assert_both_same, dense_net, train_both, wholes

import kerasmgpu
from kerasmgpu import layers as ours
from kerasmgpu.collectives import all_gather_object, groups
from kerasmgpu.errors import CollectiveError, InvalidArgumentError
from kerasmgpu.shards import axis_of

K = keras.optimizers
M = {"model_parallel_size": 2}


@pytest.mark.world_size(2)
def test_dense():
    """Norms over parts, weight decay and skipped steps agree over ranks."""
    x, y = classification(29)

    def options():
        optimizer = K.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.05, epsilon=1e-4)
        return {
            "optimizer": K.LossScaleOptimizer(optimizer),
            "loss": cross_entropy(),
            "metrics": ["accuracy"],
        }

    assert_both_same(
        train_both(dense_net, options, x, y, validation_data=(x[:11], y[:11]))
    )


@pytest.mark.world_size(2)
def test_a_rank_that_has_built_more_models():
    """Names of layers then differ between the ranks of a group."""
    x, y = classification(16)
    kerasmgpu.HorovodStrategy(**M)  # joins the job
    for _ in range(groups().rank):
        dense_net(True)

    def options():
        return {"optimizer": K.SGD(0.1), "loss": cross_entropy()}

    results = train_both(dense_net, options, x, y)
    assert_both_same(results)
    names = all_gather_object([layer.name for layer in results[1][0].layers])
    assert names[0] != names[1]


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
def test_in_half_precision():
    """A last layer that stays split, under a scaled loss."""
    x, y = classification(24)

    def build(sharded):
        layers = keras.layers
        dense = ours.ShardedDense if sharded else layers.Dense
        last = {"gather_output": False} if sharded else {}
        return keras.Sequential(
            [keras.Input((8,)), dense(8, "relu"), dense(4, dtype=half, **last)]
        )

    half = keras.DTypePolicy("mixed_float16")
    kinds = iter([cross_entropy, ours.ShardedSoftmaxCrossEntropy])
    keras.config.set_dtype_policy(half)
    try:
        results = train_both(
            build,
            lambda: {
                "optimizer": K.LossScaleOptimizer(K.SGD(0.05, momentum=0.9)),
                "loss": next(kinds)(),
            },
            x,
            y,
        )
    finally:
        keras.config.set_dtype_policy("float32")
    # Sums of half precision are added in another order.
    assert_both_same(results, rtol=5e-3, atol=1e-3)


@pytest.mark.world_size(2)
def test_resident_memory_of_large_layers_falls():
    """Weights, two slots and gradients, in pages that the process holds."""

    def grown(sharded, units):
        dense = ours.ShardedDense if sharded else keras.layers.Dense
        before = psutil.Process().memory_info().rss
        model = keras.Sequential(
            [keras.Input((units,)), *(dense(units, use_bias=False) for _ in range(2))]
        )
        model.compile(K.Adam(), "mse")
        if sharded:
            model = strategy.wrap(model)
        x = np.zeros((2, units), "float32")
        model.fit(x, x, epochs=2, verbose=0)
        kept.append(model)
        return (psutil.Process().memory_info().rss - before) / 2**20

    kept = []
    strategy = kerasmgpu.HorovodStrategy(**M)
    for sharded in (True, False):  # what the first model of a kind takes
        grown(sharded, 2)
    parts, plain = grown(True, 4096), grown(False, 4096)
    print(
        f"rank {strategy.rank}: 2 Dense(4096), 128 MiB of weights, with Adam take "
        f"{plain:.0f} MiB, ShardedDense at m = 2 {parts:.0f} MiB ({parts / plain:.0%})"
    )
    assert plain > 3 * 128
    assert parts < (1 / 2 + 0.1) * plain


@pytest.mark.world_size(2)
def test_xla_is_turned_off_aloud():
    x, y = classification(8)
    model = dense_net(True)
    model.compile("sgd", cross_entropy(), jit_compile=True)
    kerasmgpu.HorovodStrategy(**M).wrap(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, verbose=0)
        model.evaluate(x, y, verbose=0)
    said = [w for w in caught if "sharded layers runs without XLA" in str(w.message)]
    assert len(said) == (groups().rank == 0)


@pytest.mark.world_size(2)
def test_files_cross_over(tmp_path_factory):
    kerasmgpu.HorovodStrategy(**M)  # joins the job
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
    with pytest.raises(InvalidArgumentError, match="no LoRA"):
        model.layers[0].enable_lora(2)
    model.compile(K.Lamb(), cross_entropy())
    strategy.wrap(model)
    with pytest.raises(InvalidArgumentError, match="Received: Lamb"):
        model.fit(x, y, verbose=0)
    model.compile("sgd", cross_entropy())
    with pytest.raises(InvalidArgumentError, match=r"kerasmgpu.*BackupAndRestore"):
        model.fit(x, y, callbacks=[keras.callbacks.BackupAndRestore("b.weights.h5")])
    with pytest.raises(InvalidArgumentError, match=r"ends in \.keras"):
        model.save("m.h5")
    split = keras.Sequential(
        [keras.Input((8,)), ours.ShardedDense(4, gather_output=False)]
    )
    split.compile("sgd", cross_entropy())
    with pytest.raises(InvalidArgumentError, match="expected whole outputs"):
        strategy.wrap(split)
    for after in (keras.layers.Dense(2), keras.layers.Softmax()):
        given = [keras.Input((8,)), *split.layers]
        mixed = keras.Sequential([*given, keras.layers.ReLU(), after])
        with pytest.raises(InvalidArgumentError, match="a split input of"):
            strategy.wrap(mixed)
    pair = ours.ShardedDense(4, shard="input", input_is_split=True)
    with pytest.raises(InvalidArgumentError, match="a whole input of"):
        strategy.wrap(keras.Sequential([keras.Input((8,)), pair]))
    model.compile("sgd", ours.ShardedSoftmaxCrossEntropy())
    with pytest.raises(InvalidArgumentError, match="output that is whole"):
        model.fit(x, y, verbose=0)
    with pytest.raises(InvalidArgumentError, match=r"nearest are 2 and 4.*filters=3"):
        ours.ShardedConv2D(3, 1)
    with pytest.raises(InvalidArgumentError, match="without weights"):
        ours.ShardedEmbedding(4, 2, weights=np.zeros((4, 2)))
