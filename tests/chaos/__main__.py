"""`python -m chaos`: run rows many times, and write each outcome at once.

python -m chaos --list
python -m chaos --rows cut-1s,reset --times 3 --out /tmp/chaos.json
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from chaos.results import Results, default_path
from chaos.row import Row
from chaos.session import ROWS, run_in_lanes, run_row


def main() -> int:
    arguments = _parse()
    if arguments.list:
        for row in ROWS:
            print(f"{row.name:<29}{row.fault}: {row.shows}")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # the first is ignored in a script's background
        signal.signal(number, _leave)
    rows = _chosen(arguments.rows)
    results = Results(arguments.out or default_path(arguments.hardware), arguments.note)
    with tempfile.TemporaryDirectory(prefix="tahq-chaos-", ignore_cleanup_errors=True) as folder:
        if arguments.lanes > 1:
            run_in_lanes(rows, arguments.times, results, arguments.lanes, Path(folder))
        else:
            numbers = arguments.numbers and [int(number) for number in arguments.numbers.split(",")]
            for row in rows:
                run_row(row, numbers or range(arguments.times or row.times), results, Path(folder))
    failed = results.failures([row.name for row in rows])
    print(f"{results.path.with_suffix('.md')}: {f'{failed} tries failed' if failed else 'all passed'}")
    return 1 if failed else 0


def _leave(number: int, frame: object) -> None:
    """Exit; contexts end the processes of the present try."""
    sys.exit(128 + number)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="faults in real processes, row by row")
    parser.add_argument("--rows", help="names, separated by commas; default: all")
    parser.add_argument("--times", type=int, help="tries of a row; default: 20, and 3 of rows over two minutes")
    parser.add_argument("--numbers", help="only these tries, separated by commas")
    parser.add_argument("--lanes", type=int, default=1, help="tries at a time, each with its own cores")
    parser.add_argument("--out", type=Path, help="FILE.json to continue; default: benchmarks/results/chaos_….json")
    parser.add_argument("--hardware", default="here", help="name of this machine in the default file's name")
    parser.add_argument("--note", default="", help="the conditions, for the head of the table")
    parser.add_argument("--list", action="store_true", help="list the rows")
    return parser.parse_args()


def _chosen(names: str | None) -> list[Row]:
    if names is None:
        return list(ROWS)
    known = {row.name: row for row in ROWS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        sys.exit(f"unknown row: {', '.join(unknown)}; expected some of {', '.join(known)}")
    return [known[name] for name in names.split(",")]


if __name__ == "__main__":
    sys.exit(main())
