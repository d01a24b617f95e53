"""What every test may use: golden files, and hypothesis without deadlines (the machine may be busy)."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(16))))
GOLDEN_FOLDER = Path(__file__).parent / "golden"

settings.register_profile("tahq", deadline=None)
settings.load_profile("tahq")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="write what the tests produce to tests/golden instead of comparing; look at the diff before committing",
    )


def pytest_configure(config: pytest.Config) -> None:
    _let_programs_hear_signals()
    _keep_keys_apart(config)
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Interpreted kernels compute in numpy, which warns of 1/0 and of maxima of NaNs; devices do not.
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")


def _let_programs_hear_signals() -> None:
    """Under nohup, or in a script's background, SIGHUP or SIGINT is ignored, and would be by all that tests start.

    A handler that does nothing is as deaf, but does not outlive exec.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def _keep_keys_apart(config: pytest.Config) -> None:
    """Tests, and all that they start, have an account's key and a cache of measurements of their own."""
    folder = tempfile.TemporaryDirectory(prefix="tahq-tests-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CONFIG_HOME"] = folder.name
    os.environ["TAHQ_CACHE"] = f"{folder.name}/cache"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("ci") is None)  # long files first: none is left at the end
    for mark, obstacle in (("gpu", _no_cuda), ("netns", _no_namespaces)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = obstacle() if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Processes that a test starts see no GPU unless it is marked gpu: results are compared with a CPU's."""
    os.environ["CUDA_VISIBLE_DEVICES"] = GPUS if item.get_closest_marker("gpu") else ""


def _no_cuda() -> str | None:
    import torch  # only where a GPU test was collected

    return None if torch.cuda.is_available() else "no CUDA device"


def _no_namespaces() -> str | None:
    from tahq_netem.backends.choice import probe

    found = probe()
    if found.namespaces_obstacle is not None:
        return found.namespaces_obstacle
    return None if found.parts["htb"] and (found.parts["tun"] or found.parts["netem"]) else "no TUN device and no netem"


@pytest.fixture
def repeatable_kernels() -> Iterator[None]:
    """Only operators of torch that repeat their bits may run, as in workers on CUDA."""
    import torch  # not for every test

    from tahq.worker.assembly import use_repeatable_kernels

    fills = torch.utils.deterministic.fill_uninitialized_memory
    use_repeatable_kernels("cuda" if torch.cuda.is_available() else "cpu")
    yield
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """golden(name, text): text must be what tests/golden/<name> holds; with --rewrite-golden it becomes that."""
    rewrite = request.config.getoption("--rewrite-golden")

    def compare(name: str, text: str) -> None:
        path = GOLDEN_FOLDER / name
        if rewrite:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {path}; write it with pytest --rewrite-golden"
        assert text == path.read_text(encoding="utf-8"), f"differs from {path}"

    return compare
