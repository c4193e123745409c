"""`RankZeroCheckpoint`: Keras's ModelCheckpoint, written once, whole or not at all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
from typing import Any

import keras

from kerasmgpu.callbacks.common import (
    check_frequency,
    check_monitor,
    session_of,
    unknown_monitor,
)
from kerasmgpu.collectives import topology
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.files import (
    Snapshot,
    on_rank_zero,
    remove_leftovers,
    write_on_rank_zero,
)
from kerasmgpu.shards import gathered, sharded_variables
from kerasmgpu.state import optimizers_of


class RankZeroCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model during training, on rank 0.

    As `keras.callbacks.ModelCheckpoint`, with these differences. Rank 0 writes to a
    temporary file in the same folder, flushes it to disk and renames it: a job killed
    at any moment leaves the old or the new file. All ranks agree on what is best, with
    `save_freq` in batches too. A write that fails (no folder, no permission, a full
    disk) raises the same error on every rank, and the last good file stays. A monitor
    that does not exist is an error, not a warning.

    Args:
        filepath: where to; names in braces as in Keras, such as
            `"{epoch:02d}-{val_loss:.3f}.keras"`. The folder must exist.
        monitor, verbose, save_best_only, save_weights_only, mode, save_freq,
            initial_value_threshold: as in Keras.
        max_to_keep: how many of the files that this callback has written to keep, the
            latest ones; for a `filepath` with names in braces. Default: all.
        background: copy the weights and write on a thread, so that training goes on.
            The next save, and the end of training, wait for the one before. Takes the
            memory of a second copy. Default False.

    Raises:
        InvalidArgumentError: an argument, or the monitor, is unknown.
        SaveError: a write has failed.

    Example:

    ```python
    checkpoint = kerasmgpu.callbacks.RankZeroCheckpoint(
        "best-{epoch:02d}.keras", monitor="val_accuracy", save_best_only=True,
        max_to_keep=2, background=True,
    )
    model.fit(x, y, validation_split=0.1, callbacks=[checkpoint])
    ```
    """

    runs_on_all_ranks = True

    def __init__(
        self,
        filepath: Any,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        initial_value_threshold: float | None = None,
        *,
        max_to_keep: int | None = None,
        background: bool = False,
    ) -> None:
        check_frequency("save_freq", save_freq)
        if max_to_keep is not None and (
            not isinstance(max_to_keep, int) or max_to_keep < 1
        ):
            raise InvalidArgumentError(
                "Expected max_to_keep to be a number of files of at least 1, or None. "
                f"Received: max_to_keep={max_to_keep!r}."
            )
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=save_best_only,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )
        if not topology().is_rank_zero:
            self.verbose = 0
        self.max_to_keep = max_to_keep
        self.background = background
        self._written: list[str] = []
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: tuple[str, concurrent.futures.Future[None] | None] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if self.save_best_only:
            check_monitor(self, self.model, session_of(self.model))
        on_rank_zero(f"write checkpoints as {self.filepath}", self._check_folder)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._pending is not None:
            self._settle(wait=False)
        if self.save_best_only and self.monitor not in (logs or {}):
            if self.save_freq == "epoch":
                raise unknown_monitor(self, logs or {})
            return
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)
        self._settle(wait=True)
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    # For BackupAndRestore.

    def get_state(self) -> dict[str, Any]:
        names = ("best", "_batches_seen_since_last_saving", "_last_batch_seen")
        return {name: self.__dict__[name] for name in (*names, "_written")}

    def set_state(self, saved: dict[str, Any]) -> None:
        self.__dict__.update(saved)
        self._written = list(self._written)

    # Keras calls this when a save is due.

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        session = session_of(self.model)
        if batch is not None and session is not None and session.spans_ranks:
            logs = session.global_logs(logs)  # at a batch, logs are this rank's
            session.complete_rank_zero()
        if self.monitor_op is None and self.save_best_only:
            self._set_monitor_op()
        filepath = self._get_file_path(epoch, batch, logs)
        if self.save_best_only and self.monitor not in logs:
            raise unknown_monitor(self, logs)
        if not self._should_save_model(epoch, batch, logs, filepath):
            return
        self._settle(wait=True)
        parts = sharded_variables(self.model, optimizers_of(self.model))
        with gathered(parts.values()):
            if self.background:
                self._write_in_background(filepath)
            else:
                on_rank_zero(f"write {filepath}", lambda: self._write(filepath))
        if self.verbose > 0:
            doing = "saving" if self.background else "finished saving"
            print(f"\nEpoch {epoch + 1}: {doing} model to {filepath}", flush=True)

    def _write(self, filepath: str) -> None:
        method = "save_weights" if self.save_weights_only else "save"
        write_on_rank_zero(self.model, method, filepath, overwrite=True)
        self._forget_old_ones(filepath)

    def _write_in_background(self, filepath: str) -> None:
        future = None
        if topology().is_rank_zero:
            snapshot = Snapshot(self.model)

            def write() -> None:
                snapshot.save(filepath, self.save_weights_only)
                self._forget_old_ones(filepath)

            if self._executor is None:
                self._executor = concurrent.futures.ThreadPoolExecutor(
                    1, thread_name_prefix="kerasmgpu-checkpoint"
                )
            future = self._executor.submit(write)
        self._pending = (filepath, future)

    def _settle(self, wait: bool) -> None:
        """Raises, on every rank, what a write in the background has raised."""
        if self._pending is None:
            return
        filepath, future = self._pending

        def outcome() -> bool:
            if future is None or not (wait or future.done()):
                return False
            future.result()
            return True

        try:
            done = on_rank_zero(f"write {filepath} in the background", outcome)
        except Exception:
            self._pending = None
            raise
        if done:
            self._pending = None

    def _forget_old_ones(self, filepath: str) -> None:
        if filepath in self._written:
            self._written.remove(filepath)
        self._written.append(filepath)
        while self.max_to_keep is not None and len(self._written) > self.max_to_keep:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._written.pop(0))

    def _check_folder(self) -> None:
        folder = pathlib.Path(self.filepath).parent
        if "://" in self.filepath or "{" in str(folder):
            return  # not local, or not known yet
        if not folder.is_dir():
            raise FileNotFoundError(f"the folder {str(folder)!r} does not exist.")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"the folder {str(folder)!r} cannot be written to.")
        if "{" not in self.filepath:
            remove_leftovers(self.filepath)
