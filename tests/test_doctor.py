"""`kerasmgpu doctor`: it sees what is there, and what is broken."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from launching import PYTHON_BIN, Job, no_job_outlives_its_test  # noqa: F401

from kerasmgpu import diagnostics

pytestmark = pytest.mark.timeout(240)

DOCTOR = (sys.executable, "-m", "kerasmgpu", "doctor")


def doctor(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, dict]:
    job = Job(["--json", *arguments], command=DOCTOR, env=env)
    ended = job.finish(200)
    job.assert_nothing_left()
    report = json.loads(ended.out)
    return ended.code, {check["name"]: check for check in report["checks"]}


def test_a_sound_machine() -> None:
    code, checks = doctor()
    assert code == 0
    failed = [check for check in checks.values() if check["status"] == "failed"]
    assert failed == []
    for name in ("Python", "TensorFlow", "Keras", "Horovod", "MPI", "2 ranks"):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["all-reduce over MPI"]["detail"] == "2 ranks, the sum is right"
    assert "built with mpi, gloo" in checks["Horovod"]["detail"]
    assert {"cores", "memory", "shared memory", "GPUs", "ports"} <= set(checks)


def test_broken_libraries_and_no_mpi(tmp_path: Path) -> None:
    # A TensorFlow that ends the process and a Horovod that cannot be imported.
    for name, code in (
        ("tensorflow", "import os; os._exit(11)"),
        ("horovod", "raise ImportError('undefined symbol: _ZN10tensorflow')"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    root = os.path.dirname(os.path.dirname(diagnostics.__file__))
    code, checks = doctor(env={"PYTHONPATH": f"{tmp_path}:{root}"})
    assert code == 1
    assert checks["TensorFlow"]["status"] == "failed"
    assert "exit code 11" in checks["TensorFlow"]["detail"]
    assert "pip install" in checks["TensorFlow"]["mend"]
    assert checks["Horovod"]["status"] == "failed"
    assert "install-horovod" in checks["Horovod"]["mend"]
    # MPI itself still starts ranks.
    assert checks["2 ranks"]["status"] == "ok"
    assert checks["all-reduce over MPI"]["status"] == "failed"


def test_a_wrong_mpirun_leaves_gloo(tmp_path: Path) -> None:
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho HYDRA build details:\necho '  Version: 5.0.2'\n")
    fake.chmod(0o755)
    path = f"{tmp_path}:{PYTHON_BIN}:{os.environ['PATH']}"
    job = Job([], command=DOCTOR, env={"PATH": path, "COLUMNS": "200"})
    ended = job.finish(200)
    assert ended.code == 0, ended.out
    assert "MPICH 5.0.2" in ended.out
    assert "Open MPI" in ended.out
    assert "kerasmgpu run --gloo" in ended.out
    assert "A job can run." in ended.out


def test_bad_hosts_are_refused() -> None:
    job = Job(["-H", "a:0"], command=DOCTOR)
    ended = job.finish(60)
    assert ended.code != 0
    assert "at least 1 for host a" in ended.err


def test_keras_checks() -> None:
    check = diagnostics.check_keras
    assert check({"version": "3.15.1", "backend": "tensorflow"}).status == "ok"
    jax = check({"version": "3.15.1", "backend": "jax"})
    assert jax.status == "failed"
    assert "KERAS_BACKEND=tensorflow" in jax.mend
    assert check({"version": "2.15.0", "backend": "tensorflow"}).status == "failed"


def test_shared_memory_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 64 * 2**20

    monkeypatch.setattr(diagnostics.shutil, "disk_usage", lambda path: Usage)
    check = diagnostics.check_shared_memory()
    assert check.status == "warning"
    assert "--shm-size" in check.mend
