"""`ConsistencyCheck`: do all ranks still hold the same model?"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np

from kerasmgpu.callbacks.common import check_frequency, required_session
from kerasmgpu.collectives import all_gather_object, topology
from kerasmgpu.errors import RankMismatchError
from kerasmgpu.state import optimizers_of, shared_variables


class ConsistencyCheck(keras.callbacks.Callback):
    """Compares weights and optimizer state over ranks, bit by bit.

    After every step all ranks should hold the same. They do not where something wrote
    to one rank's weights alone: a callback under `if strategy.is_rank_zero`, a layer
    that assigns a variable, faulty memory. Each rank sends one digest; where these
    differ, one a variable.

    At size 1 there is nothing to compare.

    Args:
        every: "epoch" (default) or a number of batches.

    Raises:
        RankMismatchError: on every rank; names the first variable that differs and the
            ranks that hold another value than rank 0.
        InvalidArgumentError: `every` is neither.

    Example:

    ```python
    model.fit(x, y, callbacks=[kerasmgpu.callbacks.ConsistencyCheck(every=100)])
    ```

    What differs by design is left out: the states of dropout layers, and gradients that
    are being accumulated. A check reads all weights to the host, so every batch is
    too often for a large model.
    """

    def __init__(self, every: str | int = "epoch") -> None:
        super().__init__()
        check_frequency("every", every)
        self.every = every
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        required_session(self.model, "ConsistencyCheck")
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.every == "epoch":
            return
        self._batches += int(self.model.steps_per_execution)
        if self._batches >= int(self.every):
            self._batches = 0
            self._check(f"batch {batch}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.every == "epoch":
            self._check(f"epoch {epoch + 1}")

    def _check(self, moment: str) -> None:
        if topology().size == 1:
            return
        variables = shared_variables(self.model, optimizers_of(self.model))
        digests = [_digest(v.numpy()) for v in variables]
        whole = hashlib.blake2b(b"".join(digests), digest_size=16).digest()
        if len(set(all_gather_object(whole))) == 1:
            return
        everyone = all_gather_object(digests)
        for position, variable in enumerate(variables):
            others = [
                rank
                for rank, theirs in enumerate(everyone)
                if theirs[position] != everyone[0][position]
            ]
            if others:
                listed = ", ".join(map(str, others))
                raise RankMismatchError(
                    f"Rank {topology().rank} of {topology().size}: after {moment} the "
                    f"ranks hold different values. First difference: "
                    f"{variable.path!r}, of which rank(s) {listed} hold another value "
                    "than rank 0. Expected the same on every rank: look for code that "
                    "changes the model on some ranks only."
                )


def _digest(value: np.ndarray) -> bytes:
    data = np.ascontiguousarray(value)
    return hashlib.blake2b(data.view(np.uint8).data, digest_size=16).digest()
