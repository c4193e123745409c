"""`ShardedEmbedding`: an Embedding of which each rank of a group holds some words."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.collectives import groups
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.layers.group_ops import sum_parts
from kerasmgpu.layers.sharded import Sharded, saved_as_plain


@saved_as_plain(keras.layers.Embedding)
class ShardedEmbedding(Sharded, keras.layers.Embedding):
    """An `Embedding` layer whose vocabulary the ranks of a group divide.

    As `ShardedDense`: for `model_parallel_size=m` and a wrapped model; each rank holds
    1/m of the rows and of their optimizer slots, looks up the words it has, and the
    results are added up. Initial values, results and files are those of
    `keras.layers.Embedding`; with m = 1 it is that layer.

    Args:
        input_dim: words, divisible by m.
        *args, **kwargs: as of `Embedding`, without `weights`.

    Input shape: `(rows, ...)`, words of 0 to `input_dim` - 1.
    Output shape: `(rows, ..., output_dim)`.

    Raises:
        InvalidArgumentError: `input_dim` is not divisible by m; an option that cannot
            be split.
        CollectiveError: used in a model that is not wrapped.
        tf.errors.InvalidArgumentError: a word is out of range, when it is looked up.
    """

    def __init__(self, input_dim: int, *args: Any, **kwargs: Any) -> None:
        place = groups()
        if kwargs.get("weights") is not None and place.model_parallel_size > 1:
            raise InvalidArgumentError(
                f"Rank {place.rank} of {place.size}: expected a ShardedEmbedding "
                "without weights. Received: weights=... Give embeddings_initializer, "
                "or load a file."
            )
        super().__init__(input_dim, *args, **kwargs)
        self.cut_along = {"embeddings": 0}
        self.refuse_what_cannot_be_cut(input_dim=self.input_dim)

    def call(self, inputs: Any) -> Any:
        self.check_call()
        if not self.is_sharded:
            return super().call(inputs)
        words = tf.cast(inputs, tf.int64 if inputs.dtype == "int64" else tf.int32)
        in_range = [
            tf.debugging.assert_non_negative(words),
            tf.debugging.assert_less(words, tf.cast(self.input_dim, words.dtype)),
        ]
        place = groups()
        length = self.input_dim // place.model_parallel_size
        with tf.control_dependencies(
            [check for check in in_range if check is not None]
        ):
            own = words - tf.cast(place.position * length, words.dtype)
        here = (own >= 0) & (own < length)
        found = tf.gather(tf.convert_to_tensor(self.embeddings), tf.where(here, own, 0))
        found = tf.where(here[..., tf.newaxis], found, tf.zeros_like(found))
        return tf.cast(sum_parts(found), self.compute_dtype)
