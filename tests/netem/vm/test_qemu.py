"""One boot, with a script where qemu would be: what is shown, what is returned, what ends it."""

import json
import os
import time

import pytest
from vm.qemu import Machine, VmError, boot, choose_machine, command_line, read_report

from tahq.errors import UserError

REPORT = {"exit_status": 0, "kernel": "6.1.0", "guest_s": 1.5}


@pytest.fixture
def report(tmp_path):
    return tmp_path / "report"


def boot_script(script, report, timeout_s=20.0):
    shown = []
    found = boot(["/bin/sh", "-c", script], report, timeout_s, shown.append)
    return found, b"".join(shown)


def test_emulation_has_the_virtual_clock_and_one_processor():
    assert choose_machine("tcg", None, None, 512) == Machine("tcg", "virtual", 1, 512)
    assert choose_machine("tcg", "host", None, 512) == Machine("tcg", "host", 2, 512)
    assert choose_machine("kvm", None, 4, 512) == Machine("kvm", "host", 4, 512)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(UserError, match="KVM runs on the host's clock"):
        choose_machine("kvm", "virtual", None, 512)
    with pytest.raises(UserError, match="the virtual clock has one processor, not 2"):
        choose_machine("tcg", "virtual", 2, 512)


def test_only_the_virtual_clock_counts_instructions(tmp_path):
    def arguments(clock):
        return command_line("qemu", choose_machine("tcg", clock, None, 512), tmp_path / "k", tmp_path / "i", tmp_path)

    assert "-icount" in arguments("virtual")
    assert "-icount" not in arguments("host")


def test_machine_has_no_network_and_ends_instead_of_rebooting(tmp_path):
    command = command_line("qemu", Machine("tcg", "host", 2, 512), tmp_path / "k", tmp_path / "i", tmp_path / "r")
    assert {"-nodefaults", "-no-reboot"} <= set(command)
    assert {"-net", "-nic", "-netdev"}.isdisjoint(command)


def test_boot_shows_the_console_and_returns_the_report(report):
    script = f"echo Linux; echo '{json.dumps(REPORT)}' > {report}; echo Power down"
    assert boot_script(script, report) == (REPORT, b"Linux\nPower down\n")


def test_console_is_shown_as_it_comes(report):
    seen_s = []
    script = f"echo one; sleep 0.5; echo two; echo '{json.dumps(REPORT)}' > {report}"
    boot(["/bin/sh", "-c", script], report, 20.0, lambda _: seen_s.append(time.monotonic()))
    assert seen_s[-1] - seen_s[0] > 0.3


@pytest.mark.parametrize("chatter", ["sleep 60", "while true; do echo busy; sleep 0.01; done"])
def test_guest_that_does_not_end_is_killed(report, chatter):
    started_s = time.monotonic()
    with pytest.raises(VmError, match=r"not done after 1 s; allow more with --timeout"):
        boot_script(f"echo $$ > {report}; exec 2>&-; {chatter}", report, timeout_s=1.0)
    assert time.monotonic() - started_s < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int(report.read_text()), 0)


def test_guest_without_a_report_is_no_success(report):
    with pytest.raises(VmError, match=r"without a report \(qemu's status 3\)"):
        boot_script("echo panic; exit 3", report)
    with pytest.raises(VmError, match="without a report"):
        boot_script(f"echo '{{\"exit_st' > {report}", report)


def test_failure_of_the_guests_init_is_shown(report):
    report.write_text(json.dumps({"exit_status": None, "error": "OSError: /modules/veth.ko"}))
    with pytest.raises(VmError, match=r"init failed:\nOSError: /modules/veth\.ko"):
        read_report(report, 0)
