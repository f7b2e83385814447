"""TensorFlow and Keras for the tests: quiet, and with two virtual CPU devices.

Import them from here, so that the devices are set up before anything else uses TensorFlow.
"""

import functools
import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf

_cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

import keras  # noqa: E402

gc.freeze()  # What was imported stays: collecting the rest after a test takes milliseconds.

__all__ = ["keras", "mirrored_strategy", "tf"]


@functools.cache
def mirrored_strategy() -> tf.distribute.MirroredStrategy:
    """Both virtual CPUs; one for the whole process, since two of them mix their collectives up."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
