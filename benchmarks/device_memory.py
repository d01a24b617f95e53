"""What a GPU's driver says is in use, sampled by nvidia-smi: a process of its own, outside torch and its allocator."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

PERIOD_MS = 50
_QUERY = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0", f"--loop-ms={PERIOD_MS}"]


class DeviceMemory:
    """Samples the first GPU's memory in use from `with` to its end; without nvidia-smi, nothing."""

    def __enter__(self) -> "DeviceMemory":
        self._file = tempfile.NamedTemporaryFile("w", suffix=".csv", delete=False)
        program = shutil.which("nvidia-smi")
        self._process = subprocess.Popen([program, *_QUERY], stdout=self._file) if program else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._file.close()

    @property
    def samples_mib(self) -> list[int]:
        """MiB in use, every 50 ms, as far as they are written."""
        return [int(line) for line in Path(self._file.name).read_text().split() if line.isdigit()]
