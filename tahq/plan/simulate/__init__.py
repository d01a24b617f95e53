"""One step of a pipeline over a slow network, predicted: its costs, its simulation, its lower bound."""
