"""Every runtime for real, on loopback: processes that train the same model on the same data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.loopback_network import LoopbackNetwork
from support.processes import children, is_alive, wait_until
from support.sweeps import small

from tahq.comm.network_config import host_names
from tahq_netem.network.description import uniform
from tahq_netem.programs import module_argv, module_environment
from tahq_netem.runtimes.bare_async import DEEP
from tahq_netem.runtimes.session import GrowingLines, RuntimeLostError, RuntimeSession, SessionRequest
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.runner import RUNTIMES
from tahq_netem.sweep.stage_times import StageTimes, calibrate
from tahq_netem.sweep.workload import session_config

pytestmark = pytest.mark.ci

TIMEOUT_S = 120.0
RAW = "raw:dtype=fp32"


def request(folder, runtime, schedule, times=None, wire=RAW, **changes):
    """A session of the small sweep: two stages, raw fp32 unless another wire is named."""
    compute = "real" if times is None else "sleep"
    key = SessionKey(runtime, schedule, wire, wire, stages=2, micro_batch=2, compute=compute)
    config = session_config(small(**changes), key, folder, times)
    return SessionRequest(config, schedule, LoopbackNetwork(uniform(2)), tuple(host_names(2)), folder)


@pytest.fixture(scope="module")
def losses():
    """Losses of the first steps, by runtime and schedule; filled by the tests below."""
    return {}


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("runtime", "schedule"),
    [
        ("tahq", "1f1b"),
        ("torch", "1f1b"),
        ("torch", "1f1b-runtime"),
        ("bare", DEEP),
    ],
)
def test_runtime_trains_the_same_model_on_the_same_data(tmp_path, losses, runtime, schedule):
    with RUNTIMES[runtime](request(tmp_path, runtime, schedule)) as session:
        records = [session.next_step(TIMEOUT_S) for _ in range(3)]
        ours = [pid for child in session.running.values() for pid in (child.pid, *children(child.pid))]
    assert not any(is_alive(pid) for pid in ours)
    assert [record.step for record in records] == [1, 2, 3]
    frames = 4 * 2 * 32 * 64 * 4  # micro-batches, samples, tokens, channels, bytes
    assert all(record.activation_nbytes == record.gradient_nbytes == (frames,) for record in records)
    assert all(record.seconds > 0 for record in records)
    # only tahq has codecs, even if they only copy
    coding_s = [seconds for record in records for stage in record.codec_s for seconds in stage]
    assert len(coding_s) == 3 * 2 * 2
    assert (min(coding_s) > 0) if runtime == "tahq" else not any(coding_s)
    losses[runtime, schedule] = [record.loss for record in records]
    # One batch again and again, from ln 256 downwards. Clipping and AdamW differ after the first step.
    assert records[0].loss == pytest.approx(5.545, abs=0.2)
    assert records[2].loss < records[0].loss
    first = [values[0] for values in losses.values()]
    # fp32 sums of 2,048 terms, in another order
    assert max(first) - min(first) < 1e-4


@pytest.mark.acceptance
def test_tahq_with_default_settings_measures_and_plans_before_it_trains(tmp_path):
    with RUNTIMES["tahq"](request(tmp_path, "tahq", "auto", wire="auto")) as session:
        assert session.next_step(TIMEOUT_S).step == 1
    log = (tmp_path / "coordinator.log").read_text()
    assert log.index("planned for") < log.index("codecs raw:dtype=bf16") < log.index("step 1")


@pytest.mark.acceptance
def test_torch_sends_bf16_in_both_directions(tmp_path):
    records = {}
    for dtype in ("bf16", "fp32"):
        (tmp_path / dtype).mkdir()
        with RUNTIMES["torch"](request(tmp_path / dtype, "torch", "gpipe", wire=f"raw:dtype={dtype}")) as session:
            records[dtype] = [session.next_step(TIMEOUT_S) for _ in range(3)]
    frames = 4 * 2 * 32 * 64 * 2  # half of fp32's
    assert all(record.activation_nbytes == record.gradient_nbytes == (frames,) for record in records["bf16"])
    # 8 bits of mantissa: near, and not the same
    assert records["bf16"][2].loss == pytest.approx(records["fp32"][2].loss, abs=0.02)
    assert records["bf16"][2].loss != records["fp32"][2].loss


@pytest.mark.acceptance
def test_sleeping_stages_set_the_pace_and_one_that_dies_is_named(tmp_path):
    times = StageTimes((0.02, 0.02), (0.04, 0.04))
    with RUNTIMES["torch"](request(tmp_path, "torch", "gpipe", times)) as session:
        records = [session.next_step(TIMEOUT_S) for _ in range(4)]
        # f + b of the first stage, and four times those of the second
        assert sum(record.seconds for record in records[1:]) >= 3 * (0.06 + 4 * 0.06) * 0.98
        session.running["rank 1"].kill()
        with pytest.raises(RuntimeLostError, match=r"rank \d ended with status"):
            _ = [session.next_step(TIMEOUT_S) for _ in range(1000)]


def test_program_that_does_not_watch_its_stdin_is_watched(tmp_path):
    (tmp_path / "deaf.py").write_text("import sys, time\nprint(__name__, sys.argv[1:], flush=True)\ntime.sleep(600)\n")
    argv = module_argv("tahq_netem.programs", "deaf", "one", "two")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=tmp_path, env=module_environment(), text=True, **pipes) as held:
        assert held.stdout.readline() == "__main__ ['one', 'two']\n"
        held.stdin.close()
        assert held.wait(60) == 1


@pytest.mark.acceptance
@pytest.mark.parametrize(("runtime", "num_processes"), [("tahq", 3), ("bare", 2)])
def test_nothing_outlives_a_sweep_that_was_killed(tmp_path, runtime, num_processes):
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from test_runtimes import RUNTIMES, request\n"
        f"session = RUNTIMES['{runtime}'](request(Path.cwd(), '{runtime}', '1f1b'))\n"
        "print(*(process.pid for process in session.running.values()), flush=True)\n"
        "time.sleep(600)\n"
    )
    here = {"PYTHONPATH": f"{Path(__file__).parent}:{module_environment()['PYTHONPATH']}"}
    sweep = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | here, stdout=subprocess.PIPE, text=True
    )
    with sweep:
        pids = [int(word) for word in sweep.stdout.readline().split()]
        assert len(pids) == num_processes
        assert all(map(is_alive, pids))
        sweep.kill()
    # They import torch before they look at their stdin, and a coordinator without workers would wait for ever.
    wait_until(lambda: not any(map(is_alive, pids)), TIMEOUT_S, "all of the sweep's processes end")


class ShellSession(RuntimeSession):
    """A session of one shell command, on no network."""

    def _start_all(self):
        self.start("leader", "host0", ["sh", "-c", "sleep 600 & echo $! > child"])

    def steps_so_far(self):
        return []


def test_children_of_a_process_that_has_ended_end_with_the_session(tmp_path):
    with ShellSession(request(tmp_path, "tahq", "1f1b")) as session:
        with pytest.raises(RuntimeLostError, match="leader ended with status 0; the logs are empty"):
            session.next_step(30)
        child = int((tmp_path / "child").read_text())
        assert is_alive(child)
    wait_until(lambda: not is_alive(child), 10, "its child ends")


@pytest.mark.acceptance
def test_stages_are_timed_in_order(tmp_path):
    key = SessionKey("tahq", "1f1b", RAW, RAW, stages=2, micro_batch=2, compute="calibrated")
    slept = calibrate(session_config(small(), key, tmp_path, StageTimes((0.05, 0.06), (0.1, 0.12))))
    assert 0.05 <= slept.forward_s[0] < 0.1
    assert 0.06 <= slept.forward_s[1] < 0.12
    assert 0.1 <= slept.backward_s[0] < 0.2


def test_lines_are_read_when_they_are_whole(tmp_path):
    path = Path(tmp_path / "lines.jsonl")
    lines = GrowingLines(path)
    assert not list(lines.read())
    path.write_text('{"a": 1}\n{"a"')
    assert list(lines.read()) == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert list(lines.read()) == [{"a": 2}]
    assert not list(lines.read())
