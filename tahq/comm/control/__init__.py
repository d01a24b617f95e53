"""Control messages between workers and the coordinator."""
