"""SpeedupLogger: what it says, and that measuring changes nothing."""

from __future__ import annotations

import csv
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import SEED, classification, cross_entropy, dense_net, strategy

from kerasmgpu.callbacks import LearningRateScaling, SpeedupLogger
from kerasmgpu.callbacks.speedup_logger import epoch_row
from kerasmgpu.callbacks.speedup_report import Report
from kerasmgpu.collectives import all_gather_object, broadcast_object, topology
from kerasmgpu.errors import InvalidArgumentError

X, Y = classification(256)


def net() -> keras.Model:
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(4),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9), cross_entropy(), metrics=["accuracy"]
    )
    return model


def fit(*callbacks: Any, **options: Any) -> tuple[keras.Model, Any]:
    model = strategy().wrap(net())
    options = {"batch_size": 16, "epochs": 2, "verbose": 0, **options}
    return model, model.fit(X, Y, callbacks=list(callbacks), **options)


def shared(tmp_path: Any) -> Path:
    strategy()  # joins the job
    return Path(broadcast_object(str(tmp_path / "logs")))


def on_sizes(*sizes: int) -> Any:
    marks = [pytest.param(n, marks=pytest.mark.world_size(n)) for n in sizes]
    return pytest.mark.parametrize("size", marks)


@on_sizes(1, 2)
def test_measuring_changes_no_bit_and_everything_is_written(
    size: int, tmp_path: Any, capfd: Any
) -> None:
    folder = shared(tmp_path)
    plain, history = fit(LearningRateScaling(8, warmup_epochs=2))
    logger = SpeedupLogger(folder, calibrate_steps=3, plot=True)
    model, logged = fit(logger, LearningRateScaling(8, warmup_epochs=2))
    for key, values in history.history.items():
        np.testing.assert_allclose(logged.history[key], values, rtol=1e-6)
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-7)
    assert [row["epoch"] for row in logger.rows] == [1, 2]
    for row in logger.rows:
        assert row["samples_per_second"] > 0
        assert 0 < row["step_seconds_median"] <= row["step_seconds_p95"]
        assert row["efficiency"] == pytest.approx(row["speedup"] / size)
        assert 0 <= row["reduce_share"] < 1
        assert (row["serial_fraction"] is None) == (size == 1)
        if size > 1:  # Karp and Flatt, and the limit that Amdahl draws from it
            serial = (1 / row["speedup"] - 1 / size) / (1 - 1 / size)
            assert row["serial_fraction"] == pytest.approx(serial)
            if serial > 0:
                assert row["amdahl_limit"] == pytest.approx(1 / serial)
    all_gather_object(None)
    output = capfd.readouterr().out
    assert ("against one process" in output) == topology().is_rank_zero
    if not topology().is_rank_zero:
        return
    with (folder / "speedup.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    documented = {
        key
        for line in (SpeedupLogger.__doc__ or "").splitlines()
        if line.strip().startswith("| `")
        for key in line.split("|")[1].replace("`", "").replace(" ", "").split(",")
    }
    assert documented | {"reason"} == set(rows[0])
    lines = (folder / "speedup.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == logger.rows
    assert (folder / "speedup.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "baseline.json").read_text())["size"] == size


@on_sizes(1, 2)
def test_steps_alone_leave_every_variable_as_it_was(size: int) -> None:
    seen = []

    class Look(keras.callbacks.Callback):
        def before_train_begin(self) -> None:
            model = self.model
            values = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
            seen.append([value.tobytes() for value in values])

    model = strategy().wrap(net())
    model.fit(X, Y, batch_size=16, verbose=0)  # moving statistics, velocities
    looks = [Look(), SpeedupLogger(calibrate_steps=2, verbose=0), Look()]
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=looks)
    assert seen[0] == seen[1]


@on_sizes(1, 2)
def test_a_slow_pipeline_is_called_input_bound(size: int, capfd: Any) -> None:
    def slow(x: Any, y: Any) -> Any:
        time.sleep(0.25)
        return x, y

    def load(x: Any, y: Any) -> Any:
        x, y = tf.numpy_function(slow, [x, y], [tf.float32, tf.int64])
        return tf.ensure_shape(x, (None, 8)), tf.ensure_shape(y, (None,))

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32).map(load)
    logger = SpeedupLogger(calibrate_steps=3)
    strategy().wrap(net()).fit(dataset, epochs=2, verbose=0, callbacks=[logger])
    assert logger.rows[-1]["reason"].startswith("input-bound")
    assert logger.rows[-1]["input_share"] > 0.5
    assert ("input-bound" in capfd.readouterr().out) == topology().is_rank_zero


@on_sizes(1, 2)
def test_a_record_of_one_process_is_the_baseline(size: int, tmp_path: Any) -> None:
    folder = shared(tmp_path)
    first = SpeedupLogger(folder, calibrate_steps=2, verbose=0)
    fit(first)
    all_gather_object(None)
    if size > 1:
        with pytest.raises(InvalidArgumentError, match="a record of 2 ranks"):
            fit(SpeedupLogger(baseline=folder))
    record = on_all(lambda: json.loads((folder / "baseline.json").read_text()))
    record["size"] = 1
    record["samples_per_second"] = first.rows[-1]["samples_per_second"] / size
    logger = SpeedupLogger(baseline=record, verbose=0)
    fit(logger)
    speedup = logger.rows[-1]["samples_per_second"] / record["samples_per_second"]
    assert logger.rows[-1]["speedup"] == pytest.approx(speedup)
    model = strategy().wrap(dense_net(8, 3))
    model.compile("sgd", cross_entropy())
    logger = SpeedupLogger(baseline=record)
    with pytest.raises(InvalidArgumentError, match="a baseline of another model"):
        model.fit(X, Y % 3, verbose=0, callbacks=[logger])
    assert int(model.optimizer.iterations) == 0
    with pytest.raises(InvalidArgumentError, match="without samples_per_second"):
        fit(SpeedupLogger(baseline={"size": 1, "model": "x"}))
    with pytest.raises(InvalidArgumentError, match="cannot find baseline="):
        fit(SpeedupLogger(baseline=folder / "missing.json"))


def test_numbers_go_to_tensorboard_where_it_is_installed(
    tmp_path: Path, monkeypatch: Any
) -> None:
    row = {"epoch": 3, "speedup": 1.5, "amdahl_limit": None, "reason": "some"}
    Report(tmp_path / ".", append=False).add(row)  # without it: the two other files
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "speedup.csv",
        "speedup.jsonl",
    ]
    scalars: dict[str, float] = {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(tf.summary, "scalar", scalars.__setitem__)
    Report(tmp_path, append=True).add(row)
    assert scalars == {"speedup/speedup": 1.5}
    assert len((tmp_path / "speedup.jsonl").read_text().splitlines()) == 2


def on_all(function: Any) -> Any:
    return broadcast_object(function() if topology().is_rank_zero else None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"input": [0.5, 0.0, 0.0]}, "input-bound: rank 0 waits for data 50%"),
        ({"reduce": [0.4, 0.4, 0.4]}, "reduce-bound: 40% of the step"),
        ({"reduce": [0.6, 0.6, 0.0]}, "one slow rank: rank 2 computes 67% longer"),
    ],
)
def test_the_reason_for_a_low_efficiency(
    changes: dict[str, Any], reason: str | None
) -> None:
    waits = {"input": [0.0] * 3, "reduce": [0.0] * 3, **changes}
    seconds = 0.95 if reason is None else 0.3
    everyone = [
        {
            "periods": [1.0] * 10,
            "input": 10 * waits["input"][rank],
            "reduce": 10 * waits["reduce"][rank],
            "rows": 30.0,
            "seconds": seconds,
            "replicas": 3,
            "holds_model": True,
        }
        for rank in range(3)
    ]
    row = epoch_row(0, everyone)
    assert row["samples_per_second"] == pytest.approx(30)
    assert row["speedup"] == pytest.approx(3 * seconds)
    found = row["reason"]
    assert (found is None) if reason is None else found.startswith(reason)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibrate_steps": 0}, "calibrate_steps to be a number of steps"),
        ({"plot": True}, "needs a log_dir"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SpeedupLogger(**arguments)
