"""``.keras``: the whole model, as ``keras.models.load_model`` reads it.

Keras writes three members, stored without compression, and so do we. The manifest is a key of
``metadata.json``, which is written last: with a fourth member Keras would take it for an asset
and unpack the whole archive to the temporary directory at every load.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from keras_safe_ckpt.errors import CorruptCheckpointError
from keras_safe_ckpt.storage.atomic import StagedFile
from keras_safe_ckpt.storage.formats.array_reader import ArrayReader
from keras_safe_ckpt.storage.formats.format import (
    OpenCheckpoint,
    damage_reported,
    opened_for_reading,
)
from keras_safe_ckpt.storage.formats.hdf5_image import CHUNK_BYTES, ImageWriter
from keras_safe_ckpt.storage.formats.seekable import FileWindow, SeekableFile
from keras_safe_ckpt.storage.manifest import LARGEST_BYTES, Manifest, parsed, shortened
from keras_safe_ckpt.storage.snapshot import Snapshot, capture

MANIFEST_KEY = "keras_safe_ckpt"

#: The one flag of a member that changes nothing; with others `zipfile` may refuse to read it.
_UTF8_NAME = 0x800

_CONFIG, _METADATA, _WEIGHTS = "config.json", "metadata.json", "model.weights.h5"


class KerasZip:
    """Keras's ``.keras`` archive with a manifest inside."""

    suffix = ".keras"
    whole_model = True

    def capture(self, model: Any, scratch: Path | None) -> Snapshot:
        return capture(model, whole_model=True, scratch=scratch)

    def write(self, staged: StagedFile, snapshot: Snapshot, draft: Manifest) -> Manifest:
        if snapshot.config is None or snapshot.metadata is None:
            raise ValueError("A .keras file needs a snapshot of the whole model.")
        writer = ImageWriter(snapshot.groups, snapshot.host_arrays())
        members = {
            _CONFIG: snapshot.config.encode(),
            **{f"assets/{name}": data for name, data in snapshot.assets.items()},
        }
        with zipfile.ZipFile(_ZipTarget(staged), "w") as archive:
            for name, data in members.items():
                _add(archive, name, [memoryview(data)], len(data))
            _add(archive, _WEIGHTS, writer.chunks(), writer.size)
            checksum = archive.getinfo(_WEIGHTS).CRC
            manifest = dataclasses.replace(
                writer.complete(draft),
                members={**_digests(members), _WEIGHTS: f"crc32:{checksum:08x}"},
            )
            metadata = _with_manifest(snapshot.metadata, manifest)
            _add(archive, _METADATA, [memoryview(metadata)], len(metadata))
        return manifest

    def open(self, path: Path) -> OpenCheckpoint:
        return OpenKerasZip(path)


def _digests(members: Mapping[str, bytes]) -> dict[str, str]:
    return {name: xxhash.xxh3_128(data).hexdigest() for name, data in members.items()}


def _with_manifest(metadata: str, manifest: Manifest) -> bytes:
    """Keras's own keys as they were, and ours added to them."""
    combined = {**json.loads(metadata), MANIFEST_KEY: json.loads(manifest.to_json())}
    return json.dumps(combined, separators=(",", ":")).encode()


def _add(archive: zipfile.ZipFile, name: str, chunks: Iterable[memoryview], size: int) -> None:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_STORED
    info.file_size = size
    info.external_attr = 0o600 << 16
    with archive.open(info, "w", force_zip64=size >= zipfile.ZIP64_LIMIT) as member:
        for chunk in chunks:
            member.write(chunk)


class _ZipTarget(SeekableFile):
    """The staged file as `zipfile` wants it, which goes back to complete the header of a member."""

    def __init__(self, staged: StagedFile) -> None:
        super().__init__(staged.size)
        self._staged = staged

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._position == self.size:
            self._staged.write(view)
        else:
            self._staged.write_at(self._position, view)
        self._position += len(view)
        self.size = self._staged.size
        return len(view)


class OpenKerasZip(OpenCheckpoint):
    """An open ``.keras`` file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        with opened_for_reading(path) as descriptor:
            self._descriptor = descriptor
            self._file = FileWindow(descriptor, 0, os.fstat(descriptor).st_size)
            self._members = self._list_members()
            self.manifest = self._read_manifest()
            start, size = self._place(_WEIGHTS)
            self._reader = ArrayReader(
                FileWindow(descriptor, start, size), self.manifest, self._path
            )

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        with damage_reported(self._path):
            self._check_members()
        super().verify(advance)

    def _list_members(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self._file) as archive:
                listed = archive.infolist()
        except zipfile.BadZipFile:
            # To `zipfile` what cannot be read is no archive. It may be whole, and the best one.
            if self._file.error is not None:
                raise self._file.error from None
            raise
        members = {info.filename: info for info in listed}
        if len(members) != len(listed):
            raise CorruptCheckpointError(self._path, "two of its members have the same name")
        for name in (_CONFIG, _METADATA, _WEIGHTS):
            if name not in members:
                raise CorruptCheckpointError(self._path, f"its member {name!r} is missing")
        return members

    def _place(self, name: str) -> tuple[int, int]:
        """Offset and size of a member's data, which lies in the file as it is."""
        info = self._members[name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ~_UTF8_NAME:
            raise CorruptCheckpointError(self._path, f"its member {name!r} is not stored plainly")
        encoded = name.encode()
        header = bytearray(30 + len(encoded))
        self._file.read_at(info.header_offset, memoryview(header))
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        if header[:4] != b"PK\3\4" or name_length != len(encoded) or header[30:] != encoded:
            raise CorruptCheckpointError(self._path, f"the header of {name!r} is damaged")
        start = info.header_offset + 30 + name_length + extra_length
        if start + info.file_size > self._file.size or info.compress_size != info.file_size:
            raise CorruptCheckpointError(self._path, f"its member {name!r} is cut off")
        return start, info.file_size

    def _read_manifest(self) -> Manifest:
        start, size = self._place(_METADATA)
        if size > LARGEST_BYTES:
            raise CorruptCheckpointError(self._path, f"its {_METADATA} has {size} bytes")
        data = bytearray(size)
        self._file.read_at(start, memoryview(data))
        try:
            document = parsed(data)[MANIFEST_KEY]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptCheckpointError(
                self._path,
                "it was not written by this library (no manifest); Keras itself may open it",
            ) from error
        return Manifest.from_json(json.dumps(document).encode(), self._path)

    def _check_members(self) -> None:
        """Compare all but the weights, and every checksum that plain Keras will look at."""
        expected = {_METADATA, *self.manifest.members}
        if set(self._members) != expected:
            difference = shortened(str(sorted(set(self._members) ^ expected)))
            raise CorruptCheckpointError(self._path, f"members do not fit: {difference}")
        if sum(info.compress_size for info in self._members.values()) > self._file.size:
            # They could all have the same bytes, to be read as often.
            raise CorruptCheckpointError(self._path, "its members overlap, or are cut off")
        for name in expected:
            info = self._members[name]
            recorded = self.manifest.members.get(name)
            if name == _WEIGHTS:
                # The digests of its parts cover the data; its checksum is only written down.
                digest, checksum = f"crc32:{info.CRC:08x}", info.CRC
            else:
                digest, checksum = self._digest_and_checksum(name)
            if recorded not in (None, digest) or checksum != info.CRC:
                raise CorruptCheckpointError(self._path, f"{name!r} does not match its digest")

    def _digest_and_checksum(self, name: str) -> tuple[str, int]:
        start, size = self._place(name)
        digest, checksum = xxhash.xxh3_128(), 0
        buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
        for offset in range(0, size, CHUNK_BYTES):
            view = buffer[: min(CHUNK_BYTES, size - offset)]
            self._file.read_at(start + offset, view)
            digest.update(view)
            checksum = zlib.crc32(view, checksum)
        return digest.hexdigest(), checksum
