"""What the ranks agree on: stopping, state, random seeds, shapes of calls."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from ranks import (
    assert_ranks_agree,
    assert_same,
    classification,
    cross_entropy,
    dense_net,
    one_and_all,
    strategy,
)

from kerasmgpu.collectives import all_gather_object, topology

pytestmark = pytest.mark.world_size(2)


def build(**options):
    model = dense_net()
    model.compile(keras.optimizers.SGD(0.1), cross_entropy(), **options)
    return model


class StopAt(keras.callbacks.Callback):
    """Asks to stop in a hook, on one rank."""

    def __init__(self, hook, at, rank):
        super().__init__()
        setattr(self, hook, self._hook)
        self.at, self.rank, self.seen = at, rank, -1
        self.on_train_batch_end = self._count(self.on_train_batch_end)

    def _count(self, inner):
        def hook(batch, logs=None):
            self.batches = getattr(self, "batches", 0) + 1
            inner(batch, logs)

        return hook

    def _hook(self, *args, **kwargs):
        self.seen += 1
        if self.seen == self.at and topology().rank == self.rank:
            self.model.stop_training = True
            assert self.model.stop_training


@pytest.mark.parametrize(
    ("hook", "at", "batches", "rank"),
    [
        ("on_train_begin", 0, 1, 1),
        ("on_epoch_begin", 1, 5, 0),
        ("on_train_batch_begin", 2, 3, 1),
        # At the latest one batch after it was asked.
        ("on_train_batch_end", 2, 4, 0),
        ("on_train_batch_end", 2, 4, 1),
        ("on_train_batch_end", 3, 4, 1),  # the last of an epoch
        ("on_epoch_end", 0, 4, 0),
        ("on_epoch_end", 0, 4, 1),
        ("on_test_batch_end", 0, 4, 1),
    ],
)
def test_stop_on_one_rank(hook, at, batches, rank):
    x, y = classification(32)
    model = strategy().wrap(build())
    stop = StopAt(hook, at, rank)
    model.fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        verbose=0,
        callbacks=[stop],
        validation_data=(x[:8], y[:8]),
    )
    assert all_gather_object(stop.batches) == [batches] * 2
    assert_ranks_agree(model)
    # The next fit starts anew.
    assert len(model.fit(x, y, verbose=0, epochs=2).history["loss"]) == 2


def test_stop_evaluating_on_one_rank():
    x, y = classification(64)
    model = strategy().wrap(build())

    class Stop(keras.callbacks.Callback):
        batches = 0

        def on_test_batch_end(self, batch, logs=None):
            self.batches += 1
            if topology().rank == 1 and batch == 1:
                self.model.stop_evaluating = True

    stop = Stop()
    model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[stop])
    assert all_gather_object(stop.batches) == [3, 3]


def test_keras_callbacks_decide_alike():
    """EarlyStopping, ReduceLROnPlateau and schedulers, before and after others."""
    x, y = classification(48)
    callbacks = keras.callbacks

    def train(model):
        return model.fit(
            x,
            y,
            batch_size=8,
            epochs=6,
            verbose=0,
            validation_data=(x[:13], y[:13]),
            callbacks=[
                callbacks.EarlyStopping(
                    patience=1, restore_best_weights=True, min_delta=0.05
                ),
                callbacks.ReduceLROnPlateau(patience=0, min_delta=0.2),
                callbacks.TerminateOnNaN(),
            ],
        )

    assert_same(*one_and_all(build, train))


def test_logs_at_epoch_end_are_global_for_every_callback():
    x, y = classification(29)
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(dict(logs))
    )
    model = strategy().wrap(build(metrics=["accuracy"]))
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[note],
        validation_data=(x[:9], y[:9]),
    )
    assert all_gather_object(seen) == [seen] * 2
    assert [logs["val_loss"] for logs in seen] == history.history["val_loss"]


def test_progress_is_rank_zeros(capfd):
    x, y = classification(16)
    strategy().wrap(build()).fit(x, y, verbose=2)
    out = capfd.readouterr().out
    assert ("1/1 - " in out) == (topology().rank == 0)


def test_weights_before_step_zero():
    """Ranks that start differently all continue from rank 0's state."""
    x, y = classification(32)
    keras.utils.set_random_seed(100 + topology().rank)
    model = build()
    model.optimizer.learning_rate.assign(0.1 * (topology().rank + 1))
    first = all_gather_object(model.get_weights())
    model = strategy().wrap(model)
    model.fit(x, y, batch_size=32, verbose=0, shuffle=False)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.1)
    plain = build()
    plain.set_weights(first[0])
    plain.fit(x, y, batch_size=32, verbose=0, shuffle=False)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_evaluate_uses_rank_zeros_weights():
    x, y = classification(20)
    keras.utils.set_random_seed(topology().rank)
    model = strategy().wrap(build())
    values = all_gather_object(model.evaluate(x, y, verbose=0))
    assert values[0] == values[1]
    assert_ranks_agree(model)


def test_dropout_differs_by_rank_and_repeats():
    x = np.ones((8, 50), "float32")

    def masks():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5)])
        model.compile(loss="mse")
        strategy().wrap(model).fit(x, x, verbose=0)
        return model(x, training=True).numpy()

    first, again = masks(), masks()
    np.testing.assert_array_equal(first, again)
    everyone = all_gather_object(first)
    assert not np.array_equal(everyone[0], everyone[1])


def test_wrap_before_compile_after_load_and_twice(tmp_path_factory):
    x, y = classification(16)
    own = strategy()
    model = dense_net()
    assert own.wrap(model) is model
    model.compile(keras.optimizers.SGD(0.1), cross_entropy())
    assert own.wrap(model) is model
    assert isinstance(model, keras.Sequential)
    model.fit(x, y, verbose=0)
    assert_ranks_agree(model)
    path = str(tmp_path_factory.mktemp("saved") / "model.keras")
    own.local()
    model.save(path)
    with own.rank_zero_first():
        pass
    from kerasmgpu.collectives import broadcast_object

    path = broadcast_object(path)
    loaded = keras.models.load_model(path)
    assert type(loaded) is keras.Sequential
    assert type(loaded.optimizer) is keras.optimizers.SGD
    own.wrap(loaded).fit(x, y, verbose=0)
    assert_ranks_agree(loaded)
    assert type(own.unwrap(loaded)) is keras.Sequential
    assert type(loaded.optimizer) is keras.optimizers.SGD


def test_a_loop_of_ones_own():
    """A wrapped optimizer alone: the plain mean of the ranks' gradients."""
    optimizer = strategy().wrap(keras.optimizers.SGD(1.0))
    variable = keras.Variable([0.0, 0.0])

    @tf.function
    def step(gradient):
        optimizer.apply([gradient], [variable])

    for _ in range(2):
        step(tf.constant([1.0, 3.0]) * (topology().rank + 1))
    np.testing.assert_allclose(variable.numpy(), [-3.0, -9.0])


def test_two_optimizers_in_a_loop_of_ones_own():
    """What they send differs in name, and not by what a rank has made before."""
    strategy()  # joins the job
    for _ in range(topology().rank):
        keras.optimizers.SGD()
    optimizers = [strategy().wrap(keras.optimizers.SGD(1.0)) for _ in range(2)]
    variables = [keras.Variable([0.0, 0.0]) for _ in range(2)]

    @tf.function
    def step(gradient):
        for number, optimizer in enumerate(optimizers):
            with tf.name_scope(optimizer.name):
                gradients = [gradient * 10.0**number]
                optimizer.apply(gradients, [variables[number]])

    for _ in range(20):
        step(tf.constant([1.0, 3.0]) * (topology().rank + 1))
    for number, variable in enumerate(variables):
        np.testing.assert_allclose(variable, np.array([-30, -90]) * 10**number)


@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({"gradient_compression": "fp16"}, 2e-2),
        ({"gradient_compression": "bf16"}, 5e-2),
        ({"gradient_reduction": "adasum"}, None),
    ],
)
def test_compression_and_adasum(options, rtol):
    x, y = classification(29)
    one, _, ranked, _ = one_and_all(
        build, lambda m: m.fit(x, y, batch_size=8, verbose=0), **options
    )
    assert_ranks_agree(ranked)
    if rtol is not None:
        for a, b in zip(one.get_weights(), ranked.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10)


def test_plain_sum_of_gradients():
    x, y = classification(16)
    keras.utils.set_random_seed(1)
    one = dense_net()
    one.compile(keras.optimizers.SGD(0.2), cross_entropy())
    one.fit(x, y, batch_size=16, verbose=0)
    keras.utils.set_random_seed(1)
    ranked = build()
    strategy(gradient_reduction="sum").wrap(ranked)
    ranked.fit(x, y, batch_size=16, verbose=0)  # two means of 8 rows, added up
    for a, b in zip(one.get_weights(), ranked.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_several_strategies_in_one_process():
    x, y = classification(16)
    first = strategy().wrap(build())
    second = strategy(sharding="none", gradient_compression="fp16").wrap(build())
    first.fit(x, y, verbose=0)
    half = slice(0, 8) if topology().rank == 0 else slice(8, 16)
    second.fit(x[half], y[half], verbose=0)
    assert_ranks_agree(first)
    assert_ranks_agree(second)


def test_metrics_are_kept_apart_from_a_second_model():
    """Two models trained in turn do not disturb each other's step functions."""
    x, y = classification(16)
    a, b = strategy().wrap(build()), strategy().wrap(build())
    for _ in range(2):
        a.fit(x, y, verbose=0)
        b.fit(x, y, verbose=0)
    assert_ranks_agree(a)
    assert_ranks_agree(b)
