"""Optimizer updates in one operation of TensorFlow's, with Keras's numbers.

Keras 3 writes an update as some ten operations, each of which reads and writes whole
weights. On a CPU core that also computes, the time counts. TensorFlow has fused
operations for the usual optimizers: same formulas, same variables. Adam's differs by up
to 1e-5 of an update, because Keras takes 1 - beta of Python's numbers and TensorFlow of
float32. What is not covered here is left to Keras.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


def fused_update(
    optimizer: Any, plain: Any, gradient: Any, variable: Any, learning_rate: Any
) -> bool:
    """Updates a variable and the optimizer's slots.

    Args:
        optimizer: a built Keras optimizer.
        plain: its class, without what a wrapper adds.
        gradient: of the variable.
        variable: the `tf.Variable` or `keras.Variable` to update.
        learning_rate: scalar.

    Returns:
        Whether it was done; if not, nothing has changed.
    """
    if isinstance(variable, keras.Variable):
        variable = variable.value
    if (
        not isinstance(gradient, tf.Tensor)  # sparse gradients touch few rows
        or variable.dtype != tf.float32
        or gradient.dtype != tf.float32
        or not hasattr(variable, "handle")
    ):
        return False
    update = _UPDATES.get(plain.update_step)
    rate = tf.cast(learning_rate, tf.float32)
    return update is not None and update(optimizer, gradient, variable, rate)


def _adam(optimizer: Any, gradient: Any, variable: Any, rate: Any) -> bool:
    if optimizer.amsgrad:
        return False
    index = optimizer._get_variable_index(variable)
    step = keras.ops.cast(optimizer.iterations + 1, "float32")
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=optimizer._momentums[index].value.handle,
        v=optimizer._velocities[index].value.handle,
        beta1_power=tf.pow(tf.constant(optimizer.beta_1, tf.float32), step),
        beta2_power=tf.pow(tf.constant(optimizer.beta_2, tf.float32), step),
        lr=rate,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
        grad=gradient,
    )
    return True


def _sgd(optimizer: Any, gradient: Any, variable: Any, rate: Any) -> bool:
    if optimizer.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=rate, delta=gradient
        )
        return True
    index = optimizer._get_variable_index(variable)
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=optimizer.momentums[index].value.handle,
        lr=rate,
        grad=gradient,
        momentum=optimizer.momentum,
        use_nesterov=optimizer.nesterov,
    )
    return True


#: Taken by the method, so that a subclass with an update of its own is left alone.
_UPDATES = {
    keras.optimizers.Adam.update_step: _adam,
    keras.optimizers.SGD.update_step: _sgd,
}
