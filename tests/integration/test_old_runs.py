"""Runs that commit 5e6a489 (version 0.1) made and stopped after step 4 continue here, to the bit.

The runs were made with the cluster.yaml and the text in their folders, on two cores of an AMD EPYC with torch 2.13.0.
`expected.json` has the losses, gradient norms and the hash of the final weights that 5e6a489 itself got by step 8.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from support.runs import launch

pytestmark = pytest.mark.ci

RUNS = Path(__file__).with_name("runs_5e6a489")


def _arithmetic(snapshot: Path) -> list[dict[str, str]]:
    """The processor, libraries and number of threads that computed each stage's file."""
    files = sorted(snapshot.glob("*.safetensors"))
    return [json.loads(safe_open(file, "pt").metadata()["tahq"])["arithmetic"] for file in files]


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.acceptance), "llama"])
def test_run_of_version_0_1_continues_to_the_bit(tmp_path, name):
    old = RUNS / name
    folder = tmp_path / "runs" / name
    shutil.copytree(old, folder)
    shutil.copy(old / "text.txt", tmp_path)
    run = launch(tmp_path, yaml.safe_load((old / "cluster.yaml").read_text()), "--resume", "--set", "training.steps=8")
    assert run.returncode == 0, run.stderr
    expected = json.loads((old / "expected.json").read_text())
    norms = [row["grad_norm"] for row in run.metrics]
    if _arithmetic(folder / "snapshots/step-00000008") == _arithmetic(old / "snapshots/step-00000004"):
        digest = hashlib.sha256()
        for tensor_name, tensor in sorted(run.weights.items()):
            digest.update(tensor_name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        assert (run.losses, norms) == (expected["losses"], expected["grad_norms"])
        assert digest.hexdigest() == expected["weights_sha256"]
    else:  # another processor or another torch rounds differently
        assert run.losses == pytest.approx(expected["losses"], rel=1e-4)
        assert norms == pytest.approx(expected["grad_norms"], rel=1e-3)
