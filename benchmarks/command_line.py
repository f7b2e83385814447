"""How long each command takes to look at an empty folder.

    python benchmarks/command_line.py              # some seconds
    python benchmarks/command_line.py --markdown   # a table for the documentation

Each command is a process of its own, `--rounds` times, in turn with the others and with a Python
that does nothing; the best round counts, with the median beside it. Ends with 1 if a goal is
missed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOAL_SECONDS = 0.5
NOTHING = "python -c pass"


def commands(folder: Path) -> dict[str, list[str]]:
    program = [sys.executable, "-m", "keras_safe_ckpt"]
    missing = str(folder / "missing")
    return {
        NOTHING: [sys.executable, "-c", "pass"],
        "ls": [*program, "ls", str(folder)],
        "show (nothing there)": [*program, "show", missing],
        "verify (nothing there)": [*program, "verify", str(folder)],
        "diff (nothing there)": [*program, "diff", missing, missing],
        "prune": [*program, "prune", str(folder), "--max-to-keep", "1"],
        "locks": [*program, "locks", str(folder)],
        "doctor": [*program, "doctor", str(folder)],
        "report (nothing there)": [*program, "report", str(folder)],
        "recover": [*program, "recover", str(folder)],
        "merge (nothing there)": [*program, "merge", str(folder), "-o", missing],
        "tfrecord verify (nothing there)": [*program, "tfrecord", "verify", missing],
        "--help": [*program, "--help"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="of each command (7)")
    parser.add_argument("--markdown", action="store_true", help="print a table for a document")
    arguments = parser.parse_args()
    took: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ksc-bench-") as name:
        for _ in range(arguments.rounds):
            for what, command in commands(Path(name)).items():
                began = time.perf_counter()
                done = subprocess.run(command, capture_output=True, check=False)
                took.setdefault(what, []).append(time.perf_counter() - began)
                if done.returncode not in (0, 2) or b"Traceback" in done.stderr:
                    sys.stderr.buffer.write(done.stderr)
                    return 2
    missed = False
    form = (
        "| {} | {:.2f} s | {:.2f} s | {:.1f} | {} |"
        if arguments.markdown
        else "{:<34} {:>6.2f} s  median {:.2f} s  {:>5.1f} times a Python that does nothing  {}"
    )
    if arguments.markdown:
        print(
            "| command on an empty folder | best | median | of a Python that does nothing | goal |"
        )
        print("| --- | --- | --- | --- | --- |")
    for what, seconds in took.items():
        best = min(seconds)
        goal = ""
        if what != NOTHING:
            missed = missed or best > GOAL_SECONDS
            goal = f"<= {GOAL_SECONDS} s {'yes' if best <= GOAL_SECONDS else 'NO'}"
        ratio = best / min(took[NOTHING])
        print(
            form.format(
                f"`{what}`" if arguments.markdown else what,
                best,
                statistics.median(seconds),
                ratio,
                goal,
            )
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
