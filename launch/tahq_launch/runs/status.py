"""`tahq ps` and `tahq status`: the states of runs, from their files, as the dashboard shows them."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tahq.observe import figures
from tahq_launch.command_line import plain_table, print_table
from tahq_launch.dashboard.run_feed import RunFeed
from tahq_launch.runs.found import kept_runs, live_runs, writer_of

_RECENT_NBYTES = 1 << 20
"""Of metrics.jsonl, for the newest steps."""


def print_runs(*, is_all: bool, json_lines: bool) -> None:
    """Print the live runs of this machine, with `is_all` also others in `runs/`: a table, or one object per line."""
    live = live_runs()
    there = {folder.resolve() for folder in live}
    kept = [folder for folder in kept_runs() if folder.resolve() not in there] if is_all else []
    rows = [_row(folder) for folder in (*live, *kept)]
    if json_lines:
        for row in rows:
            print(json.dumps(row))
    elif rows:
        titles = ("name", "step", "tokens/s", "since", "folder", "state")
        print_table(titles, [_cells(row) for row in rows], left=(0, 4, 5))
    else:
        print("no runs are in runs/" if is_all else "no run is live here; --all shows also those in runs/")


def _row(folder: Path) -> dict[str, Any]:
    view = view_of(RunFeed(folder, _RECENT_NBYTES))
    names = ("name", "step", "total_steps", "tokens_per_s", "state", "since")
    shown = Path.cwd() in folder.resolve().parents
    place = folder.resolve().relative_to(Path.cwd()) if shown else folder
    return {name: view[name] for name in names} | {"folder": str(place), "pid": writer_of(folder)}


def _cells(row: dict[str, Any]) -> Sequence[object]:
    rate = row["tokens_per_s"]
    speed = f"{rate:,.0f}" if rate is not None and row["pid"] is not None else "–"
    state = row["state"].partition(";")[0]  # without the command that resumes it
    return (row["name"], f"{row['step']}/{row['total_steps']}", speed, moment(row["since"]), row["folder"], state)


def view_of(feed: RunFeed) -> dict[str, Any]:
    """A run's present state, from all that its files hold."""
    view: dict[str, Any] | None = None
    while view is None:
        news = feed.news()
        view = news["view"] if news is not None else None
    return view


def moment(time_s: float | None) -> str:
    """``2026-11-28 01:07`` in local time; ``–`` if it is unknown."""
    return "–" if time_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))


def print_status(feed: RunFeed, where: str, *, as_json: bool) -> None:
    """Print one run in detail: state, figures, stages, links and the bottleneck; `where`: its folder or address."""
    view = view_of(feed)
    if as_json:
        print(json.dumps({**view, "where": where}))
        return
    for line in _lines(view, where):
        print(line)


def _lines(view: dict[str, Any], where: str) -> Iterator[str]:
    yield f"{view['name']}: {view['state']}"
    since = view["since"]
    lasts = f" ({figures.duration(round(time.time() - since))})" if since is not None and not view["is_over"] else ""
    rows = {
        "where": where,
        "started": f"{moment(since)}{lasts}",
        "step": f"{view['step']} of {view['total_steps']}",
        **view["figures"],
        "its limit": view["limit"],
        "damaged": view["problem"],
    }
    yield from (f"  {name:<16}{text}" for name, text in rows.items() if text)
    if view["stages"]:
        yield ""
        titles = ("stage", "state", "compute", "waits", "memory", "worker")
        yield plain_table(titles, list(_stages(view)), left=(1, 5))
    if view["links"]:
        yield ""
        keys = ("carries", "use_text", "rate", "state", "codec")
        links = [(f"{link['from']} → {link['to']}", *(link[key] for key in keys)) for link in view["links"]]
        yield plain_table(("link", "carries", "use", "rate", "state", "codec"), links, left=(0, 1, 4, 5))


def _stages(view: dict[str, Any]) -> Iterator[Sequence[object]]:
    for stage in view["stages"]:
        shares = {name: share for name, share, _ in stage.get("parts", ())}
        compute = figures.share(shares["forward"] + shares["backward"]) if shares else "–"
        waits = figures.share(shares["waits for frames"] + shares["waits for room"]) if shares else "–"
        state = stage["state"] or "–"
        yield (stage["stage"], state, compute, waits, stage.get("memory", "unknown"), stage["worker"])
