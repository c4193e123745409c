"""Measuring and predicting how training scales."""
