"""Techniques that reduce a stage's memory, and its estimate."""
