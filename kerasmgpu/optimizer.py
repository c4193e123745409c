"""The reduce inside `optimizer.apply`: weigh, all-reduce, then Keras clips and updates.

A wrapped optimizer is the user's object with its class swapped for a subclass. Keras
calls `apply` → (accumulate) → `_clip_gradients` → weight decay → update, so gradients
are reduced on entry, before anything reads them. With `gradient_accumulation_steps`
they are weighed on entry and reduced once, just before the clipping of the update. A
`LossScaleOptimizer` looks at the gradients in its own outer `apply`, so there the outer
one weighs and reduces.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from kerasmgpu import buckets
from kerasmgpu.collectives import (
    exchange_pieces,
    gather_tensor,
    groups,
    reduce_tensor,
    topology,
)
from kerasmgpu.control import current_step
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.fused_updates import fused_update
from kerasmgpu.shards import axis_of, part_of, slots_of
from kerasmgpu.slices import exchange_slices, table_allowed
from kerasmgpu.timing import timed

if TYPE_CHECKING:
    _Base: Any = keras.optimizers.Optimizer
else:
    _Base = object

#: Set while an outer optimizer that has weighed the gradients calls its inner one.
_weighed: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "kerasmgpu_weighed", default=False
)


#: In an update: whether each gradient belongs to a part of a weight.
_parts: contextvars.ContextVar[list[bool]] = contextvars.ContextVar(
    "kerasmgpu_parts",
    default=[],  # noqa: B039
)

#: Set where updates are to be compiled by XLA.
_compiled: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "kerasmgpu_compiled", default=False
)


@contextlib.contextmanager
def compiled_update() -> Iterator[None]:
    """While it lasts, XLA compiles what optimizers do with the reduced gradients."""
    token = _compiled.set(True)
    try:
        yield
    finally:
        _compiled.reset(token)


def applying() -> bool:
    """Whether an optimizer is updating, as opposed to the step around it."""
    return _weighed.get()


REDUCTIONS = ("mean", "sum", "adasum")
COMPRESSIONS = (None, "fp16", "bf16")


class Reducer:
    """Weighs and reduces one optimizer's gradients.

    Args:
        reduction: "mean" (each rank's gradient counts by its rows), "sum" (plain sum)
            or "adasum".
        compression: None, "fp16" or "bf16": the type in which gradients travel.
        name: of its collectives; the same on all ranks.

    Attributes:
        tables: what `table_allowed` says of the optimizer that updates.
    """

    def __init__(self, reduction: str, compression: str | None, name: str) -> None:
        self.reduction = reduction
        self.compression = compression
        self.name = f"kerasmgpu.gradients.{name}"
        self.tables: str | None = None

    def weigh(self, gradients: Sequence[Any], parts: Sequence[bool]) -> list[Any]:
        """Multiplies each gradient by what this rank counts in the step.

        That is `rows / total_rows` inside a wrapped model's step and `1 / size`
        elsewhere. A rank without rows gives exact zeros, whatever it computed.

        Args:
            gradients: as in `reduce`.
            parts: whether each belongs to a part of a weight.
        """
        weigh = self._weighing()
        return [weigh(*both) for both in zip(gradients, parts, strict=True)]

    def reduce(
        self, gradients: Sequence[Any], parts: Sequence[bool], weighed: bool
    ) -> list[Any]:
        """Adds up gradients over ranks, each as soon as its bucket is there.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None (left as it is). The same
                kinds and shapes on every rank.
            parts: whether each belongs to a part of a weight: it is added up over the
                ranks that hold the same part.
            weighed: whether `weigh` has been done; else it is done here, by bucket.
        """
        weigh = (lambda gradient, part: gradient) if weighed else self._weighing()
        step = current_step()
        reduced = list(gradients)
        for bucket in self._buckets(gradients, parts):
            part = parts[bucket[0]]
            name = f"{self.name}.{_name_of(bucket)}"
            own = buckets.join([gradients[position] for position in bucket])
            total = self._reduce_one(weigh(own, part), step, name, part)
            pieces = buckets.cut(total, [gradients[position] for position in bucket])
            for position, piece in zip(bucket, pieces, strict=True):
                reduced[position] = piece
        return reduced

    def _weighing(self) -> Callable[[Any, bool], Any]:
        """Multiplies a gradient, given whether it belongs to a part of a weight."""
        if self.reduction != "mean":
            return lambda gradient, part: gradient
        step = current_step()
        if step is None:
            weight = tf.constant(1.0 / groups().replicas, tf.float32)
        else:
            weight = step.weight
        m = groups().model_parallel_size
        among_all = weight / m if m > 1 else weight

        def weigh(gradient: Any, part: bool) -> Any:
            # The ranks of a group hold the same gradients of what they hold alike:
            # dense ones are shared out, of sparse ones the first rank sends all.
            fully = part or isinstance(gradient, tf.IndexedSlices)
            return _scaled(gradient, weight if fully else among_all)

        return weigh

    def _buckets(
        self, gradients: Sequence[Any], parts: Sequence[bool]
    ) -> list[list[int]]:
        if self.reduction == "adasum":  # it looks at each gradient's direction
            return [[position] for position in range(len(gradients))]
        return buckets.fill(gradients, parts)

    def _reduce_one(self, gradient: Any, step: Any, name: str, part: bool) -> Any:
        if gradient is None:
            return None
        among = "position" if part else "all"
        if isinstance(gradient, tf.IndexedSlices):
            if self.reduction == "adasum":
                gradient = tf.convert_to_tensor(gradient)
            else:
                rows = None if step is None else step.rows
                return exchange_slices(gradient, rows, name, among, self.tables)
        tensor = tf.convert_to_tensor(gradient)
        op = "adasum" if self.reduction == "adasum" else "sum"
        if self.compression == "bf16" and tensor.dtype == tf.float32:
            return _reduce_as_bfloat16(tensor, name)
        if self.compression == "fp16" and tensor.dtype == tf.float32:
            return tf.cast(
                reduce_tensor(tf.cast(tensor, tf.float16), op, name), "float32"
            )
        if tensor.dtype == tf.bfloat16:
            return tf.cast(
                reduce_tensor(tf.cast(tensor, "float32"), op, name, among), "bfloat16"
            )
        return reduce_tensor(tensor, op, name, among)


def _name_of(bucket: Sequence[int]) -> str:
    return str(bucket[0]) if len(bucket) == 1 else f"{bucket[-1]}_to_{bucket[0]}"


def _scaled(gradient: Any, weight: tf.Tensor) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.math.multiply_no_nan(
            gradient.values, tf.cast(weight, gradient.values.dtype)
        )
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    gradient = tf.convert_to_tensor(gradient)
    # multiply_no_nan: a weight of 0 gives 0 also for what is not finite.
    if gradient.dtype in (tf.float16, tf.bfloat16):
        wide = tf.math.multiply_no_nan(tf.cast(gradient, tf.float32), weight)
        return tf.cast(wide, gradient.dtype)
    return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))


def _reduce_as_bfloat16(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """An all-reduce that sends bfloat16, which neither MPI nor Horovod can add.

    As in a ring all-reduce, each rank adds up one piece of the tensor, in float32, and
    then all ranks gather the pieces: 2 (N - 1) / N times 2 bytes an element.
    """
    size = topology().size
    flat = tf.reshape(tensor, [-1])
    length = tf.shape(flat)[0]
    piece = (length + size - 1) // size
    flat = tf.pad(flat, [[0, piece * size - length]])
    bits = tf.bitcast(tf.cast(flat, tf.bfloat16), tf.uint16)
    received = exchange_pieces(bits, f"{name}.pieces")
    pieces = tf.cast(
        tf.bitcast(tf.reshape(received, [size, piece]), tf.bfloat16), "float32"
    )
    total = tf.cast(tf.reduce_sum(pieces, axis=0), tf.bfloat16)
    bits = gather_tensor(tf.bitcast(total, tf.uint16), f"{name}.sums")
    whole = tf.cast(tf.bitcast(bits, tf.bfloat16), tf.float32)
    return tf.reshape(whole[:length], tf.shape(tensor))


class RankedOptimizer(_Base):
    """Mixin, put before the user's optimizer class by `wrap`."""

    _kerasmgpu: Reducer

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        reducer = self.__dict__.get("_kerasmgpu")
        if reducer is None or topology().size == 1 or len(grads) == 0:
            return super().apply(grads, trainable_variables)
        if not _weighed.get():
            own = grads
            parts = _which_are_parts(self, trainable_variables, len(own))

            def exchange() -> list[Any]:
                if _accumulates(self):
                    return reducer.weigh(own, parts)
                inner = getattr(self, "inner_optimizer", self)
                reducer.tables = table_allowed(inner, plain_class(inner))
                return reducer.reduce(own, parts, weighed=False)

            grads = timed("reduce", exchange, ready=list(own))
        outermost = not _weighed.get()
        token = _weighed.set(True)
        try:
            # One that accumulates reduces inside of `apply`, which XLA cannot compile.
            if _compiled.get() and outermost and not _accumulates(self):
                apply = super().apply
                update = tf.function(
                    lambda reduced: apply(reduced, trainable_variables),
                    jit_compile=True,
                    autograph=False,
                )
                return update(grads)
            return super().apply(grads, trainable_variables)
        finally:
            _weighed.reset(token)

    @tf.autograph.experimental.do_not_convert
    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        grads, variables = list(grads), list(trainable_variables)
        token = _parts.set(_which_are_parts(self, variables, len(grads)))
        try:
            super()._backend_apply_gradients(grads, variables)
        finally:
            _parts.reset(token)

    @tf.autograph.experimental.do_not_convert
    def _clip_gradients(self, grads: Any) -> Any:
        reducer = self.__dict__.get("_kerasmgpu")
        if (
            reducer is not None
            and topology().size > 1
            and self.gradient_accumulation_steps
        ):
            own = grads
            grads = timed(
                "reduce",
                lambda: reducer.reduce(own, [False] * len(own), weighed=True),
                ready=list(own),
            )
        parts = _parts.get()
        if reducer is not None and any(parts):
            norm = self.clipnorm or self.global_clipnorm
            if norm and norm > 0:
                name = f"{reducer.name}.norms"
                return clip_by_norm(grads, parts, norm, not self.clipnorm, name)
        return super()._clip_gradients(grads)

    def add_variable_from_reference(self, *args: Any, **kwargs: Any) -> Any:
        # Keras puts the slot beside its variable, which a graph under way undoes.
        with tf.init_scope():
            return super().add_variable_from_reference(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        plain = plain_class(self)
        if topology().size == 1 or not fused_update(
            self, plain, gradient, variable, learning_rate
        ):
            super().update_step(gradient, variable, learning_rate)

    def load_own_variables(self, store: Any) -> None:
        """Keras's, of a file that has wholes where this rank holds parts."""
        variables = self.variables
        if slots_of(self) and len(store.keys()) == len(variables):
            cut = {}
            for position, variable in enumerate(variables):
                value, axis = store[str(position)], axis_of(variable)
                cut[str(position)] = (
                    value if axis is None else part_of(np.asarray(value), axis)
                )
            store = cut
        super().load_own_variables(store)

    @tf.autograph.experimental.do_not_convert
    def check_finite(self, grads: Any) -> Any:
        """Of a LossScaleOptimizer: whether to update, the same on all ranks."""
        finite = super().check_finite(grads)
        reducer = self.__dict__.get("_kerasmgpu")
        if reducer is None or topology().size == 1:
            return finite
        if not (_accumulates(self) or slots_of(self)):
            return finite  # of gradients that are the same on all ranks
        name = f"{reducer.name}.finite"
        return reduce_tensor(tf.cast(finite, tf.uint8), "min", name) > 0


def _which_are_parts(optimizer: Any, variables: Any, count: int) -> list[bool]:
    """Whether each gradient belongs to a part of a weight."""
    if groups().model_parallel_size == 1:
        return [False] * count
    if variables is None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        variables = inner._trainable_variables
    return [axis_of(variable) is not None for variable in variables]


def clip_by_norm(
    gradients: Sequence[Any],
    parts: Sequence[bool],
    limit: float,
    whole: bool,
    name: str,
) -> list[Any]:
    """Clips as Keras does, by the norms of whole gradients of which some are parts.

    Args:
        gradients: reduced; tensors or `tf.IndexedSlices`.
        parts: whether each belongs to a part of a weight.
        limit: the largest norm.
        whole: by one norm of all gradients (`global_clipnorm`) or by that of each.
        name: of the collective.
    """
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g)
        for g in gradients
    ]
    squares = [tf.reduce_sum(tf.square(tf.cast(v, tf.float32))) for v in values]
    own = tf.stack([s for s, part in zip(squares, parts, strict=True) if part])
    # Gathered and then added up in one order: the same bits on all ranks.
    sums = iter(
        tf.unstack(
            tf.reduce_sum(gather_tensor(own[tf.newaxis], name, among="group"), 0),
            num=sum(parts),
        )
    )
    squares = [next(sums) if p else s for s, p in zip(squares, parts, strict=True)]
    if whole:
        norm = tf.sqrt(tf.add_n(squares))
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        scales = [scale] * len(values)
    else:
        scales = [limit / tf.maximum(tf.sqrt(s), limit) for s in squares]
    clipped = []
    for gradient, value, scale in zip(gradients, values, scales, strict=True):
        scaled = value * tf.cast(scale, value.dtype)
        if isinstance(gradient, tf.IndexedSlices) and whole:
            # As of Keras, after which optimizers update every row.
            scaled = tf.convert_to_tensor(gradient) * tf.cast(scale, value.dtype)
        elif isinstance(gradient, tf.IndexedSlices):
            scaled = tf.IndexedSlices(scaled, gradient.indices, gradient.dense_shape)
        clipped.append(scaled)
    return clipped


def _accumulates(optimizer: Any) -> bool:
    """Whether gradients are added up over micro-steps, here or inside."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(inner.gradient_accumulation_steps)


_K = keras.optimizers
_ELEMENTWISE = {
    kind.update_step
    for kind in (
        *(_K.SGD, _K.RMSprop, _K.Adam, _K.AdamW, _K.Adadelta, _K.Adagrad, _K.Adamax),
        *(_K.Nadam, _K.Ftrl, _K.Lion),
    )
}


def check_optimizers_of_groups(optimizers: Sequence[Any], sharded: bool) -> None:
    """Refuses what optimizers cannot do with groups of ranks.

    Args:
        optimizers: of a model.
        sharded: whether the model has sharded layers.
    """
    place = groups()
    if place.model_parallel_size == 1:
        return
    for optimizer in optimizers:
        if _accumulates(optimizer):
            raise InvalidArgumentError(
                f"Rank {place.rank} of {place.size}: expected an optimizer without "
                "gradient_accumulation_steps with groups of ranks "
                f"(model_parallel_size={place.model_parallel_size}). Received: "
                f"{optimizer.name!r} with gradient_accumulation_steps. Use a larger "
                "batch_size."
            )
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        plain: Any = plain_class(inner)
        if sharded and plain.update_step not in _ELEMENTWISE:
            raise InvalidArgumentError(
                f"Rank {place.rank} of {place.size}: expected an optimizer that "
                "updates element by element with sharded layers (SGD, RMSprop, Adam, "
                "AdamW, Adadelta, Adagrad, Adamax, Nadam, Ftrl, Lion). Received: "
                f"{plain.__name__}, which looks at whole weights or is "
                "not known."
            )


def accumulators(optimizer: Any) -> list[Any]:
    """The variables in which gradients are added up over micro-steps; as a rule none.

    Each rank adds up its own weighed gradients, so these differ by rank.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not inner.gradient_accumulation_steps or not inner.built:
        return []
    return list(inner._accumulated_gradients)


def wrap_optimizer(
    optimizer: Any, reduction: str, compression: str | None, name: str = "own"
) -> Any:
    """Swaps the optimizer's class; the same object is returned. Idempotent.

    `name` tells apart the optimizers of one model, by their position. It is no counter
    of all optimizers: one that is wrapped on one rank alone would put it out of step.
    """
    if "_kerasmgpu" in optimizer.__dict__:
        reducer = optimizer.__dict__["_kerasmgpu"]
        if (reducer.reduction, reducer.compression) != (reduction, compression):
            raise InvalidArgumentError(
                f"The optimizer {optimizer.name!r} was already wrapped with "
                f"gradient_reduction={reducer.reduction!r}, "
                f"gradient_compression={reducer.compression!r}. Received: a strategy "
                f"with {reduction!r}, {compression!r}. Call strategy.unwrap first, or "
                "give each model an optimizer of its own."
            )
        return optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(inner, keras.optimizers.Optimizer):
        wrap_optimizer(inner, reduction, compression, name)
    reducer = Reducer(reduction, compression, name)
    object.__setattr__(optimizer, "_kerasmgpu", reducer)
    original = type(optimizer)
    optimizer.__class__ = type(
        original.__name__,
        (RankedOptimizer, original),
        {"__module__": original.__module__, "__qualname__": original.__qualname__},
    )
    return optimizer


def unwrap_optimizer(optimizer: Any) -> Any:
    """Puts the optimizer's own class back."""
    if optimizer.__dict__.pop("_kerasmgpu", None) is not None:
        optimizer.__class__ = plain_class(optimizer)
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(inner, keras.optimizers.Optimizer):
        unwrap_optimizer(inner)
    return optimizer


def plain_class(wrapped: Any) -> type:
    """The class that a wrapped model or optimizer had: the one after the mixin."""
    return type(wrapped).__mro__[2]
