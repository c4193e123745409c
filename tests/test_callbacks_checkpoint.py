"""Files: written once, whole or not at all, and without a trace of kerasmgpu."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from ranks import (
    SEED,
    assert_ranks_agree,
    classification,
    cross_entropy,
    dense_net,
    strategy,
)

from kerasmgpu import files
from kerasmgpu.callbacks import RankZeroCheckpoint
from kerasmgpu.collectives import all_gather_object, broadcast_object, topology
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.files import SaveError

X, Y = classification(48)
ROOT = Path(__file__).parent.parent


def net(optimizer: Any = "adam") -> keras.Model:
    keras.utils.set_random_seed(SEED)
    model = dense_net()
    model.compile(optimizer=optimizer, loss=cross_entropy(), metrics=["accuracy"])
    return model


def wrapped(optimizer: Any = "adam") -> keras.Model:
    return strategy().wrap(net(optimizer))


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> Any:
    options = {
        "batch_size": 16,
        "epochs": 3,
        "verbose": 0,
        "validation_data": classification(20),
        **options,
    }
    return model.fit(X, Y, callbacks=list(callbacks), **options)


def shared(tmp_path: Any) -> Path:
    strategy()  # joins the job
    return Path(broadcast_object(str(tmp_path)))


def on_sizes(*sizes: int) -> Any:
    marks = [pytest.param(n, marks=pytest.mark.world_size(n)) for n in sizes]
    return pytest.mark.parametrize("size", marks)


def names(folder: Path) -> list[str]:
    """What is in a folder, when every rank is done with it."""
    all_gather_object(None)
    found = sorted(os.listdir(folder))
    all_gather_object(None)
    return found


def same_on_all_ranks(error: BaseException) -> bool:
    return len(set(all_gather_object(str(error)))) == 1


# RankZeroCheckpoint -------------------------------------------------------------------


@on_sizes(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_names_and_how_many_are_kept(
    size: int, background: bool, tmp_path: Any
) -> None:
    folder = shared(tmp_path)
    path = str(folder / "{epoch:02d}-{val_loss:.3f}.keras")
    model = wrapped()
    history = fit(
        model, RankZeroCheckpoint(path, max_to_keep=2, background=background), epochs=4
    )
    losses = history.history["val_loss"]
    expected = [f"{e:02d}-{losses[e - 1]:.3f}.keras" for e in (3, 4)]
    assert names(folder) == expected
    loaded = keras.models.load_model(folder / expected[-1])
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(loaded.optimizer.iterations) == 12


class FakeLosses(keras.callbacks.Callback):
    """Puts these losses, the same on all ranks, into the logs of the epochs."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["made_up"] = self.losses[epoch]


@on_sizes(1, 2)
def test_only_the_best_is_kept(size: int, tmp_path: Any) -> None:
    path = str(shared(tmp_path) / "{epoch}.weights.h5")
    checkpoint = RankZeroCheckpoint(
        path, "made_up", save_best_only=True, save_weights_only=True, mode="min"
    )
    fit(wrapped(), FakeLosses([3.0, 2.0, 2.5, 1.0]), checkpoint, epochs=4)
    expected = ["1.weights.h5", "2.weights.h5", "4.weights.h5"]
    assert names(Path(path).parent) == expected
    assert set(all_gather_object(checkpoint.best)) == {1.0}


@pytest.mark.world_size(2)
def test_what_is_best_within_an_epoch_is_agreed_on(tmp_path: Any) -> None:
    path = str(shared(tmp_path) / "best.keras")
    # Rank 1's own rows are easy and rank 0's are not: their own losses differ.
    y = np.where(np.arange(48) % 16 < 8, Y, 0)
    model = wrapped()
    checkpoint = RankZeroCheckpoint(path, "loss", save_best_only=True, save_freq=1)
    model.fit(
        X, y, batch_size=16, shuffle=False, callbacks=[checkpoint], epochs=2, verbose=0
    )
    best = all_gather_object(checkpoint.best)
    assert best[0] == best[1]
    assert_ranks_agree(model)


@on_sizes(1, 2)
def test_a_missing_folder_or_monitor_is_said_before_training(
    size: int, tmp_path: Any
) -> None:
    model = wrapped()
    with pytest.raises(SaveError, match="nowhere' does not exist") as caught:
        fit(model, RankZeroCheckpoint(str(shared(tmp_path) / "nowhere" / "m.keras")))
    assert same_on_all_ranks(caught.value)
    path = str(shared(tmp_path) / "m.keras")
    with pytest.raises(InvalidArgumentError, match="cannot find monitor='val_f1'"):
        fit(model, RankZeroCheckpoint(path, "val_f1", save_best_only=True))
    checkpoint = RankZeroCheckpoint(path, "val_loss", save_best_only=True)
    with pytest.raises(InvalidArgumentError, match="needs validation_data"):
        fit(model, checkpoint, validation_data=None)
    assert int(model.optimizer.iterations) == 0
    checkpoint = RankZeroCheckpoint(path, "other", save_best_only=True, mode="max")
    with pytest.raises(InvalidArgumentError, match=r"Expected one of .*made_up"):
        fit(model, FakeLosses([1.0]), checkpoint)  # known at the end of the epoch
    assert names(Path(path).parent) == []


@on_sizes(1, 2)
@pytest.mark.parametrize("background", [False, True])
def test_a_failed_write_is_an_error_everywhere_and_the_old_file_stays(
    size: int, background: bool, tmp_path: Any, monkeypatch: Any
) -> None:
    path = shared(tmp_path) / "model.keras"
    checkpoint = RankZeroCheckpoint(str(path), background=background)
    model = wrapped()
    fit(model, checkpoint, epochs=1)
    all_gather_object(None)
    old = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(SaveError, match=r"could not write .*No space left") as caught:
        fit(model, checkpoint)
    assert same_on_all_ranks(caught.value)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert names(path.parent) == ["model.keras"]
    fit(model, checkpoint, epochs=1)  # and it can be used again
    assert path.read_bytes() != old or not topology().is_rank_zero


@on_sizes(1, 2)
def test_a_folder_that_vanishes(size: int, tmp_path: Any) -> None:
    folder = shared(tmp_path) / "runs"
    if topology().is_rank_zero:
        folder.mkdir()
    all_gather_object(None)

    class RemoveFolder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.raises(SaveError, match="Create the folder, or check the path"):
        fit(wrapped(), RankZeroCheckpoint(str(folder / "m.keras")), RemoveFolder())


@on_sizes(1, 2)
def test_training_goes_on_while_a_file_is_written(
    size: int, tmp_path: Any, monkeypatch: Any
) -> None:
    path = shared(tmp_path) / "{epoch}.keras"
    go_on = threading.Event()
    flush = files._flush
    weights: list[Any] = []

    def slow(target: Path) -> None:
        assert go_on.wait(60)
        flush(target)

    monkeypatch.setattr(files, "_flush", slow)

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            weights.append(self.model.get_weights())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (len(weights), batch) == (2, 2):  # an epoch later the write still hangs
                assert os.path.exists(str(path).format(epoch=1)) is False
                go_on.set()

    fit(wrapped(), RankZeroCheckpoint(str(path), background=True), Watch(), epochs=2)
    assert names(path.parent) == ["1.keras", "2.keras"]
    # It holds the weights of the moment when it was asked for.
    loaded = keras.models.load_model(str(path).format(epoch=1))
    for a, b in zip(loaded.get_weights(), weights[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_arguments_of_a_checkpoint() -> None:
    for save_freq in (0, -3, "day"):
        with pytest.raises(InvalidArgumentError, match="save_freq to be"):
            RankZeroCheckpoint("m.keras", save_freq=save_freq)
    for max_to_keep in (0, 1.5):
        with pytest.raises(InvalidArgumentError, match="max_to_keep to be a number"):
            RankZeroCheckpoint("m.keras", max_to_keep=max_to_keep)


def test_a_model_that_is_not_wrapped_is_saved_too(tmp_path: Any) -> None:
    path = tmp_path / "m.keras"
    fit(net(), RankZeroCheckpoint(str(path), save_best_only=True), epochs=1)
    assert os.listdir(tmp_path) == ["m.keras"]


def test_a_kill_at_any_moment_leaves_a_file_that_loads(tmp_path: Any) -> None:
    program = [sys.executable, str(ROOT / "tests/programs/kill_while_saving.py")]
    ended = subprocess.run(
        [*program, str(tmp_path), "30"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = re.search(r"loadable (\d+) of 30, under way (\d+)", ended.stdout)
    assert found is not None, ended.stdout + ended.stderr
    assert found[1] == "30", ended.stdout
    assert int(found[2]) >= 10, "too few kills hit a write"


# save, save_weights, export -----------------------------------------------------------


@pytest.mark.world_size(2)
def test_rank_zero_writes_and_needs_no_other_rank(tmp_path: Any) -> None:
    folder = shared(tmp_path) / f"rank{topology().rank}"
    folder.mkdir()
    model = wrapped(keras.optimizers.SGD(0.1, momentum=0.9))
    fit(model, epochs=1)
    if topology().is_rank_zero:  # no collective in it: the others do not call it
        model.save(folder / "alone.keras")
    model.save(folder / "all.keras")
    model.save_weights(folder / "all.weights.h5")
    model.export(folder / "exported", verbose=False)
    expected = ["all.keras", "all.weights.h5", "alone.keras", "exported"]
    assert sorted(os.listdir(folder)) == (expected if topology().is_rank_zero else [])
    fit(model, epochs=1)  # and it trains on
    assert_ranks_agree(model)


def config_of(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        text = archive.read("config.json").decode()
    return json.loads(re.sub(r', "shared_object_id": \d+', "", text))


@on_sizes(1, 2)
@pytest.mark.parametrize("kind", ["sequential", "functional", "loss scale"])
def test_the_file_is_plain_keras(size: int, kind: str, tmp_path: Any) -> None:
    def build() -> keras.Model:
        optimizer = keras.optimizers.Adam(0.01, clipnorm=1.0, name="inner")
        inputs = keras.Input((8,), name="inputs")
        layers = [
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(4, name="dense"),
        ]
        if kind == "sequential":
            model = keras.Sequential([inputs, *layers], name="net")
        else:
            outputs = layers[1](layers[0](inputs))
            model = keras.Model(inputs, outputs, name="net")
        if kind == "loss scale":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="outer")
        model.compile(optimizer=optimizer, loss=cross_entropy(), metrics=["accuracy"])
        return model

    folder = shared(tmp_path)
    plain = build()
    fit(plain, epochs=1)
    model = strategy().wrap(build())
    fit(model, epochs=1)
    if topology().is_rank_zero:
        plain.save(folder / "plain.keras")
    model.save(folder / "wrapped.keras")
    if topology().is_rank_zero:
        one, other = (
            config_of(folder / "plain.keras"),
            config_of(folder / "wrapped.keras"),
        )
        assert one == other
        assert "kerasmgpu" not in json.dumps(other)


WITHOUT = """
    import sys

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("kerasmgpu", "horovod"):
                raise ImportError(name)

    sys.meta_path.insert(0, Missing())
    import keras, numpy as np
    folder = sys.argv[1]
    x, y = np.ones((8, 8), "float32"), np.zeros(8)
    model = keras.models.load_model(folder + "/model.keras")
    before = model.predict(x, verbose=0)
    assert int(model.optimizer.iterations) == 9, model.optimizer.iterations
    model.fit(x, y, verbose=0)
    assert np.isfinite(model.predict(x, verbose=0)).all()
    model.load_weights(folder + "/model.weights.h5")
    assert np.array_equal(model.predict(x, verbose=0), before)
    assert not {"kerasmgpu", "horovod"} & {n.split(".")[0] for n in sys.modules}
    print("plain")
"""


@pytest.mark.world_size(2)
def test_the_file_serves_where_kerasmgpu_cannot_be_imported(tmp_path: Any) -> None:
    model = wrapped(keras.optimizers.SGD(0.1, momentum=0.9))
    folder = shared(tmp_path)
    fit(model, RankZeroCheckpoint(str(folder / "model.keras")))
    model.save_weights(folder / "model.weights.h5")
    if topology().is_rank_zero:
        clean = {
            k: v for k, v in os.environ.items() if "MPI" not in k and "PMI" not in k
        }
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(WITHOUT), str(folder)],
            capture_output=True,
            text=True,
            timeout=120,
            env=clean,
        )
        assert ended.stdout.strip() == "plain", ended.stderr[-2000:]
