"""Faults in real processes, row by row, and what must hold in spite of each.

`session.py` lists the rows; `python -m chaos` (`make chaos`) runs them many times and writes the results, and
`test_short_form.py` runs the quick ones once. docs/dev/chaos.md says what each row shows.
"""
