"""A training that runs alone, as local workers, and on a cluster; the other files start it.

python examples/train.py
python -m keras_safe_ckpt launch --workers 2 examples/train.py
"""

from __future__ import annotations

import argparse
import os

import tensorflow as tf

import keras_safe_ckpt


def make_strategy() -> tf.distribute.MultiWorkerMirroredStrategy:
    """From TF_CONFIG, which the launcher, TFJob and Ray set; or from the variables of SLURM.

    To be made before anything else uses TensorFlow.
    """
    if "TF_CONFIG" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    # This resolver counts GPUs. Without any, one for each task makes it count the tasks.
    gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    tasks = int(os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
    resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
        gpus_per_node=max(gpus, tasks), gpus_per_task=1, auto_set_gpu=gpus > 0
    )
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="run", help="where the checkpoints go")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    strategy = make_strategy()
    keras_safe_ckpt.enable_multi_worker_fit()
    import keras

    keras.utils.set_random_seed(0)
    x = tf.random.stateless_normal((1024, 8), seed=(0, 1))
    data = tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, axis=1))).batch(64)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    best = keras_safe_ckpt.SafeModelCheckpoint(
        os.path.join(arguments.directory, "best.keras"), monitor="loss", save_best_only=True
    )
    # Preempted and started again, the run continues at the batch where it was.
    state = keras_safe_ckpt.PreemptionAwareCallback(os.path.join(arguments.directory, "state"))
    model.fit(data, epochs=arguments.epochs, verbose=2, callbacks=[best, state])


if __name__ == "__main__":
    main()
