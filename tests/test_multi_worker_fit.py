"""`fit` under MultiWorkerMirroredStrategy, by numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from clusters import WORKER, launch_ok
from keras_setup import keras, tf
from multi_worker_cases import BATCH, CASES, TRAIN, build, flat, train
from processes import PROJECT

EQUALITY = (
    WORKER
    + f"""
import warnings
sys.path.insert(0, {str(PROJECT / "tests")!r})
from multi_worker_cases import CASES, build, train
from keras_safe_ckpt.cluster.roles import role_of
keras_safe_ckpt.enable_multi_worker_fit()
results, said = {{}}, []
for name in json.loads(ARGUMENTS[0]):
    model = build(keras, CASES[name], strategy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results[name] = train(keras, tf, CASES[name], model)
    said += [str(one.message) for one in caught if "not synchronized" in str(one.message)]
role = role_of(model)
report(results=results, said=said,
       role=[role.number, role.world, role.chief, role.synchronous, role.task_type,
             role.task_index, role.members])
"""
)

#: Here it matters who gets which part of a batch.
SPLIT = ("dropout", "plain", "plain, dropout")


def close(received, wanted):
    if isinstance(wanted, dict):
        return received.keys() == wanted.keys() and all(
            close(received[key], wanted[key]) for key in wanted
        )
    return np.allclose(received, wanted, rtol=2e-5, atol=2e-6)


def differences(facts, wanted):
    """Which values of which training on which worker are not those of one process."""
    return [
        f"{name}, worker {worker}: {key}"
        for name, values in wanted.items()
        for worker, fact in enumerate(facts)
        for key, value in values.items()
        if not close(fact["results"][name][key], value)
    ]


def in_one_process(names):
    return {name: train(keras, tf, CASES[name], build(keras, CASES[name])) for name in names}


def shared_by_hand(case, workers):
    """The trainable weights after training with batches shared by so many replicas.

    Each replica is a model of its own, with its own moving statistics and its own random numbers;
    the mean of their gradients goes to all.
    """
    replicas = [build(keras, case) for _ in range(workers)]
    for _ in range(case.epochs):
        for begin in range(0, len(TRAIN[0]), BATCH):
            x, y = (values[begin : begin + BATCH] for values in TRAIN)
            gradients = []
            for number, model in enumerate(replicas):
                part = slice(number * BATCH // workers, (number + 1) * BATCH // workers)
                with tf.GradientTape() as tape:
                    loss = keras.losses.mean_squared_error(y[part], model(x[part], training=True))
                    loss = tf.reduce_mean(loss)
                gradients.append(tape.gradient(loss, model.trainable_variables))
            mean = [sum(parts) / workers for parts in zip(*gradients, strict=True)]
            for model in replicas:
                model.optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
    return [
        (flat(m.trainable_variables), flat(v for v in m.variables if "moving" in v.path))
        for m in replicas
    ]


SAMPLE = ["plain, dropout", "synchronized, four steps, repeated"]
EACH = [name for name in CASES if name not in SAMPLE]


@pytest.mark.parametrize(
    "names", [SAMPLE, pytest.param(EACH, marks=pytest.mark.campaign)], ids=["sample", "each"]
)
def test_two_workers_end_as_one_process(tmp_path, names):
    facts = launch_ok(tmp_path, EQUALITY, json.dumps(names))
    assert differences(facts, in_one_process([name for name in names if name not in SPLIT])) == []
    for name in set(SPLIT) & set(names):
        shared = shared_by_hand(CASES[name], 2)
        for fact, (weights, statistics) in zip(facts, shared, strict=True):
            assert close(fact["results"][name]["weights"], weights), name
            assert close(fact["results"][name]["statistics"], statistics), name
    chief, other = (fact["results"] for fact in facts)
    for name in names:
        # Bit by bit: they are the same numbers.
        assert chief[name]["weights"] == other[name]["weights"], name
        assert chief[name]["history"] == other[name]["history"], name
        assert chief[name]["evaluated"] == other[name]["evaluated"], name
        if CASES[name].normalization:
            equal = chief[name]["statistics"] == other[name]["statistics"]
            assert equal == (CASES[name].normalization == "synchronized"), name
    assert [fact["role"] for fact in facts] == [
        [0, 2, True, True, "worker", 0, ["worker 0", "worker 1"]],
        [1, 2, False, True, "worker", 1, ["worker 0", "worker 1"]],
    ]
    for fact in facts:
        assert len(fact["said"]) == 1
        assert "BatchNormalization(synchronized=True)" in fact["said"][0]


@pytest.mark.campaign
def test_three_workers_end_as_one_process(tmp_path):
    names = ["synchronized", "four steps"]
    facts = launch_ok(tmp_path, EQUALITY, json.dumps(names), workers=3)
    assert differences(facts, in_one_process(names)) == []
    members = ["worker 0", "worker 1", "worker 2"]
    assert [fact["role"][:3] for fact in facts] == [[0, 3, True], [1, 3, False], [2, 3, False]]
    assert all(fact["role"][-1] == members for fact in facts)
    assert not any(fact["said"] for fact in facts)
