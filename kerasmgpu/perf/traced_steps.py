"""The program of which `kerasmgpu bench --trace` takes a trace: a rank that trains.

    python -m kerasmgpu.perf.traced_steps --model mnist_cnn --folder DIR

Some steps, of one epoch, are profiled after a warm-up. What they computed, and when, is
written to a JSON file in DIR.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kerasmgpu.errors import CollectiveError
from kerasmgpu.perf import trace
from kerasmgpu.perf.workloads import BATCHES_PER_EPOCH, WORKLOADS

WARMUP_STEPS = 20
STEPS = 10


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args(argv)
    import kerasmgpu

    strategy = kerasmgpu.HorovodStrategy()
    workload = WORKLOADS[args.model]
    model = strategy.wrap(workload.compiled_model())
    batch_size = strategy.size * workload.per_rank_batch_size
    x, y = workload.data(batch_size)
    profile = args.folder / f"profile.{strategy.rank}"
    # An epoch that warms up, and within the next one the steps that are traced.
    tracer = make_tracer(BATCHES_PER_EPOCH + WARMUP_STEPS, profile)
    model.fit(x, y, batch_size, epochs=2, callbacks=[tracer], verbose=0)
    found = next(profile.rglob("*.xplane.pb"))
    spans = trace.read_profile(found.read_bytes())
    result = {
        "start": tracer.start,
        "end": tracer.end,
        "computation": trace.within(spans, tracer.start, tracer.end),
    }
    path = args.folder / f"result.{strategy.rank}.json"
    path.write_text(json.dumps(result), encoding="utf-8")


def make_tracer(first_step: int, folder: Path) -> Any:
    """A callback that profiles `STEPS` steps; `start` and `end` say when, in us."""
    import keras
    import tensorflow as tf

    class Tracer(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.start = self.end = 0.0
            self._seen = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._seen += 1
            if self._seen == first_step:
                tf.profiler.experimental.start(str(folder))
                self.start = time.time() * 1e6
            elif self._seen == first_step + STEPS:
                self.end = time.time() * 1e6
                tf.profiler.experimental.stop()

    return Tracer()


def merge(
    results: Sequence[dict[str, Any]], timeline: str
) -> tuple[dict[int, list[trace.Span]], dict[int, list[trace.Span]]]:
    """Rank → communication and rank → computation, while all ranks were traced.

    Args:
        results: what each rank wrote.
        timeline: the text of Horovod's file.

    Raises:
        CollectiveError: the ranks were not traced at the same time.
    """
    start = max(result["start"] for result in results)
    end = min(result["end"] for result in results)
    if not end > start:
        raise CollectiveError(
            f"Expected {len(results)} ranks that were traced at the same time. "
            f"Received: traces that are {start - end:.0f} us apart. Measure again."
        )
    transfers = trace.within(trace.read_timeline(timeline), start, end)
    communication, computation = {}, {}
    for rank, result in enumerate(results):
        spans = [trace.Span(*span) for span in result["computation"]]
        communication[rank] = transfers
        computation[rank] = trace.within(spans, start, end)
    return communication, computation


if __name__ == "__main__":
    main()
