"""Which copies of checkpoints exist off their stages' hosts, and which to make next: functions over the table.

One checkpoint is copied at a time: when it is copied everywhere, the newest follows. A checkpoint that cannot be
copied, because a host is lost with its part or a copy has failed, is skipped. A stage's copy is held by its nearest
neighbour on another host, the next stage rather than the previous one.
"""

from tahq.comm.control.messages import Copied, Copy
from tahq.coordinator.context import CoordinatorOptions
from tahq.coordinator.joining.seats import CopyOrder, RestorePoint, Seat, Seats
from tahq.coordinator.run_state import RunState


def published(run: RunState, seats: Seats) -> None:
    """Note that the run's newest checkpoint is complete: parts that could not be copied are tried again."""
    copying = run.copying
    if copying is None or any(copying.step in seat.gone | seat.failed for seat in seats):
        run.copying = run.newest
    for seat in seats:
        for step in seat.failed:
            seat.ordered.pop(step, None)
        seat.failed.clear()


def rebased(run: RunState, seats: Seats) -> None:
    """Forget copies of checkpoints before the base."""
    for seat in seats:
        seat.forget_copies(lambda step: step < run.base.step)
        seat.gone = {step for step in seat.gone if step >= run.base.step}


def began(run: RunState, seat: Seat) -> None:
    """Note where a stage's worker begins: its host has no part of complete checkpoints that are newer."""
    points = [point for point in (run.base, run.copying, run.newest) if point is not None]
    seat.gone |= {point.step for point in points if point.step > seat.position}
    if run.copying is not None and run.copying.step in seat.gone:
        run.copying = run.newest if run.newest.step not in seat.gone else None


def is_needed(options: CoordinatorOptions, seats: Seats) -> bool:
    """Whether any stage can be copied to another host."""
    return any(_neighbour(options, seats, seat) is not None for seat in seats)


def uncopied(options: CoordinatorOptions, seats: Seats) -> list[Seat]:
    """Stages whose checkpoints should be copied, but whose workers no other worker can dial."""
    return [
        seat
        for seat in seats.held
        if options.copies
        and seat.hello is not None
        and not seat.hello.address
        and any(options.copies_within_host or other.host != seat.host for other in seats.held if other is not seat)
    ]


def is_complete(options: CoordinatorOptions, run: RunState, seats: Seats) -> bool:
    """Whether the checkpoint that is being copied is copied, of every stage that can be."""
    target = run.copying
    if target is None or not options.copies:
        return target is not None
    if seats.missing or not _can_be_copied(options, seats, target) or any(target.step in seat.gone for seat in seats):
        return False
    orders = [(seat, _order_for(options, seats, seat)) for seat in seats]
    return all(order is None or seat.copied.get(target.step) == order for seat, order in orders)


def due(options: CoordinatorOptions, run: RunState, seats: Seats) -> list[tuple[bytes, Copy]]:
    """Orders to keep copies of the base and of the checkpoint being copied; each is returned once, to be sent."""
    orders = []
    for point in filter(None, (run.base, run.copying)):
        for seat in seats if _can_be_copied(options, seats, point) else ():
            order = _order_for(options, seats, seat)
            if order is None or point.step in seat.gone or seat.ordered.get(point.step) == order:
                continue
            address = seat.hello.address if order.source and seat.hello is not None else ""
            name = point.file_of(seat.stage)
            orders.append((order.holder, Copy(point.step, seat.stage, name, point.files[name], address)))
            seat.ordered[point.step] = order
    return orders


def _order_for(options: CoordinatorOptions, seats: Seats, seat: Seat) -> CopyOrder | None:
    """The worker that is to hold a stage's copy, and its source (empty: the stage has no worker)."""
    if not seat.is_held:
        holder = seats[seat.copy_holder] if seat.copy_holder is not None else None
        return CopyOrder(holder.identity, b"") if holder is not None and holder.hello is not None else None
    holder = _neighbour(options, seats, seat)
    if holder is None:
        return None
    seat.copy_holder = holder.stage
    return CopyOrder(holder.identity, seat.identity)


def _neighbour(options: CoordinatorOptions, seats: Seats, seat: Seat) -> Seat | None:
    if not options.copies or not _can_be_dialled(seat):
        return None
    others = (
        other
        for other in seats
        if other is not seat and _can_be_dialled(other) and (options.copies_within_host or other.host != seat.host)
    )
    return min(others, key=lambda other: (abs(other.stage - seat.stage), other.stage < seat.stage), default=None)


def _can_be_dialled(seat: Seat) -> bool:
    return seat.hello is not None and bool(seat.hello.address)


def copied(seat: Seat, holder: Seat, message: Copied) -> None:
    """Note that a holder has a copy of a stage's part, or could not get it."""
    order = seat.ordered.get(message.step)
    if order is None or order.holder != holder.identity:
        return  # ordered by another coordinator, or not wanted any more
    if message.error:
        seat.failed.add(message.step)
    else:
        seat.failed.discard(message.step)
        seat.copied[message.step] = order


def sources(seats: Seats, stage: int) -> list[tuple[int, Seat, str]]:
    """Other workers with a stage's files, as (steps behind the checkpoint, seat, host:port), the newest first."""
    rows = []
    for step, order in sorted(seats[stage].copied.items(), reverse=True):
        holder = seats.find(order.holder)
        if holder is not None and holder.hello is not None and holder.hello.address:
            rows.append((step, holder, holder.hello.address))
    return rows


def lacks(run: RunState, seats: Seats, stage: int) -> str:
    """The file without which a stage cannot begin on another host; empty: it can."""
    if not run.base.snapshot or {step for step, *_ in sources(seats, stage)} & {run.base.step, run.newest.step}:
        return ""
    return run.base.file_of(stage) or f"files of {run.base.snapshot}"


def _can_be_copied(options: CoordinatorOptions, seats: Seats, point: RestorePoint) -> bool:
    """Whether it is in parts of the run's own stages."""
    return bool(options.copies) and len(point.files) == len(seats) and all(point.file_of(seat.stage) for seat in seats)
