"""Keys of whole runs: made without a word where everything is started here, refused in one line, and leaked nowhere."""

import stat
from pathlib import Path

import pytest
from support.processes import children, workers
from support.runs import write_config

from tahq.comm.keys import default_key_path, new_key_pair, read_key_file, write_key_file
from tahq.config.cluster import ClusterConfig
from tahq.errors import UserError
from tahq_launch.start.prepared_run import _warnings
from tahq_launch.start.run_keys import make_run_keys

from .conftest import TWO_STAGES

BY_HAND = {"address": "192.0.2.1"}
BY_SSH = {"address": "192.0.2.2", "ssh": "gpu2"}


def configured(**changes) -> ClusterConfig:
    return ClusterConfig.model_validate({**TWO_STAGES, **changes})


# -- who has which key ----------------------------------------------------------------------------


@pytest.fixture
def account(monkeypatch, tmp_path) -> Path:
    """The account's key file, which is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "tahq" / "key.secret"


def test_local_workers_get_a_key_each_and_the_coordinator_the_accounts(account):
    keys = make_run_keys(configured(), starts_workers=True)
    assert keys.coordinator == read_key_file(account)
    assert keys.allowed == {keys.coordinator.public, keys.stages[0].public, keys.stages[1].public}
    assert len(keys.allowed) == 3
    again = make_run_keys(configured(), starts_workers=True)
    assert again.coordinator == keys.coordinator
    assert again.stages != keys.stages


def test_only_workers_that_are_started_from_here_get_a_key(account):
    named, listed = new_key_pair().public, new_key_pair().public
    hosts = [{**BY_HAND, "public_key": named}, BY_SSH]
    config = configured(hosts=hosts, security={"allow": [listed]})
    keys = make_run_keys(config, starts_workers=True)
    assert set(keys.stages) == {1}
    assert keys.allowed == {keys.coordinator.public, keys.stages[1].public, named, listed}
    assert make_run_keys(config, starts_workers=False).stages == {}


def test_account_whose_key_cannot_be_made_still_runs_local_workers(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    assert make_run_keys(configured(), starts_workers=True) is not None
    with pytest.raises(UserError, match="cannot write the key"):
        make_run_keys(configured(), starts_workers=False)


def test_without_curve_there_are_no_keys_and_a_warning_where_others_reach_it(account):
    off = {"security": {"curve": False}}
    assert make_run_keys(configured(**off), starts_workers=True) is None
    assert not account.exists()
    assert _warnings(configured(**off)) == []
    assert _warnings(configured()) == []
    (warning,) = _warnings(configured(**off, run={**TWO_STAGES["run"], "bind": "0.0.0.0:0"}))
    assert "security.curve is off" in warning


def test_list_that_cannot_be_read_is_named(account, tmp_path):
    nobody = r"^security\.allow\.1: expected a public key of 64 digits or an existing file; got nowhere\.keys$"
    with pytest.raises(UserError, match=nobody):
        make_run_keys(configured(security={"allow": ["5f1c0e" + "0" * 58, "nowhere.keys"]}), starts_workers=True)
    with pytest.raises(
        UserError, match=r"^security\.allow\.0: the list of public keys .* cannot be read: Is a directory"
    ):
        make_run_keys(configured(security={"allow": [str(tmp_path)]}), starts_workers=True)


# -- commands -------------------------------------------------------------------------------------


def test_keygen_prints_the_public_half_and_keeps_the_other(tmp_path, start):
    made = start("tahq", "keygen", "--out", "gpu1.secret")
    public, stderr = made.communicate(timeout=60)
    assert (made.returncode, stderr) == (0, "")
    assert stat.S_IMODE((tmp_path / "gpu1.secret").stat().st_mode) == 0o600
    assert read_key_file(tmp_path / "gpu1.secret").public == public.strip()
    again = start("tahq", "keygen", "--out", "gpu1.secret")
    assert "is there already" in again.communicate(timeout=60)[1]
    assert again.returncode == 2
    assert start("tahq", "keygen", "--out", "gpu1.secret", "--show").communicate(timeout=60)[0] == public


def test_workers_under_keys_of_their_own_complete_a_run_and_others_are_told_what_to_do(tmp_path, start):
    """Accounts that share nothing: the coordinator's and the workers' keys are known by their public halves alone."""
    ours, stranger = [new_key_pair() for _ in range(2)], new_key_pair()
    for name, keys in (("stage0", ours[0]), ("stage1", ours[1]), ("stranger", stranger)):
        write_key_file(tmp_path / name, keys)
    (tmp_path / "workers").write_text("\n".join(f"{keys.public} a worker" for keys in ours))
    write_config(tmp_path, {**TWO_STAGES, "security": {"allow": ["workers"]}})
    coordinator = start("tahq", "coordinator", "cluster.yaml", "--bind", "127.0.0.1:0")
    peer = coordinator.stdout.readline().split()[-1]
    coordinator.stdout.readline()
    told = coordinator.stdout.readline()
    key = read_key_file(default_key_path()).public
    assert f"--coordinator-key {key}" in told
    assert "`tahq keygen --show`" in told

    def worker(stage: int, *flags: str):
        return start("tahq-worker", "--stage", str(stage), "--peer", peer, *flags)

    mistakes = {
        f"does not know this worker's key {stranger.public}": ("--key", "stranger", "--coordinator-key", key),
        f"its key is not {ours[1].public} (this worker's own)": ("--key", "stage1"),
        "it uses CURVE; start this worker without --no-curve": ("--no-curve",),
    }
    refused = {message: worker(1, *flags) for message, flags in mistakes.items()}
    for message, process in refused.items():
        _, stderr = process.communicate(timeout=60)
        lines = [line for line in stderr.splitlines() if line.startswith("tahq-worker: ")]
        assert process.returncode == 2, stderr
        assert len(lines) == 1, stderr
        assert message in lines[0]
    ok = [worker(stage, "--key", f"stage{stage}", "--coordinator-key", key) for stage in range(2)]
    for process in (*ok, coordinator):
        _, stderr = process.communicate(timeout=120)
        assert (process.returncode, stderr.count("Traceback")) == (0, 0), stderr
        if process is not coordinator:
            assert f"dialling {peer} …\n" in stderr
            assert f"joined {peer}, as stage {ok.index(process)}\n" in stderr
    log = (tmp_path / "runs" / "tiny" / "logs" / "launcher.log").read_text()
    assert f"its public key {stranger.public}" in log


def test_worker_says_at_once_whom_it_dials(start):
    process = start("tahq-worker", "--stage", "0", "--peer", "127.0.0.1:9")
    assert process.stderr.readline().endswith("dialling 127.0.0.1:9 …\n")
    assert process.poll() is None


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--key", "none.secret"), "there is no key at none.secret; make one with `tahq keygen"),
        (("--coordinator-key", "12ab"), "--coordinator-key: expected a public key"),
        (("--no-curve", "--key", "a"), "--no-curve"),
        (("--keys-from-stdin",), "no keys came on stdin"),
    ],
)
def test_worker_with_wrong_keys_says_so_in_one_line(start, flags, part):
    process = start("tahq-worker", "--stage", "0", "--peer", "127.0.0.1:9", *flags)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.count("\n") == 1
    assert part in stderr


# -- secrets --------------------------------------------------------------------------------------


def test_no_secret_is_in_the_run_folder_the_command_lines_or_the_environments(training, tmp_path):
    """Whatever looks like a key in them is a public one, of which there are few."""
    secret = read_key_file(default_key_path()).secret
    processes = [training.pid, *children(training.pid), *workers(training.pid)]
    assert len(processes) == 4
    seen = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    seen += [Path(f"/proc/{pid}/{what}") for pid in processes for what in ("cmdline", "environ")]
    assert any(path.name == "config.yaml" for path in seen)
    for path in seen:
        content = path.read_bytes()
        assert secret.encode() not in content
        assert bytes.fromhex(secret) not in content
        assert b"tahq-secret-key" not in content
    cmdlines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes)
    assert not [word for word in cmdlines.split(b"\0") if len(word) >= 64 and not word.strip(b"0123456789abcdef")]
