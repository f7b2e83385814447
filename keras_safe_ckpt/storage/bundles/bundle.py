"""One checkpoint of TensorFlow in a directory: its files, and whether they are whole."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keras_safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.bundles.entry_bytes import are_whole
from keras_safe_ckpt.storage.bundles.index import Index, read_index
from keras_safe_ckpt.storage.paths import open_regular

_PART = re.compile(r"^(?P<name>[^.].*)\.(?P<kind>index|data-\d{5}-of-\d{5})$", re.DOTALL)


@dataclass(frozen=True)
class Bundle:
    """``name`` is what its files begin with, such as ``ckpt-7``."""

    directory: Path
    name: str

    @property
    def prefix(self) -> str:
        """What TensorFlow calls the path of a checkpoint."""
        return os.path.join(self.directory, self.name)

    @property
    def index(self) -> Path:
        return self.directory / f"{self.name}.index"

    def data(self, shard: int, shards: int) -> Path:
        return self.directory / f"{self.name}.data-{shard:05d}-of-{shards:05d}"

    def check(self) -> Index:
        """Raise unless all parts are there and as long as they must be."""
        index = read_index(self.index)
        for shard, least in enumerate(index.least_sizes()):
            path = self.data(shard, index.shards)
            try:
                size = os.stat(path).st_size
            except FileNotFoundError:
                raise CorruptCheckpointError(self.prefix, f"{path.name} is missing") from None
            except OSError as error:
                raise UnreadableCheckpointError(path, error) from error
            if size < least:
                raise CorruptCheckpointError(
                    self.prefix, f"{path.name} has {size} bytes and should have {least}"
                )
        return index

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """Read every byte; raise if a checksum does not hold.

        ``advance`` is told of each so many bytes that were read.
        """
        index = self.check()
        for shard in range(index.shards):
            path = self.data(shard, index.shards)
            entries = [entry for entry in index.entries if entry.shard == shard]
            try:
                with open_regular(path) as file:
                    for entry in sorted(entries, key=lambda entry: entry.offset):
                        if not entry.sliced and not are_whole(file.fileno(), entry):
                            raise CorruptCheckpointError(
                                self.prefix, f"the checksum of {entry.name!r} is wrong"
                            )
                        if advance is not None:
                            advance(entry.size)
            except FileNotFoundError:
                raise CheckpointNotFoundError(path) from None
            except OSError as error:
                raise UnreadableCheckpointError(path, error) from error


def part_of(file_name: str, meta_suffix: str | None = None) -> tuple[str, str] | None:
    """The checkpoint that a file belongs to by its name, and which part it is.

    ``meta_suffix`` is what graphs end with, where they belong to checkpoints.
    """
    match = _PART.match(file_name)
    if match is not None:
        return match["name"], match["kind"]
    name, _, kind = file_name.rpartition(".")
    return (name, kind) if name and not name.startswith(".") and kind == meta_suffix else None
