"""What a loss divides by: makes each rank's loss add up to the one-process loss.

The optimizer weighs each rank's gradient by its rows. That is exact for a mean over
rows. Inside a wrapped model's step every Keras loss is therefore multiplied, before
backward, by what is missing to make it so:

| reduction | divides by | factor |
|---|---|---|
| "sum_over_batch_size", "mean" | the entries | 1 |
| the same, with a mask | the unmasked entries `d` | `d / sum(d) * total_rows / rows` |
| "mean_with_sample_weight" | the summed weights `d` | the same |
| "sum" | nothing | `total_rows / rows` |

(`sum(d)` is over ranks.) A loss function that returns a scalar, and one added with
`add_loss`, is taken for a mean over rows. So is an activity regularizer, but for Keras
releases in which it adds up over rows.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.collectives import groups, reduce_tensor
from kerasmgpu.control import Step, current_step
from kerasmgpu.keras_compat import activity_losses_are_means, mask_of
from kerasmgpu.overriding import overridden

#: In a step that is run in pieces: what losses divided by so far, and the totals.
_pieces: contextvars.ContextVar[tuple[list[Any], Any] | None] = contextvars.ContextVar(
    "kerasmgpu_divisors", default=None
)

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


@contextlib.contextmanager
def scaled_losses(model: Any, same_entries: bool) -> Iterator[None]:
    """While it lasts, Keras losses and activity regularizers add up over ranks.

    Args:
        model: whose layers' activity regularizers are meant.
        same_entries: whether a row has equally many entries on all ranks, as when all
            ranks cut their rows from one global batch.
    """
    original = keras.losses.Loss.__call__

    def scaled(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step = current_step()
        if step is None or loss.reduction in (None, "none"):
            return original(loss, y_true, y_pred, sample_weight)
        values: list[Any] = []
        with overridden([loss], "call", lambda loss: _recording(loss, values)):
            result = original(loss, y_true, y_pred, sample_weight)
        if not values or values[-1].shape.rank == 0:
            return result
        factor = _factor(
            loss, values[-1], mask_of(y_pred), sample_weight, step, same_entries
        )
        return result if factor is None else result * tf.cast(factor, result.dtype)

    regularized = [
        layer
        for layer in model._flatten_layers()
        if getattr(layer, "activity_regularizer", None) is not None
        and not activity_losses_are_means()
    ]
    originals = [layer.activity_regularizer for layer in regularized]
    keras.losses.Loss.__call__ = scaled
    for layer, regularizer in zip(regularized, originals, strict=True):
        object.__setattr__(layer, "activity_regularizer", _summed(regularizer))
    try:
        yield
    finally:
        keras.losses.Loss.__call__ = original
        for layer, regularizer in zip(regularized, originals, strict=True):
            object.__setattr__(layer, "activity_regularizer", regularizer)


def _summed(regularizer: Any) -> Any:
    def scaled(outputs: Any) -> Any:
        penalty = regularizer(outputs)
        step = current_step()
        if step is None:
            return penalty
        return penalty * tf.cast(step.per_row_scale, penalty.dtype)

    return scaled


def _recording(loss: Any, values: list[Any]) -> Any:
    """The loss's `call`, which also keeps what it returns: unreduced, with a mask."""
    call = loss.call

    def recording(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        values.append(result)
        return result

    return recording


def _factor(
    loss: Any,
    values: Any,
    mask: Any,
    sample_weight: Any,
    step: Step,
    same_entries: bool,
) -> tf.Tensor | None:
    if loss.reduction == "sum":
        return step.per_row_scale
    if loss.reduction not in _MEANS:
        return None
    out_mask = mask_of(values)
    if mask is not None and not tf.is_tensor(mask):
        mask = None  # a nest of predictions has no one mask
    if mask is not None and out_mask is not None:
        mask = tf.cast(mask, tf.bool) & tf.cast(out_mask, tf.bool)
    elif mask is None:
        mask = out_mask
    by_weight = loss.reduction == "mean_with_sample_weight" and (
        sample_weight is not None
    )
    if by_weight:
        divisor = tf.cast(sample_weight, tf.float64)
        if mask is not None:
            mask = tf.cast(mask, tf.float64)
            if mask.shape.rank == divisor.shape.rank + 1:
                divisor = divisor[..., tf.newaxis]
            divisor = divisor * mask
    elif mask is not None:
        divisor = tf.cast(mask, tf.float64)
    elif same_entries or values.shape[1:].is_fully_defined():
        return None
    else:
        divisor = tf.cast(tf.size(values), tf.float64)
    divisor = tf.reduce_sum(divisor)
    divisor = tf.where(step.rows > 0, divisor, tf.zeros_like(divisor))
    total = _total(divisor)
    share = tf.cast(tf.math.divide_no_nan(divisor, total), tf.float32)
    return share * step.per_row_scale


def _total(divisor: tf.Tensor) -> tf.Tensor:
    """Over all rows of the step: summed at once, or counted before (`divisors`)."""
    pieces = _pieces.get()
    if pieces is None:
        return reduce_tensor(divisor, "sum") / groups().model_parallel_size
    found, totals = pieces
    found.append(divisor)
    return divisor if totals is None else totals[len(found) - 1]


@contextlib.contextmanager
def divisors(totals: list[tf.Tensor] | None) -> Iterator[list[tf.Tensor]]:
    """While it lasts, the losses of a piece of a step send nothing.

    Args:
        totals: what each loss divides by in the whole step; None where that is being
            counted, and the losses' values mean nothing.

    Yields:
        What each loss divides by in this piece.
    """
    found: list[tf.Tensor] = []
    token = _pieces.set((found, totals))
    try:
        yield found
    finally:
        _pieces.reset(token)
