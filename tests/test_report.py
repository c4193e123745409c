"""What a rank says about itself, without Horovod: hooks, cost, and the roll call."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit
from pathlib import Path

import pytest
from launching import ROOT

from kerasmgpu import report, roll_call

pytestmark = pytest.mark.timeout(60)


def on_a_rank(
    code: str, size: int = 2, rank: int = 1
) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that a launcher made a rank of a job."""
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith("KERASMGPU_")},
        "PYTHONPATH": str(ROOT),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": str(rank),
    }
    program = f"import os, sys, time\nfrom kerasmgpu import report\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environ,
        capture_output=True,
        text=True,
        timeout=40,
    )


def test_waiting_costs_less_than_two_microseconds() -> None:
    number = 20_000
    best = min(timeit.repeat(lambda: report.waiting("step 1"), number=number, repeat=5))
    assert best / number < 2e-6
    report.working()


def test_waiting_is_stored() -> None:
    report.waiting("step 3")
    assert roll_call.state[:2] == (True, "step 3")
    report.working("loading")
    assert roll_call.state[:2] == (False, "loading")
    report.working()


def test_importing_it_changes_nothing() -> None:
    ended = on_a_rank("print(sys.excepthook is sys.__excepthook__)")
    assert ended.stdout == "True\n"


def test_an_uncaught_exception_skips_what_could_hang() -> None:
    ended = on_a_rank(
        "import atexit\n"
        "atexit.register(lambda: time.sleep(30))\n"
        "report.install_failure_hooks()\n"
        "raise ValueError('no such luck')"
    )
    assert ended.returncode == 1
    assert "Traceback (most recent call last)" in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("kerasmgpu: rank 1 of 2 on host ")
    assert last.endswith("failed: ValueError: no such luck")


def test_a_long_traceback_ends_in_sight() -> None:
    ended = on_a_rank(
        "report.install_failure_hooks()\n"
        "def f(n):\n"
        "    if n == 0: raise ValueError('deep')\n"
        "    g(n)\n"
        "def g(n): f(n - 1)\n"
        "f(40)"
    )
    assert "ValueError: deep" in "\n".join(ended.stderr.splitlines()[-12:])


def test_alone_nothing_changes() -> None:
    ended = on_a_rank(
        "import atexit\n"
        "atexit.register(lambda: print('at exit'))\n"
        "report.install_failure_hooks()\n"
        "raise ValueError('no such luck')",
        size=1,
        rank=0,
    )
    assert ended.returncode == 1
    assert ended.stdout == "at exit\n"
    assert "kerasmgpu:" not in ended.stderr


def test_a_forked_child_fails_for_itself() -> None:
    ended = on_a_rank(
        "report.install_failure_hooks()\n"
        "if os.fork() == 0: raise ValueError('in the child')\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert ended.returncode == 0
    assert "1" in ended.stdout
    assert "rank 1 of 2" not in ended.stderr


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("CollectiveError('x')", True),
        ("RuntimeError('Horovod has been shut down. This was caused by')", True),
        ("ValueError('x')", False),
    ],
)
def test_consequences_are_told_from_causes(raised: str, expected: bool) -> None:
    from kerasmgpu.errors import CollectiveError

    error = eval(raised, {"CollectiveError": CollectiveError})
    assert report.is_consequence(error) is expected


def test_a_consequence_is_one_line_and_late() -> None:
    ended = on_a_rank(
        "report.install_failure_hooks()\n"
        "report.waiting('step 7')\n"
        "raise RuntimeError('Horovod has been shut down.')"
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "rank 1 of 2" in line
    assert "while in step 7" in line


def test_leaving_is_bounded_but_other_handlers_are_not(tmp_path: Path) -> None:
    # A Horovod whose shutdown hangs (another rank is stopped), and one that does not.
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    fake = tmp_path / "horovod" / "tensorflow.py"
    code = (
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import atexit, horovod.tensorflow\n"
        "from kerasmgpu.topology import Topology\n"
        "atexit.register(lambda: (time.sleep(1.0), print('saved')))\n"
        "report.install_failure_hooks()\n"
        "report.EXIT_TIMEOUT_SECONDS = 0.5\n"
        "report.start(Topology(1, 2, 1, 2), 5.0)\n"
        "report.used('test')"
    )
    fake.write_text("def shutdown(): print('left')")
    ended = on_a_rank(code)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "left\nsaved\n"
    fake.write_text("import time\ndef shutdown(): time.sleep(60)")
    ended = on_a_rank(code)
    assert ended.returncode == 1
    assert "could not leave the job in 0 s" in ended.stderr


JOB = """
import json, socket, subprocess
from kerasmgpu.topology import Topology

# An all-gather by files stands in for Horovod's.
def exchange(value, folder=sys.argv[1]):
    path = os.path.join(folder, f"rank{rank}")
    with open(path + ".part", "w") as file:
        json.dump(value, file)
    os.rename(path + ".part", path)
    paths = [os.path.join(folder, f"rank{r}") for r in range(size)]
    while not all(os.path.exists(p) for p in paths):
        time.sleep(0.02)
    return [json.load(open(p)) for p in paths]

rank, size = int(sys.argv[2]), int(sys.argv[3])
report.install_failure_hooks()
report.start(Topology(rank, size, rank, size), 0.5, exchange)
"""


def job(tmp_path: Path, size: int, code: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs the code on processes with a roll call between them."""
    program = f"import os, sys, time\nfrom kerasmgpu import report\n{JOB}\n{code}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(rank), str(size)],
            env={
                **{k: v for k, v in os.environ.items() if "KERASMGPU_" not in k},
                "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    ended = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=40)
        finally:
            process.kill()
        ended.append(
            subprocess.CompletedProcess(process.args, process.returncode, out, err)
        )
    return ended


def test_roll_call_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    ended = job(
        tmp_path,
        3,
        "report.used('test')\n"
        "def load_data(): time.sleep(4)\n"
        "if rank == 1:\n"
        "    report.working('loading')\n"
        "    load_data()\n"
        "else:\n"
        "    report.waiting('step 5')\n"
        "    time.sleep(4)\n"
        "report.working()",
    )
    for rank in (0, 2):
        told = ended[rank].stderr
        assert f"rank {rank} of 3 on host" in told
        assert "in step 5, on:" in told
        assert "rank 1 on host" in told
        assert "is in loading" in told
        assert "load_data" in told
        assert "rank 0 on" not in told.partition("on:")[2]
    assert ended[1].stderr == ""


def test_roll_call_survives_rank_zero(tmp_path: Path) -> None:
    ended = job(
        tmp_path,
        2,
        "report.used('test')\n"
        "time.sleep(1)\n"
        "if rank == 1:\n"
        "    time.sleep(1)\n"
        "    report.waiting('step 9')\n"
        "    time.sleep(2)\n"
        "    report.working()\n"
        "    print('alive')",
    )
    assert ended[0].returncode == 0
    assert ended[1].returncode == 0
    assert ended[1].stdout == "alive\n"
    assert "rank 0 on host" in ended[1].stderr
    assert "has left the job (its program ended)" in ended[1].stderr


def test_nothing_wrapped_is_said_once(tmp_path: Path) -> None:
    ended = job(tmp_path, 2, "")
    assert "no model was wrapped" in ended[0].stderr
    assert ended[1].stderr == ""


def test_strangers_are_not_listened_to(tmp_path: Path) -> None:
    ended = job(
        tmp_path,
        2,
        "report.used('test')\n"
        "from kerasmgpu import roll_call\n"
        "if rank == 0: time.sleep(3)\n"
        "else:\n"
        "    port = roll_call._member._offer['port']\n"
        "    s = socket.create_connection(('127.0.0.1', port))\n"
        '    s.sendall(b\'{"rank": 1, "token": "guess"}\\n\')\n'
        "    s.settimeout(5)\n"
        "    print(s.recv(10))",
    )
    assert ended[1].stdout == "b''\n"
