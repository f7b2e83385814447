"""The command line: ``python -m keras_safe_ckpt`` and ``keras-safe-ckpt``."""
