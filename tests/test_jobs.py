"""Whole jobs under a bare mpirun: what is said, and that nothing hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

HEADER = """
import sys, time
import numpy as np, keras, kerasmgpu
strategy = kerasmgpu.HorovodStrategy(stall_timeout_seconds=3)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.zeros((64, 3)), np.zeros((64, 1))
"""


def job(tmp_path, body, size=2):
    """Runs a script on ranks; returns exit code, output and seconds."""
    script = tmp_path / "script.py"
    script.write_text(HEADER + body)
    bin_folder = os.path.dirname(sys.executable)
    path = bin_folder + os.pathsep + os.environ["PATH"]
    mpirun = shutil.which("mpirun", path=path)
    assert mpirun is not None
    command = [mpirun, "--oversubscribe", "--bind-to", "none", "-np", str(size)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    start = time.monotonic()
    result = subprocess.run(
        [*command, sys.executable, str(script)],
        env={**os.environ, "PATH": path, "TF_NUM_INTRAOP_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return result.returncode, result.stdout, time.monotonic() - start


@pytest.mark.timeout(300)
def test_fit_on_one_rank_only(tmp_path):
    """The rank that waits says on whom and in what; then the job goes on."""
    code, out, _ = job(
        tmp_path,
        "strategy.wrap(model)\n"
        "if strategy.rank == 1:\n"
        "    time.sleep(9)\n"
        "model.fit(x, y, verbose=0)\n"
        "print('done', strategy.rank)\n",
    )
    assert code == 0, out
    assert "done 0" in out
    assert "done 1" in out
    said = out[out.index("waited") - 200 :]
    assert "rank 1" in said
    assert "the start of fit()" in said


@pytest.mark.timeout(300)
def test_a_rank_that_raises_ends_the_job(tmp_path):
    code, out, _ = job(
        tmp_path,
        "strategy.wrap(model)\n"
        "class Fail(keras.callbacks.Callback):\n"
        "    def on_train_batch_end(self, batch, logs=None):\n"
        "        if strategy.rank == 1 and batch == 3:\n"
        "            print('raised at', time.time(), flush=True)\n"
        "            raise ValueError('the disk of this rank is gone')\n"
        "model.fit(x, y, batch_size=8, epochs=10000, verbose=0, callbacks=[Fail()])\n",
    )
    ended = time.time()
    raised = float(out[out.index("raised at") :].split()[2])
    assert code != 0
    assert ended - raised < 10
    last = "\n".join(out.splitlines()[-30:])
    assert "rank 1" in last.lower()
    assert "ValueError: the disk of this rank is gone" in last
    assert "on_train_batch_end" in last


@pytest.mark.timeout(300)
def test_a_rank_that_leaves_early(tmp_path):
    """sys.exit(0) on one rank while others train is a failure, not a hang."""
    code, out, _ = job(
        tmp_path,
        "strategy.wrap(model)\n"
        "class Leave(keras.callbacks.Callback):\n"
        "    def on_train_batch_end(self, batch, logs=None):\n"
        "        if strategy.rank == 1 and batch == 3:\n"
        "            print('left at', time.time(), flush=True)\n"
        "            sys.exit(0)\n"
        "model.fit(x, y, batch_size=8, epochs=10000, verbose=0, callbacks=[Leave()])\n",
    )
    ended = time.time()
    assert code != 0
    assert ended - float(out[out.index("left at") :].split()[2]) < 15
    assert "another rank has left the job" in out or "rank 1" in out


@pytest.mark.timeout(300)
def test_nothing_wrapped(tmp_path):
    code, out, _ = job(tmp_path, "model.fit(x, y, verbose=0)\n")
    assert code == 0
    assert "no model was wrapped" in out


@pytest.mark.timeout(300)
def test_something_wrapped_says_nothing(tmp_path):
    code, out, _ = job(
        tmp_path, "strategy.wrap(model)\nmodel.fit(x, y, verbose=0, epochs=2)\n"
    )
    assert code == 0
    assert "no model was wrapped" not in out
    assert "kerasmgpu" not in out
