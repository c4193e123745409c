"""Keras callbacks for jobs of many ranks; imported as `kerasmgpu.callbacks`."""
