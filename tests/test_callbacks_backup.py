"""BackupAndRestore: preemption, damage, other models, another number of ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from ranks import SEED, assert_ranks_agree, classification, cross_entropy, strategy

from kerasmgpu.callbacks import BackupAndRestore, LearningRateScaling
from kerasmgpu.collectives import all_gather_object, alone, broadcast_object, topology
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.files import SaveError

ROWS, BATCH, EPOCHS = 72, 16, 3  # 5 batches, the last one of 8 rows
X, Y = classification(ROWS)
ROOT = Path(__file__).parent.parent


class Killed(Exception):
    """Stands for a kill."""


class At(keras.callbacks.Callback):
    """Does something before a batch."""

    def __init__(self, epoch: int, batch: int, function: Any) -> None:
        super().__init__()
        self.at = (epoch, batch)
        self.function = function
        self.epoch, self.batches = -1, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == self.at:
            self.function()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1


def kill() -> None:
    raise Killed


def net(optimizer: Any = None, units: int = 16, dropout: float = 0.3) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(4),
        ]
    )
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer=optimizer, loss=cross_entropy(), metrics=["accuracy"])
    return model


def run(
    folder: Any, *callbacks: Any, build: Any = net, x: Any = X, y: Any = Y, **fit: Any
) -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(SEED)
    model = strategy().wrap(build())
    used = list(callbacks)
    if folder is not None:
        used.insert(0, BackupAndRestore(folder, save_freq=1))
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0, **fit}
    return model, model.fit(x, y, callbacks=used, **settings)


def killed_run(folder: Any, epoch: int = 1, batch: int = 2, **options: Any) -> None:
    with pytest.raises(Killed):
        run(folder, At(epoch, batch, kill), **options)


def shared(tmp_path: Any) -> Path:
    strategy()  # joins the job
    return Path(broadcast_object(str(tmp_path / "backup")))


def assert_same(ones: Any, others: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    (one, history), (other, other_history) = ones, others
    assert history.epoch == other_history.epoch
    for key, values in history.history.items():
        np.testing.assert_allclose(
            other_history.history[key], values, rtol=max(rtol, 1e-5), err_msg=key
        )
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=rtol, atol=atol)


def on_sizes(*sizes: int) -> Any:
    marks = [pytest.param(n, marks=pytest.mark.world_size(n)) for n in sizes]
    return pytest.mark.parametrize("size", marks)


@on_sizes(1, 2)
def test_a_signal_on_one_rank_stops_all_after_the_same_batch(
    size: int, tmp_path: Any, capfd: Any
) -> None:
    folder = shared(tmp_path)
    whole = run(None)
    for moment in ((1, 1), (1, 4)):  # within an epoch, and at its last batch

        def me(rank: int = size - 1) -> None:
            if topology().rank == rank:
                os.kill(os.getpid(), signal.SIGTERM)

        signalled = At(*moment, me)
        backup = BackupAndRestore(folder, exit_code=9)  # else saved by epoch
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            run(None, signalled, backup)
        assert left.value.code == 9
        assert signal.getsignal(signal.SIGTERM) is before
        assert len(set(all_gather_object(signalled.batches))) == 1
        output = capfd.readouterr().out
        assert (f"SIGTERM on rank {size - 1}. Stopped after" in output) == (
            topology().is_rank_zero
        )
    resumed = run(None, BackupAndRestore(folder))
    assert_same(whole, resumed)
    assert_ranks_agree(resumed[0])


@pytest.mark.world_size(3)
def test_only_rank_zero_needs_the_folder(tmp_path: Any) -> None:
    folder = tmp_path / "backup" if topology().is_rank_zero else "/proc/nowhere"
    whole = run(None)
    killed_run(folder)
    resumed = run(folder)
    assert_same(whole, resumed)
    assert_ranks_agree(resumed[0])


@on_sizes(1, 2)
def test_a_damaged_backup_is_said_and_the_one_before_used(
    size: int, tmp_path: Any, capfd: Any
) -> None:
    folder = shared(tmp_path)
    whole = run(None)
    killed_run(folder)
    if topology().is_rank_zero:
        _, newest = sorted(folder.glob("state-*"))  # two generations
        data = bytearray(newest.read_bytes())
        data[len(data) // 2] ^= 1
        newest.write_bytes(data)
    all_gather_object(None)
    capfd.readouterr()
    resumed = run(folder)
    assert_same(whole, resumed)
    if topology().is_rank_zero:
        output = capfd.readouterr().out
        assert f"{newest} is damaged" in output
        assert "at epoch 2, after 1 of its batches" in output
    all_gather_object(None)
    killed_run(folder)
    if topology().is_rank_zero:
        for path in folder.glob("state-*"):
            path.write_bytes(path.read_bytes()[:-100])
    all_gather_object(None)
    with pytest.raises(InvalidArgumentError, match=r"All backups in .* are damaged"):
        run(folder)


@on_sizes(1, 2)
def test_a_backup_of_something_else_is_refused_everywhere(
    size: int, tmp_path: Any
) -> None:
    folder = shared(tmp_path)
    killed_run(folder)
    kept = sorted(os.listdir(folder))
    wider = r"weight 'sequential\w*/dense\w*/kernel' of shape \(8, 16\)"
    cases: list[tuple[str, dict[str, Any]]] = [
        (wider, {"build": lambda: net(units=24)}),
        ("another model or optimizer", {"build": lambda: net(keras.optimizers.Adam())}),
        ("global batch of 16 rows. Received: 32", {"batch_size": 32}),
        ("5 batches an epoch. Received: data of 3", {"x": X[:48], "y": Y[:48]}),
    ]
    for message, options in cases:
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            run(folder, **options)
        # Paths in a message are numbered by creation; the rest is the same.
        assert len({str(m) for m in all_gather_object(str(caught.value))}) == 1
    assert sorted(os.listdir(folder)) == kept  # nothing saved is lost
    run(folder)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("first", [1, 2])
def test_another_number_of_ranks_goes_on(first: int, tmp_path: Any) -> None:
    """Rank 0 by itself stands for a job of one."""
    folder = shared(tmp_path)

    def build() -> keras.Model:
        return net(dropout=0.0)

    def scaling() -> Any:
        return LearningRateScaling(8, warmup_epochs=2)

    whole = run(None, scaling(), build=build)
    kills = At(1, 2, kill)
    if first == 2:
        with pytest.raises(Killed):
            run(folder, scaling(), kills, build=build)
        if topology().is_rank_zero:
            with alone():
                resumed = run(folder, scaling(), build=build)
            assert_same(whole, resumed, rtol=1e-4, atol=2e-6)
        return
    if topology().is_rank_zero:
        with alone(), pytest.raises(Killed):
            run(folder, scaling(), kills, build=build)
    else:  # optimizers are numbered as they are wrapped, alike on all ranks
        with alone():
            strategy().wrap(build())
    all_gather_object(None)
    resumed = run(folder, scaling(), build=build)
    assert_same(whole, resumed, rtol=1e-4, atol=2e-6)
    assert_ranks_agree(resumed[0])


@on_sizes(1, 2)
def test_a_folder_that_cannot_be_used_is_said_before_training(
    size: int, tmp_path: Any
) -> None:
    path = shared(tmp_path)
    if topology().is_rank_zero:
        path.write_text("a file")
    all_gather_object(None)
    with pytest.raises(SaveError, match="could not use the backup folder") as caught:
        run(path)
    assert len(set(all_gather_object(str(caught.value)))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backup_dir": ""}, "backup_dir to be the path of a folder"),
        ({"save_freq": 0}, "save_freq to be"),
        ({"save_freq": "batch"}, "save_freq to be"),
        ({"exit_code": 256}, "exit_code to be a whole number from 0 to 255"),
        ({"preemption_signals": [signal.SIGKILL]}, "can catch. Received: SIGKILL"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        BackupAndRestore(**{"backup_dir": "backup", **arguments})


@pytest.mark.parametrize(
    ("signal_name", "exit_code"), [("SIGKILL", None), ("SIGTERM", "75")]
)
def test_the_example_kills_itself_and_goes_on(
    signal_name: str, exit_code: str | None
) -> None:
    ended = subprocess.run(
        [sys.executable, "examples/resume.py", "-np", "2", "--signal", signal_name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    code = re.search(r"It ended with exit code (\d+)", ended.stdout)
    assert code is not None
    assert exit_code in (None, code[1]), ended.stdout + ended.stderr
    assert "The resumed run is the run that was left alone." in ended.stdout
