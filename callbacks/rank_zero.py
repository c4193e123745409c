"""`RankZero`: a callback that runs on rank 0 only."""

from __future__ import annotations

from typing import Any

import keras

from kerasmgpu.collectives import topology
from kerasmgpu.errors import InvalidTypeError

_HOOKS = (
    *("on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end"),
    *("on_train_begin", "on_train_end", "on_train_batch_begin", "on_train_batch_end"),
    *("on_test_begin", "on_test_end", "on_test_batch_begin", "on_test_batch_end"),
    *("on_predict_begin", "on_predict_end"),
    *("on_predict_batch_begin", "on_predict_batch_end"),
)


class RankZero(keras.callbacks.Callback):
    """Runs a callback on rank 0 only.

    For callbacks that write files, print or talk to a server, and would do so once a
    rank. Keras's own (ModelCheckpoint, BackupAndRestore, CSVLogger, TensorBoard) are
    run that way in any case. Such a callback must not call a collective: the other
    ranks would not. It may set `model.stop_training`: all ranks then stop.

    At size 1 it changes nothing.

    Args:
        callback: a Keras callback.

    Raises:
        InvalidTypeError: `callback` is not a callback.

    Example:

    ```python
    progress = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"])
    )
    model.fit(x, y, callbacks=[kerasmgpu.callbacks.RankZero(progress)])
    ```
    """

    def __init__(self, callback: Any) -> None:
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise InvalidTypeError(
                "RankZero expects a keras.callbacks.Callback. Received: "
                f"{type(callback).__module__}.{type(callback).__qualname__}. Pass an "
                "instance, not the class."
            )
        self.callback = callback
        # Keras runs batch hooks on threads where every callback says that it may.
        self.async_safe = getattr(callback, "async_safe", False)

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.callback.set_model(model)


def _delegate(name: str) -> Any:
    def hook(self: RankZero, *args: Any, **kwargs: Any) -> None:
        if topology().is_rank_zero:
            getattr(self.callback, name)(*args, **kwargs)

    hook.__name__ = name
    return hook


for _name in _HOOKS:
    setattr(RankZero, _name, _delegate(_name))
