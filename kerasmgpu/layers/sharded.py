"""What sharded layers share: each rank of a group holds a part of the weights.

A sharded layer is a subclass of the Keras layer it replaces, with its class name,
config and place in files, so that a saved model holds the plain layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from kerasmgpu.collectives import groups
from kerasmgpu.errors import CollectiveError, InvalidArgumentError
from kerasmgpu.keras_compat import in_symbolic_scope, serialize_as
from kerasmgpu.layers.group_ops import sum_parts
from kerasmgpu.shards import load_variables, mark, part_of, save_variables

if TYPE_CHECKING:
    _Base: Any = keras.layers.Layer
else:
    _Base = object

_SUMMED = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
)
ELEMENTWISE = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "tanh"),
    *("sigmoid", "hard_sigmoid", "hard_silu", "softplus", "softsign", "mish"),
    "exponential",
)


def saved_as_plain(plain: type) -> Any:
    """Class decorator: files, names and summaries show the Keras layer."""

    def adopt(cls: Any) -> Any:
        cls.__name__ = plain.__name__
        serialize_as(cls, plain)
        return cls

    return adopt


class Sharded(_Base):
    """Mixin, put before the Keras layer.

    Attributes:
        is_sharded: whether the group has more than one rank, so that weights are cut.
        cut_along: name of a weight → the axis along which it is cut.
        wrapped: whether the model that holds the layer is wrapped.
    """

    cut_along: dict[str, int]
    wrapped = False

    def refuse_what_cannot_be_cut(self, **sizes: int) -> None:
        """To be called at the end of `__init__`; notes the group.

        Raises:
            InvalidArgumentError: a size, by its argument's name, is not divisible by
                the ranks of a group; or an option that needs whole weights.
        """
        m = groups().model_parallel_size
        object.__setattr__(self, "is_sharded", m > 1)
        if m == 1:
            return
        for name, size in sizes.items():
            self.check_divisible(name, size)
        for name, value in vars(self).items():
            wanted = True
            if name.endswith("_constraint"):
                wanted = value is None or type(value) is keras.constraints.NonNeg
            elif name == "activity_regularizer":
                wanted = value is None or self.output_is_whole
            elif name.endswith("_regularizer"):
                wanted = value is None or type(value) in _SUMMED
            elif name in ("lora_rank", "quantization_config"):
                wanted = value is None
            if not wanted:
                raise InvalidArgumentError(
                    f"{self._where()} expected no {name} that needs whole weights or "
                    "outputs (weights may have L1 and L2 regularizers and the NonNeg "
                    f"constraint). Received: {name}={value!r}."
                )

    @property
    def output_is_whole(self) -> bool:
        """Whether all ranks of a group get the whole output."""
        return True

    def check_divisible(self, name: str, size: int) -> None:
        m = groups().model_parallel_size
        if size % m:
            near = [n for n in (size // m * m, (size // m + 1) * m) if n]
            raise InvalidArgumentError(
                f"{self._where()} expected {name} to be divisible by "
                f"model_parallel_size={m}; the nearest are "
                f"{' and '.join(map(str, near))}. Received: {name}={size}."
            )

    def check_elementwise(self, activation: Any) -> None:
        """Refuses an activation that needs the whole output."""
        name = getattr(activation, "__name__", None)
        if name not in ELEMENTWISE:
            raise InvalidArgumentError(
                f"{self._where()} expected an activation that works element by "
                f"element ({', '.join(ELEMENTWISE)}) where the output stays split "
                f"(gather_output=False). Received: activation={name or activation!r}."
            )

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_whole_kernels("enable_lora")
        super().enable_lora(*args, **kwargs)

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_whole_kernels("quantize")
        super().quantize(*args, **kwargs)

    def _refuse_whole_kernels(self, method: str) -> None:
        if self.is_sharded:
            raise InvalidArgumentError(
                f"{self._where()} expected no LoRA and no quantization, which need "
                f"whole weights. Received: {method}(). Save the model, load it with "
                "keras.models.load_model in one process, and do it there."
            )

    def check_call(self) -> None:
        """Refuses to compute outside of a wrapped model of the same group."""
        m = groups().model_parallel_size
        if self.is_sharded != (m > 1):
            raise CollectiveError(
                f"{self._where()} expected the strategy to be created before the "
                "layer. Received: a layer made "
                f"{'with' if self.is_sharded else 'without'} groups, used under "
                f"model_parallel_size={m}."
            )
        if self.is_sharded and not self.wrapped and not in_symbolic_scope():
            raise CollectiveError(
                f"{self._where()} expected a model wrapped with strategy.wrap(model), "
                "used on all ranks. Received: a call of the sharded layer in a model "
                "that is not wrapped."
            )

    def _where(self) -> str:
        place = groups()
        return f"Rank {place.rank} of {place.size}: the sharded layer {self.name!r}:"

    # Weights --------------------------------------------------------------------------

    def add_weight(self, **options: Any) -> Any:  # Keras's layers name what they pass
        axis = self.cut_along.get(options.get("name") or "")
        if not self.is_sharded or axis is None:
            return super().add_weight(**options)
        whole = tuple(options["shape"])
        initializer = keras.initializers.get(options["initializer"])

        def own_part(shape: Any, dtype: Any = None) -> Any:
            """Draws the whole, as the plain layer would, and cuts."""

            @tf.function(autograph=False)  # draws in place: holds one whole, not some
            def draw() -> tf.Tensor:
                drawn = tf.convert_to_tensor(initializer(whole, dtype=dtype))
                return part_of(drawn, axis)

            with tf.device("CPU:0"):
                value = draw()
            return tf.identity(value)

        m = groups().model_parallel_size
        shape = tuple(n // m if i == axis else n for i, n in enumerate(whole))
        variable = super().add_weight(
            **{**options, "shape": shape, "initializer": own_part}
        )
        mark(variable, axis)
        regularizer = variable.regularizer
        if regularizer is not None:
            variable.regularizer = lambda part: sum_parts(regularizer(part))
        return variable

    # Files ----------------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        if not self.is_sharded:
            return super().save_own_variables(store)
        return save_variables(self.weights, store)

    def load_own_variables(self, store: Any) -> None:
        if not self.is_sharded:
            return super().load_own_variables(store)
        self._check_load_own_variables(store)
        return load_variables(self.weights, store)
