"""Steps of a model on this rank alone, to compare the job with.

They run on made-up rows of the shapes of the data, so that no batch is taken from it,
and leave no trace: every variable gets its value back, to the bit.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from kerasmgpu.collectives import alone, barrier, groups
from kerasmgpu.data import bounds
from kerasmgpu.keras_compat import build_from_spec, tree
from kerasmgpu.state import optimizers_of

_STEPS_LEFT_OUT = 2  # the first one traces


def seconds_alone(session: Any, steps: int) -> list[float] | None:
    """Seconds of each of `steps` training steps without communication.

    All ranks run theirs at the same time, as in training, so that what they share
    (memory, a network drive, the cores of one machine) counts. Must be called on every
    rank.

    Returns:
        The seconds, or None where the data does not tell the shape of a batch.
    """
    model = session.model
    batch = _made_up(session.data.batch_spec, rows_of_rank(session))
    if batch is None:
        return None
    build_from_spec(model, session.data.batch_spec)
    owners = (model, *optimizers_of(model))
    variables = {id(v): v for owner in owners for v in owner.variables}
    saved = [(v, tf.identity(v.value)) for v in variables.values()]
    run = tf.autograph.experimental.do_not_convert(lambda data: model.train_step(data))
    if not model.run_eagerly:
        run = tf.function(run, jit_compile=False)
    seconds = []
    try:
        with alone():
            for _ in range(_STEPS_LEFT_OUT):
                _finish(run(batch))
        barrier()
        with alone():
            for _ in range(steps):
                start = time.perf_counter()
                _finish(run(batch))
                seconds.append(time.perf_counter() - start)
    finally:
        for variable, value in saved:
            variable.assign(value)
    return seconds


def rows_of_rank(session: Any) -> int:
    """Rows of a full global batch that this rank takes."""
    total = session.global_batch_size or 32
    low, high = bounds(total, groups().replica, groups().replicas)
    return max(1, high - low)


def _finish(outputs: Any) -> None:
    for leaf in tf.nest.flatten(outputs):
        if tf.is_tensor(leaf):
            leaf.numpy()


def _made_up(spec: Any, rows: int) -> Any:
    unknown = False

    def make(leaf: Any) -> Any:
        nonlocal unknown
        if not isinstance(leaf, tf.TensorSpec):
            unknown = unknown or hasattr(leaf, "shape")  # ragged or sparse
            return None
        if leaf.shape.rank is None or None in leaf.shape[1:]:
            unknown = True
            return None
        shape = [rows, *leaf.shape[1:]]
        if leaf.dtype.is_floating:
            return tf.random.stateless_uniform(shape, [1, 2], dtype=leaf.dtype)
        return tf.zeros(shape, leaf.dtype)

    batch = tree.map_structure(make, spec)
    return None if unknown else batch
