"""`kerasmgpu bench --trace`: reading, merging, arithmetic; and one small trace."""

from __future__ import annotations

import itertools
import json
import re
import sys

import pytest

from kerasmgpu.cli import main
from kerasmgpu.errors import BuildError, CollectiveError, InvalidArgumentError
from kerasmgpu.perf import blocks, trace, traced_steps
from kerasmgpu.perf.trace import Span

#: As Horovod writes it; one tensor is reduced, the end of the other is missing.
TIMELINE = """[
{"name": "process_name", "ph": "M", "pid": 0,
 "args": {"start_time_since_epoch_in_micros": 5000}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "call/gradient.0"}},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 10, "pid": 1},
{"ph": "X", "name": "1", "ts": 12, "pid": 1, "dur": 0},
{"ph": "E", "ts": 20, "pid": 1},{"ph": "B", "name": "ALLREDUCE", "ts": 30, "pid": 1},
{"ph": "B", "name": "MPI_ALLREDUCE", "ts": 35, "pid": 1},
{"ph": "E", "ts": 40, "pid": 1},
{"ph": "E", "ts": 50, "pid": 1, "args": {"dtype": "float32", "shape": "[64]"}},
{"ph": "B", "name": "ALLREDUCE", "ts": 60, "pid": 1},{"ph": "E", "t"""


def test_a_timeline_of_horovods():
    assert trace.read_timeline(TIMELINE) == [Span("gradient.0 ALLREDUCE", 5030, 5050)]
    with pytest.raises(InvalidArgumentError, match="says when it began"):
        trace.read_timeline("[]")


def a_profile(started_ns, line_ns):
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/host:CPU")
    events = [("m/dense/MatMul:MatMul", 2_000_000, 3_000_000)]
    events += [("ExecutorState::Process", 0, 9_000_000)]
    events += [("grad_HorovodAllreduce:HorovodAllreduce", 6_000_000, 1_000_000)]
    line = plane.lines.add(name="tf_Compute/1", timestamp_ns=line_ns)
    for key, (name, offset, duration) in enumerate(events):
        plane.event_metadata[key].name = name
        line.events.add(metadata_id=key, offset_ps=offset, duration_ps=duration)
    environment = space.planes.add(name="Task Environment")
    environment.stat_metadata[7].name = "profile_start_time"
    environment.stats.add(metadata_id=7, uint64_value=started_ns)
    return space.SerializeToString()


@pytest.mark.parametrize("line_ns", [4_000, 1_000_004_000])
def test_a_profile_of_tensorflows(line_ns):
    """Lines count from the start of the profile, or from 1970."""
    spans = trace.read_profile(a_profile(1_000_000_000, line_ns))
    assert spans == [Span("m/dense/MatMul:MatMul", 1_000_006, 1_000_009)]


def test_a_tensorflow_that_cannot_read_profiles(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow.tsl.profiler.protobuf", None)
    with pytest.raises(BuildError, match=r"Install another to use --trace"):
        trace.read_profile(b"")


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("m/conv2d/Relu:_MklNativeFusedConv2D", True),
        ("IteratorGetNext:IteratorGetNext", False),
        ("cond/_19:_Send", False),
        ("x:_HostRecv", False),
        ("StatefulPartitionedCall:StatefulPartitionedCall", False),
        ("ThreadpoolListener::Record", False),
        ("MatMul", False),
    ],
)
def test_what_counts_as_computation(name, computes):
    assert trace.is_computation(name) is computes


def test_exposed_is_what_no_computation_covers():
    computation = [Span("a", 0, 10), Span("b", 5, 12), Span("c", 20, 30)]
    communication = [Span("x", 8, 18), Span("y", 16, 22)]  # 8 to 22, bare 12 to 20
    assert trace.total(communication) == 14
    assert trace.exposed(communication, computation) == 8
    shares = trace.exposed_share(
        {0: communication, 1: communication}, {0: computation, 1: []}
    )
    assert shares == (8 + 14) / 28
    with pytest.raises(InvalidArgumentError, match="Received: none"):
        trace.exposed_share({0: []}, {0: computation})


def test_ranks_are_merged_where_all_were_traced():
    results = [
        {"start": 5000, "end": 5045, "computation": [["a", 4990, 5035]]},
        {"start": 5032, "end": 5090, "computation": [["b", 5040, 5080]]},
    ]
    communication, computation = traced_steps.merge(results, TIMELINE)
    assert communication[0] == [Span("gradient.0 ALLREDUCE", 5032, 5045)]
    assert communication[1] == communication[0]
    assert computation == {0: [Span("a", 5032, 5035)], 1: [Span("b", 5040, 5045)]}
    made = trace.chrome_trace(communication, computation)
    rows = [
        (e["pid"], e["tid"], e["name"], e["ts"], e["dur"])
        for e in made["traceEvents"]
        if e["ph"] == "X"
    ]
    assert rows == [
        (0, 0, "a", 0, 3),
        (0, 1, "gradient.0 ALLREDUCE", 0, 13),
        (1, 0, "b", 8, 5),
        (1, 1, "gradient.0 ALLREDUCE", 0, 13),
    ]
    results[0]["end"] = 5030
    with pytest.raises(CollectiveError, match="traces that are 2 us apart"):
        traced_steps.merge(results, TIMELINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "/no/such/t.json"], "Expected a FILE that can be written"),
        (["--trace", "t.json", "--np", "1"], "two ranks or more for --trace"),
    ],
)
def test_bad_input(arguments, message, capfd, monkeypatch):
    monkeypatch.setattr(blocks.subprocess, "Popen", None)
    assert main(["bench", *arguments]) == 1
    assert message in capfd.readouterr().err


def test_a_trace_of_two_ranks(tmp_path, capfd):
    path = tmp_path / "trace.json"
    assert main(["bench", "--model", "mlp", "--np", "2", "--trace", str(path)]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert re.search(r"mlp, 10 steps on 2 ranks: \d+% of the communication", printed)
    events = json.loads(path.read_text())["traceEvents"]
    for rank in (0, 1):
        rows = {
            row: [e for e in events if (e["pid"], e.get("tid")) == (rank, row)]
            for row in (0, 1)
        }
        parts = {
            row: [name for e in found if e["ph"] == "X" for name in e["args"]["parts"]]
            for row, found in rows.items()
        }
        updates = [n for n in parts[0] if "ResourceApply" in n]
        controls = [n for n in parts[1] if n == "kerasmgpu.control.train ALLREDUCE"]
        assert len(updates) >= 8 * 2
        assert 8 <= len(controls) <= 12
        for found in rows.values():  # a row's events do not overlap
            spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if "ts" in e)
            for (_, end), (start, _) in itertools.pairwise(spans):
                assert start >= end - 1e-3
