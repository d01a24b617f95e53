"""Control messages over ZMQ: a client in every worker, one server in the coordinator."""

from tahq.comm.control.client import ControlClient
from tahq.comm.control.server import ControlServer

__all__ = ["ControlClient", "ControlServer"]
