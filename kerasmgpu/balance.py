"""`sharding="balanced"`: rows by speed.

Each rank measures how many rows a second it computes, waits for others and for data
left out. At the beginning of an epoch all ranks gather the speeds and cut the following
global batches in proportion. Gradients count by rows, so the numbers stay those of one
process. The cut is made inside the step, after all that fetches data ahead, so that all
ranks cut a batch alike whatever they have fetched before the shares changed.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import tensorflow as tf

from kerasmgpu.collectives import all_gather_object, topology
from kerasmgpu.control import META_ROWS
from kerasmgpu.data import DATA, META, rows_between, spare_row_of
from kerasmgpu.keras_compat import tree
from kerasmgpu.timing import StepTimers


class Balancer:
    """The ranks' shares of each global batch, and what they are computed from.

    Attributes:
        timers: to be given to the training step.
    """

    def __init__(self) -> None:
        self.timers = StepTimers()
        size = topology().size
        # Where each rank's share begins, and where the last one's ends.
        self._ends = tf.Variable(
            [rank / size for rank in range(size + 1)], dtype=tf.float64, trainable=False
        )
        self._speeds: list[float] = []

    def note_step(self, rows: float, seconds: float) -> None:
        """Notes a step of this rank: its rows, and its time, waits included."""
        busy = seconds - sum(self.timers.take().values())
        if rows > 0 and busy > 0:
            self._speeds.append(rows / busy)

    def speed(self) -> float | None:
        """Rows a second this rank computes, by the steps since the last call."""
        speeds, self._speeds = self._speeds, []
        return statistics.median(speeds) if speeds else None

    def begin_epoch(self, epoch: int, global_batch_size: int | None) -> None:
        """Changes the shares to the speeds measured. Must be called on every rank."""
        speeds = all_gather_object(self.speed())
        if None in speeds:  # nothing was measured yet
            return
        rows = global_batch_size or 100
        before = rows_of_ranks(rows, self._ends)
        ends, total = [0.0], sum(speeds)
        for speed in speeds:
            ends.append(ends[-1] + speed / total)
        self._ends.assign([*ends[:-1], 1.0])
        after = rows_of_ranks(rows, self._ends)
        if after != before and topology().is_rank_zero:
            unit = f"rows of {rows}" if global_batch_size else "% of the rows"
            print(
                f"kerasmgpu: from epoch {epoch + 1} on, ranks take "
                f"{', '.join(map(str, after))} {unit}; measured "
                f"{', '.join(f'{speed:.4g}' for speed in speeds)} rows a second.",
                flush=True,
            )

    def own_part(self, element: dict[str, Any]) -> dict[str, Any]:
        """This rank's rows of an element that holds a whole global batch."""
        rank, meta = topology().rank, element[META]
        total = tf.cast(meta[META_ROWS], tf.int64)
        bounds = share_bounds(total, self._ends.read_value())
        low, high = bounds[rank], bounds[rank + 1]
        rows = high - low
        low, high = spare_row_of(low, high, total)
        data = tree.map_structure(
            lambda leaf: rows_between(leaf, low, high), element[DATA]
        )
        meta = tf.concat([[tf.cast(rows, meta.dtype)], meta[META_ROWS + 1 :]], 0)
        return {DATA: data, META: meta}


def share_bounds(rows: Any, ends: Any) -> tf.Tensor:
    """Where each rank's rows begin, and where the last one's end.

    Every rank has at least one row, where there are as many rows as ranks.

    Args:
        rows: int64 scalar.
        ends: float64 `(size + 1,)`, from 0 to 1, not falling.

    Returns:
        int64 `(size + 1,)`.
    """
    rows, ends = tf.cast(rows, tf.int64), tf.convert_to_tensor(ends)
    size = int(ends.shape[0]) - 1
    ranks = tf.range(size + 1, dtype=tf.int64)
    wanted = tf.cast(tf.round(tf.cast(rows, tf.float64) * ends), tf.int64)
    # Rows beyond one a rank must not fall from one bound to the next.
    beyond = tf.unstack(tf.clip_by_value(wanted - ranks, 0, tf.maximum(rows - size, 0)))
    for i in range(1, size + 1):
        beyond[i] = tf.maximum(beyond[i], beyond[i - 1])
    return tf.where(rows >= size, ranks + tf.stack(beyond), rows * ranks // size)


def rows_of_ranks(rows: int, ends: Any) -> list[int]:
    """How many of `rows` each rank takes."""
    bounds = share_bounds(rows, ends).numpy().tolist()
    return [high - low for low, high in itertools.pairwise(bounds)]
