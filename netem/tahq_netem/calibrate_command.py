"""`tahq-netem calibrate`: is the network that this machine makes of a profile what the profile says?"""

from pathlib import Path
from typing import Final

from tahq_netem.backend_choice import backend_of_own_hosts
from tahq_netem.backend_label import backend_label
from tahq_netem.calibration import calibrate
from tahq_netem.description import BackendName
from tahq_netem.json_file import write_json
from tahq_netem.network import build_network
from tahq_netem.profiles import profile

_ADVICE: Final = (
    "run it as root (sudo), or with --backend relay, which shows no TCP dynamics; `tahq-netem probe` says more"
)


def calibrate_command(
    name: str, num_hosts: int, backend: BackendName, *, quick: bool = False, json_path: Path | None = None
) -> int:
    """Build, measure, print, remove.

    Raises:
        ConfigError: no such profile.
        NetworkError: the network cannot be made here, or only by a relay that was not asked for, or a figure is off.
    """
    config = profile(name, num_hosts)
    chosen = backend_of_own_hosts(config, backend, "--backend", _ADVICE)
    with build_network(config, backend=chosen) as network:
        label = backend_label(network.describe())
        print(f"{name}: {num_hosts} hosts, made by {label}, TCP is {network.congestion_control}")
        measured = calibrate(network, quick=quick)
    print(*measured.lines(), sep="\n")
    if json_path is not None:
        write_json(json_path, measured.as_dict())
    measured.check()
    return 0
