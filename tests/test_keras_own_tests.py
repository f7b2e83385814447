"""Keras's own tests of `ModelCheckpoint`, with `SafeModelCheckpoint` in its place."""

from __future__ import annotations

import inspect

import pytest
from keras_setup import keras

from keras_safe_ckpt import SafeModelCheckpoint

# After keras_setup, which configures TensorFlow; from the Keras that is installed.
from keras.src import callbacks as callbacks_of_keras  # isort: skip
from keras.src.callbacks.model_checkpoint_test import (  # isort: skip
    ModelCheckpointTest as TestsOfKeras,
)


class TestWithSafeModelCheckpoint(TestsOfKeras):
    @pytest.fixture(autouse=True)
    def in_its_place(self, monkeypatch):
        monkeypatch.setattr(callbacks_of_keras, "ModelCheckpoint", SafeModelCheckpoint)


del TestsOfKeras  # Else pytest would run them on Keras's class as well.


def test_they_are_there():
    names = [name for name in dir(TestWithSafeModelCheckpoint) if name.startswith("test_model_")]
    assert len(names) >= 2


def test_signature_begins_as_that_of_keras():
    theirs = list(inspect.signature(keras.callbacks.ModelCheckpoint.__init__).parameters.values())
    ours = list(inspect.signature(SafeModelCheckpoint.__init__).parameters.values())
    for their, our in zip(theirs, ours, strict=False):
        assert (our.name, our.default, our.kind) == (their.name, their.default, their.kind)
    added = ours[len(theirs) :]
    assert added
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in added)
