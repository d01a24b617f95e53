"""From the first Join to the plan and the last Ready: bringing the workers of a run together.

A worker that does not fit is refused alone; the run goes on waiting for one that does.
"""

from tahq.comm.control.messages import (
    Admit,
    Assign,
    Failed,
    Hello,
    Join,
    Message,
    Plan,
    Ready,
    Refuse,
    StandBy,
    StartOver,
)
from tahq.comm.topology import Endpoint, Position, plan_links, total_steps
from tahq.coordinator.context import RunContext
from tahq.coordinator.journal import JournalledHolder
from tahq.coordinator.membership import Member, Standing, stage_list
from tahq.coordinator.run_state import Event, Phase
from tahq.errors import ConfigError


class Gathering:
    """Answers Join, Hello and Ready.

    Args:
        context: the run.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._departed: set[bytes] = set()
        """Who was refused."""
        self._lost: set[bytes] = set()
        """Whose stage was taken back, or is another's now."""
        self._next_sample = context.options.next_sample
        """Number of the sample that the run's first step began with."""
        self.refusals: dict[int, str] = {}
        """Why the latest refused worker of a stage was refused, by the stage it wanted."""

    @property
    def missing(self) -> str:
        """Stages that the run waits for, in words, and how to start the first that is absent."""
        membership = self._context.membership
        if self._context.state.phase is Phase.CONNECTING:
            late = membership.lacking(Standing.READY)
            return stage_list(late) if late else ""
        if membership.missing:
            absent = membership.missing
            command = f"tahq-worker --stage {absent[0]} --peer {self._context.server.address}"
            return f"{stage_list(absent)} ({command})"
        late = membership.lacking(Standing.GREETED)
        return f"{stage_list(late)} to build the model" if late else ""

    def join(self, identity: bytes, join: Join, *, is_given: bool = False) -> None:
        """Assign a stage, or refuse; a spare that is given one may have another key than its host's worker had."""
        context = self._context
        answer = context.membership.join(identity, join, context.clock())
        if not is_given:
            answer = self._with_its_key(identity, answer)
        if isinstance(answer, Refuse):
            self._refuse(identity, join.stage, f"{join.host}, pid {join.pid}", answer)
            return
        self._departed.discard(identity)
        self._lost.discard(identity)
        context.server.send(identity, self._assignment(answer.stage, self._sources(identity, answer.stage)))
        context.tell_stage(answer)
        context.tell_phase(self.missing)

    def _with_its_key(self, identity: bytes, answer: Member | Refuse) -> Member | Refuse:
        """Refuse a worker that has taken a stage which is another key's."""
        keys = self._context.options.host_keys
        if isinstance(answer, Refuse) or not keys or not keys[answer.stage]:
            return answer
        key = self._context.server.public_key(identity)
        if key == keys[answer.stage]:
            return answer
        self._context.membership.leave(answer.stage)
        row = ["public key", key or "none", f"{keys[answer.stage]} (hosts.{answer.stage}.public_key)"]
        return Refuse(f"stage {answer.stage} is for the worker with another key", [row])

    def admit_spare(self, identity: bytes, join: Join) -> None:
        """Let a worker wait that wants no stage now, or whose stage is taken; or refuse it."""
        context, options = self._context, self._context.options
        if join.version != options.version:
            row = ["version", join.version, f"{options.version} (coordinator)"]
            refusal = Refuse("this worker runs another version of tahq: install the coordinator's", [row])
            self._refuse(identity, join.stage, f"{join.host}, pid {join.pid}", refusal)
            return
        is_new = identity not in context.spares
        spare = context.spares.add(identity, join, context.clock())
        self._departed.discard(identity)
        self._lost.discard(identity)
        context.server.send(identity, StandBy(options.peer_timeout_s, options.give_up_s))
        if is_new:
            context.observer.warned(f"a spare worker stands by ({spare.name}); {context.spares}")

    def lose_silent_spares(self, since_s: float) -> None:
        """Count on nobody from whom nothing has come after this time."""
        for spare in self._context.spares.silent(since_s):
            self._context.spares.remove(spare.identity)
            self._lost.add(spare.identity)
            self._context.observer.warned(f"the spare worker {spare.name} is gone; {self._context.spares}")

    def _sources(self, identity: bytes, stage: int) -> list[list[str | int]]:
        """Who else has the files of a stage, and has been told to give them to this worker."""
        server, rows = self._context.server, list[list[str | int]]()
        key = server.public_key(identity)
        for step, holder, address in self._context.copies.sources(stage, self._context.membership.members):
            if key:
                server.send(holder.identity, Admit([key]))
            rows.append([step, address, server.public_key(holder.identity)])
        return rows

    def _assignment(self, stage: int, sources: list[list[str | int]]) -> Assign:
        context, options = self._context, self._context.options
        point, base = context.recovery.point, context.recovery.base
        older = base if base.step < point.step else None
        return Assign(
            stage=stage,
            run_id=options.run_id,
            config_json=options.config_json,
            config_hash=options.config_hash,
            snapshot=point.snapshot,
            snapshot_files=dict(point.files),
            start_step=point.step,
            is_measuring=options.is_measuring,
            copied_step=older.step if older else -1,
            copied_snapshot=older.snapshot if older else "",
            copied_files=dict(older.files) if older else {},
            sources=sources,
        )

    def hello(self, identity: bytes, hello: Hello) -> bool:
        """Accept or refuse what a worker made of the configuration; whether all are accepted now.

        Raises:
            RemoteProtocolError: it may not say Hello now.
        """
        context, membership = self._context, self._context.membership
        member = membership.claim(identity, hello.stage)
        if member.standing is Standing.ASSIGNED and not context.recovery.begins(member.stage, hello.start_step):
            context.server.send(identity, StartOver(f"nobody begins at step {hello.start_step} any more"))
            self._departed.add(identity)
            self._free(member)
            return False
        refusal = membership.greet(identity, hello)
        if refusal is not None:
            self._refuse(identity, member.stage, member.name, refusal)
            context.observer.stage_left(member.stage)
        else:
            self._welcome(membership.claim(identity, hello.stage))
        context.tell_phase(self.missing)
        return not membership.lacking(Standing.GREETED)

    def _welcome(self, member: Member) -> None:
        self._context.tell_stage(member)
        warning = self._context.membership.warning(member.stage)
        if warning:
            self._context.observer.warned(warning)
        changes = member.hello.arithmetic_changes if member.hello else []
        if changes:
            self._context.observer.warned(
                f"{member.name}: the continuation is no longer exact, to the bit: {'; '.join(changes)}"
            )

    def num_steps(self) -> int:
        """Length of the run, now that all have said how many samples there are.

        Raises:
            ConfigError: warm-up and decay do not fit into the steps that `epochs` come to.
        """
        options = self._context.options
        samples, next_sample = self.data_position(options.start_step)
        start = Position(options.start_step, next_sample)
        num_steps = total_steps(options.steps, options.epochs, samples, options.global_batch, start)
        misfit = options.phases.misfit(num_steps, f"the {num_steps} steps that epochs {options.epochs} come to")
        if misfit:
            raise ConfigError(f"training: {misfit}")
        return num_steps

    def answer_rejoin(self, identity: bytes, holder: JournalledHolder | None) -> bool:
        """Give a worker its stage back that held it under the coordinator before, else have it begin anew."""
        context = self._context
        if holder is None or holder.identity != identity or context.membership.at(holder.stage) is not None:
            context.server.send(identity, StartOver("another worker has its stage"))
            return False
        member = Member(
            identity,
            *(holder.stage, holder.host, holder.pid, context.clock(), holder.worker_id),
            standing=Standing.READY,
            hello=holder.hello,
        )
        context.membership.restore(member)
        context.tell_stage(member)
        return True

    def data_position(self, step: int) -> tuple[int, int]:
        """Samples of an epoch, and the number of a step's first, as the stages with data have said."""
        members = [member for member in self._context.membership.members if member.hello]
        if self._next_sample is None:
            self._next_sample = max(member.hello.next_sample for member in members if member.hello)
        samples = max(member.hello.num_train_samples for member in members if member.hello)
        options = self._context.options
        return samples, self._next_sample + (step - options.start_step) * options.global_batch

    def plan(self, num_steps: int) -> None:
        """Tell every worker its links, and how long the run is.

        Raises:
            UserError: two neighbours of which neither can be dialled, or that cannot be joined as configured.
        """
        context, options = self._context, self._context.options
        rows = self.link_rows()
        context.state.advance(Event.ALL_GREETED, context.clock())
        context.tell_phase(self.missing)
        context.observer.planned(options.start_step, num_steps)
        data = self.data_position(options.start_step)
        for member in context.membership.members:
            context.membership.planned(member.stage)
            place = (options.start_step, num_steps, rows[member.stage])
            plan = Plan(context.recovery.epoch, *place, *data, live_step=context.recovery.step)
            context.server.send(member.identity, plan)

    def link_rows(self) -> list[list[list[str | int]]]:
        """PLAN's rows of each stage; all must have been greeted. Raises as `plan` does."""
        options = self._context.options
        endpoints = [self._endpoint(member) for member in self._context.membership.members]
        return plan_links(endpoints, options.tie_link, options.chunks_per_stage, options.inside)

    def _endpoint(self, member: Member) -> Endpoint:
        sites, hello = self._context.options.sites, member.hello
        site = sites[member.stage] if sites else ""
        if hello is None:
            return Endpoint(member.stage, member.host, "", site)
        key = self._context.server.public_key(member.identity)
        return Endpoint(member.stage, member.host, hello.address, site, hello.device, key)

    def ready(self, identity: bytes, ready: Ready) -> bool:
        """Note that a worker is connected; whether all are now.

        Raises:
            RemoteProtocolError: it may not say so now.
        """
        membership = self._context.membership
        membership.ready(identity, ready)
        self._context.tell_stage(membership.claim(identity, ready.stage))
        self._context.tell_phase(self.missing)
        return not membership.lacking(Standing.READY)

    # -- those who cannot stay -------------------------------------------------------------------

    def dismiss(self, identity: bytes, reason: str) -> None:
        """Refuse a member that broke the protocol, and free its stage."""
        member = self._context.membership.find(identity)
        stage = member.stage if member else -1
        self._refuse(identity, stage, member.name if member else "without a stage", Refuse(reason))
        self._free(member)

    def lose(self, member: Member) -> None:
        """Free the stage of a member that has fallen silent."""
        self._lost.add(member.identity)
        self._context.observer.warned(f"{member.name} has given no sign of life; its stage is free again")
        self._free(member)

    def note_lost(self, identity: bytes) -> None:
        """Somebody who held a stage has lost it: told to join anew if it ever speaks again."""
        self._lost.add(identity)

    def turn_away(self, identity: bytes, message: Message) -> None:
        """Answer somebody who holds no stage and did not ask for one."""
        spare = self._context.spares.remove(identity)
        if spare is not None and isinstance(message, Failed):
            self._context.observer.warned(f"the spare worker {spare.name} is gone; {self._context.spares}")
        elif identity in self._lost:
            self.remind(identity)
        elif isinstance(message, Failed):
            self._context.observer.warned(f"a worker without a stage failed: {message.message}")
        else:
            said = type(message).__name__
            self._context.server.send(identity, Refuse(f"got {said} from a worker without a stage; start it again"))

    def remind(self, identity: bytes) -> None:
        """Tell somebody who lost its stage, and still lives, that it has."""
        if identity in self._lost:
            self._context.server.send(identity, StartOver("its stage was taken back"))
            self._lost.discard(identity)
            self._departed.add(identity)
        elif identity in self._departed:
            self._context.server.send(identity, Refuse("it holds no stage; start this worker again"))

    def _free(self, member: Member | None) -> None:
        if member is not None:
            self._context.membership.leave(member.stage)
            self._context.observer.stage_left(member.stage)
            self._context.tell_phase(self.missing)

    def _refuse(self, identity: bytes, stage: int, who: str, refusal: Refuse) -> None:
        self._departed.add(identity)
        self._context.server.send(identity, refusal)
        rows = "".join(f"; {field}: {yours}, expected {expected}" for field, yours, expected in refusal.differences)
        self.refusals[stage] = f"{refusal.reason}{rows}"
        self._context.observer.warned(f"refused the worker {who}: {refusal.reason}{rows}")
