"""Checkpoints of TensorFlow for tests, made by TensorFlow itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from keras_setup import tf

#: Publishes checkpoints that TensorFlow has made before, in processes that do without it.
PUBLISHING = """
import shutil
from pathlib import Path
from keras_safe_ckpt import LockManager
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import Family, Keep
from keras_safe_ckpt.storage.bundles.staging import stage

def publish(directory, source, *, exactly=None, keep=Keep(2), locks=None):
    place = BundleDirectory(directory, locks=locks)
    with stage(place, Family("ckpt", bare=True), 1, exactly=exactly) as staged:
        for path in Path(source).parent.glob(Path(source).name + ".*"):
            shutil.copy(path, staged.prefix + path.name[len(Path(source).name):])
        return staged.publish(keep)
"""


def write_value(prefix: Path | str, value: float, size: int = 8) -> str:
    """A checkpoint whose tensors all say ``value``, without any manager."""
    kept = {f"v{number}": tf.Variable(np.full(size, value, "float32")) for number in range(3)}
    return str(tf.train.Checkpoint(**kept).write(str(prefix)))


def value_of(prefix: Path | str) -> float:
    """What it says; TensorFlow checks the checksums, and this that they all say the same."""
    reader = tf.train.load_checkpoint(str(prefix))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith("v")]
    values = {float(v) for name in names for v in np.ravel(reader.get_tensor(name))}
    assert len(values) == 1, f"{prefix} is torn: {values}"
    return values.pop()


def copy_bundle(source: Path, target: Path) -> None:
    for path in source.parent.glob(f"{source.name}.*"):
        shutil.copy(path, target.parent / f"{target.name}{path.name[len(source.name) :]}")


def names_in(directory: Path) -> list[str]:
    """The checkpoints that have an index."""
    return sorted(path.name.removesuffix(".index") for path in directory.glob("*.index"))


def leftovers(directory: Path) -> list[str]:
    """Temporary files and folders, and parts of checkpoints without an index."""
    whole = tuple(f"{name}." for name in names_in(directory))
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.name.endswith(".kscktmp")
        or (".data-" in path.name and not path.name.startswith(whole))
    )
