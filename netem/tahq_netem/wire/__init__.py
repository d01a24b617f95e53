"""The user-space wire of the tun backend: packets, queues, paths, and the process that moves them."""
