"""`jit_compile=True` on several ranks: the step compiled by XLA around the reduce.

Horovod's operations cannot run inside XLA. So forward pass, loss and backward pass are
one compiled function, and the optimizer's update another; between them gradients are
weighed and reduced as ever. Metrics are outside. A model of which XLA cannot compile
something is found out before the first step, and runs without XLA.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.control import Step, in_step
from kerasmgpu.keras_compat import mask_of, set_mask, tree
from kerasmgpu.optimizer import compiled_update


def is_keras_step(train_step: Any) -> bool:
    """Whether a model's own `train_step` is the one that Keras gives every model."""
    return getattr(train_step, "__func__", None) is keras.Model.train_step


def train_step(model: Any, data: Any) -> Any:
    """Keras's `train_step` in a graph, with its computation compiled by XLA.

    Args:
        model: a wrapped, compiled model.
        data: a batch of this rank's rows, as Keras hands it to `train_step`.

    Returns:
        The logs.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    compute = tf.function(_forward_and_backward, jit_compile=True, autograph=False)
    loss, y_pred, masks, gradients = compute(model, x, y, sample_weight)
    for prediction, mask in zip(tree.flatten(y_pred), masks, strict=True):
        if mask is not None:
            set_mask(prediction, mask)
    rows = tf.shape(next(leaf for leaf in tree.flatten(x) if leaf is not None))[0]
    model._loss_tracker.update_state(loss, sample_weight=rows)
    weights = model.trainable_weights
    if not model.optimizer.built:
        model.optimizer.build(weights)
    with compiled_update():
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _forward_and_backward(model: Any, x: Any, y: Any, sample_weight: Any) -> Any:
    """The loss, the predictions, their masks (flat), and the weights' gradients."""
    with tf.GradientTape() as tape:
        options = {"training": True} if model._call_has_training_arg else {}
        y_pred = model(x, **options)
        loss = model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
        scaled = model.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, model.trainable_weights)
    return loss, y_pred, [mask_of(leaf) for leaf in tree.flatten(y_pred)], gradients


def what_xla_refuses(model: Any, data: Any) -> str | None:
    """Why forward and backward pass cannot be compiled; None where they can.

    They are compiled for two rows, and not run. Must be called inside a step.

    Args:
        model: as of `train_step`.
        data: the batch, of which shapes and types count.
    """

    def rows_of(leaf: Any) -> Any:
        if leaf is None:
            return None
        shape = [2, *(size or 2 for size in leaf.shape[1:])]
        return tf.zeros(shape, leaf.dtype)

    with tf.init_scope(), contextlib.ExitStack() as stack:
        one = tf.constant(1.0)
        rows = tf.constant(2.0, tf.float64)
        stack.enter_context(in_step(Step(rows, rows, one, training=True)))
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
            tree.map_structure(rows_of, data)
        )
        try:
            compute = tf.function(
                _forward_and_backward, jit_compile=True, autograph=False
            )
            compute.experimental_get_compiler_ir(model, x, y, sample_weight)("hlo")
        except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
            return str(error).strip().splitlines()[0]
    return None
