"""One link between two machines, as pure state machines: session, frames, shaping."""
