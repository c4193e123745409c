"""Steps in pieces (`micro_batch_size`): the numbers of whole steps, in less memory."""

from __future__ import annotations

import resource
import subprocess
import sys

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from keras import layers
from ranks import (
    SEED,
    assert_same,
    classification,
    cross_entropy,
    dense_net,
    one_and_all,
)

import kerasmgpu
from kerasmgpu.collectives import topology

K = keras.optimizers


def compiled(model, **options):
    options = {
        "optimizer": K.SGD(0.1, momentum=0.9),
        "loss": cross_entropy(),
        "metrics": ["accuracy"],
        **options,
    }
    model.compile(**options)
    return model


class OwnLogs(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        from_results = keras.ops.exp(-logs["loss"]) + logs["accuracy"]
        return {**logs, "from_results": from_results, "mean": keras.ops.mean(x)}


def dense():
    # Weighted, regularized, clipped; activations penalized.
    x = keras.Input((8,))
    h = layers.Dense(16, "relu", kernel_regularizer=keras.regularizers.L2(0.1))(x)
    h = layers.ActivityRegularization(l2=0.01)(h)
    return compiled(
        OwnLogs(x, layers.Dense(4)(h)),
        optimizer=K.SGD(0.1, global_clipnorm=0.5),
        weighted_metrics=["accuracy"],
    )


def accumulating():
    return compiled(
        dense_net(),
        optimizer=K.Adam(0.01, gradient_accumulation_steps=2, epsilon=1e-4),
        steps_per_execution=3,
    )


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
        return x


def eager():
    net = keras.Sequential([keras.Input((8,)), Penalty(), layers.Dense(4)])
    return compiled(net, run_eagerly=True)


def two_heads():
    x = keras.Input((8,))
    heads = [layers.Dense(4, name=name)(x) for name in ("a", "b")]
    loss = [cross_entropy(reduction="mean_with_sample_weight"), cross_entropy()]
    loss[1].reduction = "sum"
    return compiled(
        keras.Model(x, heads),
        loss=loss,
        loss_weights=[1.0, 0.05],
        optimizer=K.SGD(0.01),
        metrics=[["accuracy"], [keras.metrics.SparseCategoricalAccuracy()]],
    )


def scaled():
    return compiled(
        dense_net(), optimizer=K.LossScaleOptimizer(K.SGD(0.1, clipnorm=0.1))
    )


DENSE = {
    "dense": dense,
    "accumulating": accumulating,
    "eager": eager,
    "two_heads": two_heads,
    "scaled": scaled,
}


def pieces_are_the_whole(build, x, y, micro_batch_size=2, **fit):
    # Batches of 8 of 25 rows: the last has one, fewer than ranks and than a piece.
    fit = {"batch_size": 8, "epochs": 2, "verbose": 0, **fit}
    result = one_and_all(
        build, lambda model: model.fit(x, y, **fit), micro_batch_size=micro_batch_size
    )
    assert_same(*result)


def dense_case(name):
    x, y = classification(25)
    weight = np.random.default_rng(3).uniform(0, 2, 25).astype("float32")
    ys = [y, (y + 1) % 4] if name == "two_heads" else y
    pieces_are_the_whole(DENSE[name], x, ys, sample_weight=weight)


def masked(eagerly, micro_batch_size=3):
    """Masks that differ by row, sparse gradients, clipping that looks at the slices."""
    generator = np.random.default_rng(2)
    x = generator.integers(1, 20, size=(25, 6)) * (
        np.arange(6) < generator.integers(1, 7, size=(25, 1))
    )
    y = generator.integers(0, 4, size=(25, 6))

    def build():
        tokens = keras.Input((6,), dtype="int32")
        vectors = layers.Embedding(20, 5, mask_zero=True)(tokens)
        model = keras.Model(tokens, layers.Dense(4)(vectors))
        return compiled(
            model,
            optimizer=K.Adam(0.01, clipnorm=0.05, epsilon=1e-4),
            run_eagerly=eagerly,
        )

    pieces_are_the_whole(build, x, y, micro_batch_size=micro_batch_size)


@pytest.mark.parametrize("name", DENSE)
def test_one_process(name):
    dense_case(name)


@pytest.mark.parametrize("eagerly", [False, True])
def test_one_process_masked(eagerly):
    masked(eagerly)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", DENSE)
def test_two_ranks(name):
    dense_case(name)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("eagerly", [False, True])
def test_two_ranks_masked(eagerly):
    masked(eagerly)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", ["dense", "two_heads"])
def test_three_ranks(name):
    dense_case(name)


@pytest.mark.world_size(3)
def test_three_ranks_masked():
    masked(False)


def test_bad_values():
    for value in (0, -1, 2.5, True, "all"):
        with pytest.raises(ValueError, match="micro_batch_size to be None, a number"):
            kerasmgpu.HorovodStrategy(micro_batch_size=value)


@pytest.mark.world_size(2)
def test_what_cannot_be_split_is_refused():
    x, y = classification(8)

    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    synchronized = layers.BatchNormalization(synchronized=True)
    for model, words in (
        (Own([layers.Dense(4)]), "train_step of one's own.*Own.train_step"),
        (keras.Sequential([synchronized, layers.Dense(4)]), "synchronized=True"),
    ):
        strategy = kerasmgpu.HorovodStrategy(micro_batch_size=2)
        with pytest.raises(ValueError, match=f"Rank {strategy.rank} of 2: .*{words}"):
            strategy.wrap(compiled(model)).fit(x, y, verbose=0)


class Tight(layers.Layer):
    """Runs out of memory on these ranks with more than `most` rows at a time."""

    def __init__(self, most, ranks=()):
        super().__init__()
        self.most, self.here = most, topology().rank in ranks
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        def check(rows):
            if self.here and rows > self.most:
                raise MemoryError("no room")
            return rows

        if not training:
            return x
        drawn = keras.random.uniform((), seed=self.seeds)  # a state to be put back
        rows = tf.py_function(check, [tf.shape(x)[0]], tf.int32)
        return x + 0.0 * (drawn + tf.cast(tf.reshape(rows, []), x.dtype))


def tight(most, ranks, **options):
    options = {"run_eagerly": False, "steps_per_execution": 2, **options}
    net = keras.Sequential([keras.Input((8,)), Tight(most, ranks), *dense_net().layers])
    return compiled(net, optimizer=K.Adam(0.01, epsilon=1e-4), **options)


def halved(capsys, ranks, most, chosen, eager=False):
    """Fails with pieces of more than `most` rows on some ranks; ends with `chosen`."""
    x, y = classification(25)
    building = iter([(), ranks])  # the plain model has room
    result = one_and_all(
        lambda: tight(most, next(building), run_eagerly=eager),
        lambda model: model.fit(x, y, batch_size=12, epochs=2, verbose=0),
        micro_batch_size="auto",
    )
    assert_same(*result)
    assert result[2]._kerasmgpu.piece_size.rows == chosen
    said = capsys.readouterr().out.count(f"micro_batch_size={chosen}")
    assert said == (chosen is not None and topology().is_rank_zero)


def test_auto_one_process(capsys):
    halved(capsys, (0,), 4, 3)


def test_auto_one_process_with_room(capsys):
    halved(capsys, (), 0, None)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("eager", [False, True])
def test_auto_one_rank_fails(capsys, eager):
    halved(capsys, (1,), 2, 2, eager)


@pytest.mark.world_size(2)
def test_auto_all_ranks_fail(capsys):
    halved(capsys, (0, 1), 1, 1)


@pytest.mark.world_size(2)
def test_auto_masked():
    masked(False, "auto")


@pytest.mark.world_size(2)
def test_auto_no_row_fits():
    x, y = classification(8)
    strategy = kerasmgpu.HorovodStrategy(micro_batch_size="auto")
    model = strategy.wrap(tight(0, (1,)))
    words = f"Rank {strategy.rank} of 2: .*one row on rank.s. 1 of 2"
    with pytest.raises(MemoryError, match=words):
        model.fit(x, y, verbose=0)


class OneTightStep(keras.callbacks.Callback):
    """During the first step the process gets no more than so much more memory."""

    def __init__(self, megabytes):
        super().__init__()
        self.bytes = megabytes << 20

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            in_use = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (in_use + self.bytes, -1))

    def on_train_batch_end(self, batch, logs=None):
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))


@pytest.mark.world_size(2)
def test_auto_when_the_allocator_fails(capsys):
    """TensorFlow's own error, for memory that the system does not give."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4096, 8)).astype("float32")
    y = generator.integers(0, 4, size=4096)

    def build():
        keras.utils.set_random_seed(SEED)
        # 2,048 rows on a rank: 78 MiB each time that they are held.
        wide = [layers.Dense(10_000), *[layers.Activation("tanh") for _ in range(3)]]
        return compiled(keras.Sequential([keras.Input((8,)), *wide, layers.Dense(4)]))

    def train(model, callbacks):
        model.fit(x[:8], y[:8], verbose=0)  # threads and variables are there then
        return model.fit(x, y, batch_size=4096, verbose=0, callbacks=callbacks)

    # The plain one later: what TensorFlow has got, it keeps.
    ranked = kerasmgpu.HorovodStrategy(micro_batch_size="auto").wrap(build())
    result = train(ranked, [OneTightStep(200)] if topology().rank == 1 else [])
    said = capsys.readouterr().out.count("memory did not suffice on rank(s) 1 of 2")
    assert (said > 0) == topology().is_rank_zero
    one = build()
    assert_same(one, train(one, []), ranked, result)


MEMORY = """
import resource, sys
import keras, numpy as np
import kerasmgpu
size = int(sys.argv[1]) or None
model = keras.Sequential([
    keras.Input((64, 64, 1)),
    *[keras.layers.Conv2D(16, 3, padding="same", activation="tanh") for _ in range(6)],
    keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model = kerasmgpu.HorovodStrategy(micro_batch_size=size).wrap(model)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
model.fit(np.ones((2, 64, 64, 1)), np.ones(2), batch_size=2, verbose=0)
before = peak()
model.fit(np.ones((128, 64, 64, 1)), np.ones(128), batch_size=128, verbose=0)
print("MiB more:", peak() - before)
"""


def test_memory_falls():
    """Peak memory of a step, above that of a tiny one."""
    peaks = []
    for size in (0, 8):
        result = subprocess.run(
            [sys.executable, "-c", MEMORY, str(size)],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert "MiB more:" in result.stdout, result.stderr
        peaks.append(float(result.stdout.rsplit(":", 1)[1]))
    whole, pieces = peaks
    print(f"peak memory of a step: {whole:.0f} MiB whole, {pieces:.0f} MiB in pieces")
    assert pieces < whole / 2
