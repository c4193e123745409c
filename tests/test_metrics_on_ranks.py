"""Metrics over ranks: the state is summed, then the result is taken."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import check, classification, cross_entropy, dense_net, one_and_all

pytestmark = pytest.mark.world_size(2)

M = keras.metrics


def binary(rows=45):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(rows, 8)).astype("float32")
    return x, (x[:, :1] + generator.normal(size=(rows, 1)) > 0).astype("float32")


class TrueRows(M.Metric):
    """As a user writes one: sums, and a division in the end."""

    def __init__(self, name="true_rows"):
        super().__init__(name=name)
        self.hits = self.add_weight(name="hits", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        hits = tf.cast((y_pred > 0.5) == (y_true > 0.5), tf.float32)
        self.hits.assign_add(tf.reduce_sum(hits))
        self.rows.assign_add(tf.shape(y_true)[0])

    def result(self):
        return self.hits / tf.cast(self.rows, tf.float32)


class StartsAtOne(TrueRows):
    """A state whose start is not zero, and a constant in it."""

    def __init__(self):
        super().__init__("starts_at_one")
        self.threshold = self.add_weight(name="t", initializer="ones")

    def reset_state(self):
        self.hits.assign(1.0)
        self.rows.assign(1)
        self.threshold.assign(0.7)


class RunningMaximum(M.Metric):
    def __init__(self):
        super().__init__(name="running_maximum")
        self.highest = self.add_weight(name="highest", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.highest.assign(tf.maximum(self.highest, tf.reduce_max(y_pred)))

    def result(self):
        return self.highest


class MeanOfBatchMeans(RunningMaximum):
    def __init__(self):
        super().__init__()
        self.name = "mean_of_batch_means"
        self.batches = self.add_weight(name="batches", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.highest.assign_add(tf.reduce_mean(y_pred))
        self.batches.assign_add(1.0)


def build_with(*metrics, **options):
    def build():
        model = dense_net(classes=1)
        model.add(keras.layers.Activation("sigmoid"))
        made = [m() if isinstance(m, type) or callable(m) else m for m in metrics]
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=made, **options)
        return model

    return build


def test_metrics_of_every_kind():
    x, y = binary()
    build = build_with(
        lambda: M.AUC(num_thresholds=50),
        M.Precision,
        M.Recall,
        lambda: M.F1Score(threshold=0.5),
        M.R2Score,
        M.RootMeanSquaredError,
        lambda: M.MeanIoU(num_classes=2),
        lambda: M.SensitivityAtSpecificity(0.5, num_thresholds=20),
        M.FalsePositives,
        M.CosineSimilarity,
        TrueRows,
        StartsAtOne,
    )
    check(build, x, y, batch_size=8, validation_data=(x[:13], y[:13]))


def test_function_that_returns_a_scalar():
    x, y = binary(29)

    def error(y_true, y_pred):
        return tf.reduce_mean(tf.abs(y_true - y_pred))

    def build():
        model = dense_net(classes=1)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[error])
        return model

    check(build, x, y, batch_size=8, validation_data=(x[:13], y[:13]))


class HiddenState(M.Metric):
    """Keeps its state where Keras does not see it."""

    def __init__(self):
        super().__init__(name="hidden_state")
        self.total = tf.Variable(0.0)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(y_pred))

    def result(self):
        return self.total.read_value()

    def reset_state(self):
        self.total.assign(0.0)


@pytest.mark.parametrize("metric", [RunningMaximum, MeanOfBatchMeans, HiddenState])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_what_cannot_be_summed_is_refused(metric, run_eagerly):
    x, y = binary()
    with pytest.raises(ValueError, match="cannot be summed") as caught:
        one_and_all(
            build_with(metric, run_eagerly=run_eagerly),
            lambda m: m.fit(x, y, batch_size=8, verbose=0),
        )
    names = ("running_maximum", "mean_of_batch_means", "hidden_state")
    place = (RunningMaximum, MeanOfBatchMeans, HiddenState).index(metric)
    assert names[place] in str(caught.value)


def test_evaluate_refuses_too():
    x, y = binary()
    with pytest.raises(ValueError, match="running_maximum"):
        one_and_all(build_with(RunningMaximum), lambda m: m.evaluate(x, y, verbose=0))


def test_result_after_evaluate_is_global():
    x, y = classification(29)

    def build():
        model = dense_net()
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
        return model

    def evaluate(model):
        values = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
        again = {k: float(v) for k, v in model.get_metrics_result().items()}
        assert again == pytest.approx(values)
        # What is summed is not summed twice.
        return model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)

    _, expected, _, values = one_and_all(build, evaluate)
    assert values == pytest.approx(expected, rel=1e-4)
