"""`ShardedDense`: a Dense layer of which each rank of a group holds a part."""

from __future__ import annotations

from typing import Any

import keras

from kerasmgpu.collectives import groups
from kerasmgpu.errors import InvalidArgumentError, check_one_of
from kerasmgpu.layers.group_ops import (
    enter_parts,
    join_parts,
    own_part,
    sum_parts,
)
from kerasmgpu.layers.sharded import Sharded, saved_as_plain


@saved_as_plain(keras.layers.Dense)
class ShardedDense(Sharded, keras.layers.Dense):
    """A `Dense` layer that the ranks of a group hold together.

    For a strategy with `model_parallel_size=m`, created before the layer, and a wrapped
    model. Each rank holds 1/m of the kernel and of its optimizer slots. Initial values,
    results and files are those of `keras.layers.Dense`; with m = 1 it is that layer.

    Args:
        units: as of `Dense`. With `shard="output"` divisible by m.
        *args, **kwargs: as of `Dense`.
        shard: "output" (default): a rank computes units/m of the outputs. "input": a
            rank takes 1/m of the inputs, and the results are added up.
        gather_output: with `shard="output"`, whether each rank gets all units
            (default) or keeps its own units/m, for layers that work element by element
            and then a `ShardedDense(shard="input", input_is_split=True)`.
        input_is_split: with `shard="input"`, whether the input is this rank's part
            already, from a layer with `gather_output=False`.

    Input shape: `(rows, ..., features)`; with `input_is_split`, features/m.
    Output shape: `(rows, ..., units)`; with `gather_output=False`, units/m.

    Raises:
        InvalidArgumentError: units or features are not divisible by m; an option that
            needs the whole weights or outputs.
        CollectiveError: used in a model that is not wrapped.
    """

    def __init__(
        self,
        units: int,
        *args: Any,
        shard: str = "output",
        gather_output: bool = True,
        input_is_split: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(units, *args, **kwargs)
        check_one_of("shard", shard, ("output", "input"))
        if shard == "input" and not gather_output:
            raise InvalidArgumentError(
                'Expected gather_output=True with shard="input", whose results are '
                "added up on every rank. Received: gather_output=False."
            )
        if shard == "output" and input_is_split:
            raise InvalidArgumentError(
                'Expected input_is_split=False with shard="output", which needs the '
                "whole input. Received: input_is_split=True."
            )
        self.shard = shard
        self.gather_output = gather_output
        self.input_is_split = input_is_split
        if shard == "output":
            self.cut_along = {"kernel": 1, "bias": 0}
            self.refuse_what_cannot_be_cut(units=self.units)
        else:
            self.cut_along = {"kernel": 0}
            self.refuse_what_cannot_be_cut()
        if self.is_sharded and not gather_output:
            self.check_elementwise(self.activation)

    @property
    def output_is_whole(self) -> bool:
        return self.gather_output

    def build(self, input_shape: Any) -> None:
        given = input_shape[-1]
        features = given
        if self.is_sharded and self.input_is_split:
            features = given * groups().model_parallel_size
        elif self.is_sharded and self.shard == "input":
            self.check_divisible("features", given)
        super().build((*input_shape[:-1], features))
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: given})

    def get_build_config(self) -> Any:
        config = super().get_build_config()
        if config and self.is_sharded and self.input_is_split:
            *rest, part = config["input_shape"]
            config["input_shape"] = (*rest, part * groups().model_parallel_size)
        return config

    def call(self, inputs: Any, training: Any = None) -> Any:
        self.check_call()
        if not self.is_sharded:
            return super().call(inputs)
        if self.shard == "input":
            part = inputs if self.input_is_split else own_part(inputs)
            x = sum_parts(keras.ops.matmul(part, self.kernel))
        else:
            x = keras.ops.matmul(enter_parts(inputs), self.kernel)
        if self.bias is not None:
            x = x + self.bias
        if self.shard == "output" and self.gather_output:
            x = join_parts(x)
        return x if self.activation is None else self.activation(x)

    def compute_output_shape(self, input_shape: Any) -> Any:
        units = self.units
        if self.is_sharded and not self.gather_output:
            units //= groups().model_parallel_size
        return (*input_shape[:-1], units)
