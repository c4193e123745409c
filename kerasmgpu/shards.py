"""Variables of which each rank of a group holds a part.

A sharded variable is a Keras variable of the part's shape with a mark: along which axis
the whole was cut. Optimizers make slots of the part's shape, which are found by their
place beside the variable. In files there are wholes: all ranks gather them (`gathered`)
before rank 0 writes, and each rank cuts its part out of what it reads.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmgpu.collectives import barrier, broadcast_tensor, gather_tensor, groups
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


def whole_shape(variable: Any) -> tuple[int, ...]:
    """The shape of what a variable is a part of; of itself where it is whole."""
    axis, m = axis_of(variable), groups().model_parallel_size
    return tuple(n * m if i == axis else n for i, n in enumerate(variable.shape))


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
        whole = _gather(variable.value, axis_of(variable))
        if groups().rank == 0:
            wholes[id(variable)] = whole
    if variables:
        barrier()  # a rank that went on and ended would end the others' collectives
    with given_wholes(wholes):
        yield


@contextlib.contextmanager
def given_wholes(wholes: dict[int, np.ndarray] | None) -> Iterator[None]:
    """While it lasts, these are the wholes, by id of the variable."""
    token = _wholes.set(wholes)
    try:
        yield
    finally:
        _wholes.reset(token)


def have_wholes() -> bool:
    """Whether this is inside of `gathered`."""
    return _wholes.get() is not None


def wholes_at_hand() -> dict[int, np.ndarray] | None:
    """What `gathered` has gathered, for another thread's `given_wholes`."""
    return _wholes.get()


def gather_values(values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Wholes of earlier values of these variables, on the first group's ranks.

    Must be called on every rank. Others than the first group get their parts back.
    """
    wholes = []
    for value, variable in zip(values, variables, strict=True):
        axis = axis_of(variable)
        if axis is not None and groups().replica == 0:
            value = _gather(value, axis)
        wholes.append(value)
    barrier()
    return wholes


def cut_values(values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """This rank's parts of wholes that belong to these variables."""
    return [
        value if axis_of(v) is None else part_of(np.asarray(value), axis_of(v) or 0)
        for value, v in zip(values, variables, strict=True)
    ]


def assign_wholes(variables: Sequence[Any], wholes: Sequence[Any] | None) -> None:
    """Puts wholes that rank 0 has into variables: its own, and its group's parts.

    Must be called on every rank, and be followed by `state.broadcast_state`, which
    gives the other groups what the first has. One part at a time is on its way.

    Args:
        variables: the same on every rank; slots among them marked (`slots_of`).
        wholes: their values, on rank 0.
    """
    for position, variable in enumerate(variables):
        axis = axis_of(variable)
        if axis is None:
            if wholes is not None:
                variable.assign(wholes[position])
        elif groups().replica == 0:
            dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
            if wholes is not None:
                whole = np.ascontiguousarray(wholes[position], dtype)
            else:
                whole = np.empty(whole_shape(variable), dtype)
            with tf.device("CPU:0"):
                data = tf.constant(whole.reshape(-1).view(np.uint8))  # any type travels
                data = broadcast_tensor(data, 0, "kerasmgpu.whole", among="group")
            whole = data.numpy().view(dtype).reshape(whole.shape)
            variable.assign(part_of(whole, axis))


def _gather(part: Any, axis: int | None) -> np.ndarray:
    with tf.device("CPU:0"):
        value = tf.convert_to_tensor(part)
        # As bytes, so that every type travels.
        data = tf.reshape(tf.bitcast(value, tf.uint8), [1, -1])
        data = gather_tensor(data, "kerasmgpu.whole", among="group").numpy()
    parts = data.reshape(-1).view(value.dtype.as_numpy_dtype)
    parts = parts.reshape(len(data), *value.shape)
    return np.concatenate(list(parts), axis or 0)


def whole_of(variable: Any) -> np.ndarray:
    """What a file holds of a variable."""
    if axis_of(variable) is None:
        return np.asarray(variable.numpy())
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
        store[str(position)] = whole_of(variable)


def load_variables(variables: Iterable[Any], store: Any) -> None:
    """Reads what `save_variables`, or plain Keras, wrote; parts are cut out."""
    for position, variable in enumerate(variables):
        value = store[str(position)]
        axis = axis_of(variable)
        variable.assign(value if axis is None else part_of(np.asarray(value), axis))
