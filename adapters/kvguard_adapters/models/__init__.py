"""Readers of model metadata."""
