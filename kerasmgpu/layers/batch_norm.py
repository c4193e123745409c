"""`BatchNormalization(synchronized=True)`: the moments of the global batch.

Inside a wrapped model's step the layer's moments are computed over the rows of all
ranks, gradients included, with one small all-reduce forward and one backward a layer.
Plain layers keep the moments of each rank's own rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.collectives import reduce_tensor
from kerasmgpu.control import Step, current_step
from kerasmgpu.overriding import overridden


@contextlib.contextmanager
def synchronized_moments(model: Any) -> Iterator[None]:
    """While it lasts, the model's synchronized layers see the global batch."""
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        and getattr(layer, "synchronized", False)
    ]
    with overridden(layers, "_moments", _moments_of):
        yield


def _moments_of(layer: Any) -> Any:
    local = layer._moments

    def moments(inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        step = current_step()
        if step is None:
            return local(inputs, mask)
        axes = list(layer._reduction_axes)
        return global_moments(inputs, mask, axes, step)

    return moments


def global_moments(
    inputs: tf.Tensor, mask: tf.Tensor | None, axes: list[int], step: Step
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and (biased) variance over the entries of all ranks.

    Each rank's count, mean and variance are joined in float64 (Chan, Golub and LeVeque
    1983, "Algorithms for computing the sample variance"), so nothing is lost to a large
    mean.

    Args:
        inputs: this rank's rows, any float type, channels on the axis not in `axes`.
        mask: bool or 0/1, the shape of `inputs` without its last axis; entries that are
            False do not count.
        axes: the axes that are reduced.
        step: the step; a rank without rows counts nothing.

    Returns:
        Two float32 vectors, one entry a channel.
    """
    x = tf.cast(inputs, tf.float32)
    if mask is None:
        weights = tf.ones_like(x)
    else:
        weights = tf.cast(mask, tf.float32)[..., tf.newaxis] * tf.ones_like(x)
        x = tf.where(weights > 0, x, tf.zeros_like(x))
    counts = tf.reduce_sum(weights, axes)
    counts = tf.where(step.rows > 0, counts, tf.zeros_like(counts))
    entries = tf.math.maximum(tf.reduce_sum(weights, axes, keepdims=True), 1.0)
    mean = tf.reduce_sum(x, axes, keepdims=True) / entries
    deviation = tf.math.squared_difference(x, mean) * weights
    variance = tf.reduce_sum(deviation, axes) / tf.reshape(entries, [-1])
    n = tf.cast(counts, tf.float64)
    m = tf.cast(tf.reshape(mean, [-1]), tf.float64)
    v = tf.cast(variance, tf.float64)
    sums = _weighted_sum(tf.stack([n, n * m, n * (v + m * m)]), step.weight)
    total = tf.math.maximum(tf.stop_gradient(sums[0]), 1.0)
    global_mean = sums[1] / total
    global_variance = sums[2] / total - tf.square(global_mean)
    return tf.cast(global_mean, tf.float32), tf.cast(global_variance, tf.float32)


def _weighted_sum(value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """A sum over ranks whose gradient counts each rank's loss by its weight.

    The ranks' losses are averaged by `weight` only later, by the optimizer, which
    multiplies everything on this rank by its own weight; so what comes from the others
    is divided by it here.
    """

    @tf.custom_gradient
    def summed(x: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            w = tf.cast(weight, dy.dtype)
            total = reduce_tensor(tf.math.multiply_no_nan(dy, w), "sum")
            return tf.math.divide_no_nan(total, w)

        return reduce_tensor(x, "sum"), gradient

    return summed(value)
