"""Who writes, and where: chosen once, when training begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from keras_safe_ckpt.cluster.roles import Role, role_from_environment
from keras_safe_ckpt.storage.path_template import WORKER, PathTemplate


class WritePolicy(Protocol):
    """Decides for one role; two roles that write must get two places, or share one knowingly."""

    def writes(self, role: Role) -> bool:
        """Whether this one writes at all."""

    def place(self, template: PathTemplate, role: Role) -> PathTemplate:
        """Where it does: the template, which is a path with placeholders, or another path."""


class ChiefOnly:
    """The chief writes, to the path as it is given; the others only take part in the capture.

    Example::

        SafeModelCheckpoint("run/best.keras", save_best_only=True, write_policy=ChiefOnly())
    """

    def writes(self, role: Role) -> bool:
        return role.chief

    def place(self, template: PathTemplate, role: Role) -> PathTemplate:
        return template.for_worker(role.number)

    def __repr__(self) -> str:
        return "ChiefOnly()"


class PerWorker:
    """Every worker writes, to a path of its own.

    The number of the worker goes where the path says ``{worker}``, else into a folder
    ``worker-<n>`` beside the file.

    Example::

        SafeModelCheckpoint("run/{worker}-{epoch:03d}.keras", write_policy=PerWorker())
    """

    def writes(self, role: Role) -> bool:
        return True

    def place(self, template: PathTemplate, role: Role) -> PathTemplate:
        if WORKER in template.fields:
            return template.for_worker(role.number)
        return template.in_folder(f"worker-{role.number}")

    def __repr__(self) -> str:
        return "PerWorker()"


class Auto:
    """This process if it is alone, the chief if all train one model, else each for itself."""

    def writes(self, role: Role) -> bool:
        return role.alone or self._choice(role).writes(role)

    def place(self, template: PathTemplate, role: Role) -> PathTemplate:
        return self._choice(role).place(template, role)

    def _choice(self, role: Role) -> WritePolicy:
        return ChiefOnly() if role.alone or role.synchronous else PerWorker()

    def __repr__(self) -> str:
        return "auto"


_BY_NAME: dict[str, WritePolicy] = {
    "auto": Auto(),
    "chief": ChiefOnly(),
    "per_worker": PerWorker(),
}


def find_policy(choice: str | WritePolicy) -> WritePolicy:
    """The policy of a name, or the object itself if it is one."""
    if isinstance(choice, str) and choice in _BY_NAME:
        return _BY_NAME[choice]
    if isinstance(choice, (str, type)) or not all(
        callable(getattr(choice, name, None)) for name in ("writes", "place")
    ):
        raise ValueError(
            f"Expected write_policy to be one of {sorted(_BY_NAME)}, ChiefOnly(), PerWorker() or "
            "an object with the methods writes(role) and place(template, role). "
            f"Received: write_policy={choice!r}"
        )
    return choice


def place(policy: WritePolicy, template: PathTemplate, role: Role) -> PathTemplate:
    """Where ``policy`` lets ``role`` write; a policy of the user's may return a plain path."""
    chosen = policy.place(template, role)
    if isinstance(chosen, (str, os.PathLike)):
        chosen = PathTemplate(chosen)
    if not isinstance(chosen, PathTemplate):
        raise ValueError(
            f"Expected place() of the write policy to return a path. Received: {chosen!r} from "
            f"{policy!r}"
        )
    return chosen


def ensure_places_differ(policy: WritePolicy, template: PathTemplate, role: Role) -> None:
    """Raise if another worker that writes would use the same path as this one."""
    if not policy.writes(role):
        return
    mine = place(policy, template, role).text
    for number in range(role.world):
        other = Role(number, role.world, number == 0, role.synchronous, f"worker {number}")
        if number == role.number or not policy.writes(other):
            continue
        if place(policy, template, other).text == mine:
            raise ValueError(
                f"Workers {role.number} and {number} would both write to {mine!r} and delete each "
                "other's checkpoints. Put {worker} into the path, or use write_policy='per_worker'."
                f" Received: write_policy={policy!r}"
            )


def saved_under(
    filepath: str | os.PathLike[str],
    worker: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[PathTemplate]:
    """Where to look for the files of a callback with this path, first place first.

    One of several workers looks at its own first; then comes the path itself, then those of
    any worker.
    """
    template = PathTemplate(filepath)
    apart = template if WORKER in template.fields else template.in_folder("worker-{worker}")
    if worker is not None:
        return [apart.for_worker(worker)]
    role = role_from_environment(os.environ if environment is None else environment)
    own = [] if role.alone else [apart.for_worker(role.number)]
    return [*own, template, apart]
