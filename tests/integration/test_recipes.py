"""Every recipe of launch/examples runs on the small model that its script makes, and is exported."""

import json
import math
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import load_file
from support.cluster_files import EXAMPLES
from support.runs import environment, finish, overrides

pytestmark = pytest.mark.acceptance

RECIPES = [pytest.param(path, id=path.stem) for path in sorted((EXAMPLES / "recipes").glob("*.yaml"))]
STEPS = 4


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder that the script makes."""
    folder = tmp_path_factory.mktemp("recipes") / "small"
    command = [sys.executable, str(EXAMPLES / "recipes" / "small.py"), str(folder)]
    subprocess.run(command, check=True, env=environment(), capture_output=True)
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_learns_on_the_small_model_and_is_exported(recipe, small, tmp_path):
    given = yaml.safe_load(recipe.read_text())
    model = small / ("experts" if recipe.stem == "experts" else "dense")
    changes = {
        "run.name": "small",
        "model": model,
        "data.records": small / given["data"]["records"],
        "data.seq_len": 64,
        "training.steps": STEPS,
        "training.global_batch": 8,
        "training.lr": 1e-2,
        "pipeline.stages": 2,
        "pipeline.balance": "counted",
    }
    done = finish(tmp_path, "tahq-launch", str(recipe), *overrides(*(f"{key}={each}" for key, each in changes.items())))
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "small"
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] < 1.1 * math.log(264)

    as_adapter = ["--adapter"] if "adapter" in given else []
    done = finish(tmp_path, "tahq", "export", *as_adapter, str(run), "out")
    assert done.returncode == 0, done.stdout + done.stderr
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    names = set(load_file(weights))
    assert names
    assert all("lora_" in name for name in names) == bool(as_adapter)
