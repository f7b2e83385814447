"""What agreeing costs the workers of a cluster: two real ones on this machine.

    python benchmarks/cluster.py                   # some seconds
    python benchmarks/cluster.py --markdown        # the table of the README

A step at which nothing was asked for is measured in a loop, with the threads that listen running,
best of several; the rest are medians. (A whole `fit` of two workers on one machine differs from
itself by far more than this costs.) Ends with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

CALLS = 100_000
GOAL_SECONDS = 5e-6


def work(folder: Path, rounds: int) -> None:
    """On each worker; the first one writes what it measured."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    import keras

    from keras_safe_ckpt.cluster.agreement import agreement_in
    from keras_safe_ckpt.cluster.cohort import Cohort, open_cohort
    from keras_safe_ckpt.cluster.roles import role_of

    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(32)])
        model.compile("sgd", "mse")
    role = role_of(model)

    times: dict[str, list[float]] = {"step": [], "agreed": [], "barrier": []}
    cohort = open_cohort(role)
    assert isinstance(cohort, Cohort)
    agreement = agreement_in(cohort, "steps")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(CALLS):
            agreement.after_step()
        times["step"].append((time.perf_counter() - began) / CALLS)
    for _ in range(20 * rounds):
        began = time.perf_counter()
        cohort.barrier("measured")
        times["barrier"].append(time.perf_counter() - began)
    for number in range(rounds):
        cohort.barrier("before")
        began = time.perf_counter()
        if role.chief:
            agreement.request("save", str(number))
        while not agreement.after_step():
            time.sleep(0.001)  # A step of training.
        times["agreed"].append(time.perf_counter() - began)
    agreement.close()
    cohort.barrier("end")
    cohort.close()
    if role.chief:
        (folder / "times.json").write_text(json.dumps(times))


def measure(rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="ksc-bench-") as folder:
        command = [sys.executable, "-m", "keras_safe_ckpt", "launch", "--workers", "2"]
        own = [__file__, "--work", folder, "--rounds", str(rounds)]
        done = subprocess.run([*command, *own], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        return dict(json.loads((Path(folder) / "times.json").read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="of each measurement (8)")
    parser.add_argument("--markdown", action="store_true", help="print a table for the README")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.work, arguments.rounds)
        return 0
    times = measure(arguments.rounds)
    step = min(times["step"])
    reached = step <= GOAL_SECONDS
    middle = {name: statistics.median(values) for name, values in times.items()}
    table = [
        ("what", "measured", "goal"),
        ("a step at which nothing was asked for", f"{step * 1e6:.2f} µs",
         f"<= {GOAL_SECONDS * 1e6:g} µs {'yes' if reached else 'NO'}"),
        ("from a request to the step that all agreed on, steps of 1 ms",
         f"{middle['agreed'] * 1e3:.1f} ms", ""),
        ("a barrier", f"{middle['barrier'] * 1e3:.1f} ms", ""),
    ]  # fmt: skip
    if arguments.markdown:
        table.insert(1, ("---",) * 3)
        for line in table:
            print("| " + " | ".join(line) + " |")
    else:
        for line in table:
            print(f"{line[0]:<75}{line[1]:<40}{line[2]}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
