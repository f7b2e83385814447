"""Who is this process, and does it write?"""

from __future__ import annotations

import json

import pytest
from keras_setup import keras, mirrored_strategy, tf

from keras_safe_ckpt import ChiefOnly, ClusterConfigError, PerWorker
from keras_safe_ckpt.cluster.roles import Role, role_from_environment, role_of
from keras_safe_ckpt.cluster.write_policies import (
    ensure_places_differ,
    find_policy,
    saved_under,
)
from keras_safe_ckpt.storage.path_template import PathTemplate

TEMPLATE = PathTemplate("run/{epoch}.keras")
ALONE = Role()
CHIEF = Role(0, 3, True, True, "chief 0")
WORKER = Role(2, 3, False, True, "worker 1")
INDEPENDENT = Role(1, 2, False, False, "worker 1")


def tf_config(cluster: object, job: object = "worker", index: object = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


WORKERS = {"worker": ["a:1", "b:1", "c:1"]}
WITH_CHIEF = {"worker": ["b:1", "c:1"], "chief": ["a:1"], "ps": ["p:1"]}


# Roles


@pytest.mark.parametrize(
    ("environment", "number", "world", "chief"),
    [
        ({}, 0, 1, True),
        ({"TF_CONFIG": "  "}, 0, 1, True),
        (tf_config({}), 0, 1, True),
        (tf_config({"worker": ["a:1"]}), 0, 1, True),
        (tf_config(WORKERS, "worker", 0), 0, 3, True),
        (tf_config(WORKERS, "worker", 2), 2, 3, False),
        (tf_config(WORKERS, "worker", "1"), 1, 3, False),
        (tf_config({"worker": {"1": "a:1", "4": "b:1"}}, "worker", 4), 1, 2, False),
        (tf_config({"worker": {"1": "a:1", "4": "b:1"}}, "worker", 1), 0, 2, True),
        (tf_config(WITH_CHIEF, "chief", 0), 0, 4, True),
        (tf_config(WITH_CHIEF, "worker", 0), 1, 4, False),
        (tf_config(WITH_CHIEF, "worker", 1), 2, 4, False),
        (tf_config(WITH_CHIEF, "ps", 0), 3, 4, False),
        (tf_config(WITH_CHIEF, "evaluator", 0), 4, 5, False),
        ({"RANK": "1", "WORLD_SIZE": "4"}, 1, 4, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, 1, True),
        ({"RANK": "3"}, 0, 1, True),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, 2, 3, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}, 0, 1, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}, 0, 8, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 0, 1, True),  # A script without srun.
        ({"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 5, 8, False),
        ({**tf_config(WORKERS, "worker", 1), "RANK": "0", "WORLD_SIZE": "9"}, 1, 3, False),
    ],
)
def test_role_from_the_environment(environment, number, world, chief):
    role = role_from_environment(environment)
    assert (role.number, role.world, role.chief) == (number, world, chief)
    assert not role.synchronous
    assert role.alone == (world == 1)


def test_numbers_of_a_cluster_are_unique():
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]
    roles = [role_from_environment(tf_config(WITH_CHIEF, *task)) for task in tasks]
    assert len({role.number for role in roles}) == len(tasks)


@pytest.mark.parametrize(
    ("environment", "key", "received"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG", "JSON"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG", r"\[1\]"),
        ({"TF_CONFIG": '{"cluster": {"worker": "a:1"}}'}, "cluster", "a:1"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": 3}'}, "task", "3"),
        (tf_config(WORKERS, "boss", 0), "task.type", "'boss'"),
        (tf_config(WORKERS, None, 0), "task.type", "None"),
        (tf_config(WORKERS, "worker", 3), "task.index", r"\[0, 1, 2\].*3"),
        (tf_config(WORKERS, "worker", -1), "task.index", "-1"),
        (tf_config(WORKERS, "worker", None), "task.index", "received None"),
        (tf_config(WORKERS, "worker", True), "task.index", "received True"),
        (tf_config(WORKERS, "worker", 1.7), "task.index", "received 1.7"),
        (tf_config(WORKERS, ["worker"], 1), "task.type", r"\['worker'\]"),
        (tf_config({"worker": {"x": "a:1"}}, "worker", 0), "cluster", "whole numbers"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK", "'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK", "WORLD_SIZE=2, received 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE", "'0'"),
        ({"SLURM_PROCID": "-1", "SLURM_NTASKS": "2"}, "SLURM_PROCID", "'-1'"),
    ],
)
def test_wrong_configuration_names_the_key(environment, key, received):
    with pytest.raises(ClusterConfigError, match=received) as caught:
        role_from_environment(environment)
    assert caught.value.key == key


def model_under(strategy):
    with strategy.scope():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def test_alone_without_a_strategy():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert role_of(model, {}) == Role()


def test_alone_under_a_mirrored_strategy():
    assert role_of(model_under(mirrored_strategy()), {}).alone


def test_mirrored_strategies_of_several_processes_are_independent():
    environment = {"RANK": "1", "WORLD_SIZE": "2"}
    role = role_of(model_under(mirrored_strategy()), environment)
    assert (role.number, role.world, role.synchronous) == (1, 2, False)


def role_by(resolver, kind=tf.distribute.MultiWorkerMirroredStrategy):
    return role_of(Trained(kind, resolver), {})


resolvers = tf.distribute.cluster_resolver


def test_roles_from_the_resolvers_of_tensorflow(monkeypatch):
    two = tf.train.ClusterSpec({"worker": ["a:1", "b:1"]})
    simple = resolvers.SimpleClusterResolver(two, task_type="worker", task_id=1)
    role = role_by(simple)
    assert (role.number, role.world, role.chief, role.synchronous) == (1, 2, False, True)
    assert (role.task_type, role.task_index) == ("worker", 1)
    assert role.members == ("worker 0", "worker 1")
    assert role.trains_together

    monkeypatch.setenv("TF_CONFIG", tf_config(WITH_CHIEF, "worker", 1)["TF_CONFIG"])
    role = role_by(resolvers.TFConfigClusterResolver())
    assert (role.number, role.world, role.chief) == (2, 3, False)
    assert role.members == ("chief 0", "worker 0", "worker 1")  # The ps does not train.
    monkeypatch.setenv("TF_CONFIG", tf_config(WITH_CHIEF, "chief", 0)["TF_CONFIG"])
    role = role_by(resolvers.TFConfigClusterResolver())
    assert (role.number, role.chief, role.task_type) == (0, True, "chief")
    monkeypatch.setenv("TF_CONFIG", tf_config(WITH_CHIEF, "evaluator", 0)["TF_CONFIG"])
    role = role_by(resolvers.TFConfigClusterResolver())
    assert (role.number, role.world, role.chief, role.synchronous) == (4, 5, False, False)
    assert not role.trains_together
    assert role.members == ()

    for key, value in {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "node[1-3]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    }.items():
        monkeypatch.setenv(key, value)
    slurm = resolvers.SlurmClusterResolver(gpus_per_node=1, gpus_per_task=1, auto_set_gpu=False)
    role = role_by(slurm)
    assert (role.number, role.world, role.chief, role.synchronous) == (1, 3, False, True)
    assert role.members == ("worker 0", "worker 1", "worker 2")


def test_a_resolver_that_is_wrong_names_the_key():
    two = tf.train.ClusterSpec({"worker": ["a:1", "b:1"]})
    for key, resolver in {
        "task.index": resolvers.SimpleClusterResolver(two, task_type="worker", task_id=2),
        "task.type": resolvers.SimpleClusterResolver(two, task_type="boss", task_id=0),
    }.items():
        with pytest.raises(ClusterConfigError) as caught:
            role_by(resolver)
        assert caught.value.key == key
        assert "cluster resolver" in str(caught.value)


def test_a_strategy_without_a_resolver_or_a_cluster():
    assert role_by(None).alone
    assert role_by(resolvers.SimpleClusterResolver(tf.train.ClusterSpec({}))).alone


class Resolver:
    """What a strategy would hand out; real workers are needed to build a real one."""

    def __init__(self, cluster, job, index):
        self.task_type, self.task_id, self._cluster = job, index, cluster

    def cluster_spec(self):
        return tf.train.ClusterSpec(self._cluster)


class Trained:
    """A model under a strategy that is an instance of ``kind`` without being set up."""

    def __init__(self, kind, resolver):
        strategy = type(kind.__name__, (kind,), {"cluster_resolver": resolver})
        self.distribute_strategy = strategy.__new__(strategy)


def test_workers_of_a_synchronous_strategy():
    kind = tf.distribute.MultiWorkerMirroredStrategy
    first = role_of(Trained(kind, Resolver(WORKERS, "worker", 0)), {"RANK": "9", "WORLD_SIZE": "3"})
    second = role_of(Trained(kind, Resolver(WORKERS, "worker", 1)), {})
    assert (first.number, first.chief, first.synchronous) == (0, True, True)
    assert (second.number, second.chief, second.synchronous) == (1, False, True)
    assert "resolver" in str(second)


def test_an_evaluator_does_not_train_together_with_the_others():
    kind = tf.distribute.MultiWorkerMirroredStrategy
    role = role_of(Trained(kind, Resolver(WORKERS, "evaluator", 0)), {})
    assert not role.synchronous
    assert not role.chief


def test_parameter_server_workers_are_independent():
    kind = tf.distribute.ParameterServerStrategy
    role = role_of(Trained(kind, Resolver(WITH_CHIEF, "worker", 1)), {})
    assert (role.number, role.synchronous) == (2, False)


def test_a_tpu_is_driven_by_one_process():
    kind = tf.distribute.TPUStrategy
    assert role_of(Trained(kind, Resolver(WORKERS, "worker", 1)), {}).alone


def test_a_synchronous_strategy_of_one_worker_is_alone():
    kind = tf.distribute.MultiWorkerMirroredStrategy
    assert role_of(Trained(kind, Resolver({}, None, None)), {}).alone


# Write policies


@pytest.mark.parametrize(
    ("policy", "role", "writes", "path"),
    [
        ("auto", ALONE, True, "run/{epoch}.keras"),
        ("auto", CHIEF, True, "run/{epoch}.keras"),
        ("auto", WORKER, False, "run/{epoch}.keras"),
        ("auto", INDEPENDENT, True, "run/worker-1/{epoch}.keras"),
        ("auto", Role(0, 1, False), True, "run/{epoch}.keras"),
        ("chief", CHIEF, True, "run/{epoch}.keras"),
        ("chief", INDEPENDENT, False, "run/{epoch}.keras"),
        ("per_worker", WORKER, True, "run/worker-2/{epoch}.keras"),
        (ChiefOnly(), WORKER, False, "run/{epoch}.keras"),
        (PerWorker(), CHIEF, True, "run/worker-0/{epoch}.keras"),
    ],
)
def test_who_writes_where(policy, role, writes, path):
    chosen = find_policy(policy)
    assert chosen.writes(role) == writes
    assert chosen.place(TEMPLATE, role).text == path


@pytest.mark.parametrize("policy", ["auto", "chief", "per_worker"])
def test_the_number_goes_where_the_path_says(policy):
    template = PathTemplate("run-{worker:02d}/{epoch}.keras")
    assert find_policy(policy).place(template, CHIEF).text == "run-00/{epoch}.keras"
    assert find_policy("per_worker").place(template, WORKER).text == "run-02/{epoch}.keras"


@pytest.mark.parametrize("policy", ["nobody", None, 3, ChiefOnly])
def test_unknown_policies_are_refused(policy):
    with pytest.raises(ValueError, match="'auto', 'chief', 'per_worker'"):
        find_policy(policy)


class Everybody:
    def writes(self, role):
        return True

    def place(self, template, role):
        return template


def test_two_workers_on_one_path_are_noticed():
    with pytest.raises(ValueError, match=r"Workers 1 and 0 .*run/\{epoch\}.keras"):
        ensure_places_differ(find_policy(Everybody()), TEMPLATE, INDEPENDENT)
    for policy in ("auto", "chief", "per_worker"):
        for role in (ALONE, CHIEF, WORKER, INDEPENDENT):
            ensure_places_differ(find_policy(policy), TEMPLATE, role)


def test_files_are_looked_for_where_workers_put_them():
    def places(path, worker=None, **environment):
        return [template.text for template in saved_under(path, worker, environment)]

    everywhere = ["a/m.keras", "a/worker-{worker}/m.keras"]
    assert places("a/m.keras") == everywhere
    assert places("a/m.keras", RANK="1", WORLD_SIZE="2") == ["a/worker-1/m.keras", *everywhere]
    assert places("a/m.keras", 3, RANK="1", WORLD_SIZE="2") == ["a/worker-3/m.keras"]
    assert set(places("{worker}.keras")) == {"{worker}.keras"}
    assert places("{worker}.keras", 3) == ["3.keras"]
