"""What TensorFlow says of files that it could not write, as an error of ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf

from keras_safe_ckpt.errors import CheckpointWriteError


@contextlib.contextmanager
def file_errors(prefix: str, target: str) -> Iterator[None]:
    """``prefix`` is where TensorFlow writes, ``target`` what the user calls it."""
    try:
        yield
    except tf.errors.OpError as error:
        if os.path.dirname(prefix) not in str(error):
            raise  # Of something else: a collective, say.
        first_line = str(error.message).partition("\n")[0]
        raise CheckpointWriteError(target, first_line) from error
