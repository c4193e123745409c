"""Kills a process that saves, at random moments, and loads what is there each time.

Prints how often the file could be loaded, and how often a write was under way.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import time
from typing import Any

import keras
import numpy as np

import kerasmgpu
from kerasmgpu.callbacks import RankZeroCheckpoint


def save_without_end(path: str, background: bool) -> None:
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(600), keras.layers.Dense(64)]
    )
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model = kerasmgpu.HorovodStrategy().wrap(model)
    checkpoint = RankZeroCheckpoint(path, background=background)
    checkpoint.set_model(model)
    checkpoint.on_train_begin()
    epoch = 0
    while True:
        checkpoint.on_epoch_begin(epoch)
        checkpoint.on_epoch_end(epoch, {"loss": 1.0})
        epoch += 1


def load_on_request(connection: multiprocessing.connection.Connection) -> None:
    while True:
        try:
            model = keras.models.load_model(connection.recv())
            outputs = model.predict(np.ones((1, 64)), verbose=0)
            connection.send(bool(np.isfinite(outputs).all()))
        except EOFError:
            return
        except Exception as error:
            connection.send(repr(error))


def main(folder: str, kills: int) -> None:
    path = os.path.join(folder, "model.keras")
    moments = random.Random(0)
    fork: Any = multiprocessing.get_context("fork")  # TensorFlow is imported once
    here, there = fork.Pipe()
    loader = fork.Process(target=load_on_request, args=(there,), daemon=True)
    loader.start()
    loadable = under_way = 0
    for number in range(kills):
        before = os.stat(path).st_mtime_ns if os.path.exists(path) else None
        saver = fork.Process(target=save_without_end, args=(path, number % 2 == 1))
        saver.start()
        while saver.is_alive():
            if os.path.exists(path) and os.stat(path).st_mtime_ns != before:
                break
            time.sleep(0.005)
        time.sleep(moments.random() * 0.15)
        os.kill(saver.pid, signal.SIGKILL)
        saver.join()
        under_way += len(os.listdir(folder)) > 1
        here.send(path)
        outcome = here.recv()
        loadable += outcome is True
        if outcome is not True:
            print(f"kill {number}: {outcome}", flush=True)
    print(f"loadable {loadable} of {kills}, under way {under_way}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
