"""Faults in real processes, row by row: what happens to a run, and what it must show all the same.

`rows.py` lists them; `python -m chaos` (`make chaos`) runs them many times and writes the results, and
`test_short_form.py` runs the quick ones once. docs/chaos.md says what each row shows.
"""
