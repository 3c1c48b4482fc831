"""kvguard: makes running out of memory a non-event for vLLM and llama.cpp."""

__version__ = "0.1.0"
