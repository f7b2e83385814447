"""The examples do what they say, as far as this machine can tell."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from processes import PROJECT, environment

from keras_safe_ckpt import CheckpointStore
from keras_safe_ckpt.cluster.launch_plan import RESTART_CODES
from keras_safe_ckpt.cluster.roles import role_from_environment

EXAMPLES = PROJECT / "examples"
LAUNCH = [sys.executable, "-m", "keras_safe_ckpt", "launch", "--workers", "2"]


@pytest.mark.long
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


def test_the_job_for_kubeflow_runs_the_same_training():
    job = yaml.safe_load((EXAMPLES / "kubernetes_tfjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    worker = job["spec"]["tfReplicaSpecs"]["Worker"]
    assert worker["restartPolicy"] == "OnFailure"
    pod = worker["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 30
    (container,) = pod["containers"]
    assert container["name"] == "tensorflow"
    check_training_of(container)


def check_training_of(container):
    """It runs the example, by a list, and its directory is on the volume."""
    assert container["command"][:2] == ["python", "examples/train.py"]
    (mount,) = container["volumeMounts"]
    assert container["command"][-1].startswith(mount["mountPath"])


def test_the_job_for_kubernetes_alone_is_started_again_and_finds_its_workers():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes_job.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    check_training_of(container)
    # Kubernetes refuses a podFailurePolicy with any other one.
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > 30
    by_code, by_condition = spec["podFailurePolicy"]["rules"]
    assert by_code["action"] == by_condition["action"] == "Ignore"
    assert by_code["onExitCodes"]["values"] == list(RESTART_CODES)
    assert by_code["onExitCodes"]["containerName"] == container["name"]
    assert by_condition["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    # The names of the pods, which only a headless service of that name has.
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 2
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    number, config = container["env"]
    assert "job-completion-index" in number["valueFrom"]["fieldRef"]["fieldPath"]
    for worker in range(2):
        text = config["value"].replace(f"$({number['name']})", str(worker))
        role = role_from_environment({"TF_CONFIG": text}, synchronous=True)
        assert (role.number, role.world, role.chief) == (worker, 2, worker == 0)
        (port,) = container["ports"]
        host = f"{job['metadata']['name']}-{worker}.{service['metadata']['name']}"
        assert f'"{host}:{port["containerPort"]}"' in text


def test_the_unit_of_systemd_starts_again_after_a_notice_until_it_is_finished(tmp_path):
    text = (EXAMPLES / "spot.service").read_text()
    codes = re.search(r"^RestartForceExitStatus=(.*)$", text, re.MULTILINE)[1]
    assert [int(code) for code in codes.split()] == list(RESTART_CODES)
    program = re.search(r"^ExecStart=(\S+) (.*)$", text, re.MULTILINE)
    assert program[2].startswith("examples/train.py --directory /mnt/checkpoints/")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / "training.service"
    unit.write_text(text.replace(program[1], sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("code", "is_finished"), [(0, True), (42, False), (1, False)])
def test_the_unit_of_systemd_knows_when_it_is_finished(tmp_path, code, is_finished):
    text = (EXAMPLES / "spot.service").read_text()
    mark = re.search(r"^ConditionPathExists=!(.*)$", text, re.MULTILINE)[1]
    command = re.search(r"^ExecStopPost=/bin/sh -c '(.*)'$", text, re.MULTILINE)[1]
    assert mark in command
    # systemd makes one dollar of two, and sets this variable.
    script = command.replace("$$", "$").replace(mark, str(tmp_path / "finished"))
    subprocess.run(["/bin/sh", "-c", script], env={"EXIT_STATUS": str(code)}, check=True)
    assert (tmp_path / "finished").exists() == is_finished
