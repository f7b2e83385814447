"""Is a file without our manifest one that Keras wrote itself, or one of ours that was cut off?"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from keras_safe_ckpt.errors import SafeCheckpointError
from keras_safe_ckpt.storage.formats.format import damage_reported, opened_for_reading
from keras_safe_ckpt.storage.formats.keras_zip import MANIFEST_KEY
from keras_safe_ckpt.storage.formats.seekable import FileWindow
from keras_safe_ckpt.storage.manifest import LARGEST_BYTES, parsed
from keras_safe_ckpt.storage.paths import let_go, open_regular

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
#: Where the superblock of HDF5 says how long the file is, by the version of the superblock.
_END_ADDRESS_AT = {0: 40, 1: 44, 2: 28, 3: 28}


def is_plain_keras(path: Path) -> bool:
    """Whether the file looks whole, and never had a manifest of ours."""
    try:
        with damage_reported(path):
            if path.name.endswith(".keras"):
                return _is_plain_archive(path)
            return _is_whole_hdf5(path)
    except SafeCheckpointError:
        return False  # Whatever it is, it is not what Keras writes.


def _is_plain_archive(path: Path) -> bool:
    with opened_for_reading(path) as descriptor:
        is_plain = _has_no_manifest(FileWindow(descriptor, 0, os.fstat(descriptor).st_size))
    let_go(descriptor)  # If that has raised it is closed already, and its number is another's.
    return is_plain


def _has_no_manifest(file: FileWindow) -> bool:
    with zipfile.ZipFile(file) as archive:
        if "metadata.json" not in archive.namelist():
            return False
        # Of a hostile archive no more is unpacked than an honest one can hold.
        with archive.open("metadata.json") as member:
            text = member.read(LARGEST_BYTES)
    return MANIFEST_KEY not in parsed(text)


def _is_whole_hdf5(path: Path) -> bool:
    """A file of ours is longer than HDF5 knows, and one that was cut off is shorter."""
    with open_regular(path) as file:
        head = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(head) < 64 or not head.startswith(_HDF5_SIGNATURE):
        return False
    place = _END_ADDRESS_AT.get(head[8])
    return place is not None and int.from_bytes(head[place : place + 8], "little") == size
