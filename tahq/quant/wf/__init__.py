"""`wf`: water-filled bits, deterministic; for activations."""
