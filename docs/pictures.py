"""Make the picture of the README anew: the report of the demonstration's interrupted run.

    python docs/pictures.py            # about a minute; needs chromium

Writes docs/report.png.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PROGRAM = [sys.executable, "-m", "keras_safe_ckpt"]
#: As much of the page as fits below the first lines of code.
SIZE = "1200,860"


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("pictures.py: chromium is not installed (apt-get install chromium)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder, "run"), Path(folder, "report.html")
        subprocess.run([*PROGRAM, "demo", "--seed", "7", "--keep", run], check=True)
        state = run / "interrupted" / "state"
        subprocess.run([*PROGRAM, "report", state, "-o", page], check=True)
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={SIZE}",
            f"--screenshot={DOCS / 'report.png'}",
            f"--user-data-dir={folder}/browser",
        ]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
