"""`kerasmgpu bench --collectives`: how fast ranks add up tensors, by size.

As a program, a rank of the job that is measured:

    python -m kerasmgpu.perf.all_reduce --folder DIR --sizes 4096,67108864

"Horovod's own settings" are measured through `strategy.all_reduce` as well, which is a
plain `hvd.allreduce` in a `tf.function`. A script without this package, of nothing but
`hvd.init` and `hvd.allreduce` with the same variables, took the same time: 4 KB 1079 us
here and there, 64 MB 35.6 to 35.7 ms here and 35.2 to 38.7 ms there (2 ranks, pinned
and not). Fusion is on, but joins only tensors that are ready at once: one alone is not
copied.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

SIZES = tuple(4096 << shift for shift in range(0, 15, 2))  # 4 KB to 64 MB
#: What a rank gets that sets nothing itself: Horovod's and Open MPI's own choices, but
#: that ranks yield while they wait, without which they take each other's cores.
PLAIN_HOROVOD = {
    "HOROVOD_CYCLE_TIME": "1",
    "HOROVOD_FUSION_THRESHOLD": str(128 << 20),
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "0",
    "KERASMGPU_KEEP_MEMORY": "0",
}
SECONDS_A_SIZE = 0.5


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sizes", required=True, help="bytes, such as 4096,1048576")
    args = parser.parse_args(argv)
    import kerasmgpu

    strategy = kerasmgpu.HorovodStrategy()
    result = {
        str(size): {
            "copy_seconds": measure_copy(size),
            "all_reduce_seconds": measure_all_reduce(strategy, size),
        }
        for size in map(int, args.sizes.split(","))
    }
    path = args.folder / f"result.{strategy.rank}.json"
    path.write_text(json.dumps(result), encoding="utf-8")


def measure_all_reduce(strategy: Any, size: int) -> float:
    """Median seconds of an all-reduce of `size` bytes of float32. On every rank."""
    import tensorflow as tf

    tensor = tf.random.uniform([size // 4])

    @tf.function
    def reduce() -> Any:
        return strategy.all_reduce(tensor, "sum")[0]

    def times(count: int) -> list[float]:
        found = []
        for _ in range(count):
            began = time.perf_counter()
            reduce()
            found.append(time.perf_counter() - began)
        return found

    # The same number on all ranks, from the slowest's first calls.
    once = float(strategy.all_reduce(statistics.median(times(6)), "max"))
    return statistics.median(times(max(5, min(1000, int(SECONDS_A_SIZE / once)))))


def measure_copy(size: int) -> float:
    """Median seconds of copying `size` bytes in this process."""
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    times = []
    for _ in range(max(5, min(1000, (256 << 20) // size))):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_rounds(
    run: Callable[[dict[str, str]], list[dict[str, Any]]],
    rounds: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Jobs with Horovod's own settings and with ours, in turns.

    Args:
        run: runs a job with these variables; returns what each rank measured.
        rounds: of both.
        progress: is told what is measured.
    """
    kinds = [("horovod", PLAIN_HOROVOD), ("kerasmgpu", {})]
    taken = []
    for number in range(rounds):
        found = {}
        for name, environ in kinds[:: -1 if number % 2 else 1]:
            progress(f"all-reduce, round {number + 1} of {rounds}: {name}'s settings")
            found[name] = run(environ)
        taken.append(found)
    return taken


def summarize(rounds: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """For each size in bytes, name of a figure → its value in each round.

    A job's time is its slowest rank's. "speedup" is Horovod's time to ours.
    """
    results: dict[str, dict[str, list[float]]] = {}
    for size in rounds[0]["kerasmgpu"][0]:

        def slowest(taken: dict[str, Any], name: str, size: str = size) -> float:
            return max(rank[size]["all_reduce_seconds"] for rank in taken[name])

        plain = [slowest(taken, "horovod") for taken in rounds]
        ours = [slowest(taken, "kerasmgpu") for taken in rounds]
        results[size] = {
            "horovod_seconds": plain,
            "kerasmgpu_seconds": ours,
            "copy_seconds": [t["kerasmgpu"][0][size]["copy_seconds"] for t in rounds],
            "speedup": [a / b for a, b in zip(plain, ours, strict=True)],
        }
    return results


def make_table(results: dict[str, dict[str, list[float]]], num_ranks: int) -> Table:
    """The table of `summarize`'s figures: medians over rounds."""
    from rich.table import Table

    table = Table(
        title=f"all-reduce of float32 on {num_ranks} ranks: time, and bytes/time"
    )
    for heading in (
        *("bytes", "copy GB/s", "Horovod us", "GB/s"),
        *("kerasmgpu us", "GB/s", "faster by"),
    ):
        table.add_column(heading, justify="right")
    for size, figures in results.items():
        cells = [f"{int(size):,}"]
        for name in ("copy", "horovod", "kerasmgpu"):
            seconds = statistics.median(figures[f"{name}_seconds"])
            if name != "copy":
                cells.append(f"{1e6 * seconds:.0f}")
            cells.append(f"{int(size) / seconds / 1e9:.2f}")
        gains = figures["speedup"]
        spread = f"{min(gains):.2f}-{max(gains):.2f}"
        cells.append(f"{statistics.median(gains):.2f} ({spread})")
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    main()
