"""The program that `kerasmgpu bench` measures: it trains, and writes down how fast.

    python -m kerasmgpu.perf.measure KIND --model mnist_cnn --folder DIR ...

KIND is "plain" (Keras alone), "ranks" (a wrapped model, as a rank of a job) or "pairs"
(a plain and a wrapped model by turns in this one process). What was measured is written
to a JSON file in DIR.

A step's time runs from the end of the step before it, within one epoch; the first step
of an epoch is left out, and so are the steps of the warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from kerasmgpu.errors import LaunchError
from kerasmgpu.perf.workloads import BATCHES_PER_EPOCH, WORKLOADS, Workload

KINDS = ("plain", "ranks", "pairs")
MEETING_TIMEOUT_SECONDS = 180.0
#: Of one model before the other's turn comes: short, so that both see the same machine.
STEPS_A_TURN = 20


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--cores", help="pin to these cores, such as 0,1")
    parser.add_argument("--index", type=int, default=0, help="of a plain process")
    parser.add_argument("--count", type=int, default=1, help="plain processes")
    parser.add_argument("--wrapped-first", action="store_true", help="in pairs")
    parser.add_argument("--batch-size", type=int, help="of each process")
    parser.add_argument("--unfused", action="store_true", help="BatchNormalization")
    args = parser.parse_args(argv)
    if args.cores is not None:
        # Before TensorFlow is imported, which makes a thread a core.
        os.sched_setaffinity(0, [int(core) for core in args.cores.split(",")])
    workload = WORKLOADS[args.model]
    if args.kind == "pairs":
        result = measure_pairs(workload, args)
        index = 0
    else:
        result, index = measure_throughput(workload, args)
    text = json.dumps(result)
    (args.folder / f"result.{index}.json").write_text(text, encoding="utf-8")


def measure_throughput(
    workload: Workload, args: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    """Trains for some seconds, alone or as a rank.

    Returns:
        What was measured, and the number of this process.
    """
    if args.kind == "ranks":
        import kerasmgpu

        strategy = kerasmgpu.HorovodStrategy(fuse_batch_norm=not args.unfused)
        size, index = strategy.size, strategy.rank
        if size != args.count:
            raise LaunchError(
                f"Expected a job of {args.count} ranks. Received: one of {size}."
            )
        model = strategy.wrap(workload.compiled_model())
    else:
        size, index = 1, args.index
        model = workload.compiled_model()
    clock = make_clock(args.warmup_steps, args.seconds)
    if args.kind == "plain" and args.count > 1:
        clock.meet = lambda: meet(args.folder, args.index, args.count)
    own_batch_size = args.batch_size or workload.per_rank_batch_size
    batch_size = size * own_batch_size
    x, y = workload.data(batch_size)
    # It stops itself, when its time is over.
    model.fit(x, y, batch_size, epochs=1_000_000, callbacks=[clock], verbose=0)
    seconds = sum(clock.step_seconds)
    rows = len(clock.step_seconds) * own_batch_size
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "steps": len(clock.step_seconds),
        "samples_per_second": rows / seconds,
        "median_step_seconds": statistics.median(clock.step_seconds),
        "epoch_to_steps": epoch_to_steps(clock.epoch_seconds, clock.step_seconds),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "gradient_bytes": sum(
            variable.numpy().nbytes for variable in model.trainable_variables
        ),
    }, index


def measure_pairs(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """Epochs of a plain and of a wrapped model by turns, in this process.

    Returns:
        "pairs": median step seconds of the plain and the wrapped model, for each turn.
    """
    import kerasmgpu

    strategy = kerasmgpu.HorovodStrategy()
    names = ["plain", "wrapped"]  # the order of making them, and of the first turn
    if args.wrapped_first:
        names.reverse()
    models = {name: workload.compiled_model() for name in names}
    models["wrapped"] = strategy.wrap(models["wrapped"])
    rows = STEPS_A_TURN * workload.per_rank_batch_size
    x, y = (array[:rows] for array in workload.data(workload.per_rank_batch_size))
    pairs: list[list[float]] = []
    deadline = None
    while deadline is None or time.perf_counter() < deadline:
        medians = {}
        for name in names:
            clock = make_clock(warmup_steps=0)
            models[name].fit(
                x, y, workload.per_rank_batch_size, callbacks=[clock], verbose=0
            )
            medians[name] = statistics.median(clock.step_seconds)
        if deadline is None:  # the first turn is the warm-up
            deadline = time.perf_counter() + args.seconds
        else:
            pairs.append([medians["plain"], medians["wrapped"]])
        names.reverse()
    return {"pairs": pairs}


def make_clock(warmup_steps: int, seconds: float = float("inf")) -> Any:
    """A callback that times steps and, after some seconds of them, stops the training.

    Its `meet` is called when the warm-up is over.
    """
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.meet = lambda: None
            self.step_seconds: list[float] = []
            self.epoch_seconds: list[float] = []  # of whole epochs
            self._epoch_began: float | None = None
            self._seen = 0
            self._last: float | None = None
            self._deadline: float | None = None

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._last = None
            now = time.perf_counter()
            if self._epoch_began is not None:
                self.epoch_seconds.append(now - self._epoch_began)
            self._epoch_began = None if self._deadline is None else now

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.perf_counter()
            self._seen += 1
            if self._deadline is None and self._seen > warmup_steps:
                self.meet()
                now = time.perf_counter()
                self._deadline = now + seconds
            elif self._deadline is not None and self._last is not None:
                self.step_seconds.append(now - self._last)
                if now > self._deadline:
                    self.model.stop_training = True
            self._last = now

    return Clock()


def epoch_to_steps(
    epoch_seconds: list[float], step_seconds: list[float]
) -> float | None:
    """An epoch's time, from its begin to the next, to that of its steps at their mean.

    None where no whole epoch was measured.
    """
    if not epoch_seconds:
        return None
    steps = BATCHES_PER_EPOCH * statistics.mean(step_seconds)
    return statistics.median(epoch_seconds) / steps


def meet(folder: Path, index: int, count: int) -> None:
    """Waits until all plain processes of a block are warm."""
    (folder / f"ready.{index}").touch()
    deadline = time.monotonic() + MEETING_TIMEOUT_SECONDS
    while len(list(folder.glob("ready.*"))) < count:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Process {index}: expected {count} processes to be warm within "
                f"{MEETING_TIMEOUT_SECONDS:.0f} s. Some are not."
            )
        time.sleep(0.005)


if __name__ == "__main__":
    main()
