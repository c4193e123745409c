"""`predict` gives all rows, in order, on every rank; `local()` this rank's alone."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import classification, dense_net, one_and_all, strategy

from kerasmgpu.collectives import topology

pytestmark = pytest.mark.world_size(3)


def same(build, predict, **options):
    _, expected, _, got = one_and_all(build, predict, **options)
    flat = tf.nest.flatten(expected)
    for a, b in zip(flat, tf.nest.flatten(got), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-4, atol=1e-6)
    tf.nest.assert_same_structure(expected, got)


@pytest.mark.parametrize(
    ("rows", "batch_size"), [(1, None), (2, 4), (8, None), (29, 4)]
)
def test_arrays(rows, batch_size):
    x, _ = classification(rows)
    same(dense_net, lambda m: m.predict(x, batch_size=batch_size, verbose=0))


def test_datasets_and_steps():
    x, _ = classification(29)
    data = tf.data.Dataset.from_tensor_slices(x).batch(8)
    same(dense_net, lambda m: m.predict(data, verbose=0))
    same(dense_net, lambda m: m.predict(data.filter(lambda *_: True), verbose=0))
    same(dense_net, lambda m: m.predict(data.repeat(), steps=5, verbose=0))


def test_steps_per_execution():
    x, _ = classification(29)

    def build():
        model = dense_net()
        model.compile(steps_per_execution=3)
        return model

    same(build, lambda m: m.predict(x, batch_size=4, verbose=0))


def test_many_outputs():
    x, _ = classification(11)

    def build():
        inputs = keras.Input((8,))
        outputs = {
            "a": keras.layers.Dense(3)(inputs),
            "b": [keras.layers.Dense(1)(inputs), keras.layers.Flatten()(inputs)],
        }
        return keras.Model(inputs, outputs)

    same(build, lambda m: m.predict(x, batch_size=4, verbose=0))


def test_rows_of_different_lengths():
    """Batches of different lengths give a ragged result, as in plain Keras."""
    generator = np.random.default_rng(0)
    pieces = [generator.normal(size=(4, n, 3)).astype("float32") for n in (2, 5, 3)]

    def data():
        signature = tf.TensorSpec([None, None, 3], tf.float32)
        return tf.data.Dataset.from_generator(
            lambda: iter(pieces), output_signature=signature
        )

    def build():
        return keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(2)])

    _, expected, _, got = one_and_all(build, lambda m: m.predict(data(), verbose=0))
    assert isinstance(got, tf.RaggedTensor)
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


def test_unbuilt_model_gets_rank_zeros_weights():
    x, _ = classification(9)
    keras.utils.set_random_seed(topology().rank)
    model = strategy().wrap(keras.Sequential([keras.layers.Dense(2)]))
    predicted = model.predict(x, verbose=0)
    np.testing.assert_allclose(predicted, model(x), rtol=1e-5, atol=1e-6)


def test_callbacks_see_plain_outputs():
    x, _ = classification(9)
    seen = []
    watch = keras.callbacks.LambdaCallback()
    watch.on_predict_batch_end = lambda batch, logs: seen.append(logs["outputs"])
    strategy().wrap(dense_net()).predict(x, verbose=0, callbacks=[watch])
    assert [tuple(o.shape) for o in seen] == [(3, 4)]


def test_local_needs_no_other_rank():
    x, y = classification(20)
    model = dense_net()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    own = strategy()
    own.wrap(model).fit(x, y, verbose=0)
    if topology().rank == 1:
        with own.local():
            values = model.evaluate(x, y, verbose=0)
            predicted = model.predict(x, verbose=0)
        np.testing.assert_allclose(predicted, model(x), rtol=1e-5, atol=1e-6)
        assert np.isfinite(values)
    everywhere = model.evaluate(x, y, verbose=0)
    if topology().rank == 1:
        assert values == pytest.approx(everywhere, rel=1e-4)


def test_training_locally_is_refused():
    x, y = classification(20)
    model = dense_net()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    own = strategy()
    own.wrap(model)
    with own.local(), pytest.raises(RuntimeError, match=r"Received: fit\(\)"):
        model.fit(x, y, verbose=0)
    with own.local(), pytest.raises(RuntimeError, match="train_on_batch"):
        model.train_on_batch(x, y)


def test_predict_step_that_returns_no_rows():
    class Total(keras.Model):
        def call(self, x):
            return tf.reduce_sum(x)

    x, _ = classification(9)
    with pytest.raises(ValueError, match="one row for each"):
        strategy().wrap(Total()).predict(x, verbose=0)
