"""A TCP proxy on loopback that writes down all it carries."""

import contextlib
import select
import socket
import threading


class Eavesdropper:
    """Listens on `address` and carries bytes to and from `target`, host:port; `heard` is all of them."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = b""
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Hang up on all, and listen no more."""
        self._is_closed = True
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        self._listener.settimeout(0.05)
        while not self._is_closed:
            with contextlib.suppress(TimeoutError):
                near, _ = self._listener.accept()
                thread = threading.Thread(target=self._carry, args=(near,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(self._target) as far:
            other = {near: far, far: near}
            while not self._is_closed:
                for end in select.select([near, far], [], [], 0.05)[0]:
                    if not (data := end.recv(65536)):
                        return
                    self.heard += data
                    other[end].sendall(data)
