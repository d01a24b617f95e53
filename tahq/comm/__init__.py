"""Bytes between peers: frames, sessions, transports, shaping, control messages. Knows no model."""
