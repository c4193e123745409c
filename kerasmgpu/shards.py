"""Variables of which each rank of a group holds a part.

A sharded variable is a Keras variable of the part's shape with a mark: along which axis
the whole was cut. Optimizers make slots of the part's shape, which are found by their
place beside the variable. In files there are wholes: all ranks gather them (`gathered`)
before rank 0 writes, and each rank cuts its part out of what it reads.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmgpu.collectives import barrier, gather_tensor, groups
from kerasmgpu.errors import CollectiveError

_MARK = "_kerasmgpu_cut_along"
_wholes: contextvars.ContextVar[dict[int, np.ndarray] | None] = contextvars.ContextVar(
    "kerasmgpu_wholes", default=None
)


def mark(variable: Any, axis: int) -> None:
    """Notes that this rank holds a part of a variable that was cut along `axis`."""
    setattr(variable, _MARK, axis)


def axis_of(variable: Any) -> int | None:
    """Along which axis a variable was cut; None for one that all ranks hold alike."""
    return getattr(variable, _MARK, None)


def part_of(whole: Any, axis: int) -> Any:
    """This rank's part of a whole array or tensor, cut into equal parts."""
    place = groups()
    length = whole.shape[axis] // place.model_parallel_size
    start = place.position * length
    return whole[(slice(None),) * axis + (slice(start, start + length),)]


def is_sharded_layer(layer: Any) -> bool:
    """Whether a layer holds parts where there are groups."""
    return bool(getattr(layer, "is_sharded", False))


def sharded_layers(model: Any) -> list[Any]:
    """The model's layers that hold parts; none without groups."""
    if groups().model_parallel_size == 1:
        return []
    return [layer for layer in model._flatten_layers() if is_sharded_layer(layer)]


def sharded_variables(model: Any, optimizers: Iterable[Any]) -> dict[int, Any]:
    """id → variable: the model's weights and the optimizers' slots that are parts."""
    found = {id(v): v for v in model.variables if axis_of(v) is not None}
    for optimizer in optimizers:
        found.update(slots_of(optimizer))
    return found


def slots_of(optimizer: Any) -> dict[int, Any]:
    """id → slot: an optimizer's variables that belong to parts. They get the mark."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    trained = getattr(optimizer, "_trainable_variables", [])
    found = {}
    for values in vars(optimizer).values():
        if not isinstance(values, list) or len(values) != len(trained):
            continue
        for slot, variable in zip(values, trained, strict=True):
            axis = axis_of(variable)
            if axis is None or slot is variable or not isinstance(slot, keras.Variable):
                continue
            if tuple(slot.shape) == tuple(variable.shape):
                mark(slot, axis)
                found[id(slot)] = slot
    return found


# Files --------------------------------------------------------------------------------


@contextlib.contextmanager
def gathered(variables: Iterable[Any]) -> Iterator[None]:
    """While it lasts, rank 0 has the wholes of these variables in host memory.

    Must be entered on every rank, with the same variables. One at a time is gathered,
    on the host, by the first group, and only rank 0 keeps it. Inside another one
    nothing is sent.
    """
    if _wholes.get() is not None:
        yield
        return
    wholes = {}
    variables = list(variables)
    for variable in variables if groups().replica == 0 else []:
        whole = _gather(variable)
        if groups().rank == 0:
            wholes[id(variable)] = whole
    if variables:
        barrier()  # a rank that went on and ended would end the others' collectives
    token = _wholes.set(wholes)
    try:
        yield
    finally:
        _wholes.reset(token)


def have_wholes() -> bool:
    """Whether this is inside of `gathered`."""
    return _wholes.get() is not None


def _gather(variable: Any) -> np.ndarray:
    axis = axis_of(variable)
    with tf.device("CPU:0"):
        value = tf.convert_to_tensor(variable.value)
        # As bytes, so that every type travels.
        data = tf.reshape(tf.bitcast(value, tf.uint8), [1, -1])
        data = gather_tensor(data, "kerasmgpu.whole", among="group").numpy()
    parts = data.reshape(-1).view(value.dtype.as_numpy_dtype)
    parts = parts.reshape(len(data), *value.shape)
    return np.concatenate(list(parts), axis)


def whole_of(variable: Any) -> Any:
    """What a file holds of a variable."""
    if axis_of(variable) is None:
        return variable
    wholes = _wholes.get() or {}
    if id(variable) not in wholes:
        place = groups()
        raise CollectiveError(
            f"Rank {place.rank} of {place.size}: expected save or save_weights of a "
            "wrapped model, called on all ranks. Received: a save of the sharded "
            f"weight {variable.path!r}, of which this rank holds a part. Call "
            "model.save on all ranks; during fit use "
            "kerasmgpu.callbacks.RankZeroCheckpoint."
        )
    return wholes[id(variable)]


def save_variables(variables: Iterable[Any], store: Any) -> None:
    """Writes variables, parts as wholes, as Keras's `save_own_variables` does."""
    for position, variable in enumerate(variables):
        whole = whole_of(variable)
        store[str(position)] = whole if whole is not variable else variable.numpy()


def load_variables(variables: Iterable[Any], store: Any) -> None:
    """Reads what `save_variables`, or plain Keras, wrote; parts are cut out."""
    for position, variable in enumerate(variables):
        value = store[str(position)]
        axis = axis_of(variable)
        variable.assign(value if axis is None else part_of(np.asarray(value), axis))
