"""A run that is killed in the middle of an epoch, and goes on as if it had not been.

    python examples/resume.py
    python examples/resume.py -np 3 --signal SIGTERM

starts three jobs of the same training: one that is left alone, one in which the last
rank kills itself in the second epoch, and that one again. SIGKILL gives no warning: the
job goes on from its last backup. On SIGTERM, as a scheduler sends it, all ranks stop
after the same batch, save and leave with exit code 75. Either way the third job ends
with the weights and the history of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile

import numpy as np

EPOCHS, BATCH, ROWS = 3, 32, 320  # 10 batches an epoch


def train(folder: str, backup: bool, kill_at: str | None, signal_name: str) -> None:
    """What runs on every rank: an ordinary script with a BackupAndRestore."""
    import keras

    import kerasmgpu

    strategy = kerasmgpu.HorovodStrategy()
    keras.utils.set_random_seed(7)  # the same data order and weights every time
    x = np.random.normal(size=(ROWS, 20)).astype("float32")
    y = (x[:, :5].sum(axis=1) > 0).astype("int64")
    model = keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = strategy.wrap(model)

    class KillMyself(keras.callbacks.Callback):
        """The last rank sends itself a signal before batch `kill_at`."""

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            me = strategy.rank == strategy.size - 1
            if me and kill_at == f"{self.epoch},{batch}":
                os.kill(os.getpid(), signal.Signals[signal_name])

    callbacks: list[keras.callbacks.Callback] = [KillMyself()]
    if backup:
        backup_dir = os.path.join(folder, "backup")
        callbacks.append(kerasmgpu.callbacks.BackupAndRestore(backup_dir, save_freq=4))
    history = model.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0
    )
    if strategy.is_rank_zero:
        np.savez(os.path.join(folder, "weights.npz"), *model.get_weights())
        with open(os.path.join(folder, "history.json"), "w") as file:
            json.dump(history.history, file)


def start(ranks: int, folder: str, *options: str) -> int:
    """Starts the training on several ranks; returns the job's exit code."""
    os.makedirs(folder, exist_ok=True)
    program = [sys.executable, os.path.abspath(__file__), "--train", folder, *options]
    launch = [sys.executable, "-m", "kerasmgpu", "run", "-np", str(ranks), "--"]
    return subprocess.run([*launch, *program], check=False).returncode


def results(folder: str) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    with np.load(os.path.join(folder, "weights.npz")) as arrays:
        weights = [arrays[name] for name in arrays.files]
    with open(os.path.join(folder, "history.json")) as file:
        return weights, json.load(file)


def compare(ranks: int, signal_name: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        whole, ended = os.path.join(root, "whole"), os.path.join(root, "ended")
        print("1. The run that is left alone.", flush=True)
        if start(ranks, whole) != 0:
            sys.exit("The training itself failed; see above.")
        print(f"2. The run that gets {signal_name} in epoch 2.", flush=True)
        kill = ["--backup", "--kill-at", "1,6", "--signal", signal_name]
        code = start(ranks, ended, *kill)
        print(f"   It ended with exit code {code}.", flush=True)
        if code == 0 or os.path.exists(os.path.join(ended, "weights.npz")):
            sys.exit("It was not ended early; nothing is shown.")
        print("3. The same run, started again.", flush=True)
        if start(ranks, ended, "--backup") != 0:
            sys.exit("It could not go on; see above.")
        (weights, history), (others, other_history) = results(whole), results(ended)
        apart = max(float(np.abs(a - b).max()) for a, b in zip(weights, others))
        print(f"largest difference between weights: {apart:.1e}")
        print(f"loss by epoch, left alone: {history['loss']}")
        print(f"loss by epoch, resumed:    {other_history['loss']}")
        same = all(np.allclose(history[k], other_history[k], 1e-5) for k in history)
        if apart > 1e-6 or not same or history.keys() != other_history.keys():
            sys.exit("The resumed run differs from the one that was left alone.")
        print("The resumed run is the run that was left alone.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-np", dest="ranks", type=int, default=2)
    parser.add_argument("--signal", default="SIGKILL", choices=["SIGKILL", "SIGTERM"])
    parser.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--backup", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.backup, options.kill_at, options.signal)
    else:
        compare(options.ranks, options.signal)


if __name__ == "__main__":
    main()
