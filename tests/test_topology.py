"""Who this process is, from the environment alone."""

from __future__ import annotations

import pytest

from kerasmgpu.errors import InvalidArgumentError, LaunchError
from kerasmgpu.topology import (
    Topology,
    check_size,
    launched_rank,
    launched_size,
    slurm_step_size,
)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, (4, "OMPI_COMM_WORLD_SIZE")),
        ({"PMI_SIZE": "2"}, (2, "PMI_SIZE")),
        ({"HOROVOD_SIZE": "3"}, (3, "HOROVOD_SIZE")),
        ({"KERASMGPU_SIZE": "2", "PMI_SIZE": "8"}, (2, "KERASMGPU_SIZE")),
        ({"SLURM_NTASKS": "4"}, None),
    ],
)
def test_launched_size(environment, expected):
    assert launched_size(environment) == expected


@pytest.mark.parametrize("text", ["", "two", "0", "-1", "1.5"])
def test_a_size_that_is_none(text):
    with pytest.raises(LaunchError, match=r"PMI_SIZE.*MPICH"):
        launched_size({"PMI_SIZE": text})


def test_rank_for_messages():
    assert launched_rank({}) == 0
    assert launched_rank({"PMI_RANK": "3"}) == 3


def test_slurm_is_a_hint():
    assert slurm_step_size({"SLURM_NTASKS": "4"}) is None
    assert slurm_step_size({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == 4


def test_sizes_must_agree():
    check_size(2, {"OMPI_COMM_WORLD_SIZE": "2"})
    check_size(1, {})
    with pytest.raises(LaunchError, match=r"mpirun started 4 .*joined a job of 1"):
        check_size(1, {"PMI_SIZE": "4"})


def test_topology_is_checked():
    with pytest.raises(InvalidArgumentError, match="rank=2, size=2"):
        Topology(rank=2, size=2)
    assert Topology().is_rank_zero
