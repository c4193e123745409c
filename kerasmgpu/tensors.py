"""The collectives that users call: nests of values, of any type, with gradients.

`HorovodStrategy.all_reduce`, `all_gather` and `broadcast`. They stand on the plain
operations of `collectives.py`, and are differentiable: a rank's gradient is that of the
sum of what all ranks differentiate.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasmgpu.collectives import (
    all_gather_object,
    broadcast_tensor,
    check_root,
    gather_tensor,
    mark_used,
    rank_in_graph,
    reduce_tensor,
    topology,
)
from kerasmgpu.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    RankMismatchError,
)

OPERATIONS = ("mean", "sum", "min", "max")

#: Types that Horovod's all-reduce takes; others travel as the type named in `_CARRIER`.
_REDUCIBLE = (
    tf.uint8,
    tf.int8,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.float32,
    tf.float64,
)
_CARRIER = {
    tf.bfloat16: tf.float32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
    tf.bool: tf.uint8,
}


# The public ones ----------------------------------------------------------------------


@tf.autograph.experimental.do_not_convert
def all_reduce(value: Any, op: str = "mean") -> Any:
    """The mean, sum, minimum or maximum over ranks of a value or a nest of values.

    Must be called on every rank, with the same structure, shapes and types. At size 1
    the value itself, as tensors.

    Args:
        value: a tensor, array, number, or a nest of them. Real and complex numbers may
            be averaged and summed; whole numbers summed; bool has "min" (and) and
            "max" (or).
        op: "mean" (default), "sum", "min" or "max".

    Returns:
        The same nest, of tensors of the same shape and type.

    Raises:
        InvalidArgumentError: `op` is none of the four.
        InvalidTypeError: a mean of whole numbers, a sum of bools, a string.
        CollectiveError: another rank has left.

    Example:

    ```python
    mean_loss = strategy.all_reduce(loss)
    rows = strategy.all_reduce(tf.shape(x)[0], op="sum")
    ```
    """
    if op not in OPERATIONS:
        raise InvalidArgumentError(
            f"Expected op to be one of {', '.join(map(repr, OPERATIONS))}. "
            f"Received: op={op!r}."
        )

    def one(tensor: tf.Tensor) -> tf.Tensor:
        _check_reducible(tensor, op)
        if topology().size == 1:
            return tensor
        if tensor.dtype.is_complex:
            parts = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])
            parts = _reduce_with_gradient(parts, op)
            return tf.complex(parts[0], parts[1])
        if tensor.dtype in _REDUCIBLE:
            return _reduce_with_gradient(tensor, op)
        carried = tf.cast(tensor, _CARRIER[tensor.dtype])
        return tf.cast(_reduce_with_gradient(carried, op), tensor.dtype)

    return _map_tensors(one, value, f"all_reduce({op})")


@tf.autograph.experimental.do_not_convert
def all_gather(value: Any) -> Any:
    """The ranks' values joined along their first dimension, in rank order.

    Must be called on every rank, with the same structure and types; the first dimension
    may differ. At size 1 the value itself, as tensors.

    Args:
        value: a tensor or array of at least one dimension, a number (which counts as
            one row), or a nest of them.

    Returns:
        The same nest; each tensor has the rows of all ranks.

    Raises:
        InvalidTypeError: a string (use `broadcast_object`, or gather its bytes).
        CollectiveError: another rank has left.
    """

    def one(tensor: tf.Tensor) -> tf.Tensor:
        if tensor.shape.rank == 0:
            tensor = tensor[tf.newaxis]
        return _carried(_gather_with_gradient, tensor)

    return _map_tensors(one, value, "all_gather", same_shapes=False)


@tf.autograph.experimental.do_not_convert
def broadcast(value: Any, root_rank: int = 0) -> Any:
    """One rank's value, on every rank.

    Must be called on every rank, with the same structure, shapes and types. At size 1
    the value itself, as tensors.

    Args:
        value: a tensor, array, number, or a nest of them.
        root_rank: the rank whose value it is.

    Returns:
        The same nest, of tensors.

    Raises:
        InvalidArgumentError: there is no rank `root_rank`.
        InvalidTypeError: a string (use `broadcast_object`).
        CollectiveError: another rank has left.
    """
    check_root(root_rank)
    one = functools.partial(_broadcast_with_gradient, root_rank=root_rank)
    return _map_tensors(functools.partial(_carried, one), value, "broadcast")


# Differentiable operations on one tensor ----------------------------------------------


def _reduce_with_gradient(tensor: tf.Tensor, op: str) -> tf.Tensor:
    if op in ("sum", "mean"):

        @tf.custom_gradient
        def reduce(x: tf.Tensor) -> Any:
            return reduce_tensor(x, op), lambda dy: reduce_tensor(dy, op)

        return reduce(tensor)

    @tf.custom_gradient
    def select(x: tf.Tensor) -> Any:
        y = reduce_tensor(x, op)

        def gradient(dy: tf.Tensor) -> tf.Tensor:
            # Shared between the entries, of all ranks, that attain the extreme.
            attained = tf.cast(tf.equal(x, y), dy.dtype)
            both = reduce_tensor(tf.stack([dy, attained]), "sum")
            return attained * both[0] / both[1]

        return y, gradient

    return select(tensor)


def _gather_with_gradient(tensor: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def gather(x: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            rows = gather_tensor(tf.reshape(tf.shape(x)[0], [1]))
            total = reduce_tensor(dy, "sum")
            return tf.split(total, rows, num=topology().size)[topology().rank]

        return gather_tensor(x), gradient

    return gather(tensor)


def _broadcast_with_gradient(tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
    @tf.custom_gradient
    def broadcast(x: tf.Tensor) -> Any:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            # Asked in the graph: a constant would let TensorFlow drop the collective
            # on the ranks that do not need its result, and the others would wait.
            mine = tf.equal(rank_in_graph(), root_rank)
            return reduce_tensor(dy, "sum") * tf.cast(mine, dy.dtype)

        return broadcast_tensor(x, root_rank), gradient

    return broadcast(tensor)


# Helpers ------------------------------------------------------------------------------


def _check_reducible(tensor: tf.Tensor, op: str) -> None:
    dtype = tensor.dtype
    if dtype == tf.bool and op not in ("min", "max"):
        raise InvalidTypeError(
            f'A bool has op="min" (true on all ranks) and op="max" (true on one). '
            f"Received: op={op!r}. Cast it to a number for others."
        )
    if dtype.is_integer and op == "mean":
        raise InvalidTypeError(
            f"The mean of whole numbers would have to be rounded. Received: dtype "
            f'{dtype.name}, op="mean". Cast the value to a float, or use op="sum" and '
            "divide."
        )
    if dtype.is_complex and op not in ("mean", "sum"):
        raise InvalidTypeError(
            f'Complex numbers have op="mean" and op="sum". Received: op={op!r}.'
        )


def _carried(
    operation: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor
) -> tf.Tensor:
    """Runs an operation that moves values in a type that Horovod can move."""
    if topology().size == 1 or tensor.dtype in _REDUCIBLE:
        return operation(tensor)
    if tensor.dtype.is_complex:
        parts = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], axis=-1)
        parts = operation(parts)
        return tf.complex(parts[..., 0], parts[..., 1])
    carried = tf.cast(tensor, _CARRIER[tensor.dtype])
    return tf.cast(operation(carried), tensor.dtype)


def _map_tensors(
    function: Callable[[tf.Tensor], tf.Tensor],
    value: Any,
    what: str,
    same_shapes: bool = True,
) -> Any:
    def convert(leaf: Any) -> tf.Tensor:
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
            raise InvalidTypeError(
                f"{what} takes dense values. Received: {type(leaf).__name__}. Convert "
                "it with tf.convert_to_tensor or to_tensor(), or pass its parts."
            )
        tensor = tf.convert_to_tensor(leaf)
        if tensor.dtype not in (*_REDUCIBLE, *_CARRIER) and not tensor.dtype.is_complex:
            raise InvalidTypeError(
                f"{what} takes numbers and bools. Received: {tensor.dtype.name}. Use "
                "broadcast_object for strings and other objects."
            )
        return tensor

    tensors = tf.nest.map_structure(convert, value)
    if topology().size > 1:
        mark_used(what)
        if os.environ.get("KERASMGPU_DEBUG") == "1" and tf.executing_eagerly():
            _compare_calls(what, tensors, same_shapes)
    return tf.nest.map_structure(function, tensors)


def _compare_calls(what: str, tensors: Any, same_shapes: bool) -> None:
    """With KERASMGPU_DEBUG=1: refuses a call that is not the same on all ranks."""
    leaves = tf.nest.flatten(tensors)
    shapes = [tuple(leaf.shape[0 if same_shapes else 1 :]) for leaf in leaves]
    call = (what, [(leaf.dtype.name, s) for leaf, s in zip(leaves, shapes)])
    calls = all_gather_object(call)
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise RankMismatchError(
                "The ranks do not call the same collective with the same shapes. "
                f"Rank 0 called {calls[0]}, rank {rank} called {other}."
            )
