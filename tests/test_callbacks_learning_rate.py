"""LearningRateScaling against formulas written down here."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import (
    SEED,
    assert_ranks_agree,
    classification,
    cross_entropy,
    dense_net,
    strategy,
)

from kerasmgpu.callbacks import LearningRateScaling
from kerasmgpu.collectives import topology
from kerasmgpu.errors import InvalidArgumentError

X, Y = classification(64)
BATCH, STEPS = 16, 4
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def net(optimizer: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(SEED)
    model = dense_net()
    model.compile(optimizer=optimizer, loss=cross_entropy(), **options)
    return model


def wrapped(optimizer: Any, **options: Any) -> keras.Model:
    return strategy().wrap(net(optimizer, **options))


def fit(model: keras.Model, *callbacks: Any, **options: Any) -> Any:
    options = {"batch_size": BATCH, "epochs": 3, "verbose": 0, **options}
    return model.fit(X, Y, callbacks=list(callbacks), **options)


def on_sizes(*sizes: int) -> Any:
    marks = [pytest.param(n, marks=pytest.mark.world_size(n)) for n in sizes]
    return pytest.mark.parametrize("size", marks)


def ramp(start: float, target: float, length: int, total: int) -> list[float]:
    return [
        start + (target - start) * min(t, length) / length for t in range(1, total + 1)
    ]


class SetRates(keras.callbacks.Callback):
    """The rates given, one a batch; the velocity is scaled with them."""

    def __init__(self, rates: list[float], correct: bool = True) -> None:
        super().__init__()
        self.rates = list(rates)
        self.correct = correct

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        old, new = float(optimizer.learning_rate), self.rates.pop(0)
        if self.correct and optimizer.built and old > 0:
            for velocity in getattr(optimizer, "momentums", []):
                velocity.assign(velocity * (new / old))
        optimizer.learning_rate = new


def assert_close(a: keras.Model, b: keras.Model) -> None:
    for one, other in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=2e-6)
    assert_ranks_agree(b)


@pytest.mark.parametrize(
    ("size", "steps_per_execution", "correction"),
    [
        pytest.param(1, 1, "auto", marks=pytest.mark.world_size(1)),
        pytest.param(2, 3, "auto", marks=pytest.mark.world_size(2)),
        pytest.param(2, 1, False, marks=pytest.mark.world_size(2)),
    ],
)
def test_every_update_has_its_rate_and_velocity(
    size: int, steps_per_execution: int, correction: Any
) -> None:
    rates = ramp(0.05, 0.1, 2 * STEPS, 3 * STEPS)
    plain = net(SGD(0.05, momentum=0.9))
    fit(plain, SetRates(rates, correct=correction == "auto"))
    model = wrapped(SGD(0.05, momentum=0.9), steps_per_execution=steps_per_execution)
    scaling = LearningRateScaling(8, warmup_epochs=2, momentum_correction=correction)
    history = fit(model, scaling)
    assert_close(plain, model)
    expected = [rates[STEPS - 1], rates[2 * STEPS - 1], 0.1]
    np.testing.assert_allclose(history.history["learning_rate"], expected, rtol=1e-6)


@on_sizes(2)
def test_from_zero_by_the_square_root_through_loss_scaling(size: int) -> None:
    rates = ramp(0.0, 0.02 * 2**0.5, STEPS, 3 * STEPS)
    plain = net(keras.optimizers.LossScaleOptimizer(Adam(0.02)))
    fit(plain, SetRates(rates))
    model = wrapped(keras.optimizers.LossScaleOptimizer(Adam(0.02)))
    scaling = LearningRateScaling(8, rule="sqrt", warmup_epochs=1, warmup_from="zero")
    fit(model, scaling)
    assert_close(plain, model)


@on_sizes(2)
def test_a_schedule_is_kept_and_multiplied(size: int) -> None:
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, STEPS, 0.5)
    factors = ramp(1.0, 2.0, STEPS, 3 * STEPS)
    rates = [float(decay(i)) * factor for i, factor in enumerate(factors)]
    plain = net(SGD(0.1))
    fit(plain, SetRates(rates))
    model = wrapped(SGD(decay))
    history = fit(model, LearningRateScaling(8, warmup_epochs=1))
    assert_close(plain, model)
    expected = rates[STEPS - 1 :: STEPS]
    np.testing.assert_allclose(history.history["learning_rate"], expected, rtol=1e-6)
    config = model.optimizer.get_config()["learning_rate"]
    assert config["class_name"] == "ExponentialDecay"


@on_sizes(1, 2)
def test_nothing_is_scaled_twice(size: int) -> None:
    model = wrapped(SGD(0.1))
    fit(model, LearningRateScaling(8, warmup_epochs=1), LearningRateScaling(8))
    first = float(model.optimizer.learning_rate)
    assert first == pytest.approx(0.16)  # 0.1 to 0.2 over 5 epochs, of which 3 are over
    fit(model, LearningRateScaling(8), initial_epoch=3, epochs=6)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.2)
    model.optimizer.learning_rate = 0.03  # as ReduceLROnPlateau does
    fit(model, LearningRateScaling(8), initial_epoch=6, epochs=7)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.03)
    fit(model, epochs=1)  # and without the callback nothing changes either
    assert float(model.optimizer.learning_rate) == pytest.approx(0.03)


@on_sizes(2)
def test_after_the_ramp_plateaus_reduce_the_rate(size: int) -> None:
    model = wrapped(SGD(0.1))
    plateau = keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=1, min_delta=10.0
    )
    history = fit(model, plateau, LearningRateScaling(8, warmup_epochs=1), epochs=4)
    rates = history.history["learning_rate"]
    np.testing.assert_allclose(rates, [0.2, 0.2, 0.1, 0.05], rtol=1e-6)


@on_sizes(2)
def test_an_optimizer_that_has_trained_needs_its_base_rate(size: int) -> None:
    model = wrapped(SGD(0.1))
    fit(model, epochs=1)
    with pytest.raises(InvalidArgumentError, match="has made 4 updates"):
        fit(model, LearningRateScaling(8))
    scaling = LearningRateScaling(8, base_learning_rate=0.05, warmup_epochs=0)
    fit(model, scaling, epochs=1)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)


@on_sizes(1, 2)
def test_the_batch_of_a_dataset_and_the_line_that_is_printed(
    size: int, capfd: Any
) -> None:
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).prefetch(1)
    model = wrapped(SGD(0.1))
    scaling = LearningRateScaling(4, warmup_epochs=2, verbose=1)
    model.fit(dataset, epochs=1, callbacks=[scaling], verbose=0)
    line = (
        "base rate 0.1 x 4 (rule 'linear', base batch 4, global batch 16) = 0.4; "
        "warm-up over 8 updates from base"
    )
    assert (line in capfd.readouterr().out) == topology().is_rank_zero
    unknown = dataset.unbatch().padded_batch(BATCH).filter(lambda x, y: True)
    with pytest.raises(InvalidArgumentError, match="how many steps an epoch has"):
        model.fit(unknown, callbacks=[LearningRateScaling(4)], verbose=0)
    generator = tf.data.Dataset.from_generator(
        lambda: iter([(X, Y)]),
        output_signature=(
            tf.TensorSpec((None, 8), tf.float32),
            tf.TensorSpec((None,), tf.int64),
        ),
    )
    with pytest.raises(InvalidArgumentError, match="cannot tell the global batch"):
        model.fit(generator, callbacks=[LearningRateScaling(4)], verbose=0)


@pytest.mark.world_size(2)
def test_ranks_with_batches_of_their_own_make_one_global_batch() -> None:
    keras.utils.set_random_seed(SEED)
    model = strategy(sharding="none").wrap(net(SGD(0.1)))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    scaling = LearningRateScaling(8, warmup_epochs=0)
    model.fit(dataset, epochs=1, callbacks=[scaling], verbose=0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.4)


@on_sizes(2)
def test_what_cannot_be_scaled_is_refused_before_training(size: int) -> None:
    model = wrapped(SGD(lambda: 0.1))
    with pytest.raises(InvalidArgumentError, match="cannot scale a learning rate"):
        fit(model, LearningRateScaling(8))
    model = wrapped(SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)))
    with pytest.raises(InvalidArgumentError, match="one of the two"):
        fit(model, LearningRateScaling(8, base_learning_rate=0.1))
    model = wrapped(Adam(0.1))
    with pytest.raises(InvalidArgumentError, match="is for SGD with momentum"):
        fit(model, LearningRateScaling(8, momentum_correction=True))
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "cubic"}, "rule to be one of 'linear', 'sqrt', 'none'"),
        ({"base_batch_size": 0}, "base_batch_size to be a positive number"),
        ({"base_batch_size": -4}, "base_batch_size to be a positive number"),
        ({"base_learning_rate": 0}, "base_learning_rate to be a positive number"),
        ({"warmup_epochs": -1}, "warmup_epochs to be a number of epochs"),
        ({"warmup_from": "target"}, "warmup_from to be one of 'base', 'zero'"),
        ({"momentum_correction": "yes"}, "momentum_correction to be one of 'auto'"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LearningRateScaling(**{"base_batch_size": 32, **arguments})


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="needs a wrapped model"):
        fit(net(SGD(0.1)), LearningRateScaling(8))
