"""`TerminateOnNaN`: all ranks stop when one has seen a loss that is no number."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from kerasmgpu.callbacks.common import session_of
from kerasmgpu.collectives import all_gather_object, topology


class TerminateOnNaN(keras.callbacks.TerminateOnNaN):
    """Stops the training on all ranks when any rank sees a NaN or infinite loss.

    As `keras.callbacks.TerminateOnNaN`. A batch's loss is that of the rank's own rows,
    so one rank may see it alone; all ranks stop after the same batch, at the latest one
    batch after it was seen, and the message says which ranks saw it, and where.

    Args:
        raise_error: raise a `RuntimeError`, on every rank, instead of stopping. Then
            `on_train_end` is not called, so that a backup is kept. Default False.

    Raises:
        RuntimeError: with `raise_error=True`.

    Example:

    ```python
    model.fit(x, y, callbacks=[kerasmgpu.callbacks.TerminateOnNaN()])
    ```
    """

    def __init__(self, raise_error: bool = False) -> None:
        super().__init__()
        self.raise_error = raise_error
        self._seen: tuple[int, int, float] | None = None
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._seen = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and self._seen is None and not np.isfinite(loss):
            self._seen = (self._epoch, batch, float(loss))
            self.model.stop_training = True
        session = session_of(self.model)
        if session is None or not session.spans_ranks:
            self._settle([self._seen])
        elif session.stop_agreed:  # the same on all ranks
            self._settle(all_gather_object(self._seen))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        session = session_of(self.model)
        if session is not None and session.spans_ranks:
            self._settle(all_gather_object(self._seen))

    def _settle(self, everyone: list[tuple[int, int, float] | None]) -> None:
        seen = {rank: one for rank, one in enumerate(everyone) if one is not None}
        if not seen:
            return
        self._seen = None
        self.model.stop_training = True
        # Those that saw it first: its gradients give it to the others in the next step.
        first = min(one[:2] for one in seen.values())
        seen = {rank: one for rank, one in seen.items() if one[:2] == first}
        epoch, batch, loss = next(iter(seen.values()))
        text = f"epoch {epoch + 1}, batch {batch}: the loss is {loss}"
        if topology().size > 1:
            text += f" on rank(s) {', '.join(map(str, seen))}"
        if self.raise_error:
            raise RuntimeError(f"NaN or Inf loss in {text}. Training is ended.")
        if topology().is_rank_zero:
            print(f"\nTerminateOnNaN: {text}; stopping the training.", flush=True)
