"""Two workers with Ray Train, which sets TF_CONFIG and starts all again when one is lost.

pip install "ray[train]"
python examples/ray_train.py
"""

from __future__ import annotations

import os
import runpy
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

TRAINING = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")


def train_worker(config: dict[str, str]) -> None:
    """What each worker runs: the same program as everywhere else."""
    sys.argv = [TRAINING, "--directory", config["directory"]]
    runpy.run_path(TRAINING, run_name="__main__")


if __name__ == "__main__":
    TensorflowTrainer(
        train_worker,
        train_loop_config={"directory": os.path.abspath("run")},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
    ).fit()
