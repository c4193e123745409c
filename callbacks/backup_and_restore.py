"""`BackupAndRestore`: a run that was ended goes on as if it had not been."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import keras

from kerasmgpu.callbacks.backup_folder import BackupFolder
from kerasmgpu.callbacks.common import check_frequency, required_session, where
from kerasmgpu.collectives import all_gather_object, broadcast_object, topology
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.files import on_rank_zero
from kerasmgpu.shards import cut_values, gather_values, sharded_layers
from kerasmgpu.state import global_seed

#: What Keras's callbacks remember. Others may have `get_state` and `set_state`.
_REMEMBERED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        keras.callbacks.EarlyStopping,
        ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    ),
    (keras.callbacks.ReduceLROnPlateau, ("best", "wait", "cooldown_counter")),
    (
        keras.callbacks.ModelCheckpoint,
        ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
)


class BackupAndRestore(keras.callbacks.Callback):
    """Saves the state of the training; a run that is started again goes on from it.

    The run that was killed and started again ends with the same weights and History as
    one that was not. Kept are weights, optimizer state, epoch and batch, the metrics
    of the epoch that had begun, the place in the data (same order; the batches that
    were consumed are passed over), random states of every rank, History, and the state
    of EarlyStopping, ReduceLROnPlateau, ModelCheckpoint, SwapEMAWeights and of
    callbacks that have `get_state()` and `set_state(state)`, as those of kerasmgpu.

    On a preemption signal, on any one rank, all ranks stop after the same batch, save,
    and leave with `exit_code`. Start the same command again to go on.

    Only rank 0 needs the folder. Two generations are kept, each with a checksum: where
    the newest is damaged, that is said and the older one used.

    Args:
        backup_dir: a folder for this run alone. It is created where it is missing.
        save_freq: "epoch" (default) or a number of batches.
        preemption_signals: signals that ask to save and leave. Default SIGTERM, which
            schedulers send before they kill.
        exit_code: with which all ranks leave after a signal. Default 75 ("temporary
            failure, try again" in sysexits.h).
        delete_checkpoint: remove the backup when training has ended. Default True.

    Raises:
        InvalidArgumentError: an argument cannot be used, or the backup is of another
            model, optimizer, data or global batch.
        SaveError: the folder cannot be written to.

    Example:

    ```python
    keras.utils.set_random_seed(1)  # the same script must give the same data order
    backup = kerasmgpu.callbacks.BackupAndRestore("backup", save_freq=100)
    model.fit(x, y, batch_size=256, epochs=90, callbacks=[backup])
    ```

    Starting again with another number of ranks, or another `model_parallel_size`, works
    with the same global batch: weights and slots are saved whole. Then
    the random states of dropout and augmentation are new ones, and sums over ranks are
    added in another order, so the result is the same to rounding (without dropout), not
    to the bit.

    The order of data is repeated, so it must be repeatable: seed the script. A dataset
    is passed over batch by batch in the epoch that had begun, and shuffles of earlier
    epochs are drawn again; a generator, and a dataset under `steps_per_epoch`, are read
    from the beginning. A `PyDataset` has its `on_epoch_begin` and `on_epoch_end` called
    once for each earlier epoch; what `__getitem__` draws at random is not repeated.
    """

    runs_last = True  # what the other callbacks make of an epoch is part of its state

    def __init__(
        self,
        backup_dir: Any,
        *,
        save_freq: str | int = "epoch",
        preemption_signals: Iterable[int] = (signal.SIGTERM,),
        exit_code: int = 75,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        if not backup_dir:
            raise InvalidArgumentError(
                "Expected backup_dir to be the path of a folder. Received: "
                f"backup_dir={backup_dir!r}."
            )
        check_frequency("save_freq", save_freq)
        if not isinstance(exit_code, int) or not 0 <= exit_code <= 255:
            raise InvalidArgumentError(
                "Expected exit_code to be a whole number from 0 to 255. Received: "
                f"exit_code={exit_code!r}."
            )
        self.preemption_signals = tuple(preemption_signals)
        for number in self.preemption_signals:
            if number in (signal.SIGKILL, signal.SIGSTOP):
                raise InvalidArgumentError(
                    "Expected preemption_signals that a process can catch. Received: "
                    f"{signal.Signals(number).name}."
                )
        self.save_freq = save_freq
        self.exit_code = exit_code
        self.delete_checkpoint = delete_checkpoint
        self._folder = BackupFolder(backup_dir)
        self._session: Any = None
        self._kept: dict[str, Any] = {}
        self._handlers: dict[int, Any] = {}
        self._signal: int | None = None
        self._epoch = 0
        self._since_saved = 0
        self._due = False

    # Beginning ------------------------------------------------------------------------

    def on_fit_begin(self, session: Any) -> None:
        self._session = session
        resume = session.begin_resume()
        saved = None

        def load() -> None:
            nonlocal saved
            self._folder.prepare()
            saved = self._folder.load()

        on_rank_zero(f"use the backup folder {self._folder.path}", load)
        resume.adopt(saved)
        self._kept = broadcast_object((saved or {}).get("kept") or {})

    def before_train_begin(self) -> None:
        required_session(self.model, "BackupAndRestore")
        self._session.resume.restore_model()
        self._restore_callbacks()

    def on_train_begin(self, logs: Any = None) -> None:
        self._signal = None
        self._since_saved = int(self._kept.get("since_saved", 0))
        self._due = False
        self._restore_callbacks()  # once more: some begin anew in on_train_begin
        if "history" in self._kept:
            history = self.model.history
            history.epoch, history.history = self._kept["history"]
        position = self._session.resume.position
        if position is not None and topology().is_rank_zero:
            print(
                f"BackupAndRestore: going on from {self._folder.path} at epoch "
                f"{position.epoch + 1}, after {position.batch} of its batches.",
                flush=True,
            )
        self._kept = {}
        if global_seed() is None:
            warnings.warn(
                "BackupAndRestore: no seed is set, so the order of shuffled data will "
                "be another one after a restart. Call keras.utils.set_random_seed(1) "
                "when the script begins.",
                stacklevel=2,
            )
        self._listen()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._session.resume.begin_epoch(epoch)

    # Saving ---------------------------------------------------------------------------

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = batch + 1
        steps = self.params.get("steps")
        last = steps is not None and done >= steps
        if self.save_freq != "epoch":
            self._since_saved += int(self.model.steps_per_execution)
            self._due = self._due or self._since_saved >= int(self.save_freq)
        if last:
            return  # the end of the epoch, with its validation, comes next
        leaving = self._preempted_rank(at_batch=True)
        if leaving is not None or self._due:
            self._save(self._epoch, done, logs)
        if leaving is not None:
            self._leave(leaving, f"epoch {self._epoch + 1}, batch {done}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        leaving = self._preempted_rank(at_batch=False)
        epochs = self.params.get("epochs")
        over = (epochs is not None and epoch + 1 >= epochs) or self._stopping()
        if over:
            return  # nothing is left to resume
        if leaving is not None or self._due or self.save_freq == "epoch":
            self._save(epoch + 1, 0, None)
        if leaving is not None:
            self._leave(leaving, f"epoch {epoch + 1}")

    def on_train_end(self, logs: Any = None) -> None:
        self._stop_listening()
        if self.delete_checkpoint:
            on_rank_zero("remove the backup", self._folder.remove)

    def _save(self, epoch: int, batch: int, logs: Any) -> None:
        self._due, self._since_saved = False, 0
        state = self._session.resume.take(epoch, batch, logs)
        best = self._best_weights()

        def write() -> None:
            state["kept"] = self._to_keep()
            for key, weights in best.items():
                state["kept"]["callbacks"][key]["best_weights"] = weights
            self._folder.save(state)

        on_rank_zero(f"save a backup in {self._folder.path}", write)

    def _to_keep(self) -> dict[str, Any]:
        history = self.model.history
        return {
            "callbacks": {key: _state_of(c) for key, c in self._others()},
            "history": (list(history.epoch), dict(history.history)),
            "since_saved": self._since_saved,
        }

    def _restore_callbacks(self) -> None:
        saved = self._kept.get("callbacks", {})
        for key, callback in self._others():
            if saved.get(key):
                _set_state_of(callback, self._of_this_rank(saved[key]))

    def _best_weights(self) -> dict[tuple[str, int], list[Any]]:
        """What EarlyStopping keeps in parts, whole. Must be called on every rank."""
        if not sharded_layers(self.model):
            return {}
        kept = {
            key: callback.best_weights
            for key, callback in self._others()
            if isinstance(callback, keras.callbacks.EarlyStopping)
            and callback.best_weights is not None
        }
        everyone = all_gather_object(list(kept))
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise InvalidArgumentError(
                    f"{where()}expected the same EarlyStopping callbacks on every "
                    "rank of a model with sharded layers. Received: with best weights "
                    f"{everyone[0]} on rank 0 and {theirs} on rank {rank}."
                )
        return {key: gather_values(kept[key], self.model.weights) for key in kept}

    def _of_this_rank(self, saved: Any) -> Any:
        """A callback's state with parts in place of whole weights."""
        best = saved.get("best_weights") if isinstance(saved, dict) else None
        if best is None or not sharded_layers(self.model):
            return saved
        return {**saved, "best_weights": cut_values(best, self.model.weights)}

    def _others(self) -> list[tuple[tuple[str, int], Any]]:
        """The other callbacks, each with its class and its number among that class.

        Some run on rank 0 only, so positions in the list would not do.
        """
        found = []
        counts: dict[str, int] = {}
        for callback in self._session.callbacks:
            callback = getattr(callback, "stands_for", callback)
            name = type(callback).__name__
            counts[name] = counts.get(name, -1) + 1
            if callback is not self:
                found.append(((name, counts[name]), callback))
        return found

    def _stopping(self) -> bool:
        """Whether a callback has ended the training."""
        asked = bool(self.model.stop_training)
        if self._session.spans_ranks:
            asked = any(all_gather_object(asked))
        return asked

    # Preemption -----------------------------------------------------------------------

    def _listen(self) -> None:
        self._stop_listening()
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "BackupAndRestore cannot listen to preemption signals: fit does not "
                "run on the main thread, which alone may. Backups are still saved.",
                stacklevel=2,
            )
            return
        for number in self.preemption_signals:
            self._handlers[number] = signal.signal(number, self._on_signal)

    def _stop_listening(self) -> None:
        for number, handler in self._handlers.items():
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(number, handler)
        self._handlers = {}

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signal = number
        # The next step's control vector carries it to the other ranks.
        self._session.preempted = True

    def _preempted_rank(self, at_batch: bool) -> tuple[int, int] | None:
        """The first rank that was signalled, and the signal; the same on all ranks."""
        session = self._session
        if not session.spans_ranks:
            return None if self._signal is None else (0, self._signal)
        if at_batch and not session.stop_agreed:
            return None
        everyone = all_gather_object(self._signal)
        return next(((r, s) for r, s in enumerate(everyone) if s is not None), None)

    def _leave(self, leaving: tuple[int, int], moment: str) -> None:
        self._stop_listening()
        rank, number = leaving
        if topology().is_rank_zero:
            print(
                f"\nBackupAndRestore: {signal.Signals(number).name} on rank {rank}. "
                f"Stopped after {moment} and saved in {self._folder.path}; start the "
                f"same command again to go on. Exit code {self.exit_code}.",
                flush=True,
            )
        sys.exit(self.exit_code)


def _state_of(callback: Any) -> Any:
    if hasattr(callback, "get_state"):
        return callback.get_state()
    for kind, names in _REMEMBERED:
        if isinstance(callback, kind):
            return {n: callback.__dict__[n] for n in names if n in callback.__dict__}
    return None


def _set_state_of(callback: Any, saved: Any) -> None:
    if hasattr(callback, "set_state"):
        callback.set_state(saved)
    else:
        callback.__dict__.update(saved)
