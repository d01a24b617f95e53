"""Key files: whole or not at all, for their owner only, and never mistaken for one another."""

import stat
import threading

import pytest
from pydantic import ValidationError

from tahq.comm.config import MachineConfig
from tahq.comm.keys import (
    Credentials,
    SecurityConfig,
    default_key_path,
    key_pair_of,
    new_key_pair,
    parse_public_key,
    read_key_file,
    read_or_make_key_file,
    read_public_keys,
    write_key_file,
)
from tahq.errors import UserError


def test_file_is_its_owners_alone_and_gives_the_pair_back(tmp_path):
    path, keys = tmp_path / "new" / "key.secret", new_key_pair()
    write_key_file(path, keys)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_key_file(path) == keys
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(FileExistsError):
        write_key_file(path, new_key_pair())
    assert read_key_file(path) == keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_file_that_others_can_read_is_refused_with_the_remedy(tmp_path, mode):
    path = tmp_path / "key.secret"
    write_key_file(path, new_key_pair())
    path.chmod(mode)
    with pytest.raises(UserError, match=f"mode {mode:o}.*chmod 600 {path}"):
        read_key_file(path)


def test_missing_file_is_refused_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(UserError, match=r"there is no key at .*`tahq keygen --output"):
        read_key_file(tmp_path / "none")


def test_file_of_something_else_is_refused_and_its_content_not_repeated(tmp_path):
    path = tmp_path / "key.secret"
    for content in ("hunter2\n", "tahq-secret-key hunter2\n", "", "\xff" * 100):
        path.write_text(content, encoding="latin-1")
        path.chmod(0o600)
        with pytest.raises(UserError, match=r"key\.secret holds no secret key") as refusal:
            read_key_file(path)
        assert "hunter2" not in str(refusal.value)


def test_of_many_who_make_a_file_at_once_all_get_the_same_pair(tmp_path):
    path, found = tmp_path / "tahq" / "key.secret", []
    threads = [threading.Thread(target=lambda: found.append(read_or_make_key_file(path))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


def test_account_has_one_key(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_key_path() == tmp_path / "tahq" / "key.secret"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert str(default_key_path()) == "/home/ada/.config/tahq/key.secret"


def test_secret_is_in_no_representation():
    keys = new_key_pair()
    assert keys.secret not in f"{keys} {keys!r} {Credentials(keys, keys.public)!r}"
    assert key_pair_of(keys.secret) == keys


@pytest.mark.parametrize("text", ["", "abc", "z" * 64, "ab" * 31, "ab" * 33])
def test_text_that_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        parse_public_key(text)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        key_pair_of(text)


def test_secret_key_is_not_taken_for_a_public_one(tmp_path):
    path, keys = tmp_path / "key.secret", new_key_pair()
    write_key_file(path, keys)
    with pytest.raises(ValueError, match="this is a secret key") as refusal:
        parse_public_key(path.read_text())
    assert keys.secret not in str(refusal.value)
    with pytest.raises(UserError, match=r"key\.secret:1: this is a secret key") as refusal:
        read_public_keys(path)
    assert keys.secret not in str(refusal.value)


def test_list_of_public_keys_has_room_for_names(tmp_path):
    one, two = new_key_pair().public, new_key_pair().public
    path = tmp_path / "workers"
    path.write_text(f"# ours\n\n{one}  gpu1, Ada's\n{two.upper()}\n")
    assert read_public_keys(path) == [one, two]
    path.write_text(f"{one}\nfoo\n")
    with pytest.raises(UserError, match=r"workers:2: expected a public key"):
        read_public_keys(path)


# -- `security:` of cluster.yaml ------------------------------------------------------------------

KEY = new_key_pair().public


def test_keys_and_files_of_keys_may_be_mixed(tmp_path):
    other = new_key_pair().public
    (tmp_path / "workers").write_text(f"{other} gpu1\n{KEY} gpu2\n")
    config = SecurityConfig(allow=[KEY.upper(), str(tmp_path / "workers")])
    assert config.allow[0] == KEY
    assert config.allowed_keys() == {KEY, other}


@pytest.mark.parametrize("entry", [KEY[:-1], KEY + "0"], ids=["too few", "too many"])
def test_key_with_a_digit_too_few_or_many_is_not_taken_for_a_file(entry):
    with pytest.raises(ValidationError, match="expected a public key of 64 hexadecimal digits"):
        SecurityConfig(allow=[entry])


def test_key_of_a_host_is_for_workers_that_are_started_by_hand():
    assert MachineConfig(address="gpu1", public_key=KEY.upper()).public_key == KEY
    with pytest.raises(ValidationError, match="public_key is for hosts that are started by hand"):
        MachineConfig(address="gpu1", ssh="gpu1", public_key=KEY)
    with pytest.raises(ValidationError, match="expected a public key"):
        MachineConfig(address="gpu1", public_key="gpu1")
