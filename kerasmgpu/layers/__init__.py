"""Keras layers that span the ranks, or a rank's devices."""

from kerasmgpu.layers.on_device import OnDevice

__all__ = ["OnDevice"]
