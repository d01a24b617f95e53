"""An invited machine's side: it has its own key admitted, and serves a stage as its worker."""

import logging
import socket
from pathlib import Path

from tahq import __version__
from tahq.comm.control.client import ControlClient
from tahq.comm.control.messages import Redeem, Refuse, Welcome
from tahq.comm.keys import Credentials, KeyPair
from tahq.comm.link.shaping import Shaping
from tahq.comm.zmq.addresses import local_address_towards, parse_address
from tahq.errors import ModelError, PeerLostError, RefusedError
from tahq.worker.control import WorkerOptions
from tahq.worker.main import run_worker
from tahq_launch.joining.invitation import Invitation, note_joined

log = logging.getLogger("tahq")

_PEER_TIMEOUT_S, _HEARTBEAT_S = 10.0, 2.0


def redeem(invitation: Invitation, own: KeyPair, advertised: str | None) -> None:
    """Have the own key admitted, and note where; doing it again with the same key changes nothing.

    `advertised`: host:port that neighbours dial, as of `tahq worker`; None or ``none``: this machine's address towards
    the coordinator.

    Raises:
        RefusedError: the invite is used, expired or unknown, or the versions differ.
        ModelError: this machine lacks the model.
        PeerLostError: the coordinator does not answer.
    """
    credentials = Credentials(invitation.keys, invitation.coordinator, is_invite=True)
    host = local_address_towards(invitation.address)
    if advertised not in (None, "none"):
        host, _ = parse_address(advertised, "--advertise")
    client = ControlClient(
        invitation.address,
        "an invited machine",
        shaping=Shaping(),
        peer_timeout_s=_PEER_TIMEOUT_S,
        heartbeat_s=_HEARTBEAT_S,
        credentials=credentials,
    )
    try:
        client.send(Redeem(own.public, socket.gethostname(), host, __version__))
        reply = client.recv()
    finally:
        client.close(linger_s=0.1)
    if isinstance(reply, Refuse):
        rows = "; ".join(f"{field}: here {mine}, expected {theirs}" for field, mine, theirs in reply.differences)
        raise RefusedError(f"{reply.reason}: {rows}" if rows else reply.reason)
    if not isinstance(reply, Welcome):
        raise PeerLostError(f"the coordinator at {invitation.address} answered the invite with {type(reply).__name__}")
    note_joined(invitation.address, invitation.coordinator)
    log.info("admitted by %s with the key %s; `tahq join` alone comes back", invitation.address, own.public)
    _check_files(reply)


def _check_files(welcome: Welcome) -> None:
    """Say which files the run reads; ModelError if the model, which every stage needs, is not here."""
    for key, paths in welcome.needs.items():
        if key != "model.path":
            log.info("if this machine gets the first or the last stage, it needs %s: %s", key, ", ".join(paths))
            continue
        if not Path(paths[0]).expanduser().is_dir():
            raise ModelError(
                f"this machine lacks the model: the run's model.path is {paths[0]}, relative to {Path.cwd()}; copy or "
                "download that folder to there, then `tahq join`, without the invite: the place is kept"
            )


def serve(options: WorkerOptions, invitation: Invitation | None) -> int:
    """Redeem the invite, if there is one, and be a worker until the run ends; returns its exit status."""
    assert options.credentials is not None, "members have keys"
    if invitation is not None:
        redeem(invitation, options.credentials.own, options.advertise)
    return run_worker(options)
