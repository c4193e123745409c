"""`sharding="balanced"`: rows by speed, and the numbers of one process."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import (
    SEED,
    assert_same,
    classification,
    cross_entropy,
    dense_net,
    one_and_all,
    strategy,
)

import kerasmgpu
from kerasmgpu.balance import Balancer, rows_of_ranks, share_bounds
from kerasmgpu.collectives import all_gather_object, topology


@pytest.mark.parametrize(
    ("rows", "ends", "shares"),
    [
        (16, [0, 0.75, 1], [12, 4]),
        (16, [0, 1e-6, 1], [1, 15]),  # never fewer than one row
        (16, [0, 1 - 1e-6, 1], [15, 1]),
        (9, [0, 0.5, 0.5001, 0.5002, 1], [4, 1, 1, 3]),
        (3, [0, 0.1, 0.2, 1], [1, 1, 1]),
        (2, [0, 0.8, 0.9, 1], [0, 1, 1]),  # fewer rows than ranks
        (7, [0, 1], [7]),
    ],
)
def test_shares_follow_speeds(rows, ends, shares):
    assert rows_of_ranks(rows, tf.constant(ends, tf.float64)) == shares


def test_shares_cover_every_batch():
    generator = np.random.default_rng(0)
    for _ in range(50):
        cuts = np.sort(generator.uniform(size=4) ** 4)
        rows = int(generator.integers(0, 40))
        bounds = share_bounds(rows, tf.constant([0, *cuts, 1], tf.float64)).numpy()
        least = 1 if rows >= 5 else 0
        assert (bounds[0], bounds[-1]) == (0, rows)
        assert (np.diff(bounds) >= least).all()


def given_speeds(monkeypatch, by_epoch):
    """Ranks report these speeds instead of measured ones."""
    epochs = iter(by_epoch)
    monkeypatch.setattr(Balancer, "speed", lambda self: next(epochs)[topology().rank])


class Rows(keras.callbacks.Callback):
    """The rows this rank had in the first step of each epoch."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            step = self.model._kerasmgpu.last_step
            self.rows.append(round(step.share * step.total_rows))


def net():
    model = dense_net()
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
        cross_entropy(),
        metrics=["accuracy"],
    )
    return model


def given_speeds_are_exact(monkeypatch, capsys, by_epoch, expected, make=None, **fit):
    x, y = classification(37)
    validation = (x[:9], y[:9])
    rows = Rows()
    given_speeds(monkeypatch, by_epoch)
    options = {"batch_size": 12, "epochs": 3, "verbose": 0, **fit}

    def train(model):
        callbacks = [rows] if "_kerasmgpu" in model.__dict__ else []
        data = (x, y) if make is None else (make(x, y), None)
        return model.fit(
            *data, validation_data=validation, callbacks=callbacks, **options
        )

    result = one_and_all(net, train, sharding="balanced")
    assert_same(*result)
    assert all_gather_object(rows.rows) == expected
    one, ranked = result[0], result[2]
    np.testing.assert_allclose(
        ranked.evaluate(x, y, verbose=0), one.evaluate(x, y, verbose=0), rtol=1e-4
    )
    assert ranked.predict(x, verbose=0).shape == (37, 4)
    return capsys.readouterr().out


@pytest.mark.world_size(2)
def test_two_ranks(monkeypatch, capsys):
    speeds = [(None, None), (3.0, 1.0), (1.0, 1e9)]
    said = given_speeds_are_exact(monkeypatch, capsys, speeds, [[6, 9, 1], [6, 3, 11]])
    lines = [line for line in said.splitlines() if "ranks take" in line]
    assert len(lines) == (2 if topology().is_rank_zero else 0)
    if lines:
        assert "from epoch 2 on, ranks take 9, 3 rows of 12; measured 3, 1" in lines[0]


@pytest.mark.world_size(2)
def test_fetched_ahead_with_steps_per_epoch(monkeypatch, capsys):
    """Batches are fetched ahead over the end of an epoch: all ranks cut them alike."""
    given_speeds_are_exact(
        monkeypatch,
        capsys,
        [(1.0, 1.0), (3.0, 1.0), (1.0, 5.0)],
        [[6, 9, 2], [6, 3, 10]],
        make=lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(12).repeat(),
        batch_size=None,
        steps_per_epoch=2,
    )


@pytest.mark.world_size(3)
def test_three_ranks(monkeypatch, capsys):
    # The last batch has one row, fewer than ranks.
    given_speeds_are_exact(
        monkeypatch,
        capsys,
        [(1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0)],
        [[4, 2, 2], [4, 4, 4], [4, 6, 6]],
    )


@pytest.mark.world_size(2)
def test_in_pieces_and_one_batch(monkeypatch):
    x, y = classification(25)
    given_speeds(monkeypatch, [(4.0, 1.0)] * 2)
    result = one_and_all(
        net,
        lambda model: model.fit(x, y, batch_size=10, epochs=2, verbose=0),
        sharding="balanced",
        micro_batch_size="auto",
    )
    assert_same(*result)
    one, ranked = result[0], result[2]
    np.testing.assert_allclose(
        ranked.train_on_batch(x, y), one.train_on_batch(x, y), rtol=1e-4
    )


class Interrupted(Exception):
    pass


class InTheMiddle(keras.callbacks.Callback):
    """Raises on every rank in the third epoch."""

    runs_on_all_ranks = True

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (2, 1):
            raise Interrupted


@pytest.mark.world_size(2)
def test_a_backup_goes_on(monkeypatch, tmp_path_factory):
    """With shares that are measured anew, and the speed logged."""
    x, y = classification(37)
    folder = strategy().broadcast_object(str(tmp_path_factory.mktemp("balanced")))
    given_speeds(monkeypatch, [(3.0, 1.0)] * 9)

    def train(model):
        fit = {"batch_size": 12, "epochs": 4, "verbose": 0}
        if "_kerasmgpu" not in model.__dict__:
            return model.fit(x, y, **fit)

        def callbacks():
            logger = kerasmgpu.callbacks.SpeedupLogger(f"{folder}/speed")
            backup = kerasmgpu.callbacks.BackupAndRestore(folder, save_freq=2)
            return [backup, logger]

        with pytest.raises(Interrupted):
            model.fit(x, y, callbacks=[*callbacks(), InTheMiddle()], **fit)
        keras.utils.set_random_seed(SEED)
        train.resumed = strategy(sharding="balanced").wrap(net())
        return train.resumed.fit(x, y, callbacks=callbacks(), **fit)

    one, one_result, _, result = one_and_all(net, train, sharding="balanced")
    assert_same(one, one_result, train.resumed, result)


class Slow(keras.layers.Layer):
    """Sleeps for each of its rows, three times as long on rank 1."""

    def call(self, x, training=False):
        def sleep(values):
            time.sleep(0.002 * (1 + 2 * topology().rank) * len(values))
            return values

        if not training:
            return x
        return tf.ensure_shape(tf.py_function(sleep, [x], x.dtype), x.shape)


@pytest.mark.world_size(2)
def test_a_slow_rank_is_measured_and_gets_fewer_rows():
    x, y = classification(96)
    model = keras.Sequential([keras.Input((8,)), Slow(), *dense_net().layers])
    model.compile("sgd", cross_entropy())
    rows = Rows()
    strategy(sharding="balanced").wrap(model)
    model.fit(x, y, batch_size=24, epochs=3, verbose=0, callbacks=[rows])
    fast, slow = all_gather_object(rows.rows)
    assert (fast[0], slow[0]) == (12, 12)
    assert fast[-1] + slow[-1] == 24
    assert slow[-1] <= 9  # 6 where the sleep is all that takes time
