"""What a checkpoint says about itself.

The manifest travels inside the checkpoint's own file. It names every array with shape, dtype and
digest, the digest of everything else in the file, and finally its own digest, so that no byte of
a checkpoint can change unnoticed.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import xxhash

from keras_safe_ckpt import __version__
from keras_safe_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError
from keras_safe_ckpt.storage.dtypes import describe, dtype_from_name

#: The version written, and the newest one understood.
FORMAT_VERSION = 1
#: The end of the year 9999: nothing later can be shown as a date.
_LATEST = 253402300799.0
#: No honest manifest is larger; reading stops here.
LARGEST_BYTES = 64 << 20
#: Nor has one more values: each takes a hundred bytes of memory, whatever it has in the file.
_MOST_VALUES = 2_000_000
#: Names of dtypes are short; NumPy takes its time for a long one.
_LONGEST_DTYPE = 64
#: How much of a text of a file goes into a message.
_SHOWN = 100


@dataclass(frozen=True)
class ArrayRecord:
    """Shape, dtype and xxh3 digest of one array, and where in the HDF5 file its bytes are."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_from_name(self.dtype).itemsize

    def __str__(self) -> str:
        return describe(dtype_from_name(self.dtype), self.shape)


@dataclass(frozen=True)
class Manifest:
    """Where in the run a checkpoint was taken, by whom, and what it must contain.

    ``epoch`` counts the finished epochs, ``batch`` the finished batches of the next one.
    ``sequence`` orders the checkpoints of a directory: the time in milliseconds, or one more than
    the highest that its writer could see if that is more. Neither a clock that was set back nor a
    run that starts over at step 0 disturbs it. ``series`` names what is pruned together, ``name``
    is that of the file: a copy under another name is the user's own.

    The HDF5 file has ``size`` bytes: the ``arrays``, and everything else, whose digest is
    ``structure``. All of it can be checked without HDF5, which one damaged byte can send into an
    endless loop.
    """

    step: int = 0
    epoch: int | None = None
    batch: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    monitor: str | None = None
    mode: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    sequence: int = 0
    series: str = ""
    name: str = ""
    optimizer: str | None = None
    host: str = ""
    pid: int = 0
    worker: str | None = None
    wall_time: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, ArrayRecord] = field(default_factory=dict)
    size: int = 0
    structure: str = ""
    members: Mapping[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> bytes:
        """The manifest and its own digest."""
        body = _canonical(asdict(self))
        return b'{"digest":"%s","manifest":%s}' % (_digest(body).encode(), body)

    @staticmethod
    def from_json(data: bytes, path: str) -> Manifest:
        """Read what `to_json` wrote; anything else is an error of the tree naming ``path``."""
        if len(data) > LARGEST_BYTES:
            raise CorruptCheckpointError(path, f"its manifest has {len(data)} bytes")
        try:
            document = parsed(data)
            body, digest = document["manifest"], document["digest"]
            version = body["format_version"]
            canonical = _canonical(body)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CorruptCheckpointError(
                path, f"its manifest cannot be read ({type(error).__name__})"
            ) from error
        # The version first: a newer one may be digested in a way that is not known here.
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise IncompatibleCheckpointError(
                path,
                [
                    f"format version: this library ({__version__}) reads up to {FORMAT_VERSION}, "
                    f"the file has {version}; upgrade keras_safe_ckpt"
                ],
            )
        if digest != _digest(canonical):
            raise CorruptCheckpointError(path, "its manifest does not match its own digest")
        try:
            return _checked(body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = shortened(str(error))
            raise CorruptCheckpointError(path, f"its manifest is malformed: {reason}") from error


def parsed(data: bytes | bytearray) -> Any:
    """JSON from a file; `ValueError` also for more values than anybody means."""
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES:,} values")
    return json.loads(data)


def shortened(text: str) -> str:
    """What a file says, as far as it is for a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def describe_writer(worker: str | None = None) -> dict[str, Any]:
    """The fields of a manifest that say who wrote it, when and with what."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "worker": worker,
        "wall_time": time.time(),
        "versions": _versions(),
    }


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"keras_safe_ckpt": __version__, "python": platform.python_version()}
    for name, packages in {
        "keras": ("keras",),
        "tensorflow": ("tensorflow", "tensorflow-cpu"),
        "h5py": ("h5py",),
    }.items():
        for package in packages:
            try:
                versions[name] = metadata.version(package)
                break
            except metadata.PackageNotFoundError:
                continue
    return versions


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def _checked(body: dict[str, Any]) -> Manifest:
    body = dict(body)
    arrays = {
        str(path): ArrayRecord(
            _shape(record["shape"]),
            str(record["dtype"]),
            str(record["digest"]),
            _not_negative(record["offset"]),
        )
        for path, record in body.pop("arrays").items()
    }
    manifest = Manifest(arrays=arrays, **body)
    for name, kinds in {
        "format_version": (int,),
        "step": (int,),
        "sequence": (int,),
        "pid": (int,),
        "epoch": (int, type(None)),
        "batch": (int, type(None)),
        "monitor": (str, type(None)),
        "mode": (str, type(None)),
        "worker": (str, type(None)),
        "optimizer": (str, type(None)),
        "series": (str,),
        "name": (str,),
        "size": (int,),
        "host": (str,),
        "structure": (str,),
        "wall_time": (int, float),
        "metrics": (dict,),
        "extra": (dict,),
        "members": (dict,),
        "versions": (dict,),
    }.items():
        value = getattr(manifest, name)
        if not isinstance(value, kinds) or (isinstance(value, int) and abs(value) >= 1 << 63):
            raise ValueError(f"{name} is not what it should be")
    if not 0 <= manifest.wall_time <= _LATEST:
        raise ValueError(f"its time is {manifest.wall_time!r}")
    for metric, value in manifest.metrics.items():
        if not isinstance(value, (int, float)) or (isinstance(value, int) and abs(value) >> 63):
            raise ValueError(f"the metric {metric!r} is no number")
    for record in arrays.values():
        if len(record.dtype) > _LONGEST_DTYPE:
            raise ValueError("a dtype has a name without end")
        dtype_from_name(record.dtype)
    return manifest


def _not_negative(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"an offset is {value!r}")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(n, int) and n >= 0 for n in value):
        raise ValueError(f"a shape is {value!r}")
    if len(value) > 64 or math.prod(value) >= 1 << 62:
        raise ValueError(f"a shape is {value!r}")
    return tuple(value)
