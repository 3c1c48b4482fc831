"""OpenAI-compatible HTTP surface of kvguard."""
