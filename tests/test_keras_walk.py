"""The quicker walk finds what Keras's own finds, in the same order."""

from __future__ import annotations

import model_zoo
import pytest
from keras_setup import keras

from keras_safe_ckpt.storage import keras_walk
from keras_safe_ckpt.storage.keras_walk import quicker_walk
from keras_safe_ckpt.storage.snapshot import capture

from keras.src.saving import saving_lib  # isort: skip

ORIGINAL = saving_lib._walk_saveable


def walked(saveable, seen=None) -> list:
    """Every attribute of every object that can be reached, in order."""
    seen = set() if seen is None else seen
    if id(saveable) in seen:
        return []
    seen.add(id(saveable))
    found = []
    for name, value in saving_lib._walk_saveable(saveable):
        found.append((type(saveable).__name__, name, type(value).__name__))
        for child in value if isinstance(value, (list, tuple)) else [value]:
            if hasattr(child, "_obj_type"):
                found += walked(child, seen)
    return found


@pytest.mark.parametrize("build", model_zoo.ZOO, ids=lambda build: build.__name__)
def test_same_attributes_in_the_same_order(build):
    model = model_zoo.made_once(build)
    theirs = walked(model)
    quicker = quicker_walk(saving_lib)
    with quicker():
        assert saving_lib._walk_saveable is not ORIGINAL
        assert walked(model) == theirs
        assert walked(model) == theirs  # From memory.
    assert saving_lib._walk_saveable is ORIGINAL
    assert len(theirs) > 5


def test_attributes_that_come_and_go_are_noticed():
    layer = keras.layers.Dense(1)
    quicker = quicker_walk(saving_lib)

    def names() -> list[str]:
        theirs = [name for name, _ in ORIGINAL(layer)]
        with quicker():
            assert [name for name, _ in saving_lib._walk_saveable(layer)] == theirs
        return theirs

    before = names()
    layer.extra = keras.layers.Dense(2)
    assert "extra" in names()
    del layer.extra
    assert "extra" not in names()
    assert "extra" not in before


def test_class_with_a_listing_of_its_own_is_asked_each_time():
    class Changing(keras.layers.Layer):
        names = ("one",)

        def __dir__(self):
            return [*super().__dir__(), *self.names]

        one = two = 3

    layer = Changing()
    quicker = quicker_walk(saving_lib)
    with quicker():
        assert "two" in [name for name, _ in saving_lib._walk_saveable(layer)]
        layer.__class__.names = ()
        listed = [name for name, _ in saving_lib._walk_saveable(layer)]
    assert listed == [name for name, _ in saving_lib._walk_saveable(layer)]


def test_keras_that_is_not_known_is_left_alone(monkeypatch):
    monkeypatch.setattr(keras_walk, "KNOWN_SOURCES", frozenset())
    quicker = quicker_walk(saving_lib)
    with quicker():
        assert saving_lib._walk_saveable is ORIGINAL


def test_keras_without_the_function_is_left_alone():
    class Other:
        pass

    other = Other()
    with quicker_walk(other)():
        pass
    assert getattr(other, "_walk_saveable", None) is None


def test_capture_leaves_keras_as_it_was():
    capture(model_zoo.made_once(model_zoo.functional))
    assert saving_lib._walk_saveable is ORIGINAL


def test_this_keras_is_known():
    """If this fails Keras has changed: compare its function with ours, then add the digest."""
    assert keras_walk._is_known(ORIGINAL)
