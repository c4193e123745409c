"""Operations within a group whose gradients fit together.

A group's ranks compute the same loss from parts, so a gradient must not be counted by
every rank: what is summed forward passes backward as it is, and the reverse (the
functions f and g of Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasmgpu.collectives import gather_tensor, groups, reduce_tensor

_NARROW = (tf.float16, tf.bfloat16)


def _sum(x: tf.Tensor) -> tf.Tensor:
    # In float32: MPI cannot add bfloat16, and float16 would lose digits.
    wide = tf.cast(x, tf.float32) if x.dtype in _NARROW else x
    return tf.cast(reduce_tensor(wide, "sum", among="group"), x.dtype)


@tf.custom_gradient
def enter_parts(x: tf.Tensor) -> Any:
    """The same value, used by parts: their gradients are added up."""
    return tf.identity(x), _sum


@tf.custom_gradient
def sum_parts(x: tf.Tensor) -> Any:
    """The sum over the group; each part gets the whole gradient."""
    return _sum(x), tf.identity


@tf.custom_gradient
def join_parts(x: tf.Tensor) -> Any:
    """The group's last axes one after the other; each part gets its own gradient."""
    place = groups()
    length = x.shape[-1]
    start = place.position * length

    def gradient(dy: tf.Tensor) -> tf.Tensor:
        return dy[..., start : start + length]

    wide = tf.cast(x, tf.float32) if x.dtype in _NARROW else x
    parts = gather_tensor(wide[tf.newaxis], among="group")
    parts = tf.unstack(parts, num=place.model_parallel_size)
    joined = tf.cast(tf.concat(parts, -1), x.dtype)
    joined.set_shape([*x.shape[:-1], length * place.model_parallel_size])
    return joined, gradient


def own_part(x: tf.Tensor) -> tf.Tensor:
    """This rank's part of the last axis of what all ranks of the group hold."""
    place = groups()
    length = x.shape[-1] // place.model_parallel_size
    start = place.position * length
    return enter_parts(x)[..., start : start + length]
