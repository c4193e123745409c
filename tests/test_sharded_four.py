"""One group of four ranks: a layer of each kind = one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from ranks import classification, cross_entropy
from sharded import assert_both_same, train_both

from kerasmgpu import layers as ours


def net(sharded):
    layers = keras.layers
    dense = ours.ShardedDense if sharded else layers.Dense
    stays, takes, last = {}, {}, {}
    if sharded:
        stays = last = {"gather_output": False}
        takes = {"shard": "input", "input_is_split": True}
    return keras.Sequential(
        [
            keras.Input((3, 3), dtype="int32"),
            (ours.ShardedEmbedding if sharded else layers.Embedding)(12, 4),
            (ours.ShardedConv2D if sharded else layers.Conv2D)(4, 2, activation="relu"),
            layers.Flatten(),
            dense(8, **stays),
            layers.ReLU(),
            dense(6, "tanh", **takes),
            dense(4, **last),
        ]
    )


@pytest.mark.world_size(4)
def test_every_kind_of_layer():
    _, y = classification(21)
    x = np.random.default_rng(2).integers(0, 12, size=(21, 3, 3))
    kinds = iter([cross_entropy, ours.ShardedSoftmaxCrossEntropy])
    results = train_both(
        net,
        lambda: {
            "optimizer": keras.optimizers.Adam(0.01, epsilon=1e-4, global_clipnorm=0.1),
            "loss": next(kinds)(),
            "metrics": ["accuracy"],
        },
        x,
        y,
        m=4,
    )
    assert_both_same(results)
    (one, _), (ranked, _) = results
    expected = one.predict(x, verbose=0)
    np.testing.assert_allclose(
        ranked.predict(x, batch_size=5, verbose=0), expected, rtol=1e-4, atol=1e-5
    )
