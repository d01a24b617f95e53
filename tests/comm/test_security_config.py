"""What a user writes about keys, and what is wrong with it."""

import pytest
from pydantic import ValidationError

from tahq.comm.config import HostConfig
from tahq.comm.keys import new_key_pair
from tahq.comm.security_config import SecurityConfig

KEY = new_key_pair().public


def test_curve_is_on_and_nobody_is_listed():
    config = SecurityConfig()
    assert config.curve
    assert config.allowed_keys() == frozenset()


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
    assert HostConfig(address="gpu1", public_key=KEY.upper()).public_key == KEY
    with pytest.raises(ValidationError, match="public_key is for hosts that are started by hand"):
        HostConfig(address="gpu1", ssh="gpu1", public_key=KEY)
    with pytest.raises(ValidationError, match="expected a public key"):
        HostConfig(address="gpu1", public_key="gpu1")
