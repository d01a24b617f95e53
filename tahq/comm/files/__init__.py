"""Copies of checkpoint files between workers."""
