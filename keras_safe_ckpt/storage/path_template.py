"""File names with placeholders: ``run/{epoch:02d}-{val_loss:.2f}.keras``."""

from __future__ import annotations

import logging
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
#: Not inside braces: a metric may be called "head/loss".
_SEPARATOR = re.compile((r"[/\\]" if os.name == "nt" else "/") + r"(?![^{}]*\})")
_PLAIN_COUNT = re.compile(r"0?\d*d?")

_log = logging.getLogger(__name__)


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
        self.fields = frozenset(_base(name) for name in names)
        if any(not name or name.isdigit() for name in self.fields):
            raise ValueError(
                "Expected placeholders with names, like {epoch} or {val_loss:.2f}. "
                f"Received: filepath={self.text!r}"
            )

    @property
    def name(self) -> str:
        """What follows the last separator, placeholders and all."""
        return self._split()[1]

    @property
    def parent(self) -> PathTemplate:
        """The template of the directory."""
        return PathTemplate(self._split()[0])

    def fill(self, values: Mapping[str, Any]) -> str:
        """The path for these values; KeyError for a name that is missing."""
        return self.text.format(**values)

    def for_worker(self, number: int) -> PathTemplate:
        """``{worker}`` filled in; the other placeholders stay."""
        return PathTemplate("".join(_for_worker(*piece, number) for piece in self._pieces))

    def in_folder(self, folder: str) -> PathTemplate:
        """The same name in a folder beside it."""
        return PathTemplate(os.path.join(self._split()[0], folder, self.name))

    def below(self, directory: str) -> PathTemplate:
        """The template with a relative path counted from ``directory``."""
        escaped = directory.replace("{", "{{").replace("}", "}}")
        return PathTemplate(os.path.join(escaped, self.text))

    def refuse_unfit_placeholders(self) -> None:
        """Raise if epoch, batch, worker or a metric cannot be written as its placeholder says."""
        for _, name, spec, conversion in self._pieces:
            if not name or name in _COUNTS or name != _base(name):
                continue  # What has parts ("{f1[0]}") is no number.
            try:
                _placeholder(name, spec, conversion).format(**{name: 0.5})
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise ValueError(
                    f"Expected placeholders of metrics like {{{name}:.3f}}. "
                    f"Received: filepath={self.text!r} ({error})"
                ) from None
        for name in _COUNTS:
            try:
                self.count_text(name, 1)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise ValueError(
                    f"Expected placeholders of whole numbers like {{{name}:03d}}. "
                    f"Received: filepath={self.text!r} ({error})"
                ) from None

    def count_text(self, name: str, count: int) -> str:
        """What the placeholders of one count alone become."""
        pieces = [_placeholder(*piece[1:]) for piece in self._pieces if _base(piece[1]) == name]
        return "".join(pieces).format(**{name: count})

    def existing(self) -> list[Path]:
        """The files that are there and that it could have named."""
        return [path for path in self._matching() if path.is_file()]

    def obstacles(self) -> list[Path]:
        """Whatever is there under a name of its own and is not a file."""
        return [path for path in self._matching() if not path.is_file() or path.is_symlink()]

    def is_series(self, series: str) -> bool:
        """Whether a checkpoint of this series was saved under the template, by any worker."""
        pattern = re.escape(self.name)
        for _, name, spec, conversion in self._pieces:
            if name == WORKER:
                placeholder = re.escape(_placeholder(name, spec, conversion))
                pattern = pattern.replace(placeholder, r"\s*\d+")
        return re.fullmatch(pattern, series) is not None

    def _matching(self) -> list[Path]:
        start, rest = self._components()
        found = [absolute(os.path.join(start, "."))]
        for component in rest:
            pattern = re.compile("".join(_expression(*piece) for piece in component._pieces))
            found = [
                directory / name
                for directory in found
                for name in _names_in(directory)
                if pattern.fullmatch(without_aside(name))
            ]
        return found

    def deepest_fixed_directory(self) -> str:
        """Of the directory, what comes before the first placeholder."""
        return self._components()[0]

    def _split(self) -> tuple[str, str]:
        name = _SEPARATOR.split(self.text)[-1]
        directory = self.text[: len(self.text) - len(name)]
        return directory.rstrip("/" + os.sep) or directory, name

    def _components(self) -> tuple[str, list[PathTemplate]]:
        """The fixed directory that it starts with, and one template for each level below."""
        *folders, name = _SEPARATOR.split(self.text)
        fixed = []
        while folders and not PathTemplate(folders[0]).fields:
            fixed.append(PathTemplate(folders.pop(0)).fill({}))
        start = "/".join(fixed) if fixed != [""] else "/"
        return start, [PathTemplate(text) for text in [*folders, name]]


_ASIDE = re.compile(r"~\d+(?=\.weights\.h5$|\.keras$|\.h5$)")


def aside_name(name: str, number: int) -> str:
    """The name for a file that makes way for another one: ``3.keras`` becomes ``3~2.keras``."""
    suffix = ".weights.h5" if name.endswith(".weights.h5") else os.path.splitext(name)[1]
    return f"{name.removesuffix(suffix)}~{number}{suffix}"


def without_aside(name: str) -> str:
    """The name that a file had before it was set aside."""
    return _ASIDE.sub("", name)


def _names_in(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        _log.warning("Passed over %s: %s", directory, error)
        return []


def _base(name: str | None) -> str:
    return re.split(r"[.\[]", name or "")[0]


def _placeholder(name: str | None, spec: str | None, conversion: str | None) -> str:
    inside = f"{name}" + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
    return f"{{{inside}}}"


def _for_worker(
    literal: str, name: str | None, spec: str | None, conversion: str | None, number: int
) -> str:
    text = literal.replace("{", "{{").replace("}", "}}")
    if name is None:
        return text
    placeholder = _placeholder(name, spec, conversion)
    return text + (placeholder.format(worker=number) if name == WORKER else placeholder)


def _expression(literal: str, name: str | None, spec: str | None, conversion: str | None) -> str:
    """What a piece of a template may have become, as a regular expression."""
    text = re.escape(literal)
    if name is None:
        return text
    # A count is made of digits: "{epoch}.keras" has not named "best.keras".
    counted = name in _COUNTS and _PLAIN_COUNT.fullmatch(spec or "") and not conversion
    return text + (r"\s*\d+" if counted else ".+")
