"""Searching for the fastest plan: candidates by their bound, the best of them simulated."""
