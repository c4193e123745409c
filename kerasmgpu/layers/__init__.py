"""Keras layers that span the ranks."""
