"""`kerasmgpu run` on this machine, for real, with programs that cost nothing."""

from __future__ import annotations

import os
import pty
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from launching import (  # noqa: F401
    ROOT,
    SIGNALS,
    Job,
    no_job_outlives_its_test,
    python,
    run,
    wait_for,
)

pytestmark = pytest.mark.timeout(120)

BOTH = pytest.mark.parametrize("options", [[], ["--gloo"]], ids=["mpirun", "gloo"])


@BOTH
def test_every_rank_runs_with_good_defaults(options: list[str]) -> None:
    ended = run(
        *options,
        "-np",
        "2",
        "--",
        *python(
            "e = os.environ\n"
            "print('rank', rank, 'of', e['KERASMGPU_SIZE'], e['OMP_NUM_THREADS'],"
            "e['TF_NUM_INTRAOP_THREADS'], e['TF_NUM_INTEROP_THREADS'],"
            "e.get('KERASMGPU_TOKEN'))"
        ),
    )
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == [
        f"[{rank}] rank {rank} of 2 {threads} {threads} {threads} None"
        for rank in (0, 1)
    ]


def test_openmpi_reduces_in_a_ring_and_yields() -> None:
    show = python(
        "print(os.environ['OMPI_MCA_coll_tuned_allreduce_algorithm'],"
        "os.environ['OMPI_MCA_mpi_yield_when_idle'], len(os.sched_getaffinity(0)))"
    )
    cores = len(os.sched_getaffinity(0))
    assert f"[0] 5 1 {cores}" in run("-np", "2", *show).out
    own = run("-np", "2", *show, env={"OMPI_MCA_coll_tuned_allreduce_algorithm": "4"})
    assert f"[0] 4 1 {cores}" in own.out


def test_ranks_share_a_session_but_no_group() -> None:
    """Linux lets no thread yield to one of another session (autogroups)."""
    ended = run("-np", "3", *python("print('in', os.getsid(0), os.getpgrp())"))
    found = [line.split()[2:] for line in ended.out.splitlines()]
    assert len({session for session, _ in found}) == 1
    assert len({group for _, group in found}) == 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_ranks_keep_to_cores_of_their_own(wanted: str) -> None:
    show = python(
        "import kerasmgpu; kerasmgpu.HorovodStrategy();"
        "tasks = os.listdir('/proc/self/task');"
        "cores = {tuple(sorted(os.sched_getaffinity(int(t)))) for t in tasks};"
        "assert os.SCHED_BATCH in {os.sched_getscheduler(int(t)) for t in tasks};"
        "print('cores', cores)"
    )
    ended = run("-np", "2", *show, env={"KERASMGPU_PIN_CORES": wanted})
    printed = [eval(line.partition("cores ")[2]) for line in ended.out.splitlines()]
    every_core = tuple(sorted(os.sched_getaffinity(0)))
    first, second = printed
    if wanted == "0":
        assert first == second == {every_core}
    else:
        assert len(first) == len(second) == 1
        (mine,), (others,) = first, second
        assert not set(mine) & set(others)
        assert len(mine) == len(others) == len(every_core) // 2


def test_what_the_user_has_set_wins() -> None:
    ended = run(
        *("-np", "1", "--env", "GIVEN=a b", "--env", "KEPT"),
        *python(
            "print([os.environ[n] for n in ('OMP_NUM_THREADS', 'GIVEN', 'KEPT',"
            "'SECRET')])"
        ),
        env={"OMP_NUM_THREADS": "7", "KEPT": "k", "SECRET": "at home"},
    )
    assert "['7', 'a b', 'k', 'at home']" in ended.out


def test_lines_are_whole_and_marked() -> None:
    # Many ranks print long lines in pieces, at the same time.
    ended = run(
        *("-np", "3"),
        *python(
            "for i in range(300):\n"
            "    os.write(1, b'x' * 700)\n"
            "    os.write(1, b'%d' % rank + b'y' * 700 + b'\\n')"
        ),
    )
    lines = ended.out.splitlines()
    assert len(lines) == 900
    for line in lines:
        mark, text = line.split(" ", 1)
        assert mark == f"[{text[700]}]"
        assert re.fullmatch(r"x{700}\dy{700}", text)


def test_a_last_line_without_an_end_and_any_bytes_arrive() -> None:
    ended = run(
        "-np", "1", *python("os.write(1, b'caf\\xc3\\xa9 \\xff'); os.write(2, b'end')")
    )
    assert ended.out.startswith("[0] caf\u00e9 ")
    assert "[0] end" in ended.err


def test_a_progress_bar_is_one_line_in_a_pipe() -> None:
    ended = run(
        *("-np", "1"),
        *python(
            "for i in range(50):\n"
            "    sys.stdout.write(f'\\r{i}/49 loss {i}'); sys.stdout.flush()\n"
            "print()"
        ),
    )
    assert ended.out == "[0] 49/49 loss 49\n"


def test_marks_are_coloured_on_a_terminal() -> None:
    main, other = pty.openpty()
    job = Job(
        ["-np", "2", *python("print('hello'); time.sleep(0.2)")],
        stdout=other,
        stderr=other,
    )
    job.process.wait(timeout=30)
    os.close(other)
    text = os.read(main, 1 << 16).decode()
    os.close(main)
    assert re.search(r"\x1b\[\d+m\[0\]\x1b\[0m hello", text)
    assert re.search(r"\x1b\[\d+m\[1\]\x1b\[0m hello", text)
    job.assert_nothing_left()


def test_output_dir_keeps_a_file_a_rank(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    run(
        *("-np", "2", "--output-dir", str(folder)),
        *python("print('out', rank); print('err', rank, file=sys.stderr)"),
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        *("rank.0.err", "rank.0.out", "rank.1.err", "rank.1.out"),
    ]
    assert (folder / "rank.1.out").read_text() == "out 1\n"
    assert (folder / "rank.0.err").read_text() == "err 0\n"


@BOTH
def test_the_first_failure_is_told_and_ends_the_job(options: list[str]) -> None:
    ended = run(
        *options,
        *("-np", "3", "--"),
        *python(
            "time.sleep(1)\n"
            "if rank == 1: raise KeyError('no such luck')\n"
            "time.sleep(60)"
        ),
    )
    assert ended.code == 1
    assert ended.seconds_after_failure < 10
    assert "rank 1 of 3 on host" in ended.last_lines
    assert "failed first" in ended.last_lines
    assert "Traceback (most recent call last)" in ended.last_lines
    assert "KeyError: 'no such luck'" in ended.last_lines


@pytest.mark.parametrize(
    ("options", "ending", "code", "told"),
    [
        ([], "sys.exit(7)", 7, "exit code 7"),
        ([], "os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ([], "os.abort()", 134, "killed by SIGABRT"),
        (["--gloo"], "os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
    ],
)
def test_exit_code_is_the_failing_ranks(
    options: list[str], ending: str, code: int, told: str
) -> None:
    ended = run(
        *options, "-np", "2", *python(f"if rank == 0: {ending}\ntime.sleep(60)")
    )
    assert ended.code == code
    assert ended.seconds_after_failure < 10
    assert told in ended.last_lines


def test_a_killed_rank_ends_the_job_in_time() -> None:
    job = Job(["-np", "2", *python("time.sleep(60)")])
    wait_for(lambda: len(job.ready()) == 2)
    job.began = time.monotonic()
    job.programs()[1].kill()
    ended = job.finish(10)
    assert ended.code == 137
    assert "rank 1 of 2" in ended.last_lines
    job.assert_nothing_left()


def test_a_killed_agent_ends_the_job_in_time() -> None:
    job = Job(["-np", "2", *python("time.sleep(60)")])
    wait_for(lambda: len(job.ready()) == 2)
    agent = job.programs()[1].parent()
    assert agent is not None
    agent.kill()
    ended = job.finish(10)
    assert ended.code != 0
    assert "rank 1 of 2" in ended.last_lines
    assert "failed first" in ended.last_lines
    job.assert_nothing_left()


@pytest.mark.parametrize(
    ("options", "number"),
    [*(([], number) for number in SIGNALS), (["--gloo"], signal.SIGINT)],
)
def test_signals_reach_every_rank(options: list[str], number: signal.Signals) -> None:
    job = Job([*options, "-np", "2", *python("time.sleep(60)")])
    wait_for(lambda: len(job.ready()) == 2)
    job.signal(number)
    ended = job.finish(10)
    assert ended.code == 128 + number
    job.assert_nothing_left()


def test_a_closed_terminal_ends_the_job() -> None:
    save = (
        "import signal\n"
        "def save(*_):\n"
        "    time.sleep(0.3)\n"
        "    open(os.environ['SAVED'] + str(rank), 'w')\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGHUP, save)\n"
        "print(f'ready {rank}', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "saved.")
        starter = (
            "import os, pty, sys, time\n"
            "pid, terminal = pty.fork()\n"
            "if pid == 0: os.execv(sys.argv[1], sys.argv[1:])\n"
            "said = b''\n"
            # Each by name: a line that is not whole yet is drawn, then printed again.
            "while not (b'ready 0' in said and b'ready 1' in said):\n"
            "    said += os.read(terminal, 1000)\n"
            "os.close(terminal)\n"
            "time.sleep(0.02)\n"
            "os.kill(pid, 1)\n"  # the kernel, too, may send SIGHUP twice
            "os.waitpid(pid, 0)"
        )
        job = Job(
            [sys.executable, "-m", "kerasmgpu", "run", "-np", "2", *python(save)],
            command=[sys.executable, "-c", starter],
            env={"SAVED": str(saved)},
        )
        assert job.finish(30).code == 0
        job.assert_nothing_left()
        assert sorted(os.listdir(folder)) == ["saved.0", "saved.1"]


def test_ranks_may_take_their_time_to_save_after_sigterm() -> None:
    program = (
        "import signal\n"
        "def save(*_):\n"
        "    time.sleep(3); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    job = Job(["-np", "2", *python(program)])
    wait_for(lambda: len(job.ready()) == 2)
    time.sleep(1)
    job.signal(signal.SIGTERM)
    ended = job.finish(15)
    assert ended.out.count("saved") == 2
    assert ended.code == 0
    job.assert_nothing_left()


def test_ranks_that_ignore_signals_are_killed() -> None:
    program = (
        "import signal\n"
        "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\n"
        "time.sleep(60)"
    )
    job = Job(["-np", "2", *python(program)])
    wait_for(lambda: len(job.ready()) == 2)
    time.sleep(0.5)
    job.signal(signal.SIGINT)
    ended = job.finish(10)
    assert ended.code == 137
    job.assert_nothing_left()


def test_a_killed_launcher_leaves_nothing() -> None:
    job = Job(["-np", "2", *python("time.sleep(60)")])
    wait_for(lambda: len(job.ready()) == 2)
    job.process.kill()
    job.process.communicate()
    job.assert_nothing_left(8)


def test_what_a_program_left_running_is_ended() -> None:
    daemon = (
        "import subprocess\n"
        "subprocess.Popen(['sleep', '77'], start_new_session=True,"
        "stdout=subprocess.DEVNULL)\n"
        "subprocess.Popen('sleep 78 & sleep 79', shell=True)"
    )
    ended = run("-np", "2", *python(daemon))
    assert ended.code == 0


def test_a_stopped_rank_is_ended_too() -> None:
    job = Job(["-np", "2", *python("time.sleep(60)")])
    wait_for(lambda: len(job.ready()) == 2)
    job.programs()[1].suspend()
    job.signal(signal.SIGINT)
    assert job.finish(10).code == 130
    job.assert_nothing_left()


def test_a_rank_that_cannot_start_ends_the_job(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    ended = run("-np", "2", str(program))
    assert ended.code in (126, 127)
    assert ended.seconds < 10
    assert "cannot be started" in ended.err


def test_ranks_that_never_start_end_the_job(tmp_path: Path) -> None:
    # An mpirun that starts one rank of two, and one that starts none.
    fake = tmp_path / "mpirun"
    fake.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit\n'
        'while [ "$1" != --map-by ]; do shift; done; shift 2\n'
        'OMPI_COMM_WORLD_RANK=0 "$@" & sleep 100\n'
    )
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = run("-np", "2", "hostname", env=env)
    assert ended.code == 1
    assert ended.seconds < 10
    assert "rank 1 of 2 did not start" in ended.err
    fake.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit\n'
        "echo there are not enough slots >&2; exit 3\n"
    )
    ended = run("-np", "2", "hostname", env=env)
    assert ended.code == 1
    assert ended.seconds < 10
    assert "there are not enough slots" in ended.err


def test_processes_that_believe_they_are_alone_are_refused(tmp_path: Path) -> None:
    fake = tmp_path / "mpirun"
    fake.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit\n'
        'while [ "$1" != --map-by ]; do shift; done; shift 2\n'
        'OMPI_COMM_WORLD_RANK=0 "$@" & OMPI_COMM_WORLD_RANK=0 "$@" & wait\n'
    )
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = run("-np", "2", *python("print('trained')"), env=env)
    assert ended.code == 1
    assert "two processes came as rank 0" in ended.err
    assert "trained" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-np", "2"], "Expected a program"),
        (["-np", "2", "--"], "Expected a program"),
        (["-np", "0", "hostname"], "at least 1"),
        (["-np", "two", "hostname"], "invalid int"),
        (["-H", "", "hostname"], "Expected a host name"),
        (["-H", "localhost:0", "hostname"], "at least 1"),
        (["-H", "localhost:1,localhost:1", "hostname"], "named twice"),
        (["-np", "3", "-H", "localhost:2", "hostname"], "at most 2 ranks"),
        (["--hostfile", "missing", "hostname"], "missing"),
        (["-np", "2", "no-such-program"], "no-such-program"),
        (["-np", "2", "python", "no_such_script.py"], "does not exist"),
        (["-np", "2", "--launcher", "magic", "hostname"], "invalid choice"),
        (["-np", "2", "--gloo", "--launcher", "mpirun", "hostname"], "horovodrun"),
        (["-np", "2", "--network-interface", "eth77", "hostname"], "eth77"),
        (["-np", "2", "--ssh-port", "0", "hostname"], "1 to 65535"),
        (["-np", "2", "--ssh-identity-file", "nokey", "hostname"], "nokey"),
        (["-np", "2", "--env", "=x", "hostname"], "NAME=VALUE"),
        (["-np", "2", "--start-timeout", "-1", "hostname"], "positive"),
        (["-np", "2", "--output-dir", "/dev/null/x", "hostname"], "--output-dir"),
    ],
)
def test_bad_input_starts_nothing(arguments: list[str], told: str) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert told in ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_without_gpus_np_must_be_given() -> None:
    ended = run("hostname", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.code == 2
    assert "Expected -np" in ended.err


def test_more_ranks_than_cores_is_a_warning() -> None:
    cores = len(os.sched_getaffinity(0))
    ended = run("-np", str(cores + 1), "true")
    assert ended.code == 0
    assert f"{cores + 1} ranks share {cores} cores" in ended.err


def test_arguments_arrive_as_they_are() -> None:
    odd = ["a b", "$HOME", "`id`", "--np", "-H", "x;y", "*", ""]
    ended = run("-np", "1", "--", *python("print(sys.argv[1:])"), *odd)
    assert f"[0] {odd}" in ended.out


def test_dry_run_starts_nothing() -> None:
    ended = run("-np", "2", "--dry-run", "--", "python", "-c", "open('x', 'w')")
    assert ended.code == 0
    assert "--np 2" in ended.out
    assert not (ROOT / "x").exists()


def test_ranks_that_trained_alone_are_warned_of() -> None:
    ended = run("-np", "2", *python("pass"))
    assert ended.code == 0
    assert "no model was wrapped" in ended.err
    assert "no model was wrapped" not in run("-np", "1", *python("pass")).err
    assert "no model was wrapped" not in run("-np", "2", "hostname").err


def test_the_file_of_variables_is_for_this_user_alone(tmp_path: Path) -> None:
    # The Gloo starter shows its environment to everyone: secrets go by a file.
    job = Job(
        ["--gloo", "-np", "1", *python("print(os.environ['SECRET']); time.sleep(5)")],
        env={"SECRET": "xyzzy", "TMPDIR": str(tmp_path)},
    )
    wait_for(lambda: len(job.programs()) == 1, 30)
    shown = [part for process in job.processes() for part in process.cmdline() if part]
    assert not any("xyzzy" in part for part in shown)
    (folder,) = tmp_path.glob("kerasmgpu-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ended = job.finish(30)
    assert "[0] xyzzy" in ended.out
    assert not list(tmp_path.glob("kerasmgpu-*"))
    job.assert_nothing_left()


def test_a_reader_that_goes_away_does_not_leave_ranks() -> None:
    read, write = os.pipe()
    job = Job(
        ["-np", "1", *python("while True: print('x' * 1000)")],
        stdout=write,
        stderr=subprocess.DEVNULL,
    )
    os.close(write)
    os.read(read, 1000)
    os.close(read)
    job.process.wait(timeout=20)
    job.assert_nothing_left(8)
