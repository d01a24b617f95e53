"""A page in the browser that shows a run, live or finished, from its folder."""
