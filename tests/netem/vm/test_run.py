"""The command line, up to the boot."""

import pytest
from vm.run import main


def test_machine_that_cannot_be_is_one_line_and_status_2(capsys):
    assert main(["--cpus", "2", "--", "true"]) == 2
    assert capsys.readouterr().err == "netem VM: the virtual clock has one processor, not 2; more need --clock host\n"


def test_help_names_units_and_defaults(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "seconds of this machine's time (default 3600)" in text
    assert "memory in MiB (default 1024)" in text
