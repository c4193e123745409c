"""N ranks = one process: optimizers."""

from __future__ import annotations

import keras
import pytest
from ranks import check, classification, cross_entropy, dense_net

pytestmark = pytest.mark.world_size(2)

K = keras.optimizers

OPTIMIZERS = {
    "momentum": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: K.Adam(0.01, epsilon=1e-4),
    "clipnorm": lambda: K.SGD(0.1, clipnorm=0.05),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.01),
    "global_clipnorm": lambda: K.SGD(0.1, global_clipnorm=0.05),
    "weight_decay_and_ema": lambda: K.AdamW(
        0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3, epsilon=1e-4
    ),
    "schedule": lambda: K.SGD(K.schedules.ExponentialDecay(0.1, 5, 0.5)),
    "accumulation": lambda: K.Adam(
        0.01, gradient_accumulation_steps=3, global_clipnorm=0.1, epsilon=1e-4
    ),
    "loss_scale": lambda: K.LossScaleOptimizer(K.SGD(0.1, clipnorm=0.1)),
    "loss_scale_accumulation": lambda: K.LossScaleOptimizer(
        K.SGD(0.1, gradient_accumulation_steps=2)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    x, y = classification(53)

    def build():
        model = dense_net()
        model.compile(OPTIMIZERS[name](), cross_entropy(), metrics=["accuracy"])
        return model

    # 53 rows in batches of 8: the last has 5, which two ranks cut into 2 and 3.
    check(build, x, y, batch_size=8, validation_data=(x[:11], y[:11]))


def test_loss_scale_skips_the_same_steps():
    """A gradient that overflows on one rank alone makes all ranks skip the step."""
    x, y = classification(32)
    x[1] = float("inf")  # rank 0 has it

    def build():
        model = dense_net()
        optimizer = K.LossScaleOptimizer(K.SGD(0.1), initial_scale=2.0**10)
        model.compile(optimizer, cross_entropy())
        return model

    model = check(build, x, y, batch_size=16, shuffle=False, epochs=1)
    assert int(model.optimizer.inner_optimizer.iterations.numpy()) == 1
