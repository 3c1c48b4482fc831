"""Policies of kvguard: pure decisions, no I/O, no clock, no logging."""
