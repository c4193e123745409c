"""Gradients of embeddings: the ranks send looked-up rows, or sums over whole tables.

Such a gradient (`tf.IndexedSlices`) has one row for each row that the batch looked up,
repeated ones apart. A ring gather makes each of N ranks send (N - 1) / N of all ranks'
looked-up rows; a ring all-reduce of the whole table, 2 (N - 1) / N of its rows
(Patarasuk and Yuan 2009). So the table is what is smaller where the ranks look up more
than twice as many rows as it has. The indices are gathered in any case, early, for they
are known before the backward pass: every rank then knows the same number.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.collectives import gather_tensor, groups, reduce_tensor

#: Send tables where that is less; the update then takes slices, or a tensor.
TO_SLICES, TO_TENSOR = "slices", "tensor"


def table_allowed(optimizer: Any, plain: type) -> str | None:
    """Whether a table's sums are all that the optimizer needs of its slices.

    Keras squares or clips slices one by one: two slices of one row are not their sum to
    Adam, RMSprop, Adagrad and others, nor to a norm. Plain SGD and Lion add them up.

    Args:
        optimizer: the one that updates.
        plain: its class, without what a wrapper adds.

    Returns:
        None, or what its update works on: `TO_SLICES` or `TO_TENSOR`.
    """
    clips = (optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm)
    if any(limit is not None for limit in clips) or groups().model_parallel_size > 1:
        return None
    if plain is keras.optimizers.SGD:
        return TO_TENSOR if optimizer.momentum else TO_SLICES
    return TO_TENSOR if plain is keras.optimizers.Lion else None


def exchange_slices(
    gradient: tf.IndexedSlices,
    rows: tf.Tensor | None,
    name: str,
    among: str,
    allowed: str | None,
) -> Any:
    """All ranks' slices, or what adds up to the same.

    A spare row's slices are left out: an index that is not in the batch must not be
    touched. Must be called on every rank.

    Args:
        gradient: this rank's, weighed.
        rows: scalar, the rows of the batch that this rank holds, where that is known.
        name: of the collectives.
        among: the ranks that hold the same table.
        allowed: as of `table_allowed`.

    Returns:
        The slices that one process would have, one rank's after the other; with
        `allowed`, `tf.IndexedSlices` or a tensor with the same sums.
    """
    values, indices = gradient.values, gradient.indices
    if rows is not None:
        count = tf.where(rows > 0, tf.shape(indices)[0], 0)
        values, indices = values[:count], indices[:count]
    if among == "all" and not groups().speaks:
        values, indices = values[:0], indices[:0]
    shape = gradient.dense_shape
    gathered = gather_tensor(indices, f"{name}.indices", among=among)

    def slices() -> tf.IndexedSlices:
        all_values = gather_tensor(values, f"{name}.values", among=among)
        return tf.IndexedSlices(all_values, gathered, shape)

    if allowed is None or values.dtype not in (tf.float32, tf.float64):
        return slices()

    def by_rows() -> Any:
        found = slices()
        return found if allowed == TO_SLICES else _table(found, gradient.shape)

    def by_table() -> Any:
        own = _table(tf.IndexedSlices(values, indices, shape), gradient.shape)
        total = reduce_tensor(own, "sum", f"{name}.table", among)
        if allowed == TO_TENSOR:
            return total
        everything = tf.range(shape[0], dtype=shape.dtype)
        return tf.IndexedSlices(total, tf.cast(everything, gathered.dtype), shape)

    looked_up = tf.cast(tf.shape(gathered)[0], shape.dtype)
    return tf.cond(looked_up > 2 * shape[0], by_table, by_rows)


def _table(slices: tf.IndexedSlices, shape: tf.TensorShape) -> tf.Tensor:
    return tf.ensure_shape(tf.convert_to_tensor(slices), shape)
