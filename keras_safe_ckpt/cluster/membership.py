"""A callback's part in the cohort of a `fit`, if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from keras_safe_ckpt.cluster.cohort import Cohort, current_cohort, open_cohort
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.errors import AgreementError


class Membership:
    """The other workers of a run: what fails here ends them too. Alone, it does nothing.

    The cohort is that of the `fit` around it; on a Keras that needs no `enable_multi_worker_fit`
    nobody has opened one, and the callback has its own.
    """

    def __init__(self, role: Role) -> None:
        self.cohort: Cohort | None = None
        self._own: Cohort | None = None
        if role.trains_together:
            self.cohort = current_cohort()
            if self.cohort is None:
                self.cohort = self._own = open_cohort(role)

    @contextmanager
    def others_told(self) -> Iterator[None]:
        """They wait for this worker: they are to end as well if it fails in here."""
        try:
            yield
        except Exception as error:
            self.tell_others(error)
            raise

    def tell_others(self, error: Exception) -> None:
        """Who was told itself has nothing new to tell."""
        if self.cohort is not None and not isinstance(error, AgreementError):
            self.cohort.fail(error)

    def finish(self, name: str, error: Exception | None, seconds: float) -> None:
        """Wait for all to come here; raise the ``error`` of this worker, or of another one."""
        if self.cohort is not None:
            try:
                self.cohort.barrier(name, error, seconds=seconds)
            finally:
                self.close()
        elif error is not None:
            raise error

    def close(self) -> None:
        """Also of a run that was interrupted, before the next one."""
        if self._own is not None:
            self._own.close()
