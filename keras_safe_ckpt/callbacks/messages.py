"""Messages to whoever watches the training."""

from __future__ import annotations

from absl import logging

from keras_safe_ckpt.storage.keras_internals import import_keras


def say(message: str) -> None:
    """Where Keras puts its own messages: on the screen, or in the log if it was told so."""
    if import_keras().config.is_interactive_logging_enabled():
        print(message, flush=True)
    else:
        logging.info(message)
