"""Several devices in one process, and whose GPUs are whose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import kerasmgpu
from kerasmgpu import devices
from kerasmgpu.errors import LaunchError
from kerasmgpu.topology import Topology

PROGRAM = Path(__file__).parent / "programs" / "two_devices.py"


def test_dropout_is_the_same_and_branches_run_side_by_side(tmp_path):
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["difference"] < 1e-5
    assert result["seconds_side_by_side"] > 0


def test_tensorflow_has_started(monkeypatch):
    # As if no test before this one had made a strategy in this process.
    monkeypatch.setattr(devices, "_devices_per_rank", None)
    tf.zeros(1)
    with pytest.raises(RuntimeError, match=r"devices_per_rank=2\) first, before any"):
        kerasmgpu.HorovodStrategy(devices_per_rank=2)
    assert devices.several_devices() is False


def test_on_device_without_several():
    layer = kerasmgpu.layers.OnDevice(tf.keras.layers.Dense(2), 0)
    assert "call" not in vars(layer)
    with pytest.raises(ValueError, match=r"there are 1 \(0 to 0\)"):
        kerasmgpu.layers.OnDevice(layer, 1)


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that this host has GPUs; returns those made visible."""
    made_visible = []

    def pretend(count):
        found = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU")
            for i in range(count)
        ]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: found)
        monkeypatch.setattr(
            tf.config,
            "set_visible_devices",
            lambda chosen, kind: made_visible.extend(d.name[-5:] for d in chosen),
        )
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return made_visible

    return pretend


def test_two_gpus_a_rank(gpus):
    visible = gpus(4)
    place = Topology(rank=3, size=4, local_rank=1, local_size=2)
    assert devices.pin_gpu(place, False, 2).endswith("GPU:2")
    assert visible == ["GPU:2", "GPU:3"]


def test_gpus_that_the_launcher_assigned(gpus, monkeypatch):
    visible = gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    place = Topology(rank=1, size=2, local_rank=1, local_size=2)
    assert devices.pin_gpu(place, False, 2).endswith("GPU:0")
    assert visible == ["GPU:0", "GPU:1"]


def test_too_few_gpus(gpus):
    gpus(3)
    place = Topology(rank=0, size=2, local_rank=0, local_size=2)
    with pytest.raises(LaunchError, match=r"2 GPUs for each of the 2.*Received: 3"):
        devices.pin_gpu(place, False, 2)


@pytest.mark.world_size(2)
def test_tensorflow_has_not_started_when_devices_are_chosen(monkeypatch):
    """It did, so that no rank could choose its GPU or its threads."""
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name)
    kerasmgpu.HorovodStrategy()
    assert tf.config.threading.get_intra_op_parallelism_threads() > 0
