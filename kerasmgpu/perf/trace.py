"""`kerasmgpu bench --trace`: computation and communication of each rank, on one clock.

Computation is what TensorFlow's profiler notes on a rank: its operations, without those
that wait. Communication is what Horovod's timeline notes: an operation's transfer, from
the moment at which all ranks are ready to the moment at which the result is there.
Horovod writes it on rank 0 alone; as ranks transfer together, it is taken for all of
them. Waiting for a rank that still computes ("negotiation") is no communication. Both
have the time of day, which ranks of one host share.

Where a transfer shares its core with the computation that hides it, it takes longer,
and the exposed share falls also by that: it goes with the exposed milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kerasmgpu.errors import BuildError, InvalidArgumentError

#: Horovod's names of transfers; what is noted inside of them are their parts.
_TRANSFERS = {"ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER"}
#: Operations of TensorFlow's that compute nothing, but wait or pass on.
_WAITING = re.compile(r"Horovod|_?(Host)?(Send|Recv)$|Iterator|.*PartitionedCall$|NoOp")


class Span(NamedTuple):
    """A named piece of time, in microseconds since 1970."""

    name: str
    start: float
    end: float


def read_timeline(text: str) -> list[Span]:
    """The transfers in a timeline of Horovod's (`HOROVOD_TIMELINE`).

    The file is a list of events, of which the end may be missing.

    Raises:
        InvalidArgumentError: it does not say when it began.
    """
    names: dict[int, str] = {}
    open_events: dict[int, list[tuple[str, float]]] = {}
    began: float | None = None
    spans = []
    for event in _events(text):
        kind, row = event.get("ph"), event.get("pid", 0)
        if kind == "M" and event.get("name") == "process_name":
            given = event["args"]
            began = given.get("start_time_since_epoch_in_micros", began)
            names[row] = given.get("name", "")
        elif kind == "B":
            open_events.setdefault(row, []).append((event["name"], event["ts"]))
        elif kind == "E" and open_events.get(row):
            name, start = open_events[row].pop()
            if name in _TRANSFERS and began is not None:
                label = f"{names.get(row, '').rpartition('/')[2]} {name}"
                spans.append(Span(label, began + start, began + event["ts"]))
    if began is None:
        raise InvalidArgumentError(
            "Expected a timeline of Horovod 0.20 or later, which says when it began "
            f"(start_time_since_epoch_in_micros). Received: {text[:80]!r}."
        )
    return spans


def _events(text: str) -> Iterable[dict[str, Any]]:
    decoder = json.JSONDecoder()
    position = text.find("{")
    while position >= 0:
        try:
            event, end = decoder.raw_decode(text, position)
        except ValueError:  # cut off where the process ended
            return
        yield event
        position = text.find("{", end)


def read_profile(data: bytes) -> list[Span]:
    """The operations that a profile of TensorFlow's (`*.xplane.pb`) has computed.

    Raises:
        BuildError: this TensorFlow's package lacks the description of the format.
    """
    try:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2
    except ImportError as error:
        raise BuildError(
            "Expected TensorFlow's package to have tensorflow.tsl.profiler.protobuf, "
            "which reads its profiles (2.18 to 2.21 do). Received: a TensorFlow "
            f"without it ({error}). Install another to use --trace."
        ) from error
    space = xplane_pb2.XSpace.FromString(data)
    began = _start_of_profile(space)
    spans = []
    for plane in space.planes:
        if "CPU" not in plane.name:
            continue
        names = {key: value.name for key, value in plane.event_metadata.items()}
        for line in plane.lines:
            if line.name.startswith("tf_data"):
                continue
            for event in line.events:
                name = names[event.metadata_id]
                if is_computation(name):
                    start = began + line.timestamp_ns / 1e3 + event.offset_ps / 1e6
                    spans.append(Span(name, start, start + event.duration_ps / 1e6))
    return spans


def _start_of_profile(space: Any) -> float:
    """What times in a profile count from; 0 where they are the time of day."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                began = stat.uint64_value or stat.int64_value
                lines = [line for one in space.planes for line in one.lines]
                counted = all(line.timestamp_ns < began / 2 for line in lines)
                return began / 1e3 if counted else 0.0
    return 0.0


def is_computation(name: str) -> bool:
    """Whether an event is an operation's, such as "model/dense/MatMul:MatMul"."""
    node, colon, operation = name.rpartition(":")
    if not colon or node.endswith(":") or " " in name:
        return False
    return not _WAITING.match(operation)


def within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The spans of a time, cut at its ends."""
    cut = (Span(n, max(a, start), min(b, end)) for n, a, b in spans)
    return [span for span in cut if span.end > span.start]


def joined(spans: Iterable[Span]) -> list[tuple[Span, list[str]]]:
    """Spans that overlap made one, in order of time, and the names in each."""
    result: list[tuple[Span, list[str]]] = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        if result and span.start < result[-1][0].end:
            last, names = result[-1]
            names.append(span.name)
            end = max(last.end, span.end)
            result[-1] = Span(f"{len(names)} at once", last.start, end), names
        else:
            result.append((span, [span.name]))
    return result


def total(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of the spans lasts."""
    return sum(span.end - span.start for span, _ in joined(spans))


def exposed(communication: Sequence[Span], computation: Sequence[Span]) -> float:
    """Microseconds of communication during which nothing is computed."""
    return total([*communication, *computation]) - total(computation)


def exposed_share(
    communication: Mapping[int, Sequence[Span]],
    computation: Mapping[int, Sequence[Span]],
) -> float:
    """Exposed communication as a share of all communication, over all ranks.

    Args:
        communication, computation: rank → spans.

    Raises:
        InvalidArgumentError: nothing was communicated.
    """
    everything = sum(total(spans) for spans in communication.values())
    if not everything > 0:
        raise InvalidArgumentError(
            "Expected communication while the steps were traced. Received: none."
        )
    bare = sum(exposed(communication[r], computation[r]) for r in communication)
    return bare / everything


def chrome_trace(
    communication: Mapping[int, Sequence[Span]],
    computation: Mapping[int, Sequence[Span]],
) -> dict[str, Any]:
    """The Trace Event Format of chrome://tracing and Perfetto: two rows a rank.

    What overlaps within a row is one event, with the names of its parts. Times count
    from the first event. (The format: "Trace Event Format", Google 2016.)
    """
    rows = {"computation": computation, "communication": communication}
    starts = [s.start for spans in rows.values() for r in spans.values() for s in r]
    origin = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for rank in sorted(computation):
        events.append(_label("process_name", rank, 0, f"rank {rank}"))
        for row, (title, spans) in enumerate(rows.items()):
            events.append(_label("thread_name", rank, row, title))
            for span, names in joined(spans[rank]):
                event = {
                    "ph": "X",
                    "name": span.name,
                    "cat": title,
                    "pid": rank,
                    "tid": row,
                    "ts": span.start - origin,
                    "dur": span.end - span.start,
                }
                events.append({**event, "args": {"parts": names}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _label(kind: str, rank: int, row: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": text}}
