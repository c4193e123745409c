"""Emulated devices and hosts: arithmetic, bad input, and one small measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from ranks import strategy

from kerasmgpu.cli import main
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.perf import blocks, emulate, network


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--emulate-step-seconds", "0.1"], "two ranks or more to emulate"),
        (["--emulate-step-seconds", "0", "--np", "2"], "Received: 0"),
        (["--emulate-step-seconds", "nan", "--np", "2"], "Received: nan"),
        (["--emulate-step-seconds", "inf", "--np", "2"], "Received: inf"),
        (["--emulate-step-seconds", "1", "--np", "65"], "at most 64 ranks"),
        (["--all-reduce", "9" * 400, "--np", "2"], "up to 2 GB"),
        (
            ["--all-reduce", "4kb", "--np", "2", "--bandwidth", "9" * 400 + "gbit"],
            "such as 25gbit",
        ),
        (
            ["--emulate-step-seconds", "1", "--np", "2", "--model", "embedding"],
            "gradients are dense",
        ),
        (["--all-reduce", "many", "--np", "2"], "Received: 'many'"),
        (["--all-reduce", "4kb", "--np", "2", "--bandwidth", "9"], "Received: '9'"),
        (["--all-reduce", "4kb", "--emulate-step-seconds", "1"], "at a time"),
        (["--all-reduce", "4kb", "--plot", "a.png"], "--all-reduce writes no plot"),
        (["--bandwidth", "1gbit"], "beside --bandwidth"),
        (["--exchange", "server"], "beside --exchange"),
    ],
)
def test_bad_input(arguments, message, capfd, monkeypatch):
    monkeypatch.setattr(blocks.subprocess, "Popen", None)
    assert main(["bench", *arguments]) == 1
    assert message in " ".join(capfd.readouterr().err.split())


def test_bandwidth_without_root(capfd, monkeypatch):
    monkeypatch.setattr(blocks.subprocess, "Popen", None)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    for mode in (["--emulate-step-seconds", "1"], ["--all-reduce", "4kb"]):
        assert main(["bench", *mode, "--np", "2", "--bandwidth", "1gbit"]) == 1
        assert "Run it as root" in " ".join(capfd.readouterr().err.split())


def test_costs_of_layers():
    import keras

    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    convolution, dense = emulate.layers_of(model)
    assert convolution == ([(3, 3, 3, 4), (4,)], 6 * 6 * 4 * 27)
    assert dense == ([(144, 10), (10,)], 1440)


def test_gradients_wait_backward():
    import time

    import tensorflow as tf

    model = emulate.emulated_model([([(2, 3)], 1.0), ([(5,), (4,)], 3.0)], 0.08)
    assert [tuple(w.shape) for w in model.trainable_weights] == [(2, 3), (5,), (4,)]
    began = time.perf_counter()
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(model(tf.ones([1, 1])))
    forward = time.perf_counter() - began
    gradients = tape.gradient(y, [w.value for w in model.trainable_weights])
    assert forward >= 0.08 / 3
    assert time.perf_counter() - began >= 0.08
    assert [tuple(g.shape) for g in gradients] == [(2, 3), (5,), (4,)]
    assert not any(np.any(g) for g in gradients)


def test_a_device_goes_on_while_its_host_is_late(monkeypatch):
    now = [10.0]

    def sleep(seconds):
        now[0] += seconds + 0.25  # it is woken up late

    monkeypatch.setattr(emulate.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(emulate.time, "sleep", sleep)
    device = emulate.Device()
    device.compute(1.0, starts=True)
    assert now[0] == 11.25
    device.compute(1.0, starts=False)
    assert now[0] == 12.25
    device.compute(0.125, starts=False)  # done before it was asked for
    assert now[0] == 12.5
    now[0] = 20.0  # what comes between steps takes its time
    device.compute(1.0, starts=True)
    assert now[0] == 21.25


def test_summary():
    def taken(seconds):
        return [{"median_step_seconds": s, "gradient_bytes": 1000} for s in seconds]

    rounds = [
        {"1: ring": taken([0.1]), "2: ring": taken([0.1, 0.2])},
        {"1: ring": taken([0.1]), "2: ring": taken([0.1, 0.1])},
    ]
    found = emulate.summarize(rounds, 1e4)["ring"]
    assert found["2"]["speedup"] == [1.0, 2.0]
    assert found["2"]["model"] == pytest.approx([1.0, 1.0])
    assert found["2"]["bound"] == pytest.approx([2.0, 2.0])
    server = emulate.summarize(
        [{"1: ring": taken([0.1]), "2: server": taken([0.1, 0.4])}], 1e4
    )["server"]
    assert server["2"]["bound"] == pytest.approx([1.0])  # twice the bytes of the ring
    with pytest.raises(InvalidArgumentError, match="below 60"):
        emulate.check("mlp", 60)


def test_cost_lines_by_hand():
    lines = emulate.cost_lines(0.1, 1000, 1e4, 3)  # 0.1 s for the bytes, once
    after = lines["cost model, ring: after computing"]
    assert after == pytest.approx({1: 1, 2: 1.0, 3: 0.3 / (0.1 + 4 / 3 * 0.1)})
    behind = lines["cost model, server: behind computing"]
    assert behind == pytest.approx({1: 1, 2: 1.0, 3: 0.75})
    assert len(lines) == 4


@pytest.mark.world_size(2)
def test_sum_at_root():
    import tensorflow as tf

    from kerasmgpu.collectives import sum_at_root

    given = tf.reshape(tf.range(6.0), [2, 3]) * (1.0 + strategy().rank)
    expected = 3.0 * np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(sum_at_root(given), expected)
    in_graph = tf.function(lambda x: sum_at_root(x) + 0.0)
    np.testing.assert_array_equal(in_graph(given), expected)


def test_two_emulated_devices(tmp_path, capfd):
    path = tmp_path / "record.json"
    options = ["--emulate-step-seconds", "0.01", "--np", "2", "--exchange", "both"]
    options += ["--model", "mlp", "--rounds", "1", "--seconds", "0.5"]
    assert main(["bench", *options, "--json", str(path)]) == 0
    assert "emulated devices: mlp" in " ".join(capfd.readouterr().out.split())
    record = json.loads(path.read_text())
    assert record["emulated"] is True
    assert record["gradient_bytes"] == 4 * (784 * 512 + 512 * 512 + 512 * 10 + 1034)
    for exchange in ("ring", "server"):
        (seconds,) = record["results"][exchange]["2"]["step_seconds"]
        assert seconds > 0.01
    assert record["results"]["ring"]["1"]["speedup"] == [1.0]


def test_an_all_reduce_over_slow_links(tmp_path, capfd):
    reason = network.why_not()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"slow links must be tested in CI: {reason}")
        pytest.skip(f"this machine cannot make hosts: {reason}")
    path = tmp_path / "record.json"
    options = ["--all-reduce", "1MB", "--bandwidth", "100mbit", "--np", "2"]
    assert main(["bench", *options, "--rounds", "1", "--json", str(path)]) == 0
    assert "on 2 emulated hosts at 100mbit" in " ".join(capfd.readouterr().out.split())
    results = json.loads(path.read_text())["results"]
    assert results["ring_bound_seconds"] == pytest.approx(0.08)
    # A burst of the link is free; more than that, and it would not be slow.
    assert results["seconds"][0] > 0.05
    left = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True)
    assert f"kmg{os.getpid()}" not in left.stdout


def test_hosts_of_a_process_that_was_killed_are_removed(tmp_path):
    reason = network.why_not()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"left hosts must be tested in CI: {reason}")
        pytest.skip(f"this machine cannot make hosts: {reason}")
    program = (
        "import os, pathlib, signal, sys\n"
        "from kerasmgpu.perf.network import VirtualHosts\n"
        "folder, binaries = map(pathlib.Path, (sys.argv[1], sys.executable))\n"
        "made = VirtualHosts(folder / 'x', binaries.parent, ['left'], 1e6)\n"
        "made.__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    assert ended.wait(60) == -signal.SIGKILL
    tag = f"kmg{ended.pid}"

    def left():
        listed = [["ip", "netns", "list"], ["ip", "link"], ["ls", "/etc/netns"]]
        said = [subprocess.run(one, capture_output=True, text=True) for one in listed]
        return "".join(one.stdout for one in said).count(tag)

    assert left() >= 4
    network.remove_left_hosts()
    assert left() == 0
    assert not any(f"{tmp_path}/x/" in _command_line(p) for p in psutil.pids())


def _command_line(pid):
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
