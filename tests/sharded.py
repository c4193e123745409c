"""Helpers of tests of layers that a group holds in parts, against the plain ones."""

from __future__ import annotations

import keras
import numpy as np
from ranks import SEED, assert_same_values

import kerasmgpu
from kerasmgpu import layers as ours
from kerasmgpu.collectives import all_gather_object, groups
from kerasmgpu.shards import axis_of, gathered, sharded_variables, whole_of
from kerasmgpu.state import optimizers_of


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
        return [whole_of(v) for v in variables]


def train_both(build, compile_options, x, y, m=2, **fit):
    """A plain model, and one with sharded layers on all ranks, trained alike."""
    results = []
    for sharded in (False, True):
        keras.utils.set_random_seed(SEED)
        if sharded:
            strategy = kerasmgpu.HorovodStrategy(model_parallel_size=m)
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
