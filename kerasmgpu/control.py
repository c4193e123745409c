"""The control vector: one tiny all-reduce at the start of every step.

It carries what the ranks must agree on before they update: how many rows each has (the
weights of its gradients), whether a rank wants to stop, whether a rank has more data,
and a fingerprint of the first global batch. It depends on the data alone, so it travels
while the forward pass runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasmgpu.collectives import groups, reduce_tensor, topology
from kerasmgpu.errors import InvalidArgumentError, RankMismatchError

#: Entries of the vector that the data pipeline puts beside each batch: this rank's
#: rows, whether more batches follow, the rows of the global batch where this rank knows
#: it (else 0), and two fingerprints of the first global batch (else 0).
META_ROWS, META_MORE, META_TOTAL, META_PRINT, META_PRINT_B = range(5)
META_SIZE = 5
#: Entries of the control vector. After them come those of the batch that must be equal
#: on all ranks, and then their squares: "all equal" can be read from sums, as
#: size * sum(f^2) == sum(f)^2.
ROWS, MORE, STOP, TOTAL, PRINT, PRINT_B = range(6)
SUMS_SIZE = 9
_COMPARED = (TOTAL, PRINT, PRINT_B)
#: Fingerprints are below this, so that sums of squares stay exact in float64.
PRINT_LIMIT = 1 << 16


@dataclasses.dataclass(frozen=True)
class Step:
    """What is known inside a step, as scalar tensors.

    Attributes:
        rows: float64, the rows of the global batch that this rank holds (may be 0: it
            then computes on a spare row whose result counts nothing).
        total_rows: float64, the rows of the global batch.
        weight: float32, `rows / total_rows`.
        training: whether the step updates weights.
    """

    rows: tf.Tensor
    total_rows: tf.Tensor
    weight: tf.Tensor
    training: bool

    @property
    def weight_among_all(self) -> tf.Tensor:
        """float32, `weight` shared out within the group: all ranks' add up to 1."""
        m = groups().model_parallel_size
        return self.weight if m == 1 else self.weight / m

    @property
    def per_row_scale(self) -> tf.Tensor:
        """float32, `total_rows / rows`: makes a sum over this rank's rows count fully.

        A loss that adds up its rows, weighted like a mean by `weight`, needs it.
        """
        return tf.cast(tf.math.divide_no_nan(self.total_rows, self.rows), tf.float32)


_current: contextvars.ContextVar[Step | None] = contextvars.ContextVar(
    "kerasmgpu_step", default=None
)


def current_step() -> Step | None:
    """The step being traced or run, or None outside a wrapped model's step."""
    return _current.get()


@contextlib.contextmanager
def in_step(step: Step | None) -> Iterator[None]:
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def exchange(meta: tf.Tensor, stop: tf.Tensor, name: str) -> tf.Tensor:
    """Sums the control vector over ranks.

    Args:
        meta: float64 `(META_SIZE,)`, what the data pipeline says of the batch.
        stop: float64 scalar, 1 where this rank asks to stop.
        name: the collective's name.

    Returns:
        float64 `(9,)`, the sums.
    """
    with tf.device("CPU:0"):  # read by Python at once, not behind a GPU's queue
        compared = meta[META_TOTAL:]
        own = [meta[:META_TOTAL], [stop], compared, compared * compared]
        return reduce_tensor(tf.concat(own, 0), "sum", name)


def make_step(
    meta: tf.Tensor, control: tf.Tensor, training: bool, same_batches: bool
) -> Step:
    """What is known of the step.

    Where all ranks cut their rows out of the same batches, each knows by itself how
    many rows there are in all: its gradients need not wait for the control vector.
    """
    rows = meta[META_ROWS]
    total = meta[META_TOTAL] if same_batches else total_rows(control)
    weight = tf.cast(tf.math.divide_no_nan(rows, total), tf.float32)
    return Step(rows=rows, total_rows=total, weight=weight, training=training)


def total_rows(control: Any) -> Any:
    """The rows of the global batch: the ranks of a group hold the same ones."""
    return control[ROWS] / groups().model_parallel_size


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on in a step."""

    stop: bool
    more: bool


def read(control: np.ndarray, same_batches: bool) -> Agreement:
    """Reads the sums of a control vector; the same outcome on every rank.

    Args:
        control: `(9,)`.
        same_batches: whether all ranks must see the same global batches
            (`sharding="batch"`).

    Raises:
        RankMismatchError: the ranks see different data, or different numbers of
            batches, where they must see the same.
        InvalidArgumentError: the global batch has no row at all.
    """
    size, rank = topology().size, topology().rank
    if control[ROWS] < 1:
        raise InvalidArgumentError(
            f"Rank {rank} of {size}: expected at least 1 row in the global batch. "
            "Received: no row on any rank. Check that the data is not empty."
        )
    if same_batches:
        for entry in _COMPARED:
            squares = control[entry + len(_COMPARED)]
            if size * squares != control[entry] ** 2:
                raise RankMismatchError(_DIFFERENT_DATA.format(rank=rank, size=size))
        if 0 < control[MORE] < size:
            raise RankMismatchError(
                f"Rank {rank} of {size}: the data of {size - int(control[MORE])} "
                "rank(s) has ended while others have more. Expected the same global "
                'batches on every rank (sharding="batch"). Give every rank the same '
                'data, or HorovodStrategy(sharding="none") where each brings its own.'
            )
    return Agreement(stop=bool(control[STOP] > 0), more=bool(control[MORE] > 0))


_DIFFERENT_DATA = (
    "Rank {rank} of {size}: the ranks see different data. Expected the same "
    "global batches on every rank, of which each takes its rows "
    '(sharding="batch"). As a rule a shuffle or a random augmentation differs. Three '
    "ways out: give it a seed (keras.utils.set_random_seed(1), or shuffle(..., "
    "seed=1)); create the dataset after the strategy, which shares rank 0's seed; or, "
    'where each rank brings its own data, use HorovodStrategy(sharding="none").'
)
