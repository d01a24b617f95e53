"""Measuring a network that is up, and the machine that it runs on."""
