"""The examples do what they say, as far as this machine can tell."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
from processes import PROJECT, environment

from keras_safe_ckpt import CheckpointStore

EXAMPLES = PROJECT / "examples"
LAUNCH = [sys.executable, "-m", "keras_safe_ckpt", "launch", "--workers", "2"]


@pytest.mark.parametrize("start", [[sys.executable], LAUNCH], ids=["alone", "two workers"])
def test_the_training_runs_alone_and_on_two_workers(tmp_path, start):
    variables = environment()
    variables.pop("TF_CONFIG", None)
    done = subprocess.run(
        [*start, EXAMPLES / "train.py", "--directory", tmp_path, "--epochs", "2"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Epoch 2/2") == (1 if len(start) == 1 else 2)
    (best,) = CheckpointStore(tmp_path, format="keras").checkpoints()
    assert best.path.name == "best.keras"
    assert best.manifest.epoch == 2
    losses = re.findall(r"loss: ([\d.]+)", done.stdout)
    assert len(set(losses)) == 2  # Of the two epochs; the same on both workers.


def test_the_script_for_slurm_is_one():
    script = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert "srun" in text
    assert "examples/train.py" in text


def test_the_program_for_ray_runs_the_same_training():
    tree = ast.parse((EXAMPLES / "ray_train.py").read_text())
    assert "train.py" in [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]


def test_the_job_for_kubernetes_runs_the_same_training():
    text = (EXAMPLES / "kubernetes_tfjob.yaml").read_text()
    assert "kind: TFJob" in text
    assert '"examples/train.py"' in text
    assert "- name: tensorflow" in text
