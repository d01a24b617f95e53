"""A TCP proxy on loopback that keeps what it carries, and whose connections a test may reset, delay or damage."""

import contextlib
import select
import socket
import struct
import threading

CHUNK = 65536


class BreakingProxy:
    """Listens on `address` and carries bytes to and from `target`, host:port."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._resets = 0
        """Connections made before as many have been reset."""
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_closed = False
        self._insertions: dict[str, bytes] = {}
        self.num_connections = 0
        self.heard = bytearray()
        """All that it has carried."""
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        self._resets += 1

    def cut(self) -> None:
        """Carry nothing and answer nothing until `heal`; bytes that come meanwhile wait."""
        self._is_open.clear()

    def insert(self, data: bytes, towards: str) -> None:
        """Put these bytes, once, in front of the next that go `towards` "target" or "dialler"."""
        self._insertions[towards] = data

    def heal(self) -> None:
        self._is_open.set()

    def close(self) -> None:
        self._is_closed = True
        self._listener.close()
        self._is_open.set()
        self.reset()

    def _accept(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(OSError):
                near, _ = self._listener.accept()
                self._is_open.wait()
                self._join(near)

    def _join(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        self.num_connections += 1
        threading.Thread(target=self._carry, args=(near, far, self._resets), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket, resets: int) -> None:
        """Until reset, or one end hangs up; the thread that carries also closes, so that no number is used twice."""
        waiting = {near: b"", far: b""}
        """By end, what it is still to be given."""
        other = {near: far, far: near}
        with contextlib.suppress(OSError):
            while self._resets == resets:
                readers = [end for end in waiting if not waiting[other[end]]]
                writers = [end for end in waiting if waiting[end]]
                readable, writable, _ = select.select(readers, writers, [], 0.02)
                self._is_open.wait()
                for end in writable:
                    waiting[end] = waiting[end][end.send(waiting[end]) :]
                for end in readable:
                    if not (data := end.recv(CHUNK)):
                        break
                    self.heard += data
                    towards = "target" if end is near else "dialler"
                    waiting[other[end]] = self._insertions.pop(towards, b"") + data
                else:
                    continue
                break
        for end in (near, far):
            # closing with a linger of 0 sends RST, and drops what was not read
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
