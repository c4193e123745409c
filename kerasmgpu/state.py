"""What the ranks must have in common before step 0, and what must differ.

Rank 0's weights, optimizer state and random seed reach every rank; models are compared
first, so that a difference is an error and not a hang. The states of dropout and
augmentation layers differ by rank afterwards, in a way that can be repeated.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasmgpu.collectives import (
    all_gather_object,
    broadcast_object,
    broadcast_tensor,
    groups,
    reduce_tensor,
    topology,
)
from kerasmgpu.errors import RankMismatchError
from kerasmgpu.optimizer import accumulators
from kerasmgpu.shards import sharded_variables, whole_shape

#: Variables are broadcast in pieces of about this many bytes.
_PIECE_BYTES = 16 << 20
#: What TensorFlow reports as the global seed when none was set.
_NO_SEED = 87654321
_seed_of_ours: int | None = None


# Random seeds -------------------------------------------------------------------------


def share_random_seeds() -> None:
    """Gives every rank rank 0's Python, NumPy and TensorFlow random state.

    Initial weights, shuffles and augmentations that are drawn from them then agree.
    TensorFlow's seed is set only where it differs, because setting it restarts its
    sequence. Must be called on every rank.
    """
    if topology().size == 1:
        return
    seeds = all_gather_object(global_seed())
    if seeds[0] is None:
        global _seed_of_ours
        seeds[0] = _seed_of_ours = int(broadcast_object(random.getrandbits(31)))
        tf.random.set_seed(seeds[0])
    elif any(other != seeds[0] for other in seeds):
        tf.random.set_seed(seeds[0])
    share_host_random_state()


def global_seed() -> int | None:
    """What `tf.random.set_seed` was given; None where it was not called."""
    seed = tf.compat.v1.random.get_seed(0)[0]
    return None if seed in (None, _NO_SEED) else int(seed)


def restore_seed(seed: int, ours: bool) -> None:
    """Sets the global seed to an earlier run's, chosen by us or by the user."""
    global _seed_of_ours
    if seed != global_seed():
        tf.random.set_seed(seed)
    _seed_of_ours = seed if ours else None


def seed_of_ours() -> int | None:
    """The global seed where the ranks share one that the user has not chosen."""
    return _seed_of_ours if global_seed() == _seed_of_ours else None


def share_host_random_state() -> None:
    """Gives every rank rank 0's Python and NumPy random state, as for shuffles."""
    states = broadcast_object((random.getstate(), np.random.get_state()))
    if not topology().is_rank_zero:
        random.setstate(states[0])
        np.random.set_state(states[1])


def separate_random_states(model: Any) -> None:
    """Makes dropout and augmentation layers draw differently on each rank.

    Called after the broadcast of rank 0's states, from which rank `r` derives its own,
    so a repeated run repeats them. Rank 0 keeps its own. The ranks of a group, which
    see the same rows, draw alike.
    """
    replica = groups().replica
    if replica == 0:
        return
    for variable in seed_states(model):
        value = variable.numpy()
        mixed = np.random.SeedSequence([int(value.flat[0]), replica]).generate_state(1)
        value.flat[0] = mixed[0].astype(value.dtype)
        variable.assign(value)


def seed_states(model: Any) -> list[Any]:
    """The state variables of the model's `keras.random.SeedGenerator`s."""
    return [v for v in model.non_trainable_variables if is_seed_state(v)]


def is_seed_state(variable: Any) -> bool:
    return "seed_generator_state" in variable.path.rsplit("/", 1)[-1]


# Same model ---------------------------------------------------------------------------


def check_same_structure(model: Any, optimizers: Iterable[Any]) -> None:
    """Raises on every rank where the ranks' models or optimizers differ.

    Must be called on every rank, with built models.

    Raises:
        RankMismatchError: names the first variable that differs, and both shapes.
    """
    everyone = all_gather_object(structure(model, optimizers))
    size = topology().size
    for rank, theirs in enumerate(everyone):
        for position in range(max(len(theirs), len(everyone[0]))):
            first = everyone[0][position] if position < len(everyone[0]) else None
            other = theirs[position] if position < len(theirs) else None
            if without_name(first) != without_name(other):
                raise RankMismatchError(
                    f"Rank {topology().rank} of {size}: the models of the ranks "
                    "differ. "
                    f"First difference: rank 0 has {words(first)}; rank {rank} has "
                    f"{words(other)}. Expected the same model on every rank: build it "
                    "from the same code and arguments, without looking at the rank."
                )


def structure(
    model: Any, optimizers: Iterable[Any], with_metrics: bool = True
) -> list[tuple[Any, ...]]:
    """What a model and its optimizers are made of, parts as the wholes they are of."""
    sharded_variables(model, optimizers)  # marks the slots
    metrics = {id(v) for v in model.metrics_variables}
    parts: list[tuple[Any, ...]] = [("model", type(model).__name__, None, None, None)]
    for variable in model.variables:
        if with_metrics or id(variable) not in metrics:
            parts.append(_description("weight", variable))
    for position, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        parts.append((f"optimizer {position}", name, None, None, None))
        for variable in optimizer.variables:
            parts.append(_description(f"optimizer {position} variable", variable))
    return parts


def structure_digest(model: Any) -> str:
    """A short text that differs where two models differ in kinds, shapes or types."""
    parts = [without_name(part) for part in structure(model, (), with_metrics=False)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def without_name(description: tuple[Any, ...] | None) -> Any:
    # Keras numbers the names of variables by creation, which may differ by rank.
    if description is None or description[2] is None:
        return description
    return (description[0], *description[2:])


def _description(kind: str, variable: Any) -> tuple[Any, ...]:
    return (
        kind,
        variable.path,
        whole_shape(variable),
        tf.as_dtype(variable.dtype).name,
        bool(getattr(variable, "trainable", True)),
    )


def words(description: tuple[Any, ...] | None) -> str:
    if description is None:
        return "nothing there"
    kind, name, shape, dtype, trainable = description
    if shape is None:
        return f"{kind} {name}"
    state = "trainable" if trainable else "not trainable"
    return f"{kind} {name!r} of shape {shape}, {dtype}, {state}"


# Broadcast ----------------------------------------------------------------------------


def broadcast_state(model: Any, optimizers: Iterable[Any]) -> None:
    """Sends rank 0's weights, optimizer state and random states to every rank.

    Must be called on every rank, with models of the same structure. Gradients that are
    being accumulated stay where they are: each rank holds its part.
    """
    optimizers = list(optimizers)
    broadcast_variables([*shared_variables(model, optimizers), *seed_states(model)])
    parts = sharded_variables(model, optimizers)
    if parts and groups().replicas > 1:
        broadcast_variables(list(parts.values()), "position")


def shared_variables(model: Any, optimizers: Iterable[Any]) -> list[Any]:
    """What all ranks hold alike after every step: weights and optimizer state.

    Left out are metrics, random states, gradients that are being accumulated, and what
    is held in parts.
    """
    optimizers = list(optimizers)
    variables: dict[int, Any] = {}
    left_out = {id(v) for v in (*model.metrics_variables, *seed_states(model))}
    left_out |= sharded_variables(model, optimizers).keys()
    for optimizer in optimizers:
        left_out |= {id(v) for v in accumulators(optimizer)}
    for owner in (model, *optimizers):
        for variable in owner.variables:
            if id(variable) not in left_out:
                variables[id(variable)] = variable
    return list(variables.values())


def gather_accumulators(optimizers: Iterable[Any], add_up: bool) -> None:
    """Brings gradients that are being accumulated together on rank 0.

    Rank 0's state, and with it a file that it writes, is then complete. Must be called
    on every rank.

    Args:
        add_up: whether the ranks hold parts, to be added up; otherwise rank 0 alone
            holds the whole (it has loaded it), and what others hold is dropped.
    """
    for optimizer in optimizers:
        for variable in accumulators(optimizer):
            total = variable.value
            if add_up:
                total = reduce_tensor(
                    tf.identity(total), "sum", "kerasmgpu.accumulated"
                )
            if not topology().is_rank_zero:
                total = tf.zeros_like(total)
            variable.assign(total)


def broadcast_variables(variables: list[Any], among: str = "all") -> None:
    """Rank 0's values, in a few large messages, one type after the other.

    Among the ranks of each "position", the first group's.
    """
    by_type: dict[str, list[Any]] = {}
    for variable in variables:
        by_type.setdefault(tf.as_dtype(variable.dtype).name, []).append(variable)
    for dtype, group in sorted(by_type.items()):
        if dtype == "string":
            continue
        for piece in _pieces(group, tf.as_dtype(dtype).size):
            _broadcast_piece(piece, tf.as_dtype(dtype), among)


def _pieces(group: list[Any], item_bytes: int) -> Iterable[list[Any]]:
    piece: list[Any] = []
    held = 0
    for variable in group:
        piece.append(variable)
        held += int(np.prod(variable.shape)) * item_bytes
        if held >= _PIECE_BYTES:
            yield piece
            piece, held = [], 0
    if piece:
        yield piece


def _broadcast_piece(variables: list[Any], dtype: tf.DType, among: str) -> None:
    flat = [tf.reshape(tf.convert_to_tensor(v.value), [-1]) for v in variables]
    joined = tf.concat(flat, 0)
    # As bytes, so that every type travels.
    if dtype == tf.bool:
        data = tf.cast(joined, tf.uint8)
    else:
        data = tf.reshape(tf.bitcast(joined, tf.uint8), [-1])
    root = 0 if among == "all" else groups().position
    data = broadcast_tensor(data, root, f"kerasmgpu.state.{among}", among)
    if topology().rank == root:
        return
    if dtype == tf.bool or dtype.size == 1:
        joined = tf.cast(data, dtype) if dtype == tf.bool else tf.bitcast(data, dtype)
    else:
        joined = tf.bitcast(tf.reshape(data, [-1, dtype.size]), dtype)
    sizes = [int(np.prod(v.shape)) for v in variables]
    for variable, part in zip(variables, tf.split(joined, sizes), strict=True):
        variable.assign(tf.reshape(part, variable.shape))


# Optimizers of a model ----------------------------------------------------------------


def optimizers_of(model: Any) -> list[Any]:
    """The Keras optimizers a model holds, `optimizer` first, then by attribute name."""
    found: dict[int, Any] = {}
    attributes = sorted(vars(model).items(), key=lambda item: item[0])
    values = [getattr(model, "optimizer", None), *(value for _, value in attributes)]
    for value in values:
        if isinstance(value, (list, tuple)):
            candidates = list(value)
        elif isinstance(value, dict):
            candidates = [value[key] for key in sorted(value, key=str)]
        else:
            candidates = [value]
        for candidate in candidates:
            if isinstance(candidate, keras.optimizers.Optimizer):
                found.setdefault(id(candidate), candidate)
    inner = {
        id(o.inner_optimizer) for o in found.values() if hasattr(o, "inner_optimizer")
    }
    return [o for key, o in found.items() if key not in inner]
