"""Messages to whoever watches the training."""

from __future__ import annotations

from absl import logging

from keras_safe_ckpt.storage.keras_internals import import_keras


def say(message: str) -> None:
    """Where Keras puts its own messages: on the screen, or in the log if it was told so.

    Nothing depends on it: a screen that is closed, or cannot show the message, stops nothing.
    """
    if not import_keras().config.is_interactive_logging_enabled():
        logging.info(message)
        return
    try:
        print(message, flush=True)
    except (OSError, ValueError) as error:
        logging.warning("%s (not on the screen: %s)", message.strip(), error)
