"""One process: the same script, the same numbers, also without Horovod."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasmgpu
from kerasmgpu import collectives, devices
from kerasmgpu.errors import LaunchError
from kerasmgpu.topology import Topology


def data(rows=40):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 8)).astype("float32")
    return x, generator.integers(0, 4, rows)


def build():
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(4),
        ]
    )
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def test_the_same_numbers():
    x, y = data()
    plain, wrapped = build(), build()
    options = {"epochs": 2, "batch_size": 8, "verbose": 0, "validation_split": 0.2}
    keras.utils.set_random_seed(1)
    expected = plain.fit(x, y, **options)
    keras.utils.set_random_seed(1)
    kerasmgpu.HorovodStrategy().wrap(wrapped)
    history = wrapped.fit(x, y, **options)
    assert history.history == expected.history
    for a, b in zip(plain.get_weights(), wrapped.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(
        plain.predict(x, verbose=0), wrapped.predict(x, verbose=0)
    )
    assert plain.evaluate(x, y, verbose=0) == wrapped.evaluate(x, y, verbose=0)
    assert plain.train_on_batch(x, y) == wrapped.train_on_batch(x, y)


def test_collectives_are_the_value_itself():
    strategy = kerasmgpu.HorovodStrategy()
    assert (strategy.rank, strategy.size, strategy.num_nodes) == (0, 1, 1)
    assert strategy.is_rank_zero
    assert float(strategy.all_reduce(2.5)) == 2.5
    assert strategy.all_gather([1, 2])[1].numpy().tolist() == [2]
    assert strategy.broadcast(np.float64(3)).dtype == tf.float64
    assert strategy.broadcast_object(strategy) is strategy
    strategy.barrier()
    with strategy.rank_zero_first(), strategy.local():
        pass
    dataset = tf.data.Dataset.range(4).batch(2)
    assert strategy.shard(dataset) is dataset
    assert strategy.shard(["a"]) == ["a"]
    with pytest.raises(TypeError, match="mean of whole numbers"):
        strategy.all_reduce(1)


def test_unwrap_gives_the_plain_object_back():
    strategy = kerasmgpu.HorovodStrategy()
    model = build()
    classes = type(model), type(model.optimizer)
    assert strategy.unwrap(strategy.wrap(strategy.wrap(model))) is model
    assert (type(model), type(model.optimizer)) == classes
    assert strategy.unwrap(model) is model


def test_clone_of_a_wrapped_model_is_plain():
    x, y = data()
    wrapped = kerasmgpu.HorovodStrategy().wrap(build())
    clone = keras.models.clone_model(wrapped)
    clone.compile("sgd", "mse")
    clone.fit(x, np.eye(4)[y], verbose=0)


WITHOUT_HOROVOD = """
import sys
sys.modules["horovod"] = None
import numpy as np, keras, kerasmgpu
strategy = kerasmgpu.HorovodStrategy()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model = strategy.wrap(model)
model.fit(np.zeros((8, 3)), np.zeros((8, 1)), verbose=0)
model.evaluate(np.zeros((8, 3)), np.zeros((8, 1)), verbose=0)
assert model.predict(np.zeros((8, 3)), verbose=0).shape == (8, 1)
model.save(sys.argv[1])
assert not any(name.startswith("horovod.") for name in sys.modules)
print("fine", strategy)
"""


def run(script, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_horovod(tmp_path):
    result = run(WITHOUT_HOROVOD, str(tmp_path / "model.keras"))
    assert "fine HorovodStrategy(rank=0, size=1)" in result.stdout, result.stderr
    assert (tmp_path / "model.keras").exists()


def test_a_job_without_horovod_says_what_to_do():
    script = (
        "import sys; sys.modules['horovod'] = None\n"
        "import kerasmgpu; kerasmgpu.HorovodStrategy()"
    )
    result = run(script, KERASMGPU_SIZE="2", KERASMGPU_RANK="1")
    assert result.returncode != 0
    assert "Rank 1 belongs to a job of several processes" in result.stderr
    assert "kerasmgpu install-horovod" in result.stderr


def test_processes_that_are_each_alone_are_refused():
    """As under another MPI's mpirun: the launcher promised two, Horovod found one."""
    script = "import kerasmgpu; kerasmgpu.HorovodStrategy()"
    result = run(script, PMI_SIZE="2", PMI_RANK="1")
    assert result.returncode != 0
    assert "started 2 processes (PMI_SIZE=2)" in result.stderr
    assert "joined a job of 1" in result.stderr


def test_another_backend_is_refused_before_keras_is_imported():
    result = run("import kerasmgpu; kerasmgpu.HorovodStrategy()", KERAS_BACKEND="jax")
    assert result.returncode != 0
    assert "KERAS_BACKEND='jax'" in result.stderr
    assert "ModuleNotFoundError" not in result.stderr


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="KERAS_BACKEND=tensorflow"):
        kerasmgpu.HorovodStrategy()


# Devices ------------------------------------------------------------------------------


class GPU:
    def __init__(self, number):
        self.name = f"/physical_device:GPU:{number}"


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that the machine has GPUs; records what is asked of TensorFlow."""
    asked = {}

    def pretend(number):
        listed = [GPU(i) for i in range(number)]
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind=None: listed
        )
        return asked

    monkeypatch.setattr(
        tf.config,
        "set_visible_devices",
        lambda devices, kind: asked.update(visible=[d.name[-5:] for d in devices]),
    )
    monkeypatch.setattr(
        tf.config.experimental,
        "set_memory_growth",
        lambda device, on: asked.setdefault("growth", []).append(device.name[-5:]),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return pretend


def test_each_rank_takes_the_gpu_of_its_local_rank(gpus):
    asked = gpus(4)
    place = Topology(
        rank=6, size=8, local_rank=2, local_size=4, node_rank=1, num_nodes=2
    )
    assert devices.pin_gpu(place, memory_growth=True).endswith("GPU:2")
    assert asked == {"visible": ["GPU:2"], "growth": ["GPU:2"]}


def test_a_gpu_that_the_launcher_assigned(gpus, monkeypatch):
    asked = gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    place = Topology(rank=1, size=2, local_rank=1, local_size=2)
    assert devices.pin_gpu(place, memory_growth=False).endswith("GPU:0")
    assert asked == {"visible": ["GPU:0"]}


def test_fewer_gpus_than_ranks(gpus):
    gpus(2)
    place = Topology(rank=0, size=3, local_rank=0, local_size=3)
    with pytest.raises(LaunchError, match=r"3 ranks on this host.*2 GPU"):
        devices.pin_gpu(place, memory_growth=True)


def test_no_gpu(gpus):
    gpus(0)
    assert devices.pin_gpu(Topology(), memory_growth=True) is None


def test_threads_are_shared_out(monkeypatch):
    set_to = []
    threading = tf.config.threading
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    monkeypatch.setattr(threading, "get_intra_op_parallelism_threads", lambda: 0)
    for name in ("intra", "inter"):
        monkeypatch.setattr(
            threading, f"set_{name}_op_parallelism_threads", set_to.append
        )
    two = Topology(rank=1, size=2, local_rank=1, local_size=2)
    cores = os.cpu_count() or 1
    assert devices.share_cpu_threads(two, cores=cores) == max(1, cores // 2)
    assert set_to == [max(1, cores // 2)] * 2
    assert devices.share_cpu_threads(Topology()) is None
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")
    assert devices.share_cpu_threads(two) is None


@pytest.mark.parametrize(
    ("cores", "size", "shares"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 2, 1, 3], 2, [[0, 2], [1, 3]]),
        ([4, 5, 6], 2, [[4], [5, 6]]),
        ([0, 1], 3, [None, None, None]),
        ([0, 1], 1, [[0, 1]]),
    ],
)
def test_cores_are_shared_out(cores, size, shares):
    received = [devices.share_of_cores(cores, rank, size) for rank in range(size)]
    assert received == shares


def test_freed_memory_is_kept_where_ranks_compute_on_cpus(monkeypatch):
    two = Topology(size=2, local_size=2)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    assert not devices.keep_freed_memory(Topology(), has_gpu=False)
    assert not devices.keep_freed_memory(two, has_gpu=True)
    monkeypatch.setenv("KERASMGPU_KEEP_MEMORY", "0")
    assert not devices.keep_freed_memory(two, has_gpu=False)
    monkeypatch.delenv("KERASMGPU_KEEP_MEMORY")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not devices.keep_freed_memory(two, has_gpu=False)


def test_join_is_once():
    assert collectives.join() is collectives.join()
