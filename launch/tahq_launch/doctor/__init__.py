"""`tahq doctor`: what is wrong with the machines of a run, and what to do about it."""
