"""Global batch → this rank's rows.

Keras's own adapters make the global batches, so order, shuffling, class weights and the
last batch are what one process has. A `ShardedAdapter`, which `fit` takes in place of
data, cuts this rank's rows out of each and puts a small vector beside them: how many of
the rows count, whether more batches follow, and a fingerprint of the first batch.

- Arrays: only the indices are batched globally; a rank gathers its own rows.
- Other sources: every rank runs the pipeline and keeps its rows. `shard(files)` with
  `sharding="none"` avoids that.

A rank without rows in a batch (fewer rows than ranks, or its data has ended) gets one
spare row that counts nothing, because many layers and losses cannot take an empty
batch. The end of data of unknown length is seen one batch ahead, so that all ranks
take the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasmgpu.collectives import all_gather_object, groups, topology
from kerasmgpu.control import META_SIZE, PRINT_LIMIT
from kerasmgpu.errors import InvalidArgumentError, InvalidTypeError
from kerasmgpu.fit_data import FitData
from kerasmgpu.keras_compat import (
    ArrayDataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    dense_arrays,
    get_data_adapter,
    index_batches,
    tree,
)
from kerasmgpu.state import seed_of_ours

SHARDINGS = ("batch", "none", "balanced")

#: Keys of an element: a plain batch is a tuple, so a sharded one cannot be mistaken.
DATA, META, ROW_IDS = "kerasmgpu_data", "kerasmgpu_meta", "kerasmgpu_row_ids"
#: A row's number is its batch's number times this, plus its place in the batch.
ROW_ID_STRIDE = 1 << 32


#: AutoGraph would only take time over what is written for graphs already.
_as_it_is = tf.autograph.experimental.do_not_convert


def bounds(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """The first row that rank `rank` of `size` takes, and the next rank's first."""
    return rows * rank // size, rows * (rank + 1) // size


class ShardedAdapter(FitData):
    """What a rank feeds to `fit`, `evaluate` or `predict`.

    Must be created on every rank.

    Args:
        x, y, sample_weight, batch_size, steps, shuffle, class_weight: as in `fit`;
            `batch_size` is global.
        sharding: "batch" (cut this rank's rows out of global batches), "none" (the data
            is this rank's own) or "balanced" (global batches are left whole, and cut
            inside the step).
        with_row_ids: put each row's number beside it (`predict`) instead of the vector
            for steps.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        shuffle: Any = False,
        class_weight: Any = None,
        sharding: str = "batch",
        with_row_ids: bool = False,
    ) -> None:
        _check_source(x, batch_size)
        if sharding == "none" and _is_arrays(x, y, sample_weight):
            batch_size = _own_batch_size(batch_size)
        self.sharding = sharding
        self.with_row_ids = with_row_ids
        source = get_data_adapter(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        super().__init__(source)
        self._own_batches = source.num_batches
        self._endless = _is_endless(self.source)
        _check_batched(self.source)
        if sharding == "none" and not with_row_ids:
            lengths = all_gather_object((self._own_batches, self._endless))
            known = [number for number, _ in lengths]
            self._num_batches = None if None in known else max(known)
            self._endless = all(endless for _, endless in lengths)

    # The pipeline.

    def _build(self) -> tf.data.Dataset:
        finish, done = self._finish()
        if self.sharding != "none":
            batches = self._cut_arrays(finish) or self._cut_batches(finish)
        else:
            batches = _map_numbered(
                self.source.get_tf_dataset(),
                lambda number, batch: finish(number, _own_batch(batch)),
            )
        if not done:
            known = self._num_batches is not None
            batches = (self._end_known if known else self._end_unknown)(batches)
        if self._num_batches is not None and not self.with_row_ids:
            batches = _with_length(batches, self._num_batches)
        return batches.prefetch(2)

    def _finish(self) -> tuple[Callable[[Any, Any], Any], bool]:
        """What to make of `(number, item)` where batches are cut, and whether elements
        are done with it: one stage of a pipeline is cheaper than two."""
        if self.with_row_ids:
            return _with_row_ids, True
        if self._num_batches is None:
            if self._endless:
                return (lambda number, item: _with_meta(item, True)), True
            return (lambda number, item: item), False
        if self._own_batches != self._num_batches:
            return (lambda number, item: item), False
        last = self._num_batches - 1
        return (lambda number, item: _with_meta(item, number < last)), True

    def _cut_batches(self, finish: Callable[[Any, Any], Any]) -> tf.data.Dataset:
        return _map_numbered(
            self.source.get_tf_dataset(),
            lambda number, batch: finish(
                number, _cut(batch, number, self.sharding == "balanced")
            ),
        )

    def _cut_arrays(self, finish: Callable[[Any, Any], Any]) -> tf.data.Dataset | None:
        """For arrays: batches of indices, of which only this rank's are gathered."""
        if not isinstance(self.source, ArrayDataAdapter):
            return None
        arrays = dense_arrays(self.source)
        if arrays is None:
            return None
        indices = index_batches(self.source, seed_of_ours())
        whole = self.sharding == "balanced"
        arrays_dataset = tf.data.Dataset.from_tensors(arrays).repeat()

        def cut(number: tf.Tensor, batch: tf.Tensor, data: Any) -> Any:
            total = tf.shape(batch, tf.int64)[0]
            low, high, rows = _row_range(total, whole)
            mine = batch[low:high]

            def gather(these: tf.Tensor) -> Any:
                return tree.map_structure(
                    lambda a: None if a is None else tf.gather(a, these), data
                )

            def fingerprint() -> tf.Tensor:
                return _fingerprint(gather(batch))

            first = tf.equal(number, 0)
            zeros = tf.zeros([2], tf.float64)
            prints = tf.cond(first, fingerprint, lambda: zeros)
            return finish(number, _item(gather(mine), rows, low, total, prints))

        zipped = tf.data.Dataset.zip((indices, arrays_dataset))
        return _map_numbered(zipped, lambda number, both: cut(number, *both))

    def _end_known(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Each rank has `num_batches` steps; one with fewer batches adds spare rows."""
        number = self._num_batches or 0
        if self._own_batches is not None and self._own_batches < number:
            spare = _spare_items(batches)
            batches = batches.concatenate(spare.take(number - self._own_batches))
        last = tf.constant(number - 1, tf.int64)
        return _map_numbered(batches, lambda i, item: _with_meta(item, i < last))

    def _end_unknown(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Looks one batch ahead; after the end come spare rows, for as long as others
        have data."""
        spec = batches.element_spec
        nothing = tf.experimental.Optional.empty(spec)
        some = batches.map(tf.experimental.Optional.from_value)
        endless = some.concatenate(tf.data.Dataset.from_tensors(nothing).repeat())
        # A rank that has nothing at all still takes part, from the first step on.
        start = (_spare_item(spec), tf.constant(False))

        def look_ahead(state: Any, coming: Any) -> Any:
            held, counts = state
            more = coming.has_value()
            # After the end the last batch stays, as a spare that counts nothing.
            following = tf.cond(more, coming.get_value, lambda: held)
            rows = tf.where(counts, held["rows"], 0)
            return (following, more), _with_meta({**held, "rows": rows}, more)

        return endless.scan(start, _as_it_is(look_ahead)).skip(1)


def shard_dataset(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """This rank's rows of every batch of a `tf.data.Dataset`."""
    if topology().size == 1:
        return dataset

    def cut(batch: Any) -> Any:
        rows = number_of_rows(batch)
        low, high = bounds(rows, groups().replica, groups().replicas)
        return tree.map_structure(lambda leaf: rows_between(leaf, low, high), batch)

    return _map_numbered(dataset, lambda _, batch: cut(batch))


def shard_files(files: Sequence[Any]) -> list[Any]:
    """Every `size`-th file name, from `rank` on."""
    rank, size = topology().rank, topology().size
    if len(files) < size:
        raise InvalidArgumentError(
            f"Rank {rank} of {size}: expected at least as many files as ranks. "
            f"Received: {len(files)} file(s) for {size} ranks. Write more, smaller "
            "files, start fewer ranks, or read all files on every rank with "
            'sharding="batch".'
        )
    return list(files)[groups().replica :: groups().replicas]


def shard_batch(data: Any, whole: bool = False) -> tuple[Any, tf.Tensor]:
    """This rank's rows, or all, of one global batch at hand (`train_on_batch`).

    Returns:
        `(data, meta)`, as in the elements of a `ShardedAdapter`.
    """
    data = tree.map_structure(
        lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), data
    )
    item = _cut(data, tf.constant(0, tf.int64), whole)
    element = _with_meta(item, True)
    return element[DATA], element[META]


# Checks -------------------------------------------------------------------------------


def _check_source(x: Any, batch_size: Any) -> None:
    if isinstance(x, tf.distribute.DistributedDataset):
        raise InvalidTypeError(
            "Received: a tf.distribute dataset. kerasmgpu takes the place of "
            "tf.distribute; pass the plain tf.data.Dataset."
        )
    if batch_size is not None and int(batch_size) < 1:
        raise InvalidArgumentError(
            f"Rank {topology().rank} of {topology().size}: expected a global "
            f"batch_size of at least 1. Received: batch_size={batch_size}."
        )


def _check_batched(source: Any) -> None:
    if not isinstance(source, TFDatasetAdapter):
        return
    spec = source.get_tf_dataset().element_spec
    if any(getattr(leaf, "shape", None) == () for leaf in tf.nest.flatten(spec)):
        raise InvalidArgumentError(
            f"Rank {topology().rank} of {topology().size}: expected batches, whose "
            "first dimension is rows. Received: a dataset with a scalar component "
            f"({spec}). Call dataset.batch(...) first."
        )


def _is_arrays(*values: Any) -> bool:
    leaves = [leaf for leaf in tree.flatten(values) if leaf is not None]
    return bool(leaves) and all(
        hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves
    )


def _own_batch_size(batch_size: int | None) -> int:
    rank, size = topology().rank, topology().size
    total = int(batch_size or 32)
    low, high = bounds(total, rank, size)
    if total < size:
        raise InvalidArgumentError(
            f"Rank {rank} of {size}: expected a global batch_size of at least {size}, "
            'so that every rank has a row of its own arrays (sharding="none"). '
            f"Received: batch_size={total}."
        )
    return high - low


def _is_endless(source: Any) -> bool:
    if isinstance(source, TFDatasetAdapter):
        cardinality = source.get_tf_dataset().cardinality()
        return bool(cardinality == tf.data.INFINITE_CARDINALITY)
    return isinstance(source, PyDatasetAdapter) and source.num_batches is None


# Items: the rows, how many count, the first one's place, the batch's rows, fingerprints


def _item(
    data: Any, rows: Any, low: Any = 0, total: Any = 0, prints: Any = None
) -> dict[str, Any]:
    prints = tf.zeros([2], tf.float64) if prints is None else prints
    return {
        "data": data,
        "rows": tf.cast(rows, tf.int64),
        "total": tf.cast(total, tf.int64),
        "prints": prints,
        "low": tf.cast(low, tf.int64),
    }


def _map_numbered(
    dataset: tf.data.Dataset, function: Callable[[Any, Any], Any]
) -> tf.data.Dataset:
    """`map` of `(number, element)`, the element as one argument also where a tuple."""
    return dataset.enumerate().map(_as_it_is(function), tf.data.AUTOTUNE)


def _with_length(dataset: tf.data.Dataset, number: int) -> tf.data.Dataset:
    """The dataset, which has `number` elements, in a form that says so."""
    if dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY:
        return dataset.apply(tf.data.experimental.assert_cardinality(number))
    return dataset


def _cut(batch: Any, number: tf.Tensor, whole: bool = False) -> dict[str, Any]:
    total = number_of_rows(batch)
    low, high, rows = _row_range(total, whole)
    data = tree.map_structure(lambda leaf: rows_between(leaf, low, high), batch)
    prints = tf.cond(
        tf.equal(number, 0),
        lambda: _fingerprint(batch),
        lambda: tf.zeros([2], tf.float64),
    )
    return _item(data, rows, low, total, prints)


def _own_batch(batch: Any) -> dict[str, Any]:
    rows = number_of_rows(batch)
    data = tree.map_structure(lambda leaf: _at_least_one_row(leaf, rows), batch)
    return _item(data, rows)


def _row_range(rows: tf.Tensor, whole: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """First and last-plus-one row to take, and how many of them count."""
    if whole:
        return tf.zeros_like(rows), rows, rows
    low, high = bounds(rows, groups().replica, groups().replicas)
    return *spare_row_of(low, high, rows), high - low


def spare_row_of(
    low: tf.Tensor, high: tf.Tensor, rows: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The bounds, or those of one row of the batch where there is none between them."""
    spare = tf.equal(low, high)
    low = tf.where(spare, tf.maximum(tf.minimum(low, rows - 1), 0), low)
    return low, tf.where(spare, tf.minimum(low + 1, rows), high)


def number_of_rows(batch: Any) -> tf.Tensor:
    for leaf in tree.flatten(batch):
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int64)
        if isinstance(leaf, tf.SparseTensor):
            return tf.cast(leaf.dense_shape[0], tf.int64)
        if tf.is_tensor(leaf):
            return tf.shape(leaf, tf.int64)[0]
    raise InvalidArgumentError(
        "Expected batches with at least one tensor. Received: an element without one."
    )


def rows_between(leaf: Any, low: Any, high: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        rest = tf.shape(leaf.dense_shape, tf.int64)[0] - 1
        start = tf.concat([[low], tf.zeros([rest], tf.int64)], 0)
        length = tf.concat([[high - low], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, start, length)
    return leaf[low:high]


def _at_least_one_row(leaf: Any, rows: tf.Tensor) -> Any:
    if not tf.is_tensor(leaf) or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf

    def spare() -> tf.Tensor:
        shape = tf.concat([[1], tf.shape(leaf)[1:]], 0)
        return tf.zeros(shape, leaf.dtype)

    result = tf.cond(rows > 0, lambda: leaf, spare)
    result.set_shape([None, *leaf.shape[1:]])
    return result


def _with_meta(item: dict[str, Any], more: Any) -> dict[str, Any]:
    numbers = (item["rows"], more, item["total"])
    head = tf.stack([tf.cast(number, tf.float64) for number in numbers])
    meta = tf.concat([head, item["prints"]], 0)
    meta.set_shape([META_SIZE])
    return {DATA: item["data"], META: meta}


def _with_row_ids(number: tf.Tensor, item: dict[str, Any]) -> dict[str, Any]:
    length = number_of_rows(item["data"])
    place = tf.range(length, dtype=tf.int64)
    ids = number * ROW_ID_STRIDE + item["low"] + place
    return {DATA: item["data"], ROW_IDS: tf.where(place < item["rows"], ids, -1)}


def _spare_items(batches: tf.data.Dataset) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(_spare_item(batches.element_spec)).repeat()


def _spare_item(spec: Any) -> dict[str, Any]:
    """An item of one row that counts nothing."""
    return _item(spare_data(spec["data"]), rows=0)


def spare_data(spec: Any) -> Any:
    """One row of zeros, from what is known of the shapes."""

    def zeros(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") and not isinstance(leaf, tf.OptionalSpec):
            return None  # the spec of None
        if isinstance(leaf, tf.OptionalSpec):
            return tf.experimental.Optional.empty(leaf._value_structure)
        if isinstance(leaf, tf.SparseTensorSpec):
            shape = [size or 1 for size in leaf.shape]
            return tf.sparse.from_dense(tf.zeros(shape, leaf.dtype))
        if isinstance(leaf, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_tensor(tf.zeros([1, 1], leaf.dtype))
        if leaf.shape.rank is None:
            raise InvalidArgumentError(
                f"Rank {topology().rank} of {topology().size}: this rank's data can "
                "end before the others', and the shape of its elements is unknown. "
                "Give the generator an output_signature with shapes."
            )
        return tf.zeros([size or 1 for size in leaf.shape], leaf.dtype)

    return tf.nest.map_structure(zeros, spec)


def _fingerprint(batch: Any) -> tf.Tensor:
    """Two numbers below 2^16 that, in all likelihood, differ where batches do."""
    parts = []
    for leaf in tf.nest.flatten(batch, expand_composites=True):
        if isinstance(leaf, tf.experimental.Optional) or not tf.is_tensor(leaf):
            continue
        if leaf.dtype in (tf.variant, tf.resource):
            continue
        parts.append(tf.io.serialize_tensor(leaf))
    text = tf.strings.join(parts)
    first = tf.strings.to_hash_bucket_fast(text, PRINT_LIMIT)
    second = tf.strings.to_hash_bucket_strong(text, PRINT_LIMIT, [17, 23])
    return tf.cast(tf.stack([first, second]), tf.float64)
