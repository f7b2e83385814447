"""The site is built without a warning, says something of every public name, and its code runs."""

from __future__ import annotations

import configparser
import html.parser
import inspect
import json
import re
import subprocess
import sys
import textwrap
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import PROJECT, environment
from redis_server import BINARY, RedisServer

import keras_safe_ckpt
from keras_safe_ckpt import SafeCheckpointError

DOCS = PROJECT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def public_names() -> dict[str, Any]:
    return {name: getattr(keras_safe_ckpt, name) for name in keras_safe_ckpt.__all__}


def is_error(public: Any) -> bool:
    return inspect.isclass(public) and issubclass(public, SafeCheckpointError)


# The site.


class Page(html.parser.HTMLParser):
    """What a page links to, what can be linked to in it, and what is said of each entry."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.said: dict[str, str] = {}
        self._entries: list[str] = []
        self._waiting: str | None = None
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.links += [given[name] for name in ("href", "src") if name in given]
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "dt":
            self._waiting = given.get("id", "")
        elif tag == "dd":
            self._entries.append(self._waiting or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "dd":
            self._entries.pop()

    def handle_data(self, data: str) -> None:
        if self._entries:
            innermost = self._entries[-1]
            self.said[innermost] = self.said.get(innermost, "") + data


def build_site(folder: Path) -> dict[Path, Page]:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", DOCS, folder],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return {path: Page(path) for path in folder.rglob("*.html")}


def dead_links(pages: dict[Path, Page]) -> Iterator[str]:
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path
            if parts.path:
                target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists():
                yield f"{path.name}: {link}"
            elif anchor and target in pages and anchor not in pages[target].ids:
                yield f"{path.name}: {link}, which has no such heading"


@pytest.mark.long
def test_site_is_built_without_warnings_and_has_an_entry_for_every_name(tmp_path):
    pages = build_site(tmp_path / "site")
    assert {path.stem for path in pages} >= {path.stem for path in PAGES}
    assert list(dead_links(pages)) == []
    reference = pages[tmp_path / "site" / "api.html"]
    for name in public_names():
        entry = f"keras_safe_ckpt.{name}"
        assert entry in reference.ids, f"{entry} has no entry"
        said = reference.said.get(entry, "").partition("Bases:")
        description = said[0] or said[2].partition("\n")[2]
        assert len(description.split()) >= 4, f"nothing is said of {entry}: {description!r}"
    inherited = {f"keras_safe_ckpt.SafeModelCheckpoint.{name}" for name in ("set_model", "model")}
    assert not inherited & reference.ids, "what Keras documents is not repeated"
    assert "keras_safe_ckpt.TFRecordShardWriter.write" in reference.ids


# Links as a code host shows them.


def headings(page: Path) -> set[str]:
    """The anchors that code hosts make of them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def test_links_lead_somewhere_without_the_site_too():
    seen = 0
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), f"{page.name}: {target}"
            assert there.is_relative_to(PROJECT), f"{page.name}: {target}"
            if anchor:
                assert anchor in headings(there), f"{page.name}: {target}"
            seen += 1
    assert seen > 40


def test_every_page_can_be_reached():
    index = (DOCS / "index.md").read_text()
    for page in PAGES:
        name = str(page.relative_to(DOCS))
        if name != "index.md":
            assert f"({name})" in index, name
            assert f"\n{name.removesuffix('.md')}\n" in index, f"{name} is in no toctree"


# Docstrings.


def named_in(docstring: str | None) -> set[str]:
    """Arguments with an entry of their own below ``Args:``, and names in double backticks."""
    text = inspect.cleandoc(docstring or "")
    arguments = re.search(r"^Args:\n((?:    .*\n|\n)+)", f"{text}\n", re.MULTILINE)
    entries = re.findall(r"^    (\w+): \S", arguments[1], re.MULTILINE) if arguments else []
    return {*entries, *re.findall(r"``(\w+)", text)}


def own_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Those of this library that the reference shows."""
    for name in dir(kind):
        static = inspect.getattr_static(kind, name)
        method = getattr(static, "__func__", static)
        if name.startswith("_") or not inspect.isfunction(method) or not method.__doc__:
            continue
        if method.__module__.startswith("keras_safe_ckpt"):
            yield name, method


def test_every_parameter_is_described():
    missing = []
    for name, public in public_names().items():
        callables = [(name, public)]
        if inspect.isclass(public):
            callables += [(f"{name}.{one}", method) for one, method in own_methods(public)]
        for called, callable_ in callables:
            known = named_in(callable_.__doc__)
            parameters = set(inspect.signature(callable_).parameters) - {"self"}
            missing += [f"{called}: {parameter}" for parameter in sorted(parameters - known)]
    internal = "PreemptionAwareCallback.validation_begins: callback_list"  # Not in the reference.
    assert missing == [internal]


def test_the_facts_of_every_error_are_described():
    for name, error in public_names().items():
        if is_error(error):
            facts = set(vars(error).get("__annotations__", {}))
            assert facts <= named_in(error.__doc__), name


def examples_of(public: Any) -> list[str]:
    text = f"{inspect.cleandoc(public.__doc__)}\n"
    found = re.findall(r"^Example::\n\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    return [textwrap.dedent(example) for example in found]


def test_every_public_name_has_an_example():
    """Errors are raised, not called: their root shows how they are caught."""
    for name, public in public_names().items():
        if not is_error(public) or public is SafeCheckpointError:
            assert len(examples_of(public)) == 1, name


# Code.


def python_of(page: Path) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(blocks)


@pytest.mark.long
def test_code_of_the_pages_and_of_the_docstrings_runs(tmp_path):
    pages = {str(page.relative_to(PROJECT)): python_of(page) for page in PAGES}
    pages["README.md"] = python_of(PROJECT / "README.md")
    assert sum(map(bool, pages.values())) >= 10
    assert pages["README.md"], "the README begins with code"
    docstrings = {name: "\n".join(examples_of(one)) for name, one in public_names().items()}
    server = None
    if BINARY is None:
        del docstrings["RedisLocks"]
    else:
        server = RedisServer(tmp_path).start()
        url = "redis://:secret@lockhost:6379/0"
        assert url in docstrings["RedisLocks"]
        docstrings["RedisLocks"] = docstrings["RedisLocks"].replace(url, server.url)
    pieces = [
        {"name": name, "code": code, "is_docstring": group is docstrings}
        for group in (pages, docstrings)
        for name, code in group.items()
        if code
    ]
    wanted = tmp_path / "pieces.json"
    wanted.write_text(json.dumps(pieces))
    variables = {k: v for k, v in environment().items() if k != "TF_CONFIG"}
    command = [sys.executable, PROJECT / "tests" / "documented_code.py", wanted, tmp_path]
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)
    finally:
        if server is not None:
            server.kill()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {piece["name"] for piece in pieces}
    failures = [f"{name}\n{one['failure']}" for name, one in report.items() if one["failure"]]
    assert failures == [], "\n".join(failures)
    printed = {name: one["output"] for name, one in report.items()}
    assert "\n3 {'loss': " in "\n" + printed["docs/guide/store_and_locks.md"]
    assert "20 steps, 2 checkpoints" in printed["docs/guide/loops.md"]
    assert "128 records of 256" in printed["docs/guide/data_files.md"]
    assert "maintenance_is_announced: maintenance" in printed["docs/guide/preemption.md"]


def test_pages_with_python_are_all_those_that_show_some():
    """A block in another fence (``py``, indented) would not be run."""
    for page in PAGES:
        fences = set(re.findall(r"^```(.+)$", page.read_text(), re.MULTILINE))
        assert fences <= {"python", "bash", "text", "yaml", "ini", "{toctree}"}, page.name


# What the recipes quote.


def block_of(recipe: str, language: str) -> str:
    text = (DOCS / "recipes" / recipe).read_text()
    after = text.partition("The part that matters:")[2]
    return re.search(rf"^```{language}\n(.*?)^```$", after, re.MULTILINE | re.DOTALL)[1]


def is_part_of(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return all(name in whole and is_part_of(one, whole[name]) for name, one in part.items())
    return part == whole


def test_recipes_quote_their_examples():
    examples = PROJECT / "examples"
    quoted = yaml.safe_load(block_of("kubernetes.md", "yaml"))
    _, job = yaml.safe_load_all((examples / "kubernetes_job.yaml").read_text())
    assert is_part_of(quoted, job["spec"])
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block_of("spot.md", "ini"))
    lines = (examples / "spot.service").read_text().splitlines()
    for section in unit.sections():
        for name, value in unit[section].items():
            assert f"{name}={value}" in lines
    for recipe, language, example in (
        ("slurm.md", "bash", "slurm.sbatch"),
        ("ray.md", "text", "ray_train.py"),
    ):
        lines = [line.strip() for line in (examples / example).read_text().splitlines()]
        for line in block_of(recipe, language).splitlines():
            assert "directory" in line or line.strip() in lines, f"{recipe}: {line}"
