"""Keys of whole runs: created silently for workers started here, refused in one line, and never leaked."""

import stat
from pathlib import Path

import pytest
from support.processes import children, workers
from support.runs import write_config

from tahq.comm.keys import default_key_path, new_key_pair, read_key_file, write_key_file
from tahq.config.cluster import ClusterConfig
from tahq.errors import UserError
from tahq_launch.start.local_checks import warnings_about
from tahq_launch.start.run_keys import make_run_keys

from .conftest import TWO_STAGES, assert_one_line

BY_HAND = {"address": "192.0.2.1"}
BY_SSH = {"address": "192.0.2.2", "ssh": "gpu2"}


def configured(**changes) -> ClusterConfig:
    return ClusterConfig.model_validate({**TWO_STAGES, **changes})


@pytest.fixture
def account(monkeypatch, tmp_path) -> Path:
    """The account's key file, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "tahq" / "key.secret"


def test_each_local_worker_gets_its_own_key_and_the_coordinator_the_accounts(account):
    keys = make_run_keys(configured(), starts_workers=True)
    assert keys.coordinator == read_key_file(account)
    assert keys.allowed == {keys.coordinator.public, keys.stages[0].public, keys.stages[1].public}
    again = make_run_keys(configured(), starts_workers=True)
    assert (again.coordinator == keys.coordinator, again.stages == keys.stages) == (True, False)


def test_only_workers_started_from_here_get_a_key(account):
    named, listed = new_key_pair().public, new_key_pair().public
    config = configured(hosts=[{**BY_HAND, "public_key": named}, BY_SSH], security={"allow": [listed]})
    keys = make_run_keys(config, starts_workers=True)
    assert set(keys.stages) == {1}
    assert keys.allowed == {keys.coordinator.public, keys.stages[1].public, named, listed}
    assert make_run_keys(config, starts_workers=False).stages == {}


def test_account_whose_key_cannot_be_created_still_runs_local_workers(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    assert make_run_keys(configured(), starts_workers=True) is not None
    with pytest.raises(UserError, match="cannot write the key"):
        make_run_keys(configured(), starts_workers=False)


def test_without_curve_there_are_no_keys_and_a_warning_if_others_can_reach_the_run(account):
    off = {"security": {"curve": False}}
    assert make_run_keys(configured(**off), starts_workers=True) is None
    assert not account.exists()
    assert warnings_about(configured(**off)) == warnings_about(configured()) == []
    (warning,) = warnings_about(configured(**off, run={**TWO_STAGES["run"], "bind": "0.0.0.0:0"}))
    assert "security.curve is off" in warning


def test_rate_at_which_losses_diverge_gets_a_warning():
    (warning,) = warnings_about(configured(training={**TWO_STAGES["training"], "lr": 3, "optimizer": "adamw"}))
    assert warning.startswith("warning: training.lr 3 is high for adamw")


def test_keygen_prints_the_public_half_and_keeps_the_other(tahq, tmp_path):
    assert_one_line(tahq("tahq-worker", "--peer", "127.0.0.1:9", "--keys-from-stdin"), 2, "no keys came on stdin")
    status, public, stderr = tahq("tahq", "keygen", "--out", "gpu1.secret")
    assert (status, stderr) == (0, "")
    assert stat.S_IMODE((tmp_path / "gpu1.secret").stat().st_mode) == 0o600
    assert read_key_file(tmp_path / "gpu1.secret").public == public.strip()
    status, _, stderr = tahq("tahq", "keygen", "--out", "gpu1.secret")
    assert (status, "exists already" in stderr) == (2, True)
    assert tahq("tahq", "keygen", "--out", "gpu1.secret", "--show")[1] == public


def test_workers_with_their_own_keys_complete_a_run_and_others_are_refused_with_advice(tmp_path, start):
    """Accounts that share nothing: coordinator and workers know each other by their public keys only."""
    own, stranger = [new_key_pair() for _ in range(2)], new_key_pair()
    for name, keys in (("stage0", own[0]), ("stage1", own[1]), ("stranger", stranger)):
        write_key_file(tmp_path / name, keys)
    (tmp_path / "workers").write_text("\n".join(f"{keys.public} a worker" for keys in own))
    write_config(tmp_path, {**TWO_STAGES, "security": {"allow": ["workers"]}})
    coordinator = start("tahq", "coordinator", "cluster.yaml", "--bind", "127.0.0.1:0")
    peer = coordinator.stdout.readline().split()[-1]
    coordinator.stdout.readline()
    advice = coordinator.stdout.readline()
    key = read_key_file(default_key_path()).public
    assert f"add --coordinator-key {key}" in advice
    assert "`tahq keygen --show`" in advice

    def worker(stage: int, *flags: str):
        return start("tahq-worker", "--stage", str(stage), "--peer", peer, *flags)

    mistakes = {
        f"does not know this worker's key {stranger.public}": ("--key", "stranger", "--coordinator-key", key),
        f"its key is not {own[1].public} (this worker's own)": ("--key", "stage1"),
        "it uses CURVE; start this worker without --no-curve": ("--no-curve",),
    }
    for message, process in {message: worker(1, *flags) for message, flags in mistakes.items()}.items():
        _, stderr = process.communicate(timeout=60)
        (line,) = [line for line in stderr.splitlines() if line.startswith("tahq-worker: ")]
        assert process.returncode == 2, stderr
        assert message in line
    accepted = [worker(stage, "--key", f"stage{stage}", "--coordinator-key", key) for stage in range(2)]
    for stage, process in [*enumerate(accepted), (-1, coordinator)]:
        _, stderr = process.communicate(timeout=120)
        assert (process.returncode, stderr.count("Traceback")) == (0, 0), stderr
        if process is not coordinator:
            assert stderr.index(f"dialling {peer} …\n") < stderr.index(f"joined {peer}, as stage {stage}\n")
    log = (tmp_path / "runs" / "tiny" / "logs" / "launcher.log").read_text()
    assert f"its public key {stranger.public}" in log


def test_no_secret_is_in_the_run_folder_the_command_lines_or_the_environments(training, tmp_path):
    secret = read_key_file(default_key_path()).secret
    processes = [training.pid, *children(training.pid), *workers(training.pid)]
    assert len(processes) == 4
    seen = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    seen += [Path(f"/proc/{pid}/{file}") for pid in processes for file in ("cmdline", "environ")]
    assert any(path.name == "config.yaml" for path in seen)
    for path in seen:
        content = path.read_bytes()
        assert secret.encode() not in content
        assert bytes.fromhex(secret) not in content
        assert b"tahq-secret-key" not in content
    cmdlines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes)
    assert not [word for word in cmdlines.split(b"\0") if len(word) >= 64 and not word.strip(b"0123456789abcdef")]
