"""The data of a `fit`: Keras's own adapter, what callbacks ask of it, and a replay.

With more than one rank, `data.ShardedAdapter` cuts this rank's rows out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasmgpu.keras_compat import DataAdapter, PyDatasetAdapter, tree


class FitData(DataAdapter):
    """What `fit` is given in place of data: Keras's adapter, and where to begin.

    Args:
        source: Keras's adapter of the user's data.

    Attributes:
        replay: called once, before the first epoch; a resumed run brings the order of
            the data to where it was (`resume.py`).
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.replay: Callable[[], None] | None = None
        self._num_batches = source.num_batches
        self._dataset: tf.data.Dataset | None = None

    def _build(self) -> tf.data.Dataset:
        return self.source.get_tf_dataset()

    # What Keras's epoch iterator asks for.

    def get_tf_dataset(self) -> tf.data.Dataset:
        if self._dataset is None:
            self._dataset = without_autotuning(self._build())
        return self._dataset

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

    @property
    def batch_size(self) -> int | None:
        return self.source.batch_size

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None

    def on_epoch_begin(self) -> None:
        if self.replay is not None:
            self.replay()
            self.replay = None
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.source.on_epoch_end()

    # What callbacks ask for.

    @property
    def batch_spec(self) -> Any:
        """Shapes and types of a batch, as the model sees it."""
        return self.source.get_tf_dataset().element_spec

    def rows_per_batch(self) -> int | None:
        """Rows of a full batch of the source, or None where nothing tells.

        No batch is drawn: that would change the order of a shuffled dataset.
        """
        if self.source.batch_size is not None:
            return int(self.source.batch_size)
        if isinstance(self.source, PyDatasetAdapter):
            leaves = tree.flatten(self.source.py_dataset[0])
            return next(len(leaf) for leaf in leaves if leaf is not None)
        dataset = self.source.get_tf_dataset()
        for leaf in tf.nest.flatten(dataset.element_spec):
            shape = getattr(leaf, "shape", None)
            if shape is not None and shape.rank and shape[0]:
                return int(shape[0])
        return _rows_of_batch_step(dataset)


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset without tf.data's tuning of its threads, unless the user asked for.

    The tuner stops only after a while: up to 0.6 s, and with several ranks 2.5 s, at
    the end of each epoch. Without it what says AUTOTUNE gets as many threads as the
    process has cores, which is the most that the tuner would give.
    """
    if dataset.options().autotune.enabled:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _rows_of_batch_step(dataset: Any) -> int | None:
    """What the last `batch(n)` of a pipeline says (there is no public way to ask)."""
    pending = [dataset]
    while pending:
        one = pending.pop(0)
        rows = getattr(one, "_batch_size", None)
        rows = tf.get_static_value(rows) if tf.is_tensor(rows) else rows
        if isinstance(rows, (int, np.integer)):
            return int(rows)
        pending.extend(one._inputs())
    return None
