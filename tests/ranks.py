"""Helpers of tests on ranks: N ranks against one process.

One process is played by an unwrapped model in the same process: it knows nothing of the
other ranks, and gets the same seed, model and data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import kerasmgpu
from kerasmgpu import state
from kerasmgpu.collectives import all_gather_object, topology
from kerasmgpu.optimizer import accumulators

SEED = 11


def strategy(**options: Any) -> kerasmgpu.HorovodStrategy:
    return kerasmgpu.HorovodStrategy(**options)


def classification(rows: int, features: int = 8, classes: int = 4) -> Any:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(rows, features)).astype("float32")
    y = generator.integers(0, classes, size=rows)
    return x, y


def dense_net(features: int = 8, classes: int = 4) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def cross_entropy(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def one_and_all(
    build: Callable[[], keras.Model],
    train: Callable[[keras.Model], Any],
    **options: Any,
) -> tuple[keras.Model, Any, keras.Model, Any]:
    """Trains a plain and a wrapped model alike.

    Returns:
        The plain model, what `train` gave for it, the wrapped model, the same for it.
    """
    keras.utils.set_random_seed(SEED)
    one = build()
    one_result = train(one)
    keras.utils.set_random_seed(SEED)
    ranked = strategy(**options).wrap(build())
    return one, one_result, ranked, train(ranked)


def assert_same(
    one: keras.Model,
    one_result: Any,
    ranked: keras.Model,
    ranked_result: Any,
    rtol: float = 1e-4,
    atol: float = 2e-6,
    optimizer: bool = True,
) -> None:
    """Same weights, optimizer state and History, and bit-equal over the ranks."""
    assert_same_values(one.get_weights(), ranked.get_weights(), rtol, atol, "weights")
    if optimizer and one.optimizer is not None:
        # What is being accumulated is all on rank 0 at the end of an epoch.
        apart = [] if topology().is_rank_zero else accumulators(ranked.optimizer)
        kept = [all(v is not a for a in apart) for v in ranked.optimizer.variables]
        ones, ranks = one.optimizer.variables, ranked.optimizer.variables
        assert_same_values(
            [v.numpy() for v, keep in zip(ones, kept, strict=True) if keep],
            [v.numpy() for v, keep in zip(ranks, kept, strict=True) if keep],
            rtol,
            atol,
            "optimizer",
        )
    if isinstance(one_result, keras.callbacks.History):
        one_result, ranked_result = one_result.history, ranked_result.history
    if isinstance(one_result, dict):
        # Keras numbers the metrics of the second model: auc, auc_1.
        names = [
            [re.sub(r"_\d+$", "", k) for k in r] for r in (one_result, ranked_result)
        ]
        assert names[0] == names[1]
        for (key, value), got in zip(
            one_result.items(), ranked_result.values(), strict=True
        ):
            np.testing.assert_allclose(
                np.asarray(got, "float64"),
                np.asarray(value, "float64"),
                rtol=rtol,
                atol=atol,
                err_msg=key,
            )
    assert_ranks_agree(ranked)


def assert_same_values(
    ones: list[Any], ranks: list[Any], rtol: float, atol: float, what: str
) -> None:
    assert len(ones) == len(ranks)
    for position, (a, b) in enumerate(zip(ones, ranks, strict=True)):
        if np.asarray(a).dtype.kind == "u":  # the state of a seed generator
            continue
        np.testing.assert_allclose(
            np.asarray(b, "float64"),
            np.asarray(a, "float64"),
            rtol=rtol,
            atol=atol,
            err_msg=f"{what} {position}",
        )


def assert_ranks_agree(model: keras.Model) -> None:
    """Bit-equal weights, optimizer state and statistics on all ranks."""
    values = [v.numpy() for v in model.trainable_variables]
    values += [
        v.numpy() for v in model.non_trainable_variables if not state.is_seed_state(v)
    ]
    for own in state.optimizers_of(model):
        apart = {id(v) for v in accumulators(own)}
        values += [v.numpy() for v in own.variables if id(v) not in apart]
    everyone = all_gather_object([value.tobytes() for value in values])
    assert all(theirs == everyone[0] for theirs in everyone)


def check(
    build: Callable[[], keras.Model],
    x: Any,
    y: Any = None,
    rtol: float = 1e-4,
    atol: float = 2e-6,
    options: Any = None,
    **fit: Any,
) -> keras.Model:
    """`fit` on N ranks against one process. Returns the wrapped model.

    `options` are the strategy's, the rest is for `fit`.
    """
    fit = {"epochs": 2, "verbose": 0, **fit}
    # A dataset or generator is made anew for each of the two.
    make = x if callable(x) and not isinstance(x, keras.utils.PyDataset) else lambda: x

    def train(model: keras.Model) -> Any:
        return model.fit(make(), y, **fit)

    result = one_and_all(build, train, **(options or {}))
    assert_same(*result, rtol=rtol, atol=atol)
    return result[2]


def traced_nodes(model: keras.Model) -> tuple[list[Any], dict[str, Any]]:
    """All nodes of a wrapped model's traced step, and its functions by name."""
    graph = model.train_function._traced.graph.as_graph_def()
    named = {f.signature.name: f for f in graph.library.function}
    inner = [node for f in named.values() for node in f.node_def]
    return [*graph.node, *inner], named
