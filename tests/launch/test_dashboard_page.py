"""The dashboard's page in Debian's Chromium: what a person reads, without an error and without another host.

`--rewrite-golden` with `-m acceptance` also takes the pictures of docs/how-to/dashboard.md.
"""

import os
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.made_runs import CHANGE, MadeRun, finished_run
from support.processes import name, wait_until, workers
from support.runs import tiny, write_config

from .conftest import dashboard_address

browser = pytest.importorskip("support.browser", reason="needs selenium", exc_type=ImportError)

pytestmark = [pytest.mark.ci, pytest.mark.skipif(browser.OBSTACLE is not None, reason=str(browser.OBSTACLE))]

PICTURES = Path(__file__).parents[2] / "docs" / "images"
PHONE = {"width": 375, "height": 812}
SLOW_LINKS = tiny(
    run={"name": "four-hosts"},
    training={"steps": 60, "eval_every": 10},
    wire={"activations": "wf:bits=4", "gradients": "eden:bits=3"},
    emulate={"rate": "500kbit", "delay": "5ms"},
)


@pytest.fixture
def page(tmp_path):
    """A browser's page; after the test it has reported no error, and asked only the dashboard's server."""
    with browser.browser(tmp_path / "profile") as page:
        yield page
        assert page.errors() == []
        hosts = {urlsplit(address).netloc for address in page.requested() if address.startswith(("http", "ws"))}
        assert len(hosts) == 1
        assert hosts.pop().startswith("127.0.0.1:")


@pytest.fixture
def served(start):
    """served(folder): the address of `tahq dashboard FOLDER`."""
    return lambda folder: dashboard_address(start("tahq", "dashboard", str(folder)))


def step_of(page) -> int:
    words = page.text("#steps").split()
    return int(words[1]) if words else 0


def wait_for_step(page, step: int) -> None:
    wait_until(lambda: step_of(page) >= step, 120, f"step {step}")


def assert_fits(page) -> None:
    """Nothing is wider than the window."""
    assert page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


def test_finished_run_is_readable_on_a_phone_and_its_words_are_only_text(tmp_path, page, served):
    run = MadeRun(tmp_path / "<b>run")
    run.train(1, 60)
    run.tell.warned("<img src=x onerror=alert(1)>")
    run.end()
    page.open(served(run.folder), **PHONE)
    page.wait_for("done", "#state")
    assert page.text("h1") == "<b>run"
    assert page.text("#steps") == "step 60 of 60"
    assert "stage 1's compute is the bottleneck: 60 % of the step" in page.text("#limit")
    assert "0 → 1 activations closed use 30 %, 17.6 Mbit/s wf:bits=4: 4.41 bits per element" in page.text("#pipeline")
    assert "memory 2 GB of 8 GB" in page.text("#stages")
    assert "warning <img src=x onerror=alert(1)>" in page.text("#events")
    assert f"codec {CHANGE}" in page.text("#events")
    assert "2,008 tokens/s at step 60" in page.text("#speed figcaption")
    assert page.run("return document.querySelectorAll('img, b').length") == 0
    assert_fits(page)


@pytest.mark.acceptance
def test_live_run_of_four_stages(tmp_path, page, start, request):
    write_config(tmp_path, SLOW_LINKS)
    launcher = start("tahq-launch", "cluster.yaml", "--dashboard")
    page.open(dashboard_address(launcher), height=1550)
    page.wait_for("training", "#state")
    wait_for_step(page, 30)
    pipeline = page.text("#pipeline")
    for cut in range(3):
        assert f"{cut} → {cut + 1} activations ok use " in pipeline
        assert f"{cut + 1} → {cut} gradients ok use " in pipeline
    assert pipeline.count("bit/s, round trip") == 6
    assert "validation (dashed)" in page.text("#loss figcaption")
    assert page.text("#stages").count("memory ") == 4
    assert page.run("return document.querySelector('#loss path').getAttribute('d').length") > 100
    if request.config.getoption("--rewrite-golden"):
        page.picture(PICTURES / "dashboard.png")
        page.open(page.run("return location.href"), width=375, height=1400)
        page.wait_for("training", "#state")
        page.picture(PICTURES / "dashboard-phone.png")
    page.wait_for("done", "#state", 120)
    assert page.text("#steps") == "step 60 of 60"
    assert launcher.wait(60) == 0


@pytest.mark.acceptance
def test_lost_stage_returns(tmp_path, page, start):
    endless = {"training": {**SLOW_LINKS["training"], "steps": 1_000_000, "eval_every": None}}
    write_config(tmp_path, SLOW_LINKS | endless)
    launcher = start("tahq-launch", "cluster.yaml", "--dashboard")
    page.open(dashboard_address(launcher))
    wait_for_step(page, 5)
    (victim,) = (pid for pid in workers(launcher.pid) if name(pid) == "tahq stage 2")
    os.kill(victim, signal.SIGKILL)
    page.wait_for("lost stage 2 has lost its worker", "#events")
    page.wait_for("returned stage 2 is back after", "#events")
    wait_for_step(page, step_of(page) + 1)
    assert "lost" not in page.text("#pipeline")
    launcher.terminate()
    page.wait_for("ended with status 143", "#state")
    assert launcher.wait(60) == 143


@pytest.mark.acceptance
def test_stage_that_is_away_is_marked_with_its_links(tmp_path, page, served):
    run = MadeRun(tmp_path / "run", num_stages=3)
    run.train(1, 20)
    run.tell.stage_left(1)
    run.tell.phase_changed("training", "stage 1")
    page.open(served(run.folder), **PHONE)
    page.wait_for("training: waiting for stage 1", "#state")
    assert "Stage 1 lost" in page.text("#pipeline")
    assert page.text("#pipeline").count("stage 1 is lost") == 4
    run.join(1, pid=50)
    page.wait_for("Stage 1 returning", "#pipeline")
    run.tell.stage_returned(1, 3.0)
    run.tell.phase_changed("training", "")
    page.wait_for("Stage 1 ok", "#pipeline")
    assert page.text("#pipeline").count(" ok") == 7
    assert_fits(page)
    run.end(3, "stage 2 is gone")
    page.wait_for("ended with status 3: stage 2 is gone", "#state")


@pytest.mark.acceptance
@pytest.mark.parametrize("width", [375, 1280])
def test_long_run_of_eight_stages_is_drawn_quickly(tmp_path, page, served, width):
    address = served(finished_run(tmp_path / "run", num_stages=8, num_steps=2_000))
    began_s = time.monotonic()
    page.open(address, width=width)
    page.wait_for("step 2000 of 2000", "#steps")
    assert time.monotonic() - began_s < 10
    assert "Stage 7" in page.text("#pipeline")
    assert page.run("return document.querySelector('#loss path').getAttribute('d').match(/[ML]/g).length") <= 4 * width
    drawn_ms = page.run("const began = performance.now(); draw(); return performance.now() - began")
    assert drawn_ms < 500
    assert_fits(page)
