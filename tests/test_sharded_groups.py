"""Two groups of two ranks with sharded layers: numbers, files, callbacks."""

from __future__ import annotations

import errno
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import SEED, assert_same_values, classification, cross_entropy
from sharded import assert_both_same, train_both, wholes

import kerasmgpu
from kerasmgpu import files
from kerasmgpu import layers as ours
from kerasmgpu.callbacks import BackupAndRestore, RankZeroCheckpoint, SpeedupLogger
from kerasmgpu.collectives import all_gather_object, alone, broadcast_object, topology
from kerasmgpu.errors import RankMismatchError
from kerasmgpu.files import SaveError
from kerasmgpu.state import structure_digest

K = keras.optimizers
M = {"model_parallel_size": 2}


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


def net(sharded, dropout=0.2):
    layers = keras.layers
    dense = ours.ShardedDense if sharded else layers.Dense
    return keras.Sequential(
        [keras.Input((8,)), dense(6, "tanh"), layers.Dropout(dropout), dense(4)]
    )


def net_without_dropout(sharded):  # which differs by the number of groups
    return net(sharded, 0.0)


class Killed(Exception):
    """Stands for a kill."""


class KillAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.steps_left = step

    def on_train_batch_begin(self, batch, logs=None):
        self.steps_left -= 1
        if self.steps_left < 0:
            raise Killed


X, Y = classification(40)


def fit(build, *callbacks, sharded=True, optimizer=None, **options):
    strategy = kerasmgpu.HorovodStrategy(**M)  # layers know the groups from it
    keras.utils.set_random_seed(SEED)
    model = build(sharded)
    optimizer = optimizer or K.AdamW(0.01, weight_decay=0.1, epsilon=1e-4)
    model.compile(optimizer, cross_entropy(), metrics=["accuracy"])
    model = strategy.wrap(model)
    options = {"batch_size": 8, "epochs": 3, "verbose": 0, **options}
    return model, model.fit(X, Y, callbacks=list(callbacks), **options)


def shared(tmp_path):
    kerasmgpu.HorovodStrategy(**M)  # joins the job
    return broadcast_object(str(tmp_path))


@pytest.mark.world_size(4)
def test_a_run_that_was_ended_goes_on(tmp_path):
    """In the middle of an epoch, with what EarlyStopping keeps and slots in parts."""
    folder = f"{shared(tmp_path)}/backup"

    def callbacks():
        return [
            keras.callbacks.EarlyStopping(
                "loss", patience=1, min_delta=10, restore_best_weights=True
            ),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10),
        ]

    whole, history = fit(net, *callbacks())
    assert history.epoch == [0, 1]  # and weights of the first are back
    for step in (3, 5):  # within the first epoch, within the second
        with pytest.raises(Killed):
            fit(net, KillAt(step), BackupAndRestore(folder, save_freq=1), *callbacks())
    model, resumed = fit(net, BackupAndRestore(folder, save_freq=1), *callbacks())
    assert resumed.epoch == history.epoch
    for key, values in history.history.items():
        np.testing.assert_allclose(resumed.history[key], values, rtol=1e-5)
    expected, got = wholes(whole), wholes(model)
    if expected is not None:
        assert_same_values(expected, got, 1e-5, 1e-7, "variable")
    # Every rank has its own part back.
    for a, b in zip(whole.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-7)
    assert not os.path.exists(folder)


@pytest.mark.world_size(4)
def test_a_backup_goes_on_with_another_size_of_groups(tmp_path):
    """Rank 0 by itself stands for a job of one."""
    folder = f"{shared(tmp_path)}/backup"
    build = net_without_dropout
    whole, history = fit(build)
    with pytest.raises(Killed):
        fit(build, KillAt(7), BackupAndRestore(folder, save_freq=1))
    expected = wholes(whole)
    if topology().is_rank_zero:
        with alone():
            backup = BackupAndRestore(folder, save_freq=1)
            one, resumed = fit(build, backup, sharded=False)
        for key, values in history.history.items():
            np.testing.assert_allclose(resumed.history[key], values, rtol=1e-4)
        got = [v.numpy() for v in (*one.variables, *one.optimizer.variables)]
        assert_same_values(expected, got, 1e-4, 3e-6, "variable")


def same_error(caught):
    return len(set(all_gather_object(str(caught.value)))) == 1


class SavesOnce(keras.callbacks.ModelCheckpoint):
    """Only rank 0, which runs it, knows when it saves."""

    def _should_save_model(self, epoch, batch, logs, filepath):
        return topology().is_rank_zero and (epoch, batch) == (1, 2)


@pytest.mark.world_size(4)
def test_checkpoints_of_every_kind(tmp_path, monkeypatch):
    """Keras's own, in a folder that it makes, and one in the background."""
    folder = shared(tmp_path)
    Keras = keras.callbacks.ModelCheckpoint
    model, _ = fit(
        net,
        SavesOnce(f"{folder}/made/{{batch}}.keras", save_freq=2),
        Keras(f"{folder}/keras.weights.h5", save_weights_only=True),
        RankZeroCheckpoint(f"{folder}/background.keras", background=True),
    )
    expected, state = model.predict(X, verbose=0), wholes(model)
    plain = keras.models.load_model(f"{folder}/background.keras")
    assert type(plain.layers[0]) is keras.layers.Dense
    if state is not None:
        got = [v.numpy() for v in plain.optimizer.variables]
        assert_same_values(got, state[-len(got) :], 0, 0, "optimizer")
    np.testing.assert_allclose(plain.predict(X, verbose=0), expected, 1e-4, 1e-6)
    plain = net(False)
    plain.load_weights(f"{folder}/keras.weights.h5")
    np.testing.assert_allclose(plain.predict(X, verbose=0), expected, 1e-4, 1e-6)
    made = keras.models.load_model(f"{folder}/made/3.keras")
    assert [w.shape for w in made.get_weights()] == [(8, 6), (6,), (6, 4), (4,)]
    assert os.listdir(f"{folder}/made") == ["3.keras"]

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    for callback in (
        Keras(f"{folder}/keras.keras"),
        RankZeroCheckpoint(f"{folder}/background.keras", background=True),
        BackupAndRestore(f"{folder}/backup"),
    ):
        with pytest.raises(SaveError, match="No space left") as caught:
            model.fit(X, Y, verbose=0, callbacks=[callback], epochs=2)
        assert same_error(caught)
    with pytest.raises(SaveError, match="No space left") as caught:
        model.save(f"{folder}/whole.keras")
    assert same_error(caught)


@pytest.mark.world_size(4)
def test_speed_is_said_as_far_as_it_is_measured(capfd):
    logger = SpeedupLogger()
    model, _ = fit(net, logger)
    said = capfd.readouterr().out
    assert ("4 ranks (2 groups of 2)" in said) == topology().is_rank_zero
    assert ("Give baseline=" in said) == topology().is_rank_zero
    row = logger.rows[-1]
    assert row["speedup"] is row["efficiency"] is None
    # A step's rows, once, not once for each rank of a group.
    assert row["samples_per_second"] < 1.5 * 8 / row["step_seconds_median"]
    one = net(False)
    record = {"size": 1, "model": structure_digest(one), "samples_per_second": 100.0}
    logger = SpeedupLogger(baseline=record)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[logger])
    row = logger.rows[-1]
    assert row["speedup"] == pytest.approx(row["samples_per_second"] / 100)
    assert row["efficiency"] == pytest.approx(row["speedup"] / 4)
    assert all_gather_object(logger.rows)[0] == logger.rows


@pytest.mark.world_size(4)
def test_a_save_that_not_all_ranks_make():
    model, _ = fit(net, epochs=1)

    def save_on_rank_zero():
        if topology().is_rank_zero:
            model.save("never.keras")
        model.evaluate(X, Y, verbose=0)

    with pytest.raises(RankMismatchError, match="Rank 0 calls save"):
        save_on_rank_zero()
