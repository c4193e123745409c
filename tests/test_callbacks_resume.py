"""A run that was ended and started again gives what the run that was not gives."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import SEED, assert_ranks_agree, classification, cross_entropy, strategy

from kerasmgpu.callbacks import BackupAndRestore, LearningRateScaling
from kerasmgpu.collectives import broadcast_object, topology

ROWS, BATCH, EPOCHS = 72, 16, 3  # 5 batches, the last one of 8 rows


VALIDATION = classification(24)


class Killed(Exception):
    """Stands for a kill: the process does nothing more for this fit."""


class KillAfter(keras.callbacks.Callback):
    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self.at = (epoch, batch)
        self.epoch = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == self.at:
            raise Killed


def net(optimizer: Any = None, dropout: float = 0.3, **compile: Any) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(4),
        ]
    )
    optimizer = optimizer or keras.optimizers.SGD(0.02, momentum=0.9)
    options = {"loss": cross_entropy(), "metrics": ["accuracy"], **compile}
    model.compile(optimizer=optimizer, **options)
    return model


def shared_folder(tmp_path: Any) -> str:
    strategy()  # joins the job
    return str(broadcast_object(str(tmp_path / "backup")))


def others() -> list[Any]:
    return [
        keras.callbacks.EarlyStopping(
            "val_loss", patience=2, min_delta=0.3, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.5),
        LearningRateScaling(8, warmup_epochs=2),
    ]


def run(
    folder: str | None,
    *,
    kill: tuple[int, int] | None = None,
    data: Any = None,
    build: Any = net,
    callbacks: Any = list,
    save_freq: Any = 1,
    options: Any = None,
    **fit: Any,
) -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(SEED)
    model = strategy(**(options or {})).wrap(build())
    x, y = classification(ROWS) if data is None else (data(), None)
    used = callbacks()
    if folder is not None:
        used.insert(0, BackupAndRestore(folder, save_freq=save_freq))
    if kill is not None:
        used.append(KillAfter(*kill))
    settings = {
        "epochs": EPOCHS,
        "verbose": 0,
        "callbacks": used,
        **fit,
    }
    if data is None:
        settings.setdefault("batch_size", BATCH)
    return model, model.fit(x, y, **settings)


def check(tmp_path: Any, *kills: tuple[int, int], **options: Any) -> None:
    """Kills a run at each of these batches; compares with one that was not killed."""
    folder = shared_folder(tmp_path)
    whole, whole_history = run(None, **options)
    for kill in kills:
        with pytest.raises(Killed):
            run(folder, kill=kill, **options)
    model, history = run(folder, **options)
    assert list(history.history) == list(whole_history.history)
    for key, values in whole_history.history.items():
        np.testing.assert_allclose(history.history[key], values, rtol=1e-5, err_msg=key)
    assert history.epoch == whole_history.epoch
    # Two runs of TensorFlow may differ in the last bit; another dropout mask, batch or
    # learning rate makes a thousand times as much.
    pairs = [(model, whole), (model.optimizer, whole.optimizer)]
    for own, theirs in pairs:
        for a, b in zip(own.variables, theirs.variables, strict=True):
            np.testing.assert_allclose(
                a.numpy(), b.numpy(), rtol=1e-5, atol=1e-7, err_msg=a.path
            )
    assert_ranks_agree(model)
    if topology().is_rank_zero:
        assert not os.path.exists(folder)


def any_size(function: Any) -> Any:
    """On 1 and on 2 ranks."""
    marks = [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2)]
    return pytest.mark.parametrize("size", marks)(function)


@any_size
def test_in_the_middle_of_an_epoch(tmp_path: Any, size: int) -> None:
    check(tmp_path, (0, 3), (2, 2), callbacks=others, validation_data=VALIDATION)


@pytest.mark.world_size(2)
def test_between_saves_and_at_the_end_of_an_epoch(tmp_path: Any) -> None:
    check(
        tmp_path,
        (1, 0),
        (2, 4),
        save_freq=3,
        callbacks=others,
        validation_data=VALIDATION,
    )


@pytest.mark.world_size(2)
def test_saved_by_epoch(tmp_path: Any) -> None:
    check(
        tmp_path,
        (0, 2),
        (1, 3),
        (2, 1),
        save_freq="epoch",
        callbacks=others,
        validation_data=VALIDATION,
    )


def shuffled() -> tf.data.Dataset:
    x, y = classification(ROWS)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.shuffle(ROWS, seed=3).batch(BATCH)


def of_unknown_length() -> tf.data.Dataset:
    return shuffled().unbatch().batch(BATCH)


@pytest.mark.world_size(2)
def test_a_shuffled_dataset(tmp_path: Any) -> None:
    check(tmp_path, (2, 2), data=shuffled)


@pytest.mark.world_size(2)
def test_a_dataset_of_unknown_length(tmp_path: Any) -> None:
    check(tmp_path, (0, 3), (2, 2), data=of_unknown_length)


@any_size
def test_a_repeated_dataset_with_steps_per_epoch(tmp_path: Any, size: int) -> None:
    check(
        tmp_path,
        (2, 1),
        data=lambda: shuffled().repeat(),
        steps_per_epoch=4,
    )


class Shuffled(keras.utils.PyDataset):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = classification(ROWS)
        self.order = np.arange(ROWS)

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


@pytest.mark.world_size(2)
def test_a_py_dataset_that_shuffles_itself(tmp_path: Any) -> None:
    check(tmp_path, (2, 2), data=Shuffled)


@pytest.mark.world_size(2)
def test_several_steps_a_call(tmp_path: Any) -> None:
    def build() -> keras.Model:
        return net(steps_per_execution=2)

    check(tmp_path, (1, 2), build=build, save_freq=2)


@pytest.mark.world_size(2)
def test_eagerly(tmp_path: Any) -> None:
    def build() -> keras.Model:
        return net(run_eagerly=True)

    check(tmp_path, (1, 2), build=build, epochs=2)


@pytest.mark.world_size(2)
def test_gradients_that_are_being_accumulated(tmp_path: Any) -> None:
    def build() -> keras.Model:
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
        return net(optimizer)

    check(tmp_path, (1, 2), build=build, epochs=2)


@pytest.mark.world_size(2)
def test_swapped_averages(tmp_path: Any) -> None:
    def build() -> keras.Model:
        return net(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8))

    def callbacks() -> list[Any]:
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]

    check(tmp_path, (2, 2), build=build, callbacks=callbacks, save_freq="epoch")


@pytest.mark.world_size(2)
def test_a_model_that_is_not_built(tmp_path: Any) -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(4)])
        model.compile("adam", cross_entropy(), metrics=["accuracy"])
        return model

    check(tmp_path, (1, 2), build=build)


@pytest.mark.world_size(2)
def test_each_rank_brings_its_own_data(tmp_path: Any) -> None:
    check(tmp_path, (1, 2), data=shuffled, options={"sharding": "none"})
