"""What `SpeedupLogger` writes: CSV, JSON lines, TensorBoard, a table, a plot."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import pathlib
import statistics
from typing import Any

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.files import replaced

#: Columns of the table that is printed: key, heading, format.
_COLUMNS = (
    ("epoch", "epoch", "{:d}"),
    ("samples_per_second", "rows/s", "{:,.0f}"),
    ("step_seconds_median", "step s", "{:.4f}"),
    ("step_seconds_p95", "p95 s", "{:.4f}"),
    ("speedup", "speed-up", "{:.2f}"),
    ("efficiency", "efficiency", "{:.0%}"),
    ("reduce_share", "reduce", "{:.0%}"),
    ("input_share", "input", "{:.0%}"),
    ("imbalance", "imbalance", "{:.0%}"),
    ("slowest_rank", "slowest", "{:d}"),
    ("amdahl_limit", "limit", "{:.1f}"),
)
_RECORD = "baseline.json"


def check_log_dir(log_dir: Any) -> None:
    """Makes the folder, and refuses one that cannot be written to."""
    if log_dir is None:
        return
    path = pathlib.Path(log_dir)
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{str(path)!r} cannot be written to.")


def check_plot(plot: bool, log_dir: Any) -> None:
    if not plot:
        return
    if log_dir is None:
        raise InvalidArgumentError(
            "SpeedupLogger(plot=True) needs a log_dir to put the picture in. Received: "
            "log_dir=None."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError(
            "SpeedupLogger(plot=True) needs matplotlib, which is not installed. "
            "Install it (pip install matplotlib), or leave plot out."
        )


def read_baseline(source: Any) -> dict[str, Any]:
    """A record of a run of one process.

    Raises:
        InvalidArgumentError: it is no such record.
    """
    record = source
    if isinstance(source, (str, os.PathLike)):
        path = pathlib.Path(source)
        path = path / _RECORD if path.is_dir() else path
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InvalidArgumentError(
                f"SpeedupLogger cannot find baseline={str(path)!r}. Expected the "
                f"{_RECORD} that a run of one process wrote to its log_dir."
            ) from error
        except ValueError as error:
            raise InvalidArgumentError(
                f"SpeedupLogger cannot read baseline={str(path)!r}: {error}. Expected "
                f"the {_RECORD} that a run of one process wrote."
            ) from error
    needed = {"size", "model", "samples_per_second"}
    if not isinstance(record, dict) or not needed <= set(record):
        missing = sorted(needed - set(record)) if isinstance(record, dict) else needed
        raise InvalidArgumentError(
            "SpeedupLogger expects a baseline with size, model and samples_per_second. "
            f"Received: one without {', '.join(sorted(missing))}."
        )
    if record["size"] != 1:
        raise InvalidArgumentError(
            "SpeedupLogger expects a baseline of one process. Received: a record of "
            f"{record['size']} ranks. Run the script on one process first."
        )
    return record


class Report:
    """The files of one run, on rank 0.

    Args:
        log_dir: an existing folder, or None.
        append: whether the run goes on from an earlier one.
    """

    def __init__(self, log_dir: Any, append: bool) -> None:
        self._folder = None if log_dir is None else pathlib.Path(log_dir)
        self._append = append
        self._board: Any = None
        if self._folder is not None and importlib.util.find_spec("tensorboard"):
            import tensorflow as tf

            self._board = tf.summary.create_file_writer(str(self._folder))

    def add(self, row: dict[str, Any]) -> None:
        """Writes an epoch's row."""
        if self._folder is None:
            return
        mode = "a" if self._append else "w"
        self._append = True
        path = self._folder / "speedup.csv"
        headed = mode == "a" and path.exists() and path.stat().st_size > 0
        with path.open(mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if not headed:
                writer.writeheader()
            writer.writerow(row)
        with (self._folder / "speedup.jsonl").open(mode, encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._board is not None:
            import tensorflow as tf

            with self._board.as_default(step=row["epoch"]):
                for key, value in row.items():
                    if isinstance(value, (int, float)) and key != "epoch":
                        tf.summary.scalar(f"speedup/{key}", value)
            self._board.flush()

    def finish(
        self,
        rows: list[dict[str, Any]],
        record: dict[str, Any],
        plot: bool,
        verbose: bool,
    ) -> None:
        """Writes the record and the plot, and prints the table."""
        throughput = statistics.median(row["samples_per_second"] for row in rows)
        record = {**record, "samples_per_second": throughput}
        if self._folder is not None:
            with replaced(self._folder / _RECORD) as temporary:
                text = json.dumps(record, indent=2) + "\n"
                pathlib.Path(temporary).write_text(text, encoding="utf-8")
            if plot:
                with replaced(self._folder / "speedup.png") as temporary:
                    _draw(temporary, rows, record["size"])
        if verbose:
            _print_table(rows, record)


def _print_table(rows: list[dict[str, Any]], record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    size, m = record["size"], record["model_parallel_size"]
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    if m > 1:
        ranks += f" ({size // m} group{'s' if size > m else ''} of {m})"
    table = Table(title=f"SpeedupLogger: {ranks} against one process")
    for _, heading, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_text(row[key], form) for key, _, form in _COLUMNS))
    console = Console()
    console.width = max(console.width, 110)  # into a file, rich assumes 80
    console.print(table)
    reasons = [row["reason"] for row in rows if row["reason"]]
    if reasons:
        console.print(f"Why not more: {reasons[-1]}.", soft_wrap=True, highlight=False)
    for sentence in record["not_measured"]:
        console.print(sentence, soft_wrap=True, highlight=False)


def _text(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _draw(path: str, rows: list[dict[str, Any]], size: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    epochs = [row["epoch"] for row in rows]
    axes.plot(epochs, [row["speedup"] for row in rows], "o-", label="speed-up")
    axes.axhline(size, linestyle=":", color="gray", label=f"ideal: {size}")
    axes.set(xlabel="epoch", ylabel="times one process", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    share = axes.twinx()
    percent = [100 * (row["efficiency"] or 0) for row in rows]
    share.plot(epochs, percent, "s--", color="tab:orange", label="efficiency")
    share.set(ylabel="efficiency, %", ylim=(0, 110))
    lines = [*axes.get_lines(), *share.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="lower right")
    figure.savefig(path, dpi=120)
