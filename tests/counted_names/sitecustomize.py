"""Found by the interpreters that a trial starts: their temporary names are predictable as well."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import planted_names

planted_names.count_names(planted_names.STARTED)
