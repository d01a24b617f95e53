"""Which worker may have a seat, and what workers must agree on: decisions from the first JOIN to the plan.

Pure: nothing is sent. A worker that does not fit is refused alone, and the run goes on waiting for another.
"""

from collections.abc import Sequence
from dataclasses import replace

from tahq.comm.control.members import MAX_NAME_LENGTH, other_version
from tahq.comm.control.messages import Assign, Hello, Join, Refuse
from tahq.comm.topology import Endpoint, Position, Ticket, plan_links, total_steps
from tahq.coordinator.context import CoordinatorOptions
from tahq.coordinator.joining import reaching
from tahq.coordinator.joining.seats import Seat, Seats
from tahq.coordinator.journal import JournalFacts
from tahq.coordinator.run_state import RunState
from tahq.errors import ConfigError, brief
from tahq.version import is_same_source

SHARED_FIELDS = ("tokenizer_hash", "data_hash", "num_train_samples")
"""Fields of HELLO that must be equal wherever they are not empty: a stage that needs no data leaves them empty."""

MAX_PID = 1 << 31


def is_free(seats: Seats, stage: int) -> bool:
    """Whether this is a stage of the run, without a worker."""
    return 0 <= stage < len(seats) and not seats[stage].is_held


def refusal(options: CoordinatorOptions, seats: Seats, join: Join, key: str, replaced: Seat | None) -> Refuse | None:
    """Why a worker without a stage may not have the stage that it asks for (-1: any); None: it may.

    `key` is the worker's, `replaced` the seat whose worker it would replace. A spare that was given a stage may have
    another key than the worker of the stage's host.
    """
    if refusal := other_version(options.version, join):
        return refusal
    if not 0 <= join.pid < MAX_PID:
        return Refuse(f"got process number {join.pid}, expected one below {MAX_PID}")
    if len(join.host) > MAX_NAME_LENGTH:
        return Refuse(f"got a host name of {len(join.host)} characters, expected at most {MAX_NAME_LENGTH}")
    if not -1 <= join.stage < len(seats):
        return Refuse(
            f"there is no stage {join.stage}: this run has stages 0 to {len(seats) - 1}; start with one of those"
        )
    if join.stage < 0 and not seats.missing:
        return Refuse(f"all {len(seats)} stages have a worker; stop one of them first")
    stage = join.stage if join.stage >= 0 else seats.missing[0]
    expected = options.host_keys[stage] if options.host_keys else ""
    if expected and key not in (expected, seats[stage].given_to):
        row = ["public key", key or "none", f"{expected} (hosts.{stage}.public_key)"]
        return Refuse(f"stage {stage} is for the worker with another key", [row])
    if not seats[stage].is_held or replaced is not None:
        return None
    free = f"still free: {', '.join(map(str, seats.missing))}; " if seats.missing else ""
    return Refuse(
        f"stage {stage} already has a worker: {seats[stage].name}; {free}if you know that it is gone, start this one "
        "with --takeover"
    )


def with_own_stage(options: CoordinatorOptions, seats: Seats, join: Join, key: str) -> Join:
    """JOIN with the stage that is kept for the worker's key, or one that is free for any key, if it names none."""
    if join.stage != -1 or not key or not any(options.host_keys):
        return join
    kept = [seat.stage for seat in seats if key == (seat.given_to or options.host_keys[seat.stage])]
    free = [stage for stage in seats.missing if not options.host_keys[stage] and not join.spare]
    return replace(join, stage=next(iter([*kept, *free]), -1))


def stands_by(options: CoordinatorOptions, seats: Seats, identity: bytes, join: Join, key: str) -> bool:
    """Whether a spare without a stage has to wait: no stage is free for it, and it replaces no worker."""
    if options.is_measuring:
        return join.stage == -1 and bool(options.host_keys) and all(options.host_keys[n] for n in seats.missing)
    return not is_free(seats, join.stage) and replaced_by(seats, identity, join, key) is None


def replaced_by(seats: Seats, identity: bytes, join: Join, key: str) -> Seat | None:
    """The seat whose worker this worker, which has this key, replaces; None: it replaces no worker."""
    if not 0 <= join.stage < len(seats) or not seats[join.stage].is_held:
        return None
    seat = seats[join.stage]
    follows = bool(join.worker_id) and join.worker_id == seat.worker_id
    takes = join.takeover and (not join.spare or key == seat.public_key)
    return seat if seat.identity != identity and (follows or takes) else None


def differences(options: CoordinatorOptions, seats: Seats, hello: Hello) -> list[list[str]]:
    """Rows of (field, this worker's value, expected value and its source); empty if the worker agrees.

    Version and configuration hash are compared with the coordinator's own, hashes of tokenizer and data between the
    workers that have them: the first HELLO counts.
    """
    own = (
        ("version", hello.version, options.version, is_same_source(hello.version, options.version)),
        ("config_hash", hello.config_hash, options.config_hash, hello.config_hash == options.config_hash),
    )
    rows = [[name, brief(yours), f"{expected} (coordinator)"] for name, yours, expected, agrees in own if not agrees]
    for name in SHARED_FIELDS:
        yours = getattr(hello, name)
        first = next((seat for seat in seats if getattr(seat.hello, name, None)), None)
        if first is not None and yours and yours != (expected := getattr(first.hello, name)):
            rows.append([name, brief(str(yours)), f"{expected} ({first.name})"])
    return rows


def warnings(seats: Seats, seat: Seat, hello: Hello) -> list[str]:
    """Warnings: torch's versions differ, or arithmetic and the checkpoint's; a GPU emulates bf16; and what the first
    stage says of data."""
    others = [other for other in seats if other.hello and other.hello.torch_version != hello.torch_version]
    lines = [
        f"stage {seat.stage} has torch {hello.torch_version}, {other.name} has {other.hello.torch_version}: "
        "a run is bit-exact only with the same version everywhere"
        for other in others[:1]
        if other.hello
    ]
    if hello.arithmetic_changes:
        changes = "; ".join(hello.arithmetic_changes)
        lines.append(f"{seat.name}: the continuation is no longer exact: {changes}")
    if hello.emulates_bf16:
        lines.append(f"{seat.name}: its GPU has no bf16 and emulates it; training.precision: fp16 is faster there")
    return [*lines, *(hello.data_notes if seat.stage == 0 else ())]


def assignment(
    options: CoordinatorOptions, run: RunState, stage: int, sources: Sequence[Sequence[str | int]]
) -> Assign:
    """ASSIGN for the worker that has this seat now; `sources` are rows of ASSIGN: workers that have its files."""
    newest, base = run.newest, run.base
    older = base if base.step < newest.step else None
    return Assign(
        stage=stage,
        run_id=options.run_id,
        config_json=options.config_json,
        config_hash=options.config_hash,
        snapshot=newest.snapshot,
        snapshot_files=dict(newest.files),
        start_step=newest.step,
        is_measuring=options.is_measuring,
        copied_step=older.step if older else -1,
        copied_snapshot=older.snapshot if older else "",
        copied_files=dict(older.files) if older else {},
        sources=[list(row) for row in sources],
    )


def note_data(options: CoordinatorOptions, run: RunState, seats: Seats) -> None:
    """Note the samples of an epoch, the run's first sample and its length, once all stages with data have said HELLO.

    Raises ConfigError if warm-up and decay do not fit into the steps of `epochs`.
    """
    hellos = [seat.hello for seat in seats if seat.hello is not None]
    run.num_samples = max(hello.num_train_samples for hello in hellos)
    if run.next_sample is None:
        run.next_sample = max(hello.next_sample for hello in hellos)
    training, start = options.training, Position(options.start_step, run.next_sample)
    run.num_steps = total_steps(training.steps, training.epochs, run.num_samples, training.global_batch, start)
    misfit = training.phases.misfit(run.num_steps, f"the {run.num_steps} steps of {training.epochs} epochs")
    if misfit:
        raise ConfigError(f"training: {misfit}")


def facts(options: CoordinatorOptions, run: RunState) -> JournalFacts:
    """The run as its journal begins, once all workers are there."""
    return JournalFacts(
        run_id=options.run_id,
        config_hash=options.config_hash,
        epoch=run.epoch,
        start_step=options.start_step,
        next_sample=run.next_sample or 0,
        num_train_samples=run.num_samples,
        num_steps=run.num_steps,
        global_batch=options.training.global_batch,
        step=run.base.step,
        snapshot=run.base.snapshot,
        files=run.base.files,
        codecs=run.base.saved_codecs,
    )


def note_facts(options: CoordinatorOptions, run: RunState, facts: JournalFacts) -> None:
    """Take the run's length and data from the journal of the coordinator before this one."""
    run.num_steps, run.num_samples = facts.num_steps, facts.num_train_samples
    if run.next_sample is None:
        num_done = options.start_step - facts.start_step
        run.next_sample = facts.next_sample + num_done * facts.global_batch


def data_position(options: CoordinatorOptions, run: RunState, step: int) -> tuple[int, int]:
    """Samples of an epoch, and the number of a step's first sample."""
    return run.num_samples, (run.next_sample or 0) + (step - options.start_step) * options.training.global_batch


def link_rows(options: CoordinatorOptions, seats: Seats, ticket: Ticket | None) -> list[list[list[str | int]]]:
    """PLAN's rows for each stage; UserError for two neighbours that cannot be connected as configured.

    `ticket` is for links whose ends cannot dial each other; None: there is no relay.
    """
    return plan_links(endpoints(options, seats), options.grid, options.inside, ticket)


def endpoints(options: CoordinatorOptions, seats: Seats) -> list[Endpoint]:
    """The workers of all stages as their neighbours see them."""
    return [_endpoint(options, seats, seat) for seat in seats]


def _endpoint(options: CoordinatorOptions, seats: Seats, seat: Seat) -> Endpoint:
    site = options.sites[seat.stage] if options.sites else ""
    if seat.hello is None:
        return Endpoint(seat.stage, seat.host, "", site)
    unreachable = {other.stage: why for other in seats if (why := reaching.failure(other, seat))}
    address, device = seat.hello.address, seat.hello.device
    return Endpoint(seat.stage, seat.host, address, site, device, seat.public_key, unreachable)
