"""Errors on their way from one process to another, as JSON."""

from __future__ import annotations

from typing import Any

from keras_safe_ckpt import errors

_BUILT_IN = {"ValueError": ValueError, "TypeError": TypeError}


def as_facts(error: BaseException) -> dict[str, Any]:
    """An error as JSON holds it."""
    facts = error.facts if isinstance(error, errors.SafeCheckpointError) else {}
    return {"kind": type(error).__name__, "message": str(error), "facts": facts}


def from_facts(found: dict[str, Any]) -> Exception:
    """The error that `as_facts` was given; of a kind that is not known, `SafeCheckpointError`."""
    kind, message = str(found["kind"]), str(found["message"])
    if kind in _BUILT_IN:
        return _BUILT_IN[kind](message)
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.SafeCheckpointError):
        # As unpickled: the message is there already, and need not be made from the facts.
        error = known.__new__(known)
        errors.SafeCheckpointError.__init__(error, message, **found["facts"])
        return error
    return errors.SafeCheckpointError(f"{kind}: {message}")
