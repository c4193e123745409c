"""The only module that reaches into `keras.src`: what Keras does not export.

Everything here was found in Keras 3.5 to 3.15. A Keras release that moves one of these
breaks one line of this file.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import api_export
from keras.src import tree as tree
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import (
    in_symbolic_scope as in_symbolic_scope,
)
from keras.src.saving import object_registration, saving_lib
from keras.src.trainers.compile_utils import CompileMetrics as CompileMetrics
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters import get_data_adapter as get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter as ArrayDataAdapter,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import (
    class_weight_to_sample_weights as class_weight_to_sample_weights,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDatasetAdapter as PyDatasetAdapter,
)
from keras.src.trainers.data_adapters.tf_dataset_adapter import (
    TFDatasetAdapter as TFDatasetAdapter,
)


def mask_of(value: Any) -> Any:
    """The mask that Keras attached to a tensor, or None."""
    return get_keras_mask(value)


def set_mask(value: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, as Keras's layers do."""
    set_keras_mask(value, mask)


@functools.cache
def activity_losses_are_means() -> bool:
    """Whether this Keras divides an activity regularizer's loss by the rows."""
    with tf.init_scope():
        layer = keras.layers.ActivityRegularization(l1=1.0)
        layer(tf.ones([2, 1]))
        return float(layer.losses[0]) == 1.0


def split_for_validation(arrays: Any, validation_split: float) -> Any:
    """As `fit(validation_split=...)`: the last part is for validation."""
    return array_slicing.train_validation_split(
        arrays, validation_split=validation_split
    )


def dense_arrays(adapter: ArrayDataAdapter) -> Any:
    """The `(x, y, sample_weight)` of an array adapter, class weights worked in.

    As NumPy arrays or tensors that rows can be gathered from; None where one is sparse
    or ragged.
    """
    for leaf in tree.flatten(adapter._inputs):
        ragged = isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor))
        if ragged or data_adapter_utils.is_scipy_sparse(leaf):
            return None
    arrays = array_slicing.convert_to_sliceable(
        adapter._inputs, target_backend="tensorflow"
    )
    return tree.lists_to_tuples(arrays)


def index_batches(adapter: ArrayDataAdapter, seed: int | None) -> Any:
    """The batches of row numbers, a dataset, that Keras makes of an adapter's arrays.

    Made by Keras's own adapter over the row numbers, so that a seeded shuffle is the
    same as in one process. With TensorFlow's global seed set, Keras repeats one order
    in every epoch; where the user has set none, the order is to differ by epoch.

    Args:
        adapter: of arrays.
        seed: the same on all ranks, where the user has chosen none.
    """
    if seed is not None and adapter._shuffle is True:
        return _reshuffled_batches(adapter._num_samples, adapter.batch_size, seed)
    rows = np.arange(adapter._num_samples, dtype="int64")
    indices = ArrayDataAdapter(
        rows, batch_size=adapter.batch_size, shuffle=adapter._shuffle
    )
    return indices.get_tf_dataset().map(lambda *batch: tree.flatten(batch)[0])


def _reshuffled_batches(rows: int, batch_size: int, seed: int) -> Any:
    """Batches of row numbers in an order that is drawn anew for every epoch."""
    starts = tf.data.Dataset.range(0, rows, batch_size)

    def batches(drawn: Any) -> Any:
        numbers = tf.range(rows, dtype=tf.int64)
        order = tf.random.experimental.stateless_shuffle(numbers, [seed, drawn])
        return starts.map(lambda start: order[start : start + batch_size])

    draws = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    return draws.take(1).flat_map(batches)


def move_variable(variable: Any, device: str) -> None:
    """Puts a Keras variable's value on another device, for good.

    Not while something traced, or an optimizer, holds the `tf.Variable` inside it.
    """
    held = variable._value
    if held is None:  # made later, with the model
        return
    with tf.init_scope(), tf.device(device):
        variable._initialize(tf.identity(held))


def build_from_spec(model: Any, spec: Any) -> None:
    """Creates a compiled model's variables, metrics' and optimizer's too, untrained.

    Args:
        model: a model.
        spec: shapes and types of a batch, as of `dataset.element_spec`.
    """
    model._symbolic_build(
        data_batch=tree.map_structure(
            lambda leaf: leaf if hasattr(leaf, "dtype") else None, spec
        )
    )


def prepare_thread_for_saving() -> None:
    """Lets this thread save a model inside a `keras.StatelessScope`.

    Keras makes an example of each kind of object to see which attributes to leave out,
    and some of these have variables, which must not be made in such a scope. It looks
    for the outcome under this name first (`get_attr_skipset`), by thread.
    """
    for kind in ("Layer", "Functional", "Sequential", "Metric", "Optimizer", "Loss"):
        global_state.set_global_attribute(
            f"saving_attr_skiplist_{kind}", saving_lib.get_attr_skipset(kind)
        )


def compiled_metrics(model: Any) -> Any:
    """What the user passed as `compile(metrics=..., weighted_metrics=...)`."""
    compiled = model._compile_metrics
    if compiled is None:
        return []
    return [compiled._user_metrics, compiled._user_weighted_metrics]


def holders_of_metrics_to_come(model: Any) -> list[Any]:
    """What will make metrics of its own, its `metrics`, when its `build` is called."""
    holders = (model._compile_metrics, model._compile_loss)
    return [holder for holder in holders if holder is not None and not holder.built]


def serialize_as(cls: type, plain: type) -> None:
    """Makes objects of a class serialize as those of one of Keras's classes."""
    names = api_export.REGISTERED_OBJS_TO_NAMES
    names[cls] = names[plain]


def adopt_registered_name(cls: type, original: type) -> None:
    """Makes a class serialize under the name that another was registered with."""
    names = object_registration.GLOBAL_CUSTOM_NAMES
    if original in names:
        names[cls] = names[original]
