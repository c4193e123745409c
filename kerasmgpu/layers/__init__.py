"""Keras layers that span the ranks, or a rank's devices."""

from kerasmgpu.layers.on_device import OnDevice
from kerasmgpu.layers.sharded_dense import ShardedDense

__all__ = ["OnDevice", "ShardedDense"]
