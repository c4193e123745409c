"""`LearningRateScaling`: the rate for a larger global batch, with a warm-up."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from kerasmgpu.callbacks.common import required_session, where
from kerasmgpu.collectives import topology
from kerasmgpu.errors import InvalidArgumentError, check_one_of
from kerasmgpu.files import on_rank_zero

RULES = ("linear", "sqrt", "none")
STARTS = ("base", "zero")
_KEY = "_kerasmgpu_rate"


class LearningRateScaling(keras.callbacks.Callback):
    """Scales the learning rate with the global batch, and ramps up to it.

    A batch that is k times larger takes a rate that is k times larger (Goyal et al.
    2017, arXiv 1706.02677), if the rate rises to it slowly. Update t of T uses

        start + (target - start) * t / T,    target = base * f(global / base batch)

    with T = warmup_epochs * steps per epoch, t as Keras counts epochs and batches
    (`initial_epoch` included), and f the rule. What counts is the batch, not the number
    of ranks: with a fixed `batch_size` more ranks change nothing.

    After the ramp the rate is left alone, so that `ReduceLROnPlateau` works. The base
    rate is the optimizer's, remembered with it: a second fit, a second callback and a
    resumed run do not scale twice. A `LearningRateSchedule` is kept and multiplied.

    | key in the logs of an epoch | unit |
    |---|---|
    | `learning_rate` | rate applied in the last update (1 / gradient) |

    Args:
        base_batch_size: rows a step for which the optimizer's rate is right.
        base_learning_rate: the rate that is right for it. Default: the optimizer's
            configured rate. Needed for an optimizer that has trained before (loaded
            from a file), because its rate may be scaled already.
        rule: "linear" (default), "sqrt" (Krizhevsky 2014, arXiv 1404.5997) or "none".
        warmup_epochs: length of the ramp in epochs, 0 for none. Default 5.
        warmup_from: "base" (default; section 2.2 of Goyal et al.) or "zero".
        momentum_correction: "auto" (default: for SGD with momentum), True or False.
            Keras keeps the rate inside the velocity; when the rate changes from a to b
            the velocity is multiplied by b / a, so that it is a sum of gradients at one
            rate (the remark on momentum correction of Goyal et al., section 3).
        verbose: 1 prints a line when training begins. Default 0.

    Raises:
        InvalidArgumentError: an argument is none of these, the optimizer cannot be
            scaled, or the batch or the number of steps cannot be told from the data.

    Example:

    ```python
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    model = strategy.wrap(model)
    scaling = kerasmgpu.callbacks.LearningRateScaling(base_batch_size=64)
    model.fit(x, y, batch_size=256, epochs=20, callbacks=[scaling])  # up to 0.4
    ```
    """

    def __init__(
        self,
        base_batch_size: int,
        *,
        base_learning_rate: float | None = None,
        rule: str = "linear",
        warmup_epochs: float = 5,
        warmup_from: str = "base",
        momentum_correction: str | bool = "auto",
        verbose: int = 0,
    ) -> None:
        super().__init__()
        _positive("base_batch_size", base_batch_size)
        if base_learning_rate is not None:
            _positive("base_learning_rate", base_learning_rate)
        check_one_of("rule", rule, RULES)
        check_one_of("warmup_from", warmup_from, STARTS)
        check_one_of("momentum_correction", momentum_correction, ("auto", True, False))
        if not _is_number(warmup_epochs) or warmup_epochs < 0:
            raise InvalidArgumentError(
                "Expected warmup_epochs to be a number of epochs, 0 or more. "
                f"Received: warmup_epochs={warmup_epochs!r}."
            )
        self.base_batch_size = base_batch_size
        self.base_learning_rate = base_learning_rate
        self.rule = rule
        self.warmup_epochs = warmup_epochs
        self.warmup_from = warmup_from
        self.momentum_correction = momentum_correction
        self.verbose = verbose
        self._rate: ScaledRate | None = None
        self._steps = 0
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        session = required_session(self.model, "LearningRateScaling")
        optimizer = _scalable(self.model)
        batch = session.global_batch_size
        if batch is None:
            raise InvalidArgumentError(
                f"{where()}LearningRateScaling cannot tell the global batch from this "
                "data. Expected arrays, or a dataset that ends in batch(n). Give the "
                "elements a known first dimension, as with tf.ensure_shape."
            )
        self._steps = self.params.get("steps") or 0
        if self.warmup_epochs and not self._steps:
            raise InvalidArgumentError(
                f"{where()}LearningRateScaling cannot tell how many steps an epoch "
                f"has, which warmup_epochs={self.warmup_epochs} needs. Pass "
                "steps_per_epoch to fit, or warmup_epochs=0."
            )
        base = on_rank_zero("read the learning rate", lambda: self._base(optimizer))
        ratio = batch / self.base_batch_size
        factor = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.rule]
        self._rate = rate = ScaledRate.of(optimizer)
        first = (self.model._initial_epoch or session.first_epoch) * self._steps
        length = round(self.warmup_epochs * self._steps)
        rate.begin(
            base,
            base * factor,
            length=length,
            from_zero=self.warmup_from == "zero",
            correct_momentum=self._corrects(optimizer),
            first=first,
        )
        if rate.traced_in is not self.model.train_function:
            session.retrace()
            rate.traced_in = self.model.train_function
        if self.verbose and topology().is_rank_zero:
            what = "its schedule" if rate.scheduled else f"base rate {base:g}"
            reached = "" if rate.scheduled else f" = {base * factor:g}"
            print(
                f"LearningRateScaling: {what} x {factor:g} (rule {self.rule!r}, base "
                f"batch {self.base_batch_size}, global batch {batch}){reached}; "
                f"warm-up over {length} updates from {self.warmup_from}",
                flush=True,
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._rate is not None and self._rate.ramping:
            self._rate.seek(self._epoch * self._steps + batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._rate is not None and logs is not None:
            logs["learning_rate"] = self._rate.last_applied()

    def on_train_end(self, logs: Any = None) -> None:
        if self._rate is not None:
            self._rate.end()

    # For BackupAndRestore.

    def get_state(self) -> dict[str, Any]:
        return {} if self._rate is None else self._rate.get_state()

    def set_state(self, saved: dict[str, Any]) -> None:
        if saved:
            ScaledRate.of(_scalable(self.model)).set_state(saved)

    def _base(self, optimizer: Any) -> float:
        rate = optimizer.__dict__.get(_KEY)
        scheduled = isinstance(_inner(optimizer)._learning_rate, _SCHEDULE)
        if scheduled:
            if self.base_learning_rate is not None:
                raise InvalidArgumentError(
                    f"{where()}LearningRateScaling received base_learning_rate="
                    f"{self.base_learning_rate} for an optimizer with a "
                    "LearningRateSchedule. Expected one of the two: the schedule is "
                    "multiplied as it is."
                )
            return 1.0
        if self.base_learning_rate is not None:
            return float(self.base_learning_rate)
        if rate is not None and rate.base is not None:
            return float(rate.base)
        if int(optimizer.iterations) > 0:
            raise InvalidArgumentError(
                f"{where()}LearningRateScaling cannot tell the base rate of an "
                f"optimizer that has made {int(optimizer.iterations)} updates: its "
                f"learning rate of {float(optimizer.learning_rate):g} may be scaled "
                "already. Pass base_learning_rate."
            )
        return float(optimizer.learning_rate)

    def _corrects(self, optimizer: Any) -> bool:
        inner = _inner(optimizer)
        has_momentum = isinstance(inner, keras.optimizers.SGD) and inner.momentum > 0
        if self.momentum_correction is True and not has_momentum:
            raise InvalidArgumentError(
                f"{where()}momentum_correction=True is for SGD with momentum. "
                f'Received: {type(inner).__name__}. Use "auto".'
            )
        return has_momentum and self.momentum_correction is not False


_SCHEDULE = keras.optimizers.schedules.LearningRateSchedule


class ScaledRate:
    """The rate of one optimizer, set inside the step, before each update.

    It lives with the optimizer and, once a step was traced with it, in that step. Being
    inside makes it right also where one call runs several steps.

    Args:
        optimizer: the outermost one, which `train_step` calls.
    """

    def __init__(self, optimizer: Any) -> None:
        inner = _inner(optimizer)
        self.scheduled = isinstance(inner._learning_rate, _SCHEDULE)
        self.base: float | None = None
        self.target: float | None = None
        self.traced_in: Any = None
        self._optimizer = optimizer
        # With a schedule, what it is multiplied by.
        self._multiplier = tf.Variable(1.0, trainable=False)
        self._start = tf.Variable(0.0, trainable=False)
        self._target = tf.Variable(0.0, trainable=False)
        self._length = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._update = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._corrects = tf.Variable(False, trainable=False)
        self._applied = tf.Variable(-1.0, trainable=False)
        # Past Keras's tracking of attributes: none of this belongs in a saved file.
        object.__setattr__(optimizer, _KEY, self)
        object.__setattr__(optimizer, "apply", self._apply)
        if self.scheduled:
            object.__setattr__(
                inner, "_get_current_learning_rate", self._scheduled_rate
            )

    @classmethod
    def of(cls, optimizer: Any) -> ScaledRate:
        """The one that lives with the optimizer; made at the first call."""
        return optimizer.__dict__.get(_KEY) or cls(optimizer)

    def begin(
        self,
        base: float,
        target: float,
        *,
        length: int,
        from_zero: bool,
        correct_momentum: bool,
        first: int,
    ) -> None:
        """Sets a ramp of `length` updates, of which `first` are over."""
        self._start.assign(0.0 if from_zero else base)
        self._target.assign(target)
        self._length.assign(length)
        self._corrects.assign(correct_momentum)
        self._update.assign(first)
        self._applied.assign(-1.0)
        if first >= length and self.target != target:
            self._set(target)
        self.base, self.target = base, target

    def end(self) -> None:
        self._length.assign(0)

    @property
    def ramping(self) -> bool:
        return bool(self._update < self._length)

    def seek(self, updates: int) -> None:
        """How many updates the ramp has behind it."""
        self._update.assign(updates)

    def last_applied(self) -> float:
        applied = float(self._applied)
        return applied if applied >= 0 else float(self._optimizer.learning_rate)

    def get_state(self) -> dict[str, Any]:
        multiplier = float(self._multiplier)
        return {"base": self.base, "target": self.target, "multiplier": multiplier}

    def set_state(self, saved: dict[str, Any]) -> None:
        self.base, self.target = saved["base"], saved["target"]
        self._multiplier.assign(saved["multiplier"])

    # In the step ----------------------------------------------------------------------

    def _apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        optimizer = self._optimizer
        inner = _inner(optimizer)
        if not optimizer.built and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            with keras.name_scope(optimizer.name):
                optimizer.build(trainable_variables)
        old = self._value()
        self._update.assign_add(1)
        share = tf.cast(self._update / self._length, tf.float32)
        ramp = self._start + (self._target - self._start) * share
        new = tf.where(self._update <= self._length, ramp, old)
        self._set(new)
        ratio = tf.where(self._corrects, tf.math.divide_no_nan(new, old), 1.0)
        if getattr(inner, "momentums", None):
            changed = tf.not_equal(ratio, 1.0)
            tf.cond(changed, lambda: _multiply(inner.momentums, ratio), lambda: False)
        self._applied.assign(tf.cast(inner.learning_rate, tf.float32))
        return type(optimizer).apply(optimizer, grads, trainable_variables)

    def _value(self) -> tf.Tensor:
        if self.scheduled:
            return tf.identity(self._multiplier)
        # identity: a cast to the type it has would be read when it is used.
        rate = tf.identity(_inner(self._optimizer)._learning_rate.value)
        return tf.cast(rate, tf.float32)

    def _set(self, value: Any) -> None:
        if self.scheduled:
            self._multiplier.assign(value)
        else:
            _inner(self._optimizer)._learning_rate.assign(value)

    def _scheduled_rate(self) -> Any:
        inner = _inner(self._optimizer)
        rate = type(inner)._get_current_learning_rate(inner)
        return rate * tf.cast(self._multiplier, tf.as_dtype(keras.backend.floatx()))


def _multiply(variables: list[Any], ratio: tf.Tensor) -> bool:
    for variable in variables:
        variable.assign(variable * tf.cast(ratio, variable.dtype))
    return True


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _scalable(model: Any) -> Any:
    """The model's optimizer.

    Raises:
        InvalidArgumentError: there is none whose rate can be scaled.
    """
    optimizer = getattr(model, "optimizer", None)
    inner = _inner(optimizer)
    rate = getattr(inner, "_learning_rate", None)
    if optimizer is None or hasattr(inner, "optimizers"):
        received = type(optimizer).__name__ if optimizer is not None else "none"
        raise InvalidArgumentError(
            f"{where()}LearningRateScaling expects a model with one optimizer. "
            f"Received: {received}. Give each optimizer the rate that "
            "strategy.scale_learning_rate says."
        )
    if not isinstance(rate, (_SCHEDULE, keras.Variable)):
        raise InvalidArgumentError(
            f"{where()}LearningRateScaling cannot scale a learning rate given as "
            f"{type(rate).__name__}. Expected a number or a "
            "keras.optimizers.schedules.LearningRateSchedule."
        )
    return optimizer


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _positive(name: str, value: Any) -> None:
    if not _is_number(value) or not value > 0:
        raise InvalidArgumentError(
            f"Expected {name} to be a positive number. Received: {name}={value!r}."
        )
