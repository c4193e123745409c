"""`ShardedConv2D`: a Conv2D layer of which each rank of a group holds filters."""

from __future__ import annotations

from typing import Any

import keras

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.layers.group_ops import enter_parts, join_parts
from kerasmgpu.layers.sharded import Sharded, saved_as_plain


@saved_as_plain(keras.layers.Conv2D)
class ShardedConv2D(Sharded, keras.layers.Conv2D):
    """A `Conv2D` layer whose filters the ranks of a group divide.

    As `ShardedDense`: for `model_parallel_size=m` and a wrapped model; each rank holds
    1/m of the filters and of their optimizer slots, and gets the outputs of all.
    Initial values, results and files are those of `keras.layers.Conv2D`; with m = 1 it
    is that layer.

    Args:
        filters: as of `Conv2D`, divisible by m.
        *args, **kwargs: as of `Conv2D`; `data_format="channels_last"` and `groups=1`.

    Input and output shape: as of `Conv2D`.

    Raises:
        InvalidArgumentError: filters are not divisible by m; an option that cannot be
            split.
        CollectiveError: used in a model that is not wrapped.
    """

    def __init__(self, filters: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(filters, *args, **kwargs)
        self.cut_along = {"kernel": 3, "bias": 0}
        self.refuse_what_cannot_be_cut(filters=self.filters)
        if not self.is_sharded:
            return
        for name, wanted in (("data_format", "channels_last"), ("groups", 1)):
            if getattr(self, name) != wanted:
                raise InvalidArgumentError(
                    f"{self._where()} expected {name}={wanted!r}. Received: "
                    f"{name}={getattr(self, name)!r}."
                )

    def call(self, inputs: Any) -> Any:
        self.check_call()
        if not self.is_sharded:
            return super().call(inputs)
        x = self.convolution_op(enter_parts(inputs), self.kernel)
        if self.bias is not None:
            x = x + self.bias
        x = join_parts(x)
        return x if self.activation is None else self.activation(x)
