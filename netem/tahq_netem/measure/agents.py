"""The measuring programs on the hosts of a network, seen from outside."""

import json
import select
import subprocess
import time
from typing import Any, Final, Self

from tahq.errors import NetworkError
from tahq_netem.backends.network import Network
from tahq_netem.programs import module_argv, module_environment

_START_TIMEOUT_S: Final = 30.0
_MARGIN_S: Final = 30.0
"""What a busy machine may add to a measurement of known length before it counts as hung."""


class MeasuringAgent:
    """The measuring program (`tahq_netem.measure.meter`) on one host."""

    def __init__(self, network: Network, host: str) -> None:
        self.host = host
        self._received = b""
        self._process: subprocess.Popen[bytes] = network.popen(
            host,
            module_argv("tahq_netem.measure.meter", "--address", network.address(host)),
            env=module_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        self.port: int = self._answer("port", _START_TIMEOUT_S)

    def measure(self, do: str, target: tuple[str, int], lasts_s: float, arguments: dict[str, Any]) -> Any:
        """Make a measurement that should take `lasts_s`, and return the result.

        Raises:
            NetworkError: the network did not let it through, or the program has ended or hangs.
        """
        try:
            self._commands.write(json.dumps({"do": do, "target": target, **arguments}).encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer("result", lasts_s + _MARGIN_S)

    def _answer(self, key: str, timeout_s: float) -> Any:
        answer: dict[str, Any] = json.loads(self._line(timeout_s))
        if key not in answer:
            raise NetworkError(f"a measurement from {self.host} failed: {answer.get('error', answer)}")
        return answer[key]

    def _line(self, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if not select.select([self._answers], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise NetworkError(f"the measuring program on {self.host} did not answer within {timeout_s:.0f} s")
            piece = self._answers.read(65536)
            if not piece:
                raise self._ended()
            self._received += piece
        line, _newline, self._received = self._received.partition(b"\n")
        return line

    def _ended(self) -> NetworkError:
        return NetworkError(f"the measuring program on {self.host} ended with status {self._process.wait()}")

    def close(self) -> None:
        """End the program."""
        self._commands.close()
        self._answers.close()
        self._process.terminate()
        self._process.wait()


class MeasuringAgents:
    """The agents of a network's hosts, each started when first needed; a context manager that ends them all."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._agents: dict[str, MeasuringAgent] = {}

    def measure(self, do: str, source: str, destination: str, lasts_s: float, **arguments: Any) -> Any:
        """One measurement of the path between two hosts.

        Args:
            do: a function of `meter`, by name.
            source: the host that sends.
            destination: the host that answers.
            lasts_s: how long it should take.
            arguments: those of the function, but for the target.

        Raises:
            NetworkError: the network did not let it through, or the program has ended or hangs.
        """
        target = (self._network.address(destination), self._on(destination).port)
        return self._on(source).measure(do, target, lasts_s, arguments)

    def _on(self, host: str) -> MeasuringAgent:
        if host not in self._agents:
            self._agents[host] = MeasuringAgent(self._network, host)
        return self._agents[host]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for agent in self._agents.values():
            agent.close()
