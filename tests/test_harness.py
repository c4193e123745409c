"""The harness itself: a test on ranks runs on all of them."""

from __future__ import annotations

import pytest

from kerasmgpu import collectives


@pytest.mark.world_size(3)
def test_every_rank_is_there():
    topology = collectives.join()
    assert topology.size == 3
    assert collectives.all_gather_object(topology.rank) == [0, 1, 2]
