"""Keras layers that span the ranks, or a rank's devices."""

from kerasmgpu.layers.on_device import OnDevice
from kerasmgpu.layers.sharded_conv import ShardedConv2D
from kerasmgpu.layers.sharded_dense import ShardedDense
from kerasmgpu.layers.sharded_embedding import ShardedEmbedding
from kerasmgpu.layers.sharded_loss import ShardedSoftmaxCrossEntropy

__all__ = [
    "OnDevice",
    "ShardedConv2D",
    "ShardedDense",
    "ShardedEmbedding",
    "ShardedSoftmaxCrossEntropy",
]
