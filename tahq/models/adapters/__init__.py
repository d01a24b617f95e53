"""Adapters: small trained matrices beside a model's own weights, which stay as they are."""
