"""ZMQ sockets of a process: listening, dialling, CURVE, and the thread that owns them."""
