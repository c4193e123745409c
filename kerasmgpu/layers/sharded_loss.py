"""`ShardedSoftmaxCrossEntropy`: the loss of logits that a group holds in parts."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.collectives import groups, reduce_tensor
from kerasmgpu.layers.group_ops import sum_parts
from kerasmgpu.layers.sharded import saved_as_plain


@saved_as_plain(keras.losses.SparseCategoricalCrossentropy)
class ShardedSoftmaxCrossEntropy(keras.losses.SparseCategoricalCrossentropy):
    """Softmax cross-entropy after a `ShardedDense(classes, gather_output=False)`.

    Each rank of a group holds classes/m of the logits; a maximum and two sums per row
    travel instead of all logits. Values are those of
    `SparseCategoricalCrossentropy(from_logits=True)`, which files have in its place and
    which it is with m = 1. Metrics and `predict` of the wrapped model get whole logits.

    Args:
        reduction, name, dtype: as of the Keras loss.

    Input shape: labels `(rows, ...)`, integers; logits `(rows, ..., classes/m)`.
    """

    def __init__(
        self,
        reduction: str = "sum_over_batch_size",
        name: str = "sparse_categorical_crossentropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(from_logits=True, reduction=reduction, name=name, dtype=dtype)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        place = groups()
        if place.model_parallel_size == 1:
            return super().call(y_true, y_pred)
        logits = tf.cast(y_pred, tf.float32)
        labels = tf.cast(y_true, tf.int64)
        if labels.shape.rank == logits.shape.rank:
            labels = tf.squeeze(labels, -1)
        length = logits.shape[-1]
        largest = tf.reduce_max(tf.stop_gradient(logits), -1)
        largest = reduce_tensor(largest, "max", among="group")
        shifted = logits - largest[..., tf.newaxis]
        own = labels - place.position * length
        chosen = tf.one_hot(own, length) * shifted  # none where out of this part
        parts = tf.stack(
            [tf.reduce_sum(tf.exp(shifted), -1), tf.reduce_sum(chosen, -1)]
        )
        total, label = tf.unstack(sum_parts(parts))
        return tf.math.log(total) - label
