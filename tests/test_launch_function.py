"""`kerasmgpu.run`: a function on ranks, from scripts and from a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest
from launching import ROOT, Job, no_job_outlives_its_test  # noqa: F401

import kerasmgpu
from kerasmgpu.errors import InvalidArgumentError, InvalidTypeError, LaunchError

pytestmark = pytest.mark.timeout(120)

OFFSET = 3


@pytest.fixture(autouse=True)
def a_shell(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    yield
    children = psutil.Process().children(recursive=True)
    assert not [child.cmdline() for child in children]


def test_results_by_rank(capfd: pytest.CaptureFixture[str]) -> None:
    def work(a: int, b: int = 0) -> tuple[int, str, str | None]:
        import os

        print("at work")
        return a + b + OFFSET, os.environ["KERASMGPU_RANK"], os.environ.get("MINE")

    results = kerasmgpu.run(work, (1,), {"b": 5}, num_proc=3, env={"MINE": "x y"})
    assert results == [(9, "0", "x y"), (9, "1", "x y"), (9, "2", "x y")]
    out = capfd.readouterr().out
    assert sorted(out.splitlines()) == [f"[{rank}] at work" for rank in range(3)]


def test_what_is_sent_is_for_this_user_alone() -> None:
    def look() -> list[int]:
        import os
        import stat

        path = os.environ["KERASMGPU_FUNCTION"]
        return [
            stat.S_IMODE(os.stat(name).st_mode)
            for name in (path, os.path.dirname(path))
        ]

    assert kerasmgpu.run(look, num_proc=1) == [[0o600, 0o700]]


def test_big_results_and_none() -> None:
    assert kerasmgpu.run(lambda: b"x" * 5_000_000, num_proc=1) == [b"x" * 5_000_000]
    assert kerasmgpu.run(lambda: None) == [None, None]


class OddError(Exception):
    """Cannot be read back: its constructor wants more than it keeps."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"odd {a + b}")


def test_the_remote_exception_is_raised_here() -> None:
    def fail() -> None:
        import os
        import time

        if os.environ["KERASMGPU_RANK"] == "1":
            raise KeyError("no such luck")
        time.sleep(60)

    with pytest.raises(KeyError, match="no such luck") as caught:
        kerasmgpu.run(fail)
    cause = str(caught.value.__cause__)
    assert "rank 1 of 2 on host" in cause
    assert "in fail" in cause


def test_an_exception_that_cannot_be_sent_is_told() -> None:
    def fail() -> None:
        raise OddError(1, 2)

    with pytest.raises(LaunchError, match="odd 3"):
        kerasmgpu.run(fail, num_proc=1)


@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_a_rank_that_ends_without_a_result(ending: str) -> None:
    def leave() -> None:
        import os
        import sys
        import time

        if os.environ["KERASMGPU_RANK"] == "1":
            if ending == "exit":
                sys.exit(0)
            os.kill(os.getpid(), 9)
        time.sleep(60)

    told = "without returning a result" if ending == "exit" else "SIGKILL"
    with pytest.raises(LaunchError, match=told):
        kerasmgpu.run(leave)


def test_bad_arguments() -> None:
    with pytest.raises(InvalidTypeError, match="Expected a function"):
        kerasmgpu.run("train")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="num_proc"):
        kerasmgpu.run(print, num_proc=0)
    with pytest.raises(InvalidArgumentError, match="num_proc"):
        kerasmgpu.run(print, num_proc=2.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="hosts"):
        kerasmgpu.run(print, hosts=["a:1"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="at most 1 ranks"):
        kerasmgpu.run(print, num_proc=2, hosts="localhost:1")
    with pytest.raises(InvalidTypeError, match="env"):
        kerasmgpu.run(print, env={"A": 1})  # type: ignore[dict-item]


def test_from_a_script_without_a_main_guard(tmp_path: Path) -> None:
    # TensorFlow is imported here before the ranks start, and Horovod runs on them.
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import helper
            import kerasmgpu
            import tensorflow as tf

            print("here", tf.reduce_sum(tf.ones(3)).numpy())

            def work():
                import horovod.tensorflow as hvd
                hvd.init()
                total = hvd.allreduce(tf.ones(2) * hvd.rank(), op=hvd.Sum)
                return helper.double(float(total[0]))

            print("results", kerasmgpu.run(work))
            """
        )
    )
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    job = Job([str(script)], command=[sys.executable], cwd=tmp_path)
    ended = job.finish(90)
    assert ended.code == 0, ended.err
    assert ended.out.count("here 3.0") == 1
    assert "results [2.0, 2.0]" in ended.out
    job.assert_nothing_left()


def test_from_another_thread() -> None:
    code = (
        "import threading, kerasmgpu\n"
        "box = []\n"
        "t = threading.Thread(target=lambda: box.extend(kerasmgpu.run(lambda: 7)))\n"
        "t.start(); t.join(); print(box)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert "[7, 7]" in ended.stdout, ended.stderr


def test_the_notebook_runs() -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3")
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    checked = notebook.cells[4]["outputs"][0]["data"]["text/plain"]
    assert checked == "(2, True, True)"
    said = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    assert "[0] trained on 2 ranks" in said
    assert "[1] trained on 2 ranks" in said
    assert "raised here: no such luck" in said
    assert "on rank 1 of 2 on host" in said
