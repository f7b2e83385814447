"""``python -m keras_safe_ckpt``."""

import sys

from keras_safe_ckpt.cli.main import main

sys.exit(main())
