"""Groups of ranks that hold one model together: who belongs to which.

```
model_parallel_size m = 2, 4 ranks      position 0   position 1
                          replica 0       rank 0       rank 1      the same rows
                          replica 1       rank 2       rank 3      the same rows
```

The ranks of a row, a group, see the same rows of data and hold the parts of sharded
layers. The ranks of a column hold the same part and see different rows. Neighbours form
a group, so a group is on one host where that is possible.
"""

from __future__ import annotations

import dataclasses

from kerasmgpu.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Groups:
    """One rank's place among the groups; without groups, each rank is one.

    Attributes:
        model_parallel_size: ranks in a group.
        rank: this process, 0 to `size` - 1.
        size: processes in the job.
    """

    model_parallel_size: int = 1
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        m = self.model_parallel_size
        if isinstance(m, bool) or not isinstance(m, int) or m < 1:
            raise InvalidArgumentError(
                "Expected model_parallel_size to be a whole number of at least 1. "
                f"Received: model_parallel_size={m!r}."
            )
        if self.size % m:
            fit = [d for d in range(1, self.size + 1) if self.size % d == 0]
            raise InvalidArgumentError(
                f"Rank {self.rank} of {self.size}: expected model_parallel_size to "
                f"divide the {self.size} rank(s) of the job (one of "
                f"{', '.join(map(str, fit))}). Received: model_parallel_size={m}."
            )

    @property
    def replica(self) -> int:
        """The group, 0 to `replicas` - 1."""
        return self.rank // self.model_parallel_size

    @property
    def replicas(self) -> int:
        """How many groups there are; the rows of a batch are divided among them."""
        return self.size // self.model_parallel_size

    @property
    def position(self) -> int:
        """The part that this rank holds, 0 to `model_parallel_size` - 1."""
        return self.rank % self.model_parallel_size

    @property
    def speaks(self) -> bool:
        """Whether this rank counts where a group's rows must count once."""
        return self.position == 0

    def all_groups(self) -> list[list[int]]:
        """The ranks of each group."""
        m = self.model_parallel_size
        return [list(range(i, i + m)) for i in range(0, self.size, m)]

    def all_positions(self) -> list[list[int]]:
        """The ranks of each position, one from each group."""
        m = self.model_parallel_size
        return [list(range(i, self.size, m)) for i in range(m)]
