"""Memory: what a rank takes beyond a plain process, and that it does not grow."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from launching import PROGRAMS, no_job_outlives_its_test, run

__all__ = ["no_job_outlives_its_test"]

MEBI = 1 << 20
PROGRAM = str(PROGRAMS / "memory.py")


def told_by_ranks(*arguments: str) -> list[dict[str, int]]:
    ended = run("-np", "2", "--", sys.executable, PROGRAM, "wrapped", *arguments)
    assert ended.code == 0, ended.err
    told = [json.loads(text) for text in re.findall(r"\{.*\}", ended.out)]
    assert [one["rank"] for one in sorted(told, key=lambda t: t["rank"])] == [0, 1]
    return told


def test_a_rank_takes_little_more_than_its_gradients():
    arguments = ["2048", "50"]
    plain = subprocess.run(
        [sys.executable, PROGRAM, "plain", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    alone = json.loads(plain.stdout)
    for rank in told_by_ranks(*arguments):
        more = rank["peak"] - alone["peak"]
        assert more <= 1.2 * rank["gradients"] + 64 * MEBI, f"{more / MEBI:.0f} MiB"


def test_memory_does_not_grow_over_2000_steps():
    for rank in told_by_ranks("64", "2000"):
        assert rank["growth"] < 4 * MEBI, f"{rank['growth'] / MEBI:.1f} MiB"
