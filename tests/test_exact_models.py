"""N ranks = one process: kinds of models, steps and precisions."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from ranks import (
    assert_ranks_agree,
    assert_same,
    check,
    classification,
    cross_entropy,
    dense_net,
    one_and_all,
    strategy,
)

from kerasmgpu.collectives import all_gather_object, topology
from kerasmgpu.tensors import all_reduce

pytestmark = pytest.mark.world_size(2)


def compiled(model, **options):
    options = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": cross_entropy(),
        "metrics": ["accuracy"],
        **options,
    }
    model.compile(**options)
    return model


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh")
        self.head = layers.Dense(4)

    def call(self, x):
        return self.head(self.hidden(x))


def test_subclassed_unbuilt():
    x, y = classification(37)
    check(lambda: compiled(Subclassed()), x, y, batch_size=8)


def test_convolutions_and_pooling():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(22, 8, 8, 1)).astype("float32")
    y = generator.integers(0, 4, 22)

    def build():
        return compiled(
            keras.Sequential(
                [
                    layers.Conv2D(4, 3, activation="relu"),
                    layers.MaxPooling2D(),
                    layers.Flatten(),
                    layers.Dense(4),
                ]
            )
        )

    check(build, x, y, batch_size=8)


def two_inputs_two_outputs(dicts):
    a, b = keras.Input((8,), name="a"), keras.Input((3,), name="b")
    joined = layers.Concatenate()([layers.Dense(8)(a), layers.Dense(8)(b)])
    first = layers.Dense(4, name="first")(joined)
    second = layers.Dense(1, name="second")(joined)
    outputs = {"first": first, "second": second} if dicts else [first, second]
    inputs = {"a": a, "b": b} if dicts else [a, b]
    model = keras.Model(inputs, outputs)
    losses = [cross_entropy(), keras.losses.MeanSquaredError(reduction="sum")]
    model.compile(
        keras.optimizers.SGD(0.01),
        loss=dict(zip(("first", "second"), losses, strict=True)) if dicts else losses,
        loss_weights={"first": 1.0, "second": 0.3} if dicts else [1.0, 0.3],
        metrics={"first": ["accuracy"], "second": ["mae"]}
        if dicts
        else [["accuracy"], ["mae"]],
    )
    return model


@pytest.mark.parametrize("dicts", [False, True])
def test_many_inputs_and_outputs(dicts):
    x, y = classification(29)
    generator = np.random.default_rng(1)
    b = generator.normal(size=(29, 3)).astype("float32")
    t = generator.normal(size=(29, 1)).astype("float32")
    xs = {"a": x, "b": b} if dicts else [x, b]
    ys = {"first": y, "second": t} if dicts else [y, t]
    check(lambda: two_inputs_two_outputs(dicts), xs, ys, batch_size=8)


def test_embedding_shared_and_clipped():
    """Sparse gradients, of one table used twice; clipping looks at the slices."""
    generator = np.random.default_rng(2)
    x = generator.integers(0, 20, size=(26, 5))
    y = generator.integers(0, 4, 26)

    def build():
        tokens = keras.Input((5,), dtype="int32")
        table = layers.Embedding(20, 6)
        vectors = layers.Add()([table(tokens), table(19 - tokens)])
        model = keras.Model(tokens, layers.Dense(4)(layers.Flatten()(vectors)))
        return compiled(model, optimizer=keras.optimizers.Adam(0.01, clipnorm=0.05))

    check(build, x, y, batch_size=8, atol=2e-5)


def test_frozen_and_unused_weights():
    x, y = classification(30)

    class Partly(Subclassed):
        def __init__(self):
            super().__init__()
            self.unused = layers.Dense(3)
            self.unused.build((None, 8))
            self.hidden.trainable = False

    check(lambda: compiled(Partly()), x, y, batch_size=8)


def test_regularizers_and_added_losses():
    x, y = classification(29)

    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
            return x

    def build():
        return compiled(
            keras.Sequential(
                [
                    keras.Input((8,)),
                    layers.Dense(16, kernel_regularizer="l2"),
                    Penalty(),
                    layers.Dense(8, activity_regularizer=keras.regularizers.L2(0.01)),
                    layers.ActivityRegularization(l1=0.01),
                    layers.Dense(4),
                ]
            ),
            optimizer=keras.optimizers.SGD(0.02),
        )

    check(build, x, y, batch_size=8, validation_data=(x[:9], y[:9]))


class CustomStep(Subclassed):
    """The way Keras's guide writes it: own tape, own loss metric, own numbers."""

    def __init__(self):
        super().__init__()
        self.loss_mean = keras.metrics.Mean(name="own_loss")
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="hits")
        self.own_loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="sum"
        )

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.own_loss(y, predictions) + cross_entropy()(y, predictions)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        self.loss_mean.update_state(loss)
        self.hits.update_state(y, predictions)
        return {
            "renamed": self.hits.result(),
            "own_loss": self.loss_mean.result(),
            "number": tf.reduce_mean(x),
            "from_results": keras.ops.exp(self.loss_mean.result() / 9.0)
            + 2.0 * self.hits.result(),
        }


def test_custom_train_step():
    x, y = classification(29)

    def build():
        model = CustomStep()
        model.compile(optimizer=keras.optimizers.SGD(0.02))
        return model

    check(build, x, y, batch_size=8)


class FromMetricsAndData(CustomStep):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "mixed": logs["renamed"] * tf.reduce_mean(data[0])}


def test_a_log_of_metrics_and_data_is_warned_of():
    x, y = classification(16)
    model = FromMetricsAndData()
    model.compile(optimizer=keras.optimizers.SGD(0.02))
    model = strategy().wrap(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, verbose=0)
    told = [str(w.message) for w in caught if "from metrics and" in str(w.message)]
    assert bool(told) == topology().is_rank_zero
    assert all("'mixed'" in message for message in told)


class TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8)
        self.second = layers.Dense(4)

    def compile(self, one, two, **options):
        super().compile(**options)
        self.one, self.two = one, two

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x))
            other = loss * 2.0
        for optimizer, layer, value in (
            (self.one, self.first, loss),
            (self.two, self.second, other),
        ):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(value, weights), weights)
        return {"loss": loss}


def test_two_optimizers():
    x, y = classification(32)

    def build():
        model = TwoOptimizers()
        model.compile(
            keras.optimizers.SGD(0.1),
            keras.optimizers.Adam(0.01),
            loss=cross_entropy(),
        )
        return model

    check(build, x, y, batch_size=8)


@pytest.mark.parametrize("steps", [2, 4])
def test_steps_per_execution(steps):
    x, y = classification(53)
    check(
        lambda: compiled(dense_net(), steps_per_execution=steps),
        x,
        y,
        batch_size=8,
        validation_data=(x[:20], y[:20]),
    )


def test_steps_per_execution_of_unknown_length():
    x, y = classification(53)

    def dataset():
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        return batches.filter(lambda *_: True)

    check(lambda: compiled(dense_net(), steps_per_execution=3), dataset)


def test_run_eagerly():
    x, y = classification(29)
    check(
        lambda: compiled(dense_net(), run_eagerly=True),
        x,
        y,
        batch_size=8,
        validation_data=(x[:9], y[:9]),
    )


def test_run_eagerly_unbuilt():
    x, y = classification(21)
    check(lambda: compiled(Subclassed(), run_eagerly=True), x, y, batch_size=8)


def test_train_on_batch():
    x, y = classification(40)

    def train(model):
        results = {}
        for step, start in enumerate((0, 8, 16, 24, 32)):
            stop = start + (5 if step == 4 else 8)
            logs = model.train_on_batch(x[start:stop], y[start:stop], return_dict=True)
            results.update({f"{key}{step}": v for key, v in logs.items()})
        tested = model.test_on_batch(x[:7], y[:7], return_dict=True)
        results.update({f"test_{key}": v for key, v in tested.items()})
        weighted = model.train_on_batch(x[:8], y[:8], class_weight={0: 2.0, 1: 0.5})
        return {**results, "loss": weighted[0], "accuracy": weighted[1]}

    assert_same(*one_and_all(lambda: compiled(dense_net()), train))


def test_mixed_float16():
    x, y = classification(40)

    def build():
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return compiled(dense_net())
        finally:
            keras.config.set_dtype_policy("float32")

    model = check(build, x, y, batch_size=8, rtol=2e-2, atol=2e-3)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_mixed_bfloat16():
    x, y = classification(40)

    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return compiled(dense_net(), optimizer=keras.optimizers.SGD(0.1))
        finally:
            keras.config.set_dtype_policy("float32")

    check(build, x, y, batch_size=8, rtol=6e-2, atol=1e-2)


def batch_norm_net(synchronized, policy=None):
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, dtype=policy),
            layers.BatchNormalization(synchronized=synchronized, dtype=policy),
            layers.Dense(4),
        ]
    )
    return compiled(model)


def test_synchronized_batch_norm():
    x, y = classification(53)
    x += 3.0  # a mean that is larger than the deviation
    check(
        lambda: batch_norm_net(True),
        x,
        y,
        batch_size=8,
        validation_data=(x[:9], y[:9]),
        rtol=2e-4,
        atol=2e-5,
    )


class CentersRows(layers.Layer):
    """Means over ranks: as they are, in a traced function and in branches."""

    @tf.function
    def traced_mean(self, x):
        return all_reduce(tf.reduce_mean(x, 0))

    def call(self, x):
        x -= tf.stop_gradient(all_reduce(tf.reduce_mean(x, 0))) / 2
        x -= tf.stop_gradient(self.traced_mean(x)) / 2
        for mean in (tf.reduce_mean(x, 0), tf.reduce_mean(x**2, 0)):
            mean = tf.cond(
                tf.size(mean) > 0,
                lambda: all_reduce(mean),  # noqa: B023
                lambda: mean,  # noqa: B023
            )
            x -= tf.stop_gradient(mean) / 10
        return x


def test_a_rank_that_has_built_more_models():
    """Names of layers, and the numbers of branches, then differ between ranks."""
    x, y = classification(32)

    def build():
        return keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(16),
                CentersRows(),
                layers.BatchNormalization(synchronized=True),
                layers.Dense(4),
            ]
        )

    strategy()  # joins the job
    for _ in range(topology().rank):
        build()
    model = check(lambda: compiled(build()), x, y, batch_size=8)
    names = all_gather_object([layer.name for layer in model.layers])
    assert names[0] != names[1]


def test_plain_batch_norm_statistics_are_the_mean_over_ranks():
    x, y = classification(32)
    _, _, model, _ = one_and_all(
        lambda: batch_norm_net(False),
        lambda m: m.fit(x, y, batch_size=8, verbose=0, epochs=2),
    )
    assert_ranks_agree(model)


def test_save_and_load_in_between():
    x, y = classification(32)

    def train(model):
        model.fit(x, y, batch_size=8, verbose=0)
        weights = model.get_weights()
        model.set_weights(weights)
        return model.fit(x, y, batch_size=8, verbose=0, epochs=3, initial_epoch=1)

    assert_same(*one_and_all(lambda: compiled(dense_net()), train))
