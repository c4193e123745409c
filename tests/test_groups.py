"""Groups of ranks (`model_parallel_size`) with plain layers = one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from ranks import (
    assert_same,
    check,
    classification,
    cross_entropy,
    dense_net,
    one_and_all,
)

import kerasmgpu
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.groups import Groups

M = {"model_parallel_size": 2}


def test_who_belongs_to_which():
    place = Groups(2, 2, 4)
    assert (place.replica, place.replicas, place.position) == (1, 2, 0)
    assert place.all_groups() == [[0, 1], [2, 3]]
    assert place.all_positions() == [[0, 2], [1, 3]]


def test_ranks_are_not_divisible():
    with pytest.raises(InvalidArgumentError, match=r"Rank 0 of 4.*one of 1, 2, 4"):
        Groups(3, 0, 4)
    with pytest.raises(InvalidArgumentError, match="model_parallel_size=0"):
        Groups(0)


def embedding_net():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(9, 4),
            layers.Flatten(),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(4),
        ]
    )


def _compiled(build, optimizer):
    def make():
        model = build()
        model.compile(
            optimizer(), cross_entropy(), metrics=["accuracy"], weighted_metrics=[]
        )
        return model

    return make


@pytest.mark.world_size(2)
def test_one_group_of_two():
    x, y = classification(53)
    adam = _compiled(dense_net, lambda: keras.optimizers.Adam(0.01, epsilon=1e-4))
    weights = np.linspace(0.1, 2, 53).astype("float32")
    check(adam, x, y, batch_size=8, sample_weight=weights, options=M)


@pytest.mark.world_size(2)
def test_refused_with_groups():
    for bad in ({"sharding": "none"}, {"gradient_compression": "fp16"}):
        with pytest.raises(InvalidArgumentError, match="groups of ranks"):
            kerasmgpu.HorovodStrategy(**M, **bad)
    with pytest.raises(InvalidArgumentError, match="one model_parallel_size"):
        kerasmgpu.HorovodStrategy()
    with (
        pytest.raises(InvalidArgumentError, match=r"strategy\.local"),
        kerasmgpu.HorovodStrategy(**M).local(),
    ):
        pass


@pytest.mark.world_size(2)
def test_accumulation_is_refused_with_groups():
    x, y = classification(8)
    model = dense_net()
    model.compile(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), cross_entropy()
    )
    kerasmgpu.HorovodStrategy(**M).wrap(model)
    with pytest.raises(InvalidArgumentError, match="gradient_accumulation_steps"):
        model.fit(x, y, verbose=0)


@pytest.mark.world_size(4)
def test_two_groups_of_two():
    """Sparse gradients that are clipped, synchronized moments, uneven last batch."""
    _, y = classification(53)
    x = np.random.default_rng(3).integers(0, 9, size=(53, 3))
    build = _compiled(
        embedding_net, lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)
    )

    def train(model):
        history = model.fit(
            x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x[:11], y[:11])
        )
        train.rows.append(model.predict(x, batch_size=7, verbose=0))
        train.scores.append(model.evaluate(x, y, batch_size=9, verbose=0))
        return history

    train.rows, train.scores = [], []
    assert_same(*one_and_all(build, train, **M))
    np.testing.assert_allclose(*train.rows, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(*train.scores, rtol=1e-4)
