"""What the workers of a cluster tell each other: keys that are written once, and waited for.

The store is TensorFlow's coordination service, which runs in the first worker and is reached by
all of them. Its Python names are private to TensorFlow: they are used here only, and looked for
first. `LocalStore` keeps the same contract within one process.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from typing import Any, Protocol

from keras_safe_ckpt.errors import AgreementError

#: A message of TensorFlow names the task that it could not reach; it may also name a device.
_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)(?!\d|/device)")


class Store(Protocol):
    """Keys with one value for ever. Raises `AgreementError` when the store itself is gone."""

    def put(self, key: str, value: str) -> bool:
        """Write a value; False if the key has one already."""

    def get(self, key: str, seconds: float) -> str | None:
        """The value, as soon as there is one; None if there is none after so long."""

    def lost(self) -> list[str]:
        """The tasks that do not answer any more, such as ``"worker 1"``."""

    def abort_collectives(self, reason: str) -> None:
        """End the operations in which this worker waits for others; all later ones fail too."""


class LocalStore:
    """For workers that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: str) -> bool:
        with self._changed:
            if key in self._values:
                return False
            self._values[key] = value
            self._changed.notify_all()
            return True

    def get(self, key: str, seconds: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, seconds)
            return self._values.get(key)

    def lost(self) -> list[str]:
        return []

    def abort_collectives(self, reason: str) -> None:
        """Threads of one process have none."""


class CoordinationStore:
    """TensorFlow's coordination service, for the ``jobs`` of a cluster and their sizes."""

    def __init__(self, context: Any, leader: str, jobs: list[tuple[str, int]]) -> None:
        self._context = context
        self._leader = leader
        self._jobs = jobs

    def put(self, key: str, value: str) -> bool:
        from tensorflow import errors

        try:
            self._context.set_config_key_value(key, value)
        except errors.AlreadyExistsError:
            return False
        except errors.OpError as error:
            raise self._gone(error) from error
        return True

    def get(self, key: str, seconds: float) -> str | None:
        from tensorflow import errors

        milliseconds = max(1, int(seconds * 1000))  # Zero would wait for ever.
        try:
            return str(self._context.get_config_key_value(key, milliseconds))
        except errors.DeadlineExceededError:
            return None
        except errors.OpError as error:
            raise self._gone(error) from error

    def lost(self) -> list[str]:
        from tensorflow import errors

        try:
            states = self._context.get_task_states(self._jobs)
        except errors.OpError as error:
            raise self._gone(error) from error
        tasks = [f"{job} {index}" for job, size in self._jobs for index in range(size)]
        return [task for task, state in zip(tasks, states, strict=False) if state is not None]

    def abort_collectives(self, reason: str) -> None:
        from tensorflow import errors

        self._context.abort_collective_ops(errors.UNAVAILABLE, reason)

    def _gone(self, error: Exception) -> AgreementError:
        first_line = str(error).partition("\n")[0]
        return AgreementError(
            [self._leader], f"the coordination service in {self._leader} is gone ({first_line})"
        )


_NEEDED = (
    "set_config_key_value",
    "get_config_key_value",
    "get_task_states",
    "abort_collective_ops",
    "coordination_service",
)


def coordination_store(jobs: list[tuple[str, int]]) -> tuple[CoordinationStore | None, str]:
    """The store of this process's cluster, or None and why there is none.

    ``jobs`` are the jobs that train together with their numbers of tasks, the leader's first.
    """
    context, reason = _tensorflow_context()
    if context is None:
        return None, reason
    if context.coordination_service is None:
        return None, "no MultiWorkerMirroredStrategy was made in this process"
    return CoordinationStore(context, f"{jobs[0][0]} 0", jobs), ""


def is_coordinated() -> bool:
    """Whether this process has joined a cluster; TensorFlow is not imported to find out."""
    if "tensorflow" not in sys.modules:
        return False
    context, _ = _tensorflow_context()
    return context is not None and context.coordination_service is not None


def unreachable_tasks(error: BaseException) -> list[str]:
    """The workers whose end made a collective fail, if that is what ``error`` says."""
    text = str(error)
    if "Collective ops is aborted" not in text:
        return []
    return list(dict.fromkeys(f"{job} {index}" for job, index in _TASK.findall(text)))


def _tensorflow_context() -> tuple[Any, str]:
    try:
        from tensorflow.python.eager.context import context
    except ImportError as error:
        return None, f"TensorFlow has changed: {error}"
    current = context()
    missing = [name for name in _NEEDED if not hasattr(current, name)]
    if missing:
        return None, f"TensorFlow has changed: its context has no {', '.join(missing)}"
    return current, ""


def wait_for(store: Store, key: str, deadline: float, slice_seconds: float = 0.5) -> str | None:
    """`Store.get` up to a moment of `time.monotonic`, in slices that a Ctrl-C can come between."""
    while True:
        left = deadline - time.monotonic()
        value = store.get(key, min(slice_seconds, max(0.0, left)))
        if value is not None or left <= 0:
            return value
