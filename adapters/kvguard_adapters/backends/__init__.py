"""Inference engines behind the `Backend` protocol."""
