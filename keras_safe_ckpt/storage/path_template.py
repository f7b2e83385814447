"""File names with placeholders: ``run/{epoch:02d}-{val_loss:.2f}.keras``."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_safe_ckpt.storage.paths import absolute

#: The placeholder for the number of the worker that writes.
WORKER = "worker"
_COUNTS = ("epoch", "batch", WORKER)
_SEPARATOR = re.compile(r"[/\\]" if os.name == "nt" else "/")


class PathTemplate:
    """A path as `str.format` fills it, and the files that it may have named before.

    Example::

        template = PathTemplate("run/{epoch:02d}.keras")
        template.fill({"epoch": 3})  # run/03.keras
        template.existing()          # every file in run/ that it could have named
    """

    def __init__(self, text: str | os.PathLike[str]) -> None:
        self.text = os.fspath(text)
        try:
            self._pieces = list(string.Formatter().parse(self.text))
        except ValueError as error:
            raise ValueError(
                "Expected placeholders like {epoch} or {val_loss:.2f}, and {{ for a brace. "
                f"Received: filepath={self.text!r} ({error})"
            ) from None
        names = [name for _, name, _, _ in self._pieces if name is not None]
        #: What it asks for, without ``.attribute`` and ``[index]``.
        self.fields = frozenset(re.split(r"[.\[]", name)[0] for name in names)
        if any(not name or name.isdigit() for name in self.fields):
            raise ValueError(
                "Expected placeholders with names, like {epoch} or {val_loss:.2f}. "
                f"Received: filepath={self.text!r}"
            )

    @property
    def name(self) -> str:
        """What follows the last separator, placeholders and all."""
        return _SEPARATOR.split(self.text)[-1]

    @property
    def parent(self) -> PathTemplate:
        """The template of the directory."""
        return PathTemplate(os.path.dirname(self.text))

    def fill(self, values: Mapping[str, Any]) -> str:
        """The path for these values; KeyError for a name that is missing."""
        return self.text.format(**values)

    def for_worker(self, number: int) -> PathTemplate:
        """``{worker}`` filled in; the other placeholders stay."""
        return PathTemplate("".join(_for_worker(*piece, number) for piece in self._pieces))

    def in_folder(self, folder: str) -> PathTemplate:
        """The same name in a folder beside it."""
        return PathTemplate(os.path.join(os.path.dirname(self.text), folder, self.name))

    def existing(self) -> list[Path]:
        """The files that are there and that it could have named."""
        start, rest = self._components()
        found = [absolute(os.path.join(start, "."))]
        for component in rest:
            pattern = re.compile("".join(_expression(*piece) for piece in component._pieces))
            found = [
                Path(entry.path)
                for directory in found
                if directory.is_dir()
                for entry in sorted(os.scandir(directory), key=lambda entry: entry.name)
                if pattern.fullmatch(entry.name)
            ]
        return [path for path in found if path.is_file()]

    def deepest_fixed_directory(self) -> str:
        """Of the directory, what comes before the first placeholder."""
        return self._components()[0]

    def _components(self) -> tuple[str, list[PathTemplate]]:
        """The fixed directory that it starts with, and one template for each level below."""
        *folders, name = _SEPARATOR.split(self.text)
        fixed = []
        while folders and not PathTemplate(folders[0]).fields:
            fixed.append(PathTemplate(folders.pop(0)).fill({}))
        start = "/".join(fixed) if fixed != [""] else "/"
        return start, [PathTemplate(text) for text in [*folders, name]]


def _for_worker(
    literal: str, name: str | None, spec: str | None, conversion: str | None, number: int
) -> str:
    text = literal.replace("{", "{{").replace("}", "}}")
    if name is None:
        return text
    placeholder = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
    placeholder = f"{{{placeholder}}}"
    return text + (placeholder.format(worker=number) if name == WORKER else placeholder)


def _expression(literal: str, name: str | None, spec: str | None, conversion: str | None) -> str:
    """What a piece of a template may have become, as a regular expression."""
    text = re.escape(literal)
    if name is None:
        return text
    # A count is made of digits: "{epoch}.keras" has not named "best.keras".
    counted = name in _COUNTS and (not spec or spec.endswith("d"))
    return text + (r"\s*\d+" if counted else ".+")
