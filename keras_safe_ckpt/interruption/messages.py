"""Messages to whoever watches the training."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger(__name__)


def say(message: str) -> None:
    """Where Keras puts its own messages: on the screen, or in the log if it was told so.

    Nothing depends on it: a screen that is closed, or cannot show the message, stops nothing.
    """
    keras = sys.modules.get("keras")
    if keras is not None and not keras.config.is_interactive_logging_enabled():
        from absl import logging as absl_logging

        absl_logging.info(message)
        return
    try:
        print(message, flush=True)
    except (OSError, ValueError) as error:
        _log.warning("%s (not on the screen: %s)", message.strip(), error)
