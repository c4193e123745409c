"""`kerasmgpu bench`: what it refuses, what it computes, and one small measurement."""

from __future__ import annotations

import json
import math
import os
import re
import types

import numpy as np
import psutil
import pytest

from kerasmgpu.cli import main
from kerasmgpu.errors import InvalidArgumentError, LaunchError
from kerasmgpu.perf import (
    all_reduce,
    blocks,
    emulate,
    measure,
    prediction,
    rivalry,
    scaling,
    workloads,
)

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--np", "0"], "different positive numbers, such as 1,2. Received: --np 0"),
        (
            ["--np", "two"],
            "different positive numbers, such as 1,2. Received: --np two",
        ),
        (
            ["--np", "1,1"],
            "different positive numbers, such as 1,2. Received: --np 1,1",
        ),
        (["--np", "4096"], rf"there are {CORES} core(s). Received: --np 4096"),
        (["--rounds", "0"], "--rounds and --seconds to be positive"),
        (["--seconds", "0"], "--rounds and --seconds to be positive"),
        (["--seconds", "inf"], "--seconds inf"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--plot", "/no/such/out.png"], "Expected a FILE that can be written"),
        (["--plot", "out.txt"], "to end in .png, .svg or .pdf"),
        (["--collectives", "--trace", "a.json"], "one thing to measure at a time"),
        (["--trace", "a.json", "--json", "b.json"], "--trace writes no json"),
        (["--collectives", "--np", "1"], "two ranks or more for --collectives"),
        (["--beside", "mxnet"], "different ones of unfused, bare, tf_keras, torch"),
        (["--beside", "bare,bare"], "Received: --beside bare,bare"),
        (["--beside", "bare", "--np", "1"], "two ranks or more for --beside"),
        (["--beside", "bare", "--plot", "out.png"], "--beside writes no plot"),
        (
            ["--beside", "torch", "--model", "mlp"],
            "mnist_cnn or resnet20 with --beside",
        ),
        (
            ["--beside", "torch", "--beside-python", "/no/python"],
            "/no/python, which is no program. Make one: python -m venv",
        ),
        (["--beside", "bare", "--beside-python", "x"], "--beside torch beside"),
        (["--json", "/no/such/folder/out.json"], "Expected a FILE that can be written"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments, message, capfd, monkeypatch
):
    monkeypatch.setattr(blocks.subprocess, "Popen", None)
    assert main(["bench", *arguments]) == 1
    assert message in capfd.readouterr().err


def test_ratios_are_taken_within_a_round():
    def rates(*values):
        return [
            {
                "samples_per_second": value,
                "median_step_seconds": 1 / value,
                "peak_bytes": 10,
                "epoch_to_steps": None,
            }
            for value in values
        ]

    rounds = [
        {
            "1: plain and wrapped": [[2.0, 2.2], [2.0, 2.0], [2.0, 2.1]],
            "2: alone": rates(100.0),
            "2: independent": rates(80.0, 90.0),
            "2: ranks": rates(75.0, 75.0),
        },
        {
            "1: plain and wrapped": [[4.0, 4.0]],
            "2: alone": rates(50.0),
            "2: independent": rates(50.0, 50.0),
            "2: ranks": rates(40.0, 40.0),
        },
    ]
    results = scaling.summarize(rounds, [1, 2])
    np.testing.assert_allclose(results["1"]["wrapped_to_plain"], [1.05, 1.0])
    np.testing.assert_allclose(results["2"]["ceiling_to_alone"], [1.7, 2.0])
    np.testing.assert_allclose(results["2"]["ranks_to_alone"], [1.5, 1.6])
    np.testing.assert_allclose(results["2"]["ranks_to_ceiling"], [150 / 170, 0.8])
    apart = (1 / 80 + 1 / 90) / 2
    np.testing.assert_allclose(
        results["2"]["exposed_seconds"], [1 / 75 - apart, 1 / 40 - 1 / 50]
    )
    np.testing.assert_allclose(results["2"]["slowest_seconds"], [1 / 80 - apart, 0])


def test_clock_times_steps_within_epochs_after_the_warm_up():
    clock = measure.make_clock(warmup_steps=3)
    clock.set_model(types.SimpleNamespace())
    met = []
    clock.meet = lambda: met.append(clock._seen)
    for epoch in range(2):
        clock.on_epoch_begin(epoch)
        for batch in range(6):
            clock.on_train_batch_end(batch)
    # Epoch 0: three of warm-up, one that starts the clock, two. Epoch 1: six but one.
    assert len(clock.step_seconds) == 2 + 5
    assert met == [4]
    # The epoch in which the clock started is not whole; the next has not ended.
    assert clock.epoch_seconds == []
    clock.on_epoch_begin(2)
    assert len(clock.epoch_seconds) == 1
    assert measure.epoch_to_steps([50.0, 51.0, 60.0], [1.0, 1.0]) == 51 / 50
    assert measure.epoch_to_steps([], [1.0]) is None


def test_clock_stops_the_training_when_its_time_is_over():
    clock = measure.make_clock(warmup_steps=0, seconds=1e-9)
    model = types.SimpleNamespace(stop_training=False)
    clock.set_model(model)
    clock.on_epoch_begin(0)
    clock.on_train_batch_end(0)
    assert not model.stop_training
    clock.on_train_batch_end(1)
    assert model.stop_training


def test_a_process_that_fails_is_told_with_what_it_printed(monkeypatch):
    monkeypatch.setattr(blocks, "START_TIMEOUT_SECONDS", 60.0)
    with pytest.raises(LaunchError, match=r"(?s)exit codes \[2\].*invalid choice: 'x'"):
        blocks.Blocks("x", seconds=1.0).independent(1, 1)


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(blocks, "START_TIMEOUT_SECONDS", 0.5)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(LaunchError, match="had not ended after 1 s"):
        blocks.Blocks("mlp", seconds=0.1).independent(1, 1)
    after = {process.pid for process in psutil.Process().children(recursive=True)}
    assert after <= before


@pytest.mark.parametrize(
    ("name", "weights"), [("mnist_cnn", 1_199_882), ("resnet20", 272_474)]
)
def test_models_are_the_ones_they_are_called(name, weights):
    workload = workloads.WORKLOADS[name]
    model = workload.build(workload.input_shape)
    assert sum(np.prod(w.shape) for w in model.trainable_weights) == weights


@pytest.mark.skipif(CORES < 2, reason="a rank a core is measured")
def test_a_small_measurement_and_its_record(tmp_path, capfd):
    path = tmp_path / "record.json"
    options = ("--model", "mlp", "--np", "1,2", "--rounds", "1", "--seconds", "0.5")
    files = ("--json", str(path), "--plot", str(tmp_path / "out.png"))
    assert main(["bench", *options, *files]) == 0
    printed = capfd.readouterr().out
    assert "Fitted: a step is" in printed
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "mlp, one process: ms a step" in printed
    assert f"mlp, 2 processes, {CORES // 2} core(s) each" in printed
    record = json.loads(path.read_text())
    assert record["hardware"]["cores"] == CORES
    assert {"python", "kerasmgpu", "keras", "horovod"} <= set(record["versions"])
    raw = record["raw"]["rounds"]
    assert record["results"] == scaling.summarize(raw, [1, 2])
    ones, twos = raw[0]["2: independent"]
    assert set(ones["cores"]).isdisjoint(twos["cores"])
    for ranks in (raw[0]["2: independent"], raw[0]["2: ranks"]):
        for one in ranks:
            # 64 rows a step; of the half second, what lies within epochs.
            seconds = one["steps"] * 64 / one["samples_per_second"]
            assert 0.01 < seconds < 30
    ratio = record["results"]["2"]["ranks_to_ceiling"][0]
    assert 0.01 < ratio < 3

    predicting = ("--record", str(path), "--bandwidth", "1gbit", "--np", "2,8")
    plot = ("--plot", str(tmp_path / "predicted.svg"))
    assert main(["predict", *predicting, *plot]) == 0
    assert "predicted (not measured)" in capfd.readouterr().out
    assert (tmp_path / "predicted.svg").exists()


def test_strong_scaling_shares_one_batch():
    assert scaling.batch_sizes("weak", 64, [1, 2, 4]) == {1: 64, 2: 64, 4: 64}
    assert scaling.batch_sizes("strong", 64, [1, 2, 4]) == {1: 256, 2: 128, 4: 64}
    with pytest.raises(InvalidArgumentError, match=r"divide the batch.*Received: 3"):
        scaling.batch_sizes("strong", 64, [3, 4])


def record(**changes):
    fit = {"compute": 0.2, "exchange": 0.01, "each": 0.001}
    made = {
        "model": "mlp",
        "mode": "weak",
        "gradient_bytes": 10_000_000,
        "fit": {**fit, "residuals": {"1": 0.0, "2": 0.0}, "left_out": {}},
    }
    return {k: v for k, v in {**made, **changes}.items() if v is not None}


def test_predictions_by_hand(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record()))
    measured = prediction.read_record(path)
    ring = measured.on_links(4, "ring", 1e8, 0.001)
    assert ring == pytest.approx(0.2 + 1.5 * 0.1 + 0.006)
    assert measured.speedup(4, ring) == pytest.approx(4 * 0.2 / 0.356)
    server = measured.on_links(4, "server", 1e8, 0.001)
    assert server == pytest.approx(0.2 + 6 * 0.1 + 0.002)
    assert measured.steps.step_seconds(4) == pytest.approx(0.2 + 1.5 * 0.01 + 0.003)
    path.write_text(json.dumps(record(mode="strong")))
    strong = prediction.read_record(path)
    assert strong.on_links(4, "ring", 1e8, 0.0) == pytest.approx(0.05 + 0.15)
    assert strong.speedup(4, 0.2) == pytest.approx(1.0)


def test_emulated_steps_are_fitted_and_predicted(tmp_path, capfd):
    """Four numbers of processes, one of which can be left out."""
    results = {
        "ring": {
            str(n): {"step_seconds": [0.1 + 0.02 * (2 - 2 / n) + 0.003 * (n - 1)]}
            for n in (2, 4, 8, 1)
        }
    }
    fits = emulate.fits_of(results)
    assert fits["ring"]["exchange"] == pytest.approx(0.02)
    assert fits["ring"]["left_out"] == pytest.approx({"2": 0, "4": 0, "8": 0})
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record(emulated=True, fit=None, fits=fits)))
    plot = ("--plot", str(tmp_path / "predicted.svg"))
    assert main(["predict", "--record", str(path), "--np", "8", *plot]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "emulated devices: mlp, predicted (not measured): links as meas" in printed
    assert re.search(r"Fitted without one number.* N=2: [+-]0\.0%, N=4", printed)
    assert "156.0" in printed  # 100 + 2 * 7/8 * 20 + 7 * 3 ms
    assert (tmp_path / "predicted.svg").exists()


BAD_FIT = {"compute": math.nan, "exchange": 0, "each": 0}
ZERO_FIT = {**dict.fromkeys(BAD_FIT, 0), "residuals": {"1": 0}, "left_out": {}}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("not json", "cannot be read"),
        (record(gradient_bytes=None), "lacks the field gradient_bytes"),
        (record(gradient_bytes="9"), "Received: '9'"),
        (record(mode="odd"), "Received: 'odd'"),
        (record(fit=None), "lacks the field fit."),
        (record(fit={}), "no measurement of two ranks"),
        (record(fit={"compute": 1}), "lacks the field fit.exchange"),
        (record(fit=BAD_FIT), "Received: nan"),
        (record(fit=ZERO_FIT), "some computing"),
        (record(emulated=True), "lacks the field fits."),
        ([1], "lacks the field model"),
    ],
)
def test_a_record_with_missing_fields_is_refused(made, message, tmp_path, capfd):
    path = tmp_path / "record.json"
    path.write_text(made if isinstance(made, str) else json.dumps(made))
    options = ("--record", str(path), "--bandwidth", "1gbit")
    assert main(["predict", *options]) == 1
    assert message in " ".join(capfd.readouterr().err.split())


@pytest.mark.skipif(CORES < 2, reason="a rank a core is measured")
def test_all_reduces_by_size(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(all_reduce, "SIZES", (4096, 1 << 20))
    path = tmp_path / "record.json"
    options = ("--collectives", "--rounds", "1", "--json", str(path))
    assert main(["bench", *options]) == 0
    assert "all-reduce of float32 on 2 ranks" in capfd.readouterr().out
    results = json.loads(path.read_text())["results"]
    assert list(results) == ["4096", str(1 << 20)]
    for figures in results.values():
        for name in ("horovod", "kerasmgpu", "copy"):
            assert 0 < figures[f"{name}_seconds"][0] < 1


def test_tf_keras_has_to_be_there(monkeypatch, capfd):
    monkeypatch.setattr(rivalry.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--np", "2", "--beside", "tf_keras"]) == 1
    assert "pip install --no-deps tf_keras==2." in capfd.readouterr().err


@pytest.mark.skipif(CORES < 2, reason="a rank a core is measured")
def test_beside_a_rival(tmp_path, capfd):
    path = tmp_path / "record.json"
    options = ("--model", "mlp", "--np", "2", "--rounds", "1", "--seconds", "0.2")
    assert main(["bench", *options, "--beside", "bare", "--json", str(path)]) == 0
    assert "gradients averaged by" in capfd.readouterr().out
    record = json.loads(path.read_text())
    taken = record["raw"]["rounds"][0]
    assert len(taken["kerasmgpu"]) == len(taken["bare"]) == 2
    ours, theirs = (
        sum(rank["samples_per_second"] for rank in taken[name])
        for name in ("kerasmgpu", "bare")
    )
    assert record["results"]["bare"]["ours_to_it"] == [pytest.approx(ours / theirs)]
    assert record["rivals"]["bare"].startswith("bare 3.")
