"""Every exported callback, and Keras's own, on real ranks."""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from ranks import (
    SEED,
    assert_ranks_agree,
    assert_same,
    classification,
    cross_entropy,
    dense_net,
    one_and_all,
    strategy,
)

import kerasmgpu.callbacks
from kerasmgpu.callback_list import runs_here
from kerasmgpu.callbacks import ConsistencyCheck, RankZero, TerminateOnNaN
from kerasmgpu.collectives import all_gather_object, broadcast_object, topology
from kerasmgpu.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    RankMismatchError,
)

X, Y = classification(48)

MAKE: dict[str, Callable[[str], Any]] = {
    "BackupAndRestore": lambda folder: kerasmgpu.callbacks.BackupAndRestore(
        os.path.join(folder, "backup")
    ),
    "ConsistencyCheck": lambda folder: ConsistencyCheck(every=2),
    "LearningRateScaling": lambda folder: kerasmgpu.callbacks.LearningRateScaling(
        8, warmup_epochs=1
    ),
    "RankZero": lambda folder: RankZero(keras.callbacks.LambdaCallback()),
    "RankZeroCheckpoint": lambda folder: kerasmgpu.callbacks.RankZeroCheckpoint(
        os.path.join(folder, "model.keras"), save_best_only=True
    ),
    "SpeedupLogger": lambda folder: kerasmgpu.callbacks.SpeedupLogger(
        os.path.join(folder, "logs"), calibrate_steps=2, verbose=0
    ),
    "TerminateOnNaN": lambda folder: TerminateOnNaN(),
}


def net(optimizer: Any = "sgd", **options: Any) -> keras.Model:
    model = dense_net()
    options = {"loss": cross_entropy(), "metrics": ["accuracy"], **options}
    model.compile(optimizer=optimizer, **options)
    return model


def wrapped(*args: Any, **kwargs: Any) -> keras.Model:
    keras.utils.set_random_seed(SEED)
    return strategy().wrap(net(*args, **kwargs))


def shared(tmp_path: Any) -> str:
    strategy()  # joins the job
    return str(broadcast_object(str(tmp_path)))


def on_sizes(*sizes: int) -> Any:
    marks = [pytest.param(n, marks=pytest.mark.world_size(n)) for n in sizes]
    return pytest.mark.parametrize("size", marks)


# The contract -------------------------------------------------------------------------


def test_contract_covers_every_exported_callback() -> None:
    assert sorted(MAKE) == sorted(kerasmgpu.callbacks.__all__)
    for name in kerasmgpu.callbacks.__all__:
        documentation = getattr(kerasmgpu.callbacks, name).__doc__
        assert "Example:" in documentation
        assert "Args:" in documentation
    with pytest.raises(AttributeError, match="its callbacks are BackupAndRestore"):
        kerasmgpu.callbacks.Unknown  # noqa: B018


@on_sizes(1, 2)
@pytest.mark.parametrize("name", sorted(MAKE))
def test_contract_of_each_callback(name: str, size: int, tmp_path: Any) -> None:
    model = wrapped()
    callback = MAKE[name](shared(tmp_path))
    assert isinstance(callback, keras.callbacks.Callback)
    for first in (0, 2):  # the same object serves a second fit
        history = model.fit(
            X,
            Y,
            batch_size=16,
            initial_epoch=first,
            epochs=first + 2,
            validation_data=(X, Y) if name == "RankZeroCheckpoint" else None,
            callbacks=[callback],
            verbose=0,
        )
        assert history.epoch == [first, first + 1]
        assert_ranks_agree(model)
    assert len({str(h) for h in all_gather_object(history.history)}) == 1
    assert not [key for key in vars(model) if "train_function" in key and "fast" in key]


# RankZero -----------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_rank_zero_runs_there_alone_and_may_stop_all(tmp_path: Any) -> None:
    seen: list[int] = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            if batch == 1:
                self.model.stop_training = True

    model = wrapped()
    model.fit(X, Y, batch_size=8, epochs=3, callbacks=[RankZero(Stop())], verbose=0)
    counts = all_gather_object(len(seen))
    assert counts[0] in (2, 3)  # at the latest one batch after it was asked
    assert counts[1] == 0
    assert_ranks_agree(model)


def test_rank_zero_takes_callbacks_only() -> None:
    with pytest.raises(InvalidTypeError, match="Pass an instance, not the class"):
        RankZero(keras.callbacks.History)


# TerminateOnNaN -----------------------------------------------------------------------


class FakeNaN(keras.callbacks.Callback):
    """One rank alone sees a loss that is no number."""

    def __init__(self, rank: int, batch: int) -> None:
        super().__init__()
        self.rank, self.batch = rank, batch
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if topology().rank == self.rank and batch == self.batch and logs:
            logs["loss"] = math.nan


@on_sizes(1, 3)
def test_nan_on_one_rank_stops_all_after_the_same_batch(size: int) -> None:
    for at in (1, 5):  # 5: the last batch of the epoch
        model = wrapped()
        fake = FakeNaN(size - 1, at)
        model.fit(
            X, Y, batch_size=8, epochs=2, callbacks=[fake, TerminateOnNaN()], verbose=0
        )
        batches = all_gather_object(fake.batches)
        assert len(set(batches)) == 1
        assert batches[0] in (at + 1, at + 2)
        assert_ranks_agree(model)


@on_sizes(1, 2)
def test_nan_may_be_an_error_on_every_rank(size: int) -> None:
    model = wrapped()
    callbacks = [FakeNaN(size - 1, 1), TerminateOnNaN(raise_error=True)]
    with pytest.raises(RuntimeError, match="epoch 1, batch 1: the loss is nan"):
        model.fit(X, Y, batch_size=8, callbacks=callbacks, verbose=0)


@pytest.mark.world_size(2)
def test_a_nan_in_one_ranks_rows_stops_all(capfd: Any) -> None:
    x = X.copy()
    x[15] = np.nan  # rows 8 to 15 of the first batch are rank 1's
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", cross_entropy())
    history = (
        strategy()
        .wrap(model)
        .fit(x, Y, batch_size=16, epochs=2, shuffle=False, callbacks=[TerminateOnNaN()])
    )
    assert history.epoch == [0]
    output = capfd.readouterr().out
    assert ("on rank(s) 1; stopping" in output) == topology().is_rank_zero


# ConsistencyCheck ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "every"),
    [
        pytest.param(2, "epoch", marks=pytest.mark.world_size(2)),
        pytest.param(3, 2, marks=pytest.mark.world_size(3)),
    ],
)
def test_a_difference_is_named_on_every_rank(size: int, every: Any) -> None:
    class Meddle(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if topology().rank == 1:
                variable = self.model.layers[1].kernel
                variable.assign(variable + 1e-3)

    model = wrapped(keras.optimizers.SGD(0.1, momentum=0.9))
    with pytest.raises(RankMismatchError) as caught:
        model.fit(
            X,
            Y,
            batch_size=16,
            callbacks=[Meddle(), ConsistencyCheck(every)],
            verbose=0,
        )
    message = str(caught.value)
    assert model.layers[1].kernel.path in message
    assert "of which rank(s) 1 hold another value than rank 0" in message


def test_consistency_check_refuses_nonsense() -> None:
    for every in (0, -1, "step", 1.5):
        with pytest.raises(InvalidArgumentError, match='to be "epoch" or a number'):
            ConsistencyCheck(every)


# Keras's own --------------------------------------------------------------------------


def keras_callbacks() -> list[Any]:
    return [
        keras.callbacks.EarlyStopping(
            "val_loss", patience=1, min_delta=0.05, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.History(),
    ]


@pytest.mark.world_size(2)
def test_keras_callbacks_in_any_order_as_in_one_process() -> None:
    orders = list(itertools.permutations(range(5)))
    for order in (orders[37], orders[-1]):

        def train(model: keras.Model, order: Any = order) -> Any:
            callbacks = keras_callbacks()
            return model.fit(
                X,
                Y,
                batch_size=16,
                epochs=6,
                validation_data=classification(20),
                callbacks=[callbacks[i] for i in order],
                verbose=0,
            )

        result = one_and_all(lambda: net(keras.optimizers.SGD(0.3)), train)
        assert_same(*result)
        assert len(result[1].epoch) < 6  # it did stop early


@pytest.mark.world_size(2)
def test_swapped_averages_as_in_one_process() -> None:
    def train(model: keras.Model) -> Any:
        return model.fit(
            X,
            Y,
            batch_size=16,
            epochs=2,
            validation_data=classification(20),
            callbacks=[keras.callbacks.SwapEMAWeights()],
            verbose=0,
        )

    def build() -> keras.Model:
        return net(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7))

    assert_same(*one_and_all(build, train))


@pytest.mark.world_size(2)
def test_callbacks_of_keras_that_write_run_on_rank_zero() -> None:
    writers = [
        keras.callbacks.ModelCheckpoint("m.keras"),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.TensorBoard("board"),  # to run it takes the tensorboard package
        keras.callbacks.BackupAndRestore("backup"),
    ]
    for callback in writers:
        assert runs_here(callback) == topology().is_rank_zero
    assert runs_here(keras.callbacks.EarlyStopping())


@pytest.mark.world_size(2)
def test_keras_file_callbacks_write_once(tmp_path: Any) -> None:
    folder = os.path.join(shared(tmp_path), f"rank{topology().rank}")  # own folders
    os.makedirs(folder)
    model = wrapped()
    model.fit(
        X,
        Y,
        batch_size=16,
        epochs=2,
        callbacks=[
            [keras.callbacks.ModelCheckpoint(os.path.join(folder, "m.keras"))],
            keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
            keras.callbacks.BackupAndRestore(os.path.join(folder, "backup")),
        ],
        verbose=0,
    )
    if not topology().is_rank_zero:
        assert os.listdir(folder) == []
        return
    assert sorted(os.listdir(folder)) == ["log.csv", "m.keras"]
    with open(os.path.join(folder, "log.csv"), newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1"]
    loaded = keras.models.load_model(os.path.join(folder, "m.keras"))
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
