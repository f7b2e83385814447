"""The documented examples of TensorFlow's handler, one after the other, interrupted as planned.

``guarded_loops.py FOLDER PLAN STRATEGY [CLASS]``: the strategy is ``none``, ``mirrored`` or
``workers`` (then this is one of several). In the plan ``0:scope:3`` is SIGTERM to worker 0 after
the third step of the example ``scope``, ``1:run:2k`` is kill -9 to worker 1, and ``0:scope:3d`` is
SIGTERM when the other worker is dead; each happens once.

The examples are those of the docstrings of `PreemptionCheckpointHandler`, `run` and
`save_checkpoint_if_preempted`; only the class behind the name is another one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

FOLDER, PLAN, STRATEGY = sys.argv[1:4]
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if STRATEGY == "workers" else 0

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

if STRATEGY == "workers":
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
elif STRATEGY == "mirrored":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
else:
    strategy = tf.distribute.get_strategy()

import keras  # noqa: E402

import keras_safe_ckpt  # noqa: E402

PreemptionCheckpointHandler: Any = getattr(
    *(
        (tf.distribute.experimental, "PreemptionCheckpointHandler")
        if sys.argv[4:] == ["theirs"]
        else (keras_safe_ckpt, "PreemptionGuard")
    )
)
cluster_resolver = getattr(strategy, "cluster_resolver", None)
NUM_EPOCH = EPOCHS_TO_RUN = 2
STEPS_PER_EPOCH = 3
NUM_STEPS = 6
STEPS_PER_TRAIN_FUNCTION = STEPS_IN_FUNCTION = 1
FACTS: dict[str, Any] = {}


def interrupted(example: str, step: int) -> None:
    for part in filter(None, PLAN.split(",")):
        worker, name, when = part.split(":")
        done = f"{FOLDER}/done-{part.replace(':', '-')}"
        now = (int(worker), name, int(when.rstrip("kd"))) == (TASK, example, step)
        if now and not os.path.exists(done):
            with open(done, "w"):
                pass
            wait_for_other(when, name)
            os.kill(os.getpid(), signal.SIGKILL if when.endswith("k") else signal.SIGTERM)


def wait_for_other(when: str, example: str) -> None:
    """Until it is dead, or before it is: until it has finished the step, which takes both."""
    there = f"{FOLDER}/done-{1 - TASK}-{example}-{when.replace('k', 'd')}"
    meets = f"{1 - TASK}:{example}:{when.replace('k', 'd')}" in PLAN.split(",")
    while (when.endswith("d") and is_running(1 - TASK)) or (
        when.endswith("k") and meets and not os.path.exists(there)
    ):
        time.sleep(0.01)


def is_running(task: int) -> bool:
    with open(f"{FOLDER}/pid-{task}") as file:
        return os.path.exists(f"/proc/{file.read()}")


def model_and_data() -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3), layers.Dropout(0.5), layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(1)
    batch = rng.normal(size=(4, 4)).astype("float32")
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    return model, optimizer, strategy.experimental_distribute_dataset(dataset)


def step_function(model: Any, optimizer: Any) -> Any:
    def step_fn(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(inputs, training=True) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return step_fn


def remember(example: str, model: Any, optimizer: Any, **facts: Any) -> None:
    variables = [*model.variables, *optimizer.variables]
    FACTS[example] = {
        "variables": [np.asarray(v.numpy()).tobytes().hex() for v in variables],
        **facts,
    }


def handler_example() -> None:
    """Epochs and steps in variables of the checkpoint."""
    zero = tf.constant(0, dtype=tf.dtypes.int64)
    with strategy.scope():
        trained_epoch = tf.Variable(initial_value=zero, name="epoch")
        step_in_epoch = tf.Variable(initial_value=zero, name="step_in_epoch")
        model, optimizer, dataset = model_and_data()
        checkpoint = tf.train.Checkpoint(
            optimizer=optimizer,
            model=model,
            trained_epoch=trained_epoch,
            step_in_epoch=step_in_epoch,
        )
        preemption_checkpoint_handler = PreemptionCheckpointHandler(
            cluster_resolver, checkpoint, f"{FOLDER}/handler"
        )
    step_fn = step_function(model, optimizer)

    @tf.function
    def distributed_train_function(inputs: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step_fn, args=(inputs,)), axis=None)

    iterator = iter(dataset)
    while trained_epoch.numpy() < NUM_EPOCH:
        while step_in_epoch.numpy() < STEPS_PER_EPOCH:
            preemption_checkpoint_handler.run(distributed_train_function, next(iterator))
            step_in_epoch.assign_add(STEPS_PER_TRAIN_FUNCTION)
            done = trained_epoch.numpy() * STEPS_PER_EPOCH + step_in_epoch.numpy()
            interrupted("handler", done)
        trained_epoch.assign_add(1)
        step_in_epoch.assign(0)
    runs = int(preemption_checkpoint_handler.total_run_calls)
    remember("handler", model, optimizer, runs=runs, epochs=int(trained_epoch.numpy()))


def run_example() -> None:
    """Where to go on is told by `total_run_calls`."""
    with strategy.scope():
        model, optimizer, multi_worker_dataset = model_and_data()
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)
    preemption_handler = PreemptionCheckpointHandler(cluster_resolver, checkpoint, f"{FOLDER}/run")
    step_fn = step_function(model, optimizer)

    @tf.function
    def distributed_train_step(iterator: Any) -> Any:
        per_replica_losses = strategy.run(step_fn, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    for _epoch in range(preemption_handler.total_run_calls // STEPS_PER_EPOCH, EPOCHS_TO_RUN):
        iterator = iter(multi_worker_dataset)
        total_loss, num_batches = 0.0, 0
        for _step in range(preemption_handler.total_run_calls % STEPS_PER_EPOCH, STEPS_PER_EPOCH):
            total_loss += preemption_handler.run(distributed_train_step, iterator)
            num_batches += 1  # noqa: SIM113  # as in the documentation
            interrupted("run", preemption_handler.total_run_calls)
    remember("run", model, optimizer, runs=int(preemption_handler.total_run_calls))


def scope_example() -> None:
    """A manager of the user's, and `save_checkpoint_if_preempted` after each step."""
    manager_class: Any = getattr(
        *(
            (tf.train, "CheckpointManager")
            if sys.argv[4:] == ["theirs"]
            else (keras_safe_ckpt, "SafeCheckpointManager")
        )
    )
    with strategy.scope():
        trained_step = tf.Variable(
            initial_value=tf.constant(0, dtype=tf.dtypes.int64),
            name="trained_step",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        model, optimizer, dataset = model_and_data()
        checkpoint = tf.train.Checkpoint(
            trained_step=trained_step, model=model, optimizer=optimizer
        )
        checkpoint_manager = manager_class(checkpoint, f"{FOLDER}/scope", max_to_keep=1)
        preemption_handler = PreemptionCheckpointHandler(cluster_resolver, checkpoint_manager)
    step_fn = step_function(model, optimizer)
    iterator = iter(dataset)

    @tf.function
    def train_multi_step_function() -> None:
        strategy.run(step_fn, args=(next(iterator),))

    while trained_step.numpy() < NUM_STEPS:
        train_multi_step_function()
        trained_step.assign_add(STEPS_IN_FUNCTION)
        interrupted("scope", int(trained_step.numpy()))
        preemption_handler.save_checkpoint_if_preempted()
    remember("scope", model, optimizer, steps=int(trained_step.numpy()))


with open(f"{FOLDER}/pid-{TASK}", "w") as file:
    file.write(str(os.getpid()))
handler_example()
run_example()
scope_example()
with open(f"{FOLDER}/facts-{TASK}.json", "w") as file:
    json.dump(FACTS, file)
