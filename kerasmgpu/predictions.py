"""Joining what the ranks predicted: all rows, in order, on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from kerasmgpu.collectives import (
    all_gather_object,
    gather_tensor,
    groups,
    topology,
)
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.keras_compat import tree


def gather_rows(outputs: Any, row_ids: np.ndarray, own_rows: bool) -> Any:
    """The rows of all ranks in the order of their numbers.

    Must be called on every rank.

    Args:
        outputs: a nest of arrays (or ragged or sparse tensors), one row for each entry
            of `row_ids`.
        row_ids: int64 `(rows,)`; -1 marks a spare row, which is dropped.
        own_rows: return this rank's rows only, without a collective.
    """
    kept = np.flatnonzero((row_ids >= 0) & (groups().speaks or own_rows))
    if own_rows:
        return tree.map_structure(lambda leaf: _take(leaf, kept, row_ids), outputs)
    ids = gather_tensor(tf.constant(row_ids[kept]), "kerasmgpu.predict.ids").numpy()
    order = np.argsort(ids, kind="stable")
    leaves = [_take(leaf, kept, row_ids) for leaf in tree.flatten(outputs)]
    mine = [_description(leaf) for leaf in leaves]
    everyone = all_gather_object(mine)
    joined = []
    for position, leaf in enumerate(leaves):
        kinds = {theirs[position] for theirs in everyone}
        if len(kinds) == 1 and isinstance(leaf, np.ndarray) and _is_plain(leaf):
            joined.append(_gather_array(leaf, position)[order])
        else:
            joined.append(_gather_objects(leaf, order))
    return tree.pack_sequence_as(outputs, joined)


def _take(leaf: Any, kept: np.ndarray, row_ids: np.ndarray) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf).numpy()
    rows = leaf.shape[0] if len(leaf.shape) else 0
    if rows is None:
        rows = int(leaf.nrows())
    if rows != len(row_ids):
        raise InvalidArgumentError(
            f"Rank {topology().rank} of {topology().size}: expected predict_step to "
            f"return one row for each of the {len(row_ids)} rows of its data. "
            f"Received: {rows} rows. Return per-row values, or run predict inside "
            "strategy.local() on the rank that needs them."
        )
    if len(kept) == rows:
        return leaf
    if isinstance(leaf, tf.RaggedTensor):
        return tf.gather(leaf, kept)
    return leaf[kept]


def _description(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, np.ndarray):
        return (leaf.dtype.str, leaf.shape[1:])
    return (type(leaf).__name__,)


def _is_plain(leaf: np.ndarray) -> bool:
    return leaf.dtype.kind in "biuf"


def _gather_array(leaf: np.ndarray, position: int) -> np.ndarray:
    """Gathers bytes, so that every numeric type travels."""
    row_bytes = leaf.dtype.itemsize * int(np.prod(leaf.shape[1:]))
    data = np.ascontiguousarray(leaf).view(np.uint8).reshape(len(leaf), row_bytes)
    name = f"kerasmgpu.predict.{position}"
    joined = gather_tensor(tf.constant(data), name).numpy()
    return joined.reshape(-1).view(leaf.dtype).reshape(len(joined), *leaf.shape[1:])


def _gather_objects(leaf: Any, order: np.ndarray) -> Any:
    """For rows of different shapes: sends them one by one, as objects."""
    if isinstance(leaf, tf.RaggedTensor):
        rows = [
            row.to_list() if hasattr(row, "to_list") else row.numpy() for row in leaf
        ]
    else:
        rows = list(leaf)
    everyone = [row for theirs in all_gather_object(rows) for row in theirs]
    ordered = [everyone[i] for i in order]
    shapes = {np.shape(row) for row in ordered if isinstance(row, np.ndarray)}
    if len(shapes) == 1 and all(isinstance(row, np.ndarray) for row in ordered):
        return np.stack(ordered)
    return tf.ragged.constant([np.asarray(r).tolist() for r in ordered])
