"""`SpeedupLogger`: how much faster the job is than one process, and why not more."""

from __future__ import annotations

import statistics
import time
from typing import Any

import keras

from kerasmgpu.callbacks.common import required_session, where
from kerasmgpu.callbacks.speedup_report import (
    Report,
    check_log_dir,
    check_plot,
    read_baseline,
)
from kerasmgpu.collectives import all_gather_object, groups, topology
from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.files import on_rank_zero
from kerasmgpu.perf.model import amdahl_limit, karp_flatt
from kerasmgpu.shards import sharded_layers
from kerasmgpu.state import structure_digest

#: Steps at the beginning of `fit` that are left out (the first one traces), and at the
#: beginning of each other epoch (where the pipeline starts).
_FIRST_STEPS, _EPOCH_STEPS = 3, 1
#: Below this efficiency the reason is looked for.
_LOW_EFFICIENCY = 0.85


class SpeedupLogger(keras.callbacks.Callback):
    """Measures throughput, speed-up and efficiency, epoch by epoch.

    The speed-up compares rows a second of the job with those of one process. One
    process is either a record of a run of one (`baseline`), or, where none is given,
    what it could do: steps of this model without communication, measured on every rank
    at the same time before training, on rows that are made up. Weights, optimizer and
    random states are put back afterwards, to the bit.

    With sharded layers no rank has the model to itself: without a `baseline`, `speedup`,
    `efficiency` and what follows from them are then not measured, and the report says
    so. A record of the script with `model_parallel_size=1` on one process serves. What
    the ranks of a group send each other inside sharded layers counts as computing, not
    as `reduce_share`. Rows that a group's ranks share count once.

    | key | unit |
    |---|---|
    | `epoch` | epoch, from 1 |
    | `samples_per_second` | rows / s, all ranks together |
    | `step_seconds_median`, `step_seconds_p95` | s a step, from the end of a batch to the end of the next |
    | `speedup` | times one process |
    | `efficiency` | speed-up / ranks |
    | `reduce_share` | share of the step that ranks wait for the reduce, mean over ranks |
    | `input_share` | share of the step that the slowest-fed rank waits for data |
    | `slowest_rank` | rank that computes longest |
    | `imbalance` | its time over the mean of the ranks, minus 1 |
    | `serial_fraction` | share of one process's time that does not become faster (Karp and Flatt 1990) |
    | `amdahl_limit` | speed-up that no number of ranks exceeds at that share |

    With `log_dir`, rank 0 writes `speedup.csv`, `speedup.jsonl`, `baseline.json` (a
    record of this run, for a later `baseline=` where this is one process), TensorBoard
    scalars where TensorBoard is installed, and with `plot=True` `speedup.png`. A table
    is printed when training ends and, where efficiency is low, a line that says why.

    Args:
        log_dir: folder to write to; created. Default: only the table is printed.
        baseline: a record of a run of one process with this model: its `baseline.json`,
            the folder it is in, or its contents as a dict.
        calibrate_steps: steps to measure without communication where there is no
            `baseline`. Default 20.
        plot: draw speed-up and efficiency by epoch; needs matplotlib. Default False.
        verbose: 0 prints nothing. Default 1.

    Raises:
        InvalidArgumentError: an argument cannot be used, or `baseline` is of another
            model or of a run of several processes.

    Example:

    ```python
    logger = kerasmgpu.callbacks.SpeedupLogger("logs", plot=True)
    model.fit(x, y, batch_size=256, epochs=5, callbacks=[logger])
    ```
    """  # noqa: E501

    def __init__(
        self,
        log_dir: Any = None,
        *,
        baseline: Any = None,
        calibrate_steps: int = 20,
        plot: bool = False,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        number = isinstance(calibrate_steps, int)
        if not number or isinstance(calibrate_steps, bool) or calibrate_steps < 1:
            raise InvalidArgumentError(
                "Expected calibrate_steps to be a number of steps of at least 1. "
                f"Received: calibrate_steps={calibrate_steps!r}."
            )
        check_plot(plot, log_dir)
        self.log_dir = log_dir
        self.baseline = baseline
        self.calibrate_steps = calibrate_steps
        self.plot = plot
        self.verbose = verbose
        self.rows: list[dict[str, Any]] = []
        self._report: Report | None = None
        self._session: Any = None
        self._timers: Any = None
        self._one: dict[str, Any] = {}
        self._periods: list[float] = []
        self._waits: dict[str, float] = {}
        self._left_out = 0
        self._last = 0.0

    def before_train_begin(self) -> None:
        # Before any callback begins: some put their own into the step.
        self._session = required_session(self.model, "SpeedupLogger")
        on_rank_zero(f"write to {self.log_dir}", lambda: check_log_dir(self.log_dir))
        if self.baseline is not None:
            record = on_rank_zero("read the baseline", lambda: self._read_baseline())
            self._one = {"samples_per_second": record["samples_per_second"]}
            return
        seconds = self._session.seconds_alone(self.calibrate_steps)
        self._one = {"seconds": seconds and statistics.median(seconds)}

    def on_train_begin(self, logs: Any = None) -> None:
        self._timers = self._session.start_timers()
        first = int(self.model._initial_epoch or self._session.first_epoch)
        self.rows = [row for row in self.rows if row["epoch"] <= first]
        self._left_out = _FIRST_STEPS
        if topology().is_rank_zero:
            self._report = Report(self.log_dir, append=first > 0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._periods = []
        self._waits = {"input": 0.0, "reduce": 0.0}
        self._last = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        waits = self._timers.take() if self._timers is not None else {}
        if self._left_out > 0:
            self._left_out -= 1
            return
        self._periods.append(seconds / self.model.steps_per_execution)
        for name, waited in waits.items():
            self._waits[name] += waited / self.model.steps_per_execution

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mine = {"periods": self._periods, **self._waits, **self._one}
        mine["rows"] = self._rows_per_step()
        mine["replicas"] = groups().replicas
        mine["holds_model"] = not sharded_layers(self.model)
        alone = self._one.get("seconds")
        if self._timers is None and alone:  # one rank: what is not the step itself
            waits = [max(0.0, seconds - alone) for seconds in self._periods]
            mine["input"] = sum(waits)
        everyone = all_gather_object(mine)
        self._left_out = _EPOCH_STEPS
        if all(rank["periods"] for rank in everyone):
            row = epoch_row(epoch, everyone)
            self.rows.append(row)
            if self._report is not None:
                self._report.add(row)

    def on_train_end(self, logs: Any = None) -> None:
        self._session.stop_timers()
        self._timers = None
        record = {
            "size": topology().size,
            "model_parallel_size": groups().model_parallel_size,
            "not_measured": self._not_measured(),
            "model": structure_digest(self.model),
            "global_batch_size": self._session.global_batch_size,
            "epochs": self.rows,
        }
        if self._report is not None and self.rows:
            self._report.finish(self.rows, record, self.plot, bool(self.verbose))
        self._report = None

    # For BackupAndRestore.

    def get_state(self) -> dict[str, Any]:
        return {"rows": list(self.rows)}

    def set_state(self, saved: dict[str, Any]) -> None:
        self.rows = list(saved["rows"])

    def _not_measured(self) -> list[str]:
        """What the figures leave out, in sentences."""
        if not sharded_layers(self.model):
            return []
        left_out = (
            "What ranks of a group send each other inside sharded layers is not "
            "measured apart: it counts as computing."
        )
        if self.baseline is not None:
            return [left_out]
        return [
            "Speed-up and efficiency are not measured: each rank holds a part of the "
            "sharded layers, so none can time the model alone. Give baseline=, a "
            "record of this script on one process.",
            left_out,
        ]

    def _rows_per_step(self) -> float:
        """Rows of a full global batch."""
        if self._session.global_batch_size is not None:
            return float(self._session.global_batch_size)
        step = self._session.last_step
        return float(step.total_rows) if step is not None else 0.0

    def _read_baseline(self) -> dict[str, Any]:
        record = read_baseline(self.baseline)
        mine = structure_digest(self.model)
        if record["model"] != mine:
            raise InvalidArgumentError(
                f"{where()}SpeedupLogger received a baseline of another model (digest "
                f"{record['model'][:8]}, this model has {mine[:8]}). Expected a record "
                "of the same layers and shapes. Run this script on one process first."
            )
        return record


def epoch_row(epoch: int, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """What is logged of an epoch, from what each rank measured."""
    size = len(everyone)
    means = [statistics.fmean(rank["periods"]) for rank in everyone]
    steps = [len(rank["periods"]) for rank in everyone]
    reduce = [rank["reduce"] / n for rank, n in zip(everyone, steps)]
    inputs = [rank["input"] / n for rank, n in zip(everyone, steps)]
    busy = [max(m - r - i, 1e-9) for m, r, i in zip(means, reduce, inputs)]
    step_seconds = statistics.fmean(means)
    rows = everyone[0]["rows"]
    throughput = rows / step_seconds
    replicas = everyone[0]["replicas"]
    one = _throughput_of_one(everyone, rows / replicas, busy)
    speedup = throughput / one if one else None
    serial = karp_flatt(speedup, size) if speedup else None
    periods = sorted(p for rank in everyone for p in rank["periods"])
    slowest = max(range(size), key=lambda rank: busy[rank])
    row = {
        "epoch": epoch + 1,
        "samples_per_second": throughput,
        "step_seconds_median": statistics.median(periods),
        "step_seconds_p95": periods[min(len(periods) - 1, int(0.95 * len(periods)))],
        "speedup": speedup,
        "efficiency": speedup / size if speedup else None,
        "reduce_share": statistics.fmean(reduce) / step_seconds,
        "input_share": max(inputs) / step_seconds,
        "slowest_rank": slowest,
        "imbalance": busy[slowest] / statistics.fmean(busy) - 1,
        "serial_fraction": serial,
        "amdahl_limit": amdahl_limit(serial) if serial and serial > 0 else None,
    }
    late = (busy[slowest] - statistics.fmean(busy)) / step_seconds
    reduce_share = min(reduce) / step_seconds
    row["reason"] = reason(row, reduce_share, late, inputs, size // replicas)
    return row


def _throughput_of_one(
    everyone: list[dict[str, Any]], rows: float, busy: list[float]
) -> float | None:
    """Rows a second of one process: of the record, or the mean of the ranks alone.

    Args:
        everyone: what each rank measured.
        rows: of a step that one rank sees.
        busy: seconds a step of each rank, waits left out.

    Returns:
        None where ranks hold only parts of the model, and there is no record.
    """
    if "samples_per_second" in everyone[0]:
        return float(everyone[0]["samples_per_second"])
    if not everyone[0]["holds_model"]:
        return None
    # Where the shapes are not known before training, a step without its waits.
    alone = [rank["seconds"] or b for rank, b in zip(everyone, busy)]
    return statistics.fmean(rows / seconds for seconds in alone)


def reason(
    row: dict[str, Any],
    reduce_share: float,
    late_share: float,
    inputs: list[float],
    model_parallel_size: int = 1,
) -> str | None:
    """Why efficiency is low, in a line; None where it is not.

    Args:
        row: an epoch's.
        reduce_share: share of the step that the rank that waits least waits for the
            reduce: what is left when no rank waits for a slower one.
        late_share: share of the step that the slowest rank computes longer than the
            mean.
        inputs: seconds a step that each rank waits for data.
        model_parallel_size: ranks in a group.
    """
    in_groups = model_parallel_size > 1
    efficiency = row["efficiency"]
    if efficiency is None or efficiency >= _LOW_EFFICIENCY:
        return None
    causes = {
        "input": row["input_share"],
        "slow rank": late_share,
        "reduce": reduce_share,
    }
    cause = max(causes, key=lambda name: causes[name])
    if causes[cause] < 0.05 and in_groups:
        return (
            f"the {model_parallel_size} ranks of a group see the same rows, and "
            "compute the same in all layers that are not sharded; a smaller "
            "model_parallel_size is faster where memory allows it"
        )
    if causes[cause] < 0.05:
        return (
            "the ranks compute more slowly than in calibration: they may share cores "
            "or memory with one another, or cores with their input pipelines; try "
            "fewer ranks a host, fewer threads a rank, or cache"
        )
    if cause == "input":
        rank = max(range(len(inputs)), key=lambda r: inputs[r])
        if len(inputs) == 1:
            return (
                f"input-bound: {causes[cause]:.0%} of the step goes to waiting for "
                "data, or to callbacks; try prefetch, cache, or "
                "map(num_parallel_calls=tf.data.AUTOTUNE)"
            )
        return (
            f"input-bound: rank {rank} waits for data {causes[cause]:.0%} of the step; "
            "try prefetch, cache, map(num_parallel_calls=tf.data.AUTOTUNE), or "
            "strategy.shard(files)"
        )
    if cause == "slow rank":
        return (
            f"one slow rank: rank {row['slowest_rank']} computes "
            f"{row['imbalance']:.0%} longer than the mean and the others wait; look at "
            + ("its host" if in_groups else 'its host, or use sharding="balanced"')
        )
    bound = f"reduce-bound: {causes[cause]:.0%} of the step goes to the reduce; try a "
    if in_groups:
        return bound + "larger batch"
    return bound + "larger batch, gradient_accumulation_steps, or gradient_compression"
