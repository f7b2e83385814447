"""The rules of the house: direction of imports, private names, laziness, names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import keras_safe_ckpt

PACKAGE = Path(keras_safe_ckpt.__file__).parent

#: From the bottom up: a part may import from those before it, and from itself.
LAYERS = [
    {"errors"},
    {"storage"},
    {"training", "cluster", "preemption"},
    {"interruption", "datasets"},
    {"callbacks", "loops"},
    {"reports"},
    {"cli"},
]


def modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): ast.parse(
            path.read_text()
        )
        for path in PACKAGE.rglob("*.py")
    }


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def level(part: str) -> int:
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


def test_imports_point_down():
    wrong = []
    for name, tree in modules().items():
        parts = name.split(".")
        if len(parts) < 2 or parts[1] in ("__init__", "__main__"):
            continue  # The front door may see everything.
        for target in imported(tree):
            if not target.startswith("keras_safe_ckpt."):
                continue
            other = target.split(".")[1]
            if other.startswith("__"):
                continue
            same = other == parts[1]
            if not same and level(other) >= level(parts[1]):
                wrong.append(f"{name} imports {target}")
    assert wrong == []


def test_portalocker_is_imported_by_the_locks_only():
    users = users_of("portalocker")
    assert users
    assert all(name.split(".")[-1].endswith("locks") for name in users), users


def users_of(package: str) -> set[str]:
    return {
        name
        for name, tree in modules().items()
        if any(f"{target}.".startswith(f"{package}.") for target in imported(tree))
    }


def test_private_names_of_keras_and_tensorflow_live_in_modules_of_their_own():
    assert users_of("keras.src") == {
        "keras_safe_ckpt.storage.keras_internals",
        "keras_safe_ckpt.cluster.keras_trainer",
        "keras_safe_ckpt.training.random_states",
    }
    assert users_of("tensorflow.python") == {
        "keras_safe_ckpt.cluster.coordination",
        "keras_safe_ckpt.training.random_states",
    }


def test_private_names_do_not_cross_modules():
    wrong = [
        f"{name} imports {alias.name} from {node.module}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_safe_ckpt")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert wrong == []


def test_no_pickle_is_loaded():
    for name, tree in modules().items():
        assert not {"pickle", "marshal", "shelve", "dill"} & imported(tree), name


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_import_needs_no_tensorflow():
    code = """
import sys, keras_safe_ckpt
keras_safe_ckpt.LockManager
keras_safe_ckpt.CheckpointStore
print(sorted({"tensorflow", "keras"} & set(sys.modules)))
"""
    assert python(code) == "[]\n"


def test_missing_tensorflow_is_explained():
    code = """
import sys, tempfile
sys.modules["tensorflow"] = None
from keras_safe_ckpt import CheckpointStore
try:
    CheckpointStore(tempfile.mkdtemp()).publish(object(), step=1)
except ImportError as error:
    print(error)
"""
    assert 'pip install "keras_safe_ckpt[tensorflow-cpu]"' in python(code)


def test_public_names_are_sorted_and_there():
    names = keras_safe_ckpt.__all__
    assert names == sorted(names, key=str.lower)
    for name in names:
        assert getattr(keras_safe_ckpt, name).__doc__
    assert set(names) <= set(dir(keras_safe_ckpt))


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(keras_safe_ckpt, "Nonsense")
