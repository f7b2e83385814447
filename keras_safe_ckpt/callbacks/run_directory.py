"""The directory of a run: opened, held against other jobs, and shared by all workers."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from pathlib import Path

from keras_safe_ckpt.cluster.cohort import Cohort, open_cohort
from keras_safe_ckpt.cluster.membership import Membership
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import ClusterConfigError
from keras_safe_ckpt.storage.atomic import write_atomically
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.paths import refuse_linked_directory
from keras_safe_ckpt.training.backups import Backups

#: How long a run waits for the one before it in the same directory, which may be ending.
_LOCK_SECONDS = 15.0
#: How long another worker may take to see a file that the chief has written.
_SHARED_SECONDS = 10.0
_CHIEF_SECONDS = 600.0
_MARKER = ".run-id"


class RunDirectory:
    """Held from here to `close`. ``life`` is one name for this life of the run, on all workers."""

    def __init__(
        self,
        directory: str,
        role: Role,
        membership: Membership,
        *,
        locks: Locks | None,
        max_to_keep: int,
    ) -> None:
        self._held = contextlib.ExitStack()
        self.cohort = _cohort(role, membership)
        place = Path(directory)
        if not role.alone and not role.synchronous:
            place /= f"worker-{role.number}"  # Each of these workers has a run of its own.
            refuse_linked_directory(place)
        self.backups = Backups(place, locks=locks, max_to_keep=max_to_keep)
        if role.chief or not role.trains_together:
            # Until the run ends, or the process does; the error names who holds it.
            store = self.backups.store
            self._held.enter_context(
                store.locks.exclusive(store.directory / "run", timeout=_LOCK_SECONDS)
            )
        self.life = self._agree_on_life(role)

    def close(self) -> None:
        self._held.close()

    def _agree_on_life(self, role: Role) -> str:
        life = uuid.uuid4().hex[:12]
        if not role.trains_together:
            return life
        marker = self.backups.directory / _MARKER
        if role.chief:
            write_atomically(marker, life.encode())
            self.cohort.put("preemption/life", life)
            return life
        life = str(self.cohort.await_word("preemption/life", _CHIEF_SECONDS))
        deadline = time.monotonic() + _SHARED_SECONDS
        while not _says(marker, life):
            if time.monotonic() > deadline:
                raise ValueError(
                    "Expected a directory that all workers share: this one does not see what the "
                    f"chief has written there. Received: directory={str(marker.parent)!r} on "
                    f"{socket.gethostname()}"
                )
            time.sleep(0.05)
        return life


def _cohort(role: Role, membership: Membership) -> Cohort:
    cohort = membership.cohort or open_cohort(role)
    if cohort is None:
        raise ClusterConfigError(
            "MultiWorkerMirroredStrategy", "its workers have no way to agree when to stop"
        )
    return cohort


def _says(marker: Path, life: str) -> bool:
    try:
        return marker.read_text() == life
    except OSError:
        return False
