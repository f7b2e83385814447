"""Who is this process among the workers of its job? The only reader of a cluster resolver."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_safe_ckpt.errors import ClusterConfigError

#: The order in which the jobs of a cluster are numbered through.
_JOBS = ("chief", "master", "worker", "ps", "evaluator")
#: The jobs whose tasks train together under a synchronous strategy.
_TRAINING_JOBS = ("chief", "worker")


@dataclass(frozen=True)
class Role:
    """One process of a job: its ``number`` among all ``world`` of them, and its part.

    ``synchronous`` workers train one model together, so that each has the same weights;
    ``members`` are their tasks (``"chief 0"``, ``"worker 0"``, ...), the chief's first.
    ``source`` says where this was learned, for messages.
    """

    number: int = 0
    world: int = 1
    chief: bool = True
    synchronous: bool = False
    task: str = ""
    source: str = "no strategy and no cluster variables"
    members: tuple[str, ...] = ()

    @property
    def task_type(self) -> str:
        """The job of this process, such as ``"worker"``; empty without a cluster."""
        return self.task.partition(" ")[0]

    @property
    def task_index(self) -> int:
        """Its number within the job."""
        return int(self.task.partition(" ")[2] or 0)

    @property
    def trains_together(self) -> bool:
        """Whether others wait for this process at each step."""
        return self.synchronous and not self.alone

    @property
    def alone(self) -> bool:
        return self.world == 1

    @property
    def leads(self) -> bool:
        """Whether no other worker counts and writes the same steps in its place."""
        return self.chief or not self.trains_together

    def facts(self) -> dict[str, Any]:
        """What an event log should know of it; nothing of a process that is alone."""
        return {} if self.alone else {"worker": self.number, "leads": self.leads}

    def __str__(self) -> str:
        if self.alone:
            return f"alone ({self.source})"
        kind = "synchronous" if self.synchronous else "independent"
        return f"{self.task}, number {self.number} of {self.world} {kind} ({self.source})"


def role_of(model: Any, environment: Mapping[str, str] | None = None) -> Role:
    """The role of this process in training ``model``.

    A strategy that spans machines knows; where there is none, or one for the devices of a
    single process, the variables of the launcher do.
    """
    environment = os.environ if environment is None else environment
    return role_under(getattr(model, "distribute_strategy", None), environment)


def role_under(strategy: Any, environment: Mapping[str, str]) -> Role:
    """The role of this process in what runs under a strategy of TensorFlow, or None."""
    resolver = getattr(strategy, "cluster_resolver", None)
    if strategy is None or resolver is None:
        return role_from_environment(environment)
    import tensorflow as tf

    if isinstance(strategy, tf.distribute.TPUStrategy):
        # One process drives all of it; the tasks of the resolver are not processes like this.
        return Role(source="TPUStrategy")
    synchronous = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    source = f"cluster resolver of {type(strategy).__name__}"
    return role_by(resolver, environment, synchronous, source)


def role_by(
    resolver: Any,
    environment: Mapping[str, str],
    synchronous: bool,
    source: str = "cluster resolver",
) -> Role:
    """What a cluster resolver of TensorFlow says; without a cluster, what the environment does."""
    cluster = resolver.cluster_spec().as_dict() if resolver.cluster_spec() else {}
    if not cluster:
        return role_from_environment(environment)
    return _role_in(cluster, resolver.task_type, resolver.task_id, synchronous, source)


def role_from_environment(environment: Mapping[str, str], *, synchronous: bool = False) -> Role:
    """The role that TF_CONFIG, torchrun or SLURM gave to this process.

    ``synchronous``: those whom TF_CONFIG names train one model together.
    """
    if environment.get("TF_CONFIG", "").strip():
        return _role_from_tf_config(environment["TF_CONFIG"], synchronous)
    for number, world in (
        ("RANK", "WORLD_SIZE"),  # Before SLURM: torchrun may start several in one SLURM task.
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ):
        if number in environment and world in environment:
            role = _role_from_rank(environment, number, world)
            if world == "SLURM_NTASKS" and role.number == 0:
                # Without a step: a batch script that has not called srun is one process, however
                # many tasks it has asked for.
                return Role(source="SLURM batch script without srun")
            return role
    return Role()


def _role_from_rank(environment: Mapping[str, str], number_key: str, world_key: str) -> Role:
    number = _count(environment, number_key, 0)
    world = _count(environment, world_key, 1)
    if number >= world:
        raise ClusterConfigError(
            number_key, f"expected less than {world_key}={world}, received {number}"
        )
    return Role(number, world, number == 0, task=f"worker {number}", source=number_key)


def _count(environment: Mapping[str, str], key: str, least: int) -> int:
    try:
        value = int(environment[key])
    except ValueError:
        value = least - 1
    if value < least:
        raise ClusterConfigError(
            key, f"expected a whole number of at least {least}, received {environment[key]!r}"
        )
    return value


def _role_from_tf_config(text: str, synchronous: bool) -> Role:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ClusterConfigError("TF_CONFIG", f"it is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ClusterConfigError("TF_CONFIG", f"expected an object, received {config!r}")
    cluster, task = config.get("cluster") or {}, config.get("task") or {}
    if not isinstance(cluster, dict) or not all(
        isinstance(tasks, (list, dict)) for tasks in cluster.values()
    ):
        raise ClusterConfigError(
            "cluster", f"expected lists of addresses by job, received {cluster!r}"
        )
    if not isinstance(task, dict):
        raise ClusterConfigError("task", f"expected an object, received {task!r}")
    if not cluster:
        return Role(source="TF_CONFIG without a cluster")
    return _role_in(cluster, task.get("type"), task.get("index"), synchronous, "TF_CONFIG")


def _role_in(
    cluster: Mapping[str, Any], job: Any, index: Any, synchronous: bool, source: str
) -> Role:
    if not isinstance(job, str) or (job not in cluster and job != "evaluator"):
        raise ClusterConfigError(
            "task.type", f"expected one of {sorted(cluster)}, received {job!r} ({source})"
        )
    jobs = sorted(
        {*cluster, job}, key=lambda name: (_JOBS.index(name) if name in _JOBS else 99, name)
    )
    tasks = {name: _indices(cluster.get(name, ())) for name in jobs}
    if not _is_index(index) or int(index) not in tasks[job]:
        raise ClusterConfigError(
            "task.index", f"expected one of {tasks[job]} for {job!r}, received {index!r} ({source})"
        )
    before = sum(len(tasks[name]) for name in jobs[: jobs.index(job)])
    leaders = [name for name in ("chief", "master") if name in cluster]
    members: tuple[str, ...] = ()
    if synchronous and job in _TRAINING_JOBS:
        members = tuple(f"{name} {i}" for name in _TRAINING_JOBS for i in tasks.get(name, ()))
    return Role(
        number=before + tasks[job].index(int(index)),
        world=len(members) or sum(map(len, tasks.values())),
        chief=job in leaders or (not leaders and job == "worker" and int(index) == tasks[job][0]),
        synchronous=bool(members),
        task=f"{job} {index}",
        source=source,
        members=members,
    )


def _indices(tasks: Any) -> list[int]:
    """The tasks of one job: a list of addresses, or addresses by index where some are missing."""
    if isinstance(tasks, Mapping):
        if not all(_is_index(index) for index in tasks):
            raise ClusterConfigError("cluster", f"expected whole numbers, received {list(tasks)}")
        return sorted(int(index) for index in tasks)
    return list(range(len(tasks) or 1))


def _is_index(value: Any) -> bool:
    if isinstance(value, str):
        return value.isdigit()
    return isinstance(value, int) and not isinstance(value, bool)
