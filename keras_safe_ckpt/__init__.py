"""Checkpoints for Keras 3 that nothing can lose, tear or replace by something worse.

The public names are imported on first use, so that ``import keras_safe_ckpt`` takes
milliseconds and needs no TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "CentralH5Writer",
    "CheckpointNotFoundError",
    "CheckpointStore",
    "CheckpointWriteError",
    "ChiefOnly",
    "ClusterConfigError",
    "CorruptCheckpointError",
    "CorruptRecordError",
    "enable_multi_worker_fit",
    "IncompatibleCheckpointError",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepNewest",
    "locked_tfrecord_dataset",
    "LockedTFRecordWriter",
    "LockLostError",
    "LockManager",
    "LockServerRefusedError",
    "LockServerUnreachableError",
    "LocksUnsupportedError",
    "LockTimeoutError",
    "merge_worker_files",
    "MergeConflictError",
    "PerWorker",
    "PreemptionAwareCallback",
    "PreemptionGuard",
    "RedisLocks",
    "repair_tfrecord",
    "SafeCheckpointError",
    "SafeCheckpointManager",
    "SafeModelCheckpoint",
    "SafeSaver",
    "split_tfrecord",
    "StaleHolderError",
    "TFRecordShardWriter",
    "UnreadableCheckpointError",
    "UnsafePathError",
    "verify_tfrecord",
    "WorkerH5Writer",
]

if TYPE_CHECKING:
    from keras_safe_ckpt.callbacks.model_checkpoint import SafeModelCheckpoint
    from keras_safe_ckpt.callbacks.preemption import PreemptionAwareCallback
    from keras_safe_ckpt.cluster.multi_worker import enable_multi_worker_fit
    from keras_safe_ckpt.cluster.write_policies import ChiefOnly, PerWorker
    from keras_safe_ckpt.datasets.central_writer import CentralH5Writer
    from keras_safe_ckpt.datasets.hdf5 import WorkerH5Writer
    from keras_safe_ckpt.datasets.merge import merge_worker_files
    from keras_safe_ckpt.datasets.reading import locked_tfrecord_dataset
    from keras_safe_ckpt.datasets.tfrecord import LockedTFRecordWriter, TFRecordShardWriter
    from keras_safe_ckpt.datasets.verification import (
        repair_tfrecord,
        split_tfrecord,
        verify_tfrecord,
    )
    from keras_safe_ckpt.errors import (
        AgreementError,
        CheckpointNotFoundError,
        CheckpointWriteError,
        ClusterConfigError,
        CorruptCheckpointError,
        CorruptRecordError,
        IncompatibleCheckpointError,
        LockLostError,
        LockServerRefusedError,
        LockServerUnreachableError,
        LocksUnsupportedError,
        LockTimeoutError,
        MergeConflictError,
        SafeCheckpointError,
        StaleHolderError,
        UnreadableCheckpointError,
        UnsafePathError,
    )
    from keras_safe_ckpt.loops.checkpoint_manager import SafeCheckpointManager
    from keras_safe_ckpt.loops.guard import PreemptionGuard
    from keras_safe_ckpt.loops.saver import SafeSaver
    from keras_safe_ckpt.storage.locks import LockManager
    from keras_safe_ckpt.storage.redis_locks import RedisLocks
    from keras_safe_ckpt.storage.retention import KeepAny, KeepBest, KeepEvery, KeepNewest
    from keras_safe_ckpt.storage.store import CheckpointStore

_HOME = {
    "WorkerH5Writer": "keras_safe_ckpt.datasets.hdf5",
    "merge_worker_files": "keras_safe_ckpt.datasets.merge",
    "CentralH5Writer": "keras_safe_ckpt.datasets.central_writer",
    "TFRecordShardWriter": "keras_safe_ckpt.datasets.tfrecord",
    "LockedTFRecordWriter": "keras_safe_ckpt.datasets.tfrecord",
    "locked_tfrecord_dataset": "keras_safe_ckpt.datasets.reading",
    "verify_tfrecord": "keras_safe_ckpt.datasets.verification",
    "repair_tfrecord": "keras_safe_ckpt.datasets.verification",
    "split_tfrecord": "keras_safe_ckpt.datasets.verification",
    "enable_multi_worker_fit": "keras_safe_ckpt.cluster.multi_worker",
    "ChiefOnly": "keras_safe_ckpt.cluster.write_policies",
    "PerWorker": "keras_safe_ckpt.cluster.write_policies",
    "PreemptionAwareCallback": "keras_safe_ckpt.callbacks.preemption",
    "PreemptionGuard": "keras_safe_ckpt.loops.guard",
    "SafeCheckpointManager": "keras_safe_ckpt.loops.checkpoint_manager",
    "SafeSaver": "keras_safe_ckpt.loops.saver",
    "SafeModelCheckpoint": "keras_safe_ckpt.callbacks.model_checkpoint",
    "KeepEvery": "keras_safe_ckpt.storage.retention",
    "CheckpointStore": "keras_safe_ckpt.storage.store",
    "KeepAny": "keras_safe_ckpt.storage.retention",
    "KeepBest": "keras_safe_ckpt.storage.retention",
    "KeepNewest": "keras_safe_ckpt.storage.retention",
    "LockManager": "keras_safe_ckpt.storage.locks",
    "RedisLocks": "keras_safe_ckpt.storage.redis_locks",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME.get(name, "keras_safe_ckpt.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
