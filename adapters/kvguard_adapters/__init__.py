"""Adapters of kvguard: engines, memory cards, model files, tokenizers."""
