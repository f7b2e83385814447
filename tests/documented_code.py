"""Runs the code that the documents show, in one process: TensorFlow takes seconds to start.

The first argument is a file of JSON with the pieces: the name of each, its code, and whether it is
from a docstring. Each page runs in a folder of its own below the second argument; the examples of
docstrings share one, with what they take for granted. How each ended is printed as JSON, last.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def taken_for_granted() -> dict[str, Any]:
    """Modules, a small model and its data, and files in the working directory."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_safe_ckpt as ours

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.random.default_rng(1).random((64, 8), "float32")
    y = x.sum(axis=1, keepdims=True)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
    records = [b"one", b"two", b"three"]
    for worker in range(2):
        with ours.WorkerH5Writer("predictions", worker, workers=2) as rows:
            rows.append("id", [1 - worker])
    for path in ("episodes.tfrecord", "damaged.tfrecord"):
        with ours.LockedTFRecordWriter(path) as writer:
            for record in records:
                writer.write(record)
    with open("damaged.tfrecord", "r+b") as file:
        file.seek(13)
        file.write(b"X")
    ours.split_tfrecord("episodes.tfrecord", "data/train", num_shards=8)
    return {
        **{name: getattr(ours, name) for name in ours.__all__},
        "keras": keras,
        "multiprocessing": multiprocessing,
        "np": np,
        "os": os,
        "tf": tf,
        "model": model,
        "optimizer": model.optimizer,
        "store": ours.CheckpointStore("store"),
        "x": x,
        "y": y,
        "dataset": dataset,
        "iterator": iter(dataset.repeat()),
        "train_step": lambda batch: model.train_on_batch(*batch),
        "strategy": tf.distribute.get_strategy(),
        "records": records,
    }


def run(name: str, code: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run one piece as the main program; what it printed, and how it failed."""
    module = type(sys)("__main__")
    vars(module).update(given)
    former, sys.modules["__main__"] = sys.modules["__main__"], module
    output, failure, began = io.StringIO(), "", time.perf_counter()
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, name, "exec"), vars(module))
    except BaseException:  # noqa: BLE001  # a SystemExit, too, is not what a page shows
        failure = traceback.format_exc()
    finally:
        sys.modules["__main__"] = former
    seconds = time.perf_counter() - began
    return {"output": output.getvalue(), "failure": failure, "seconds": seconds}


def main() -> None:
    import keras

    keras.config.disable_interactive_logging()
    pieces = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    report = {}
    for number, piece in enumerate(piece for piece in pieces if not piece["is_docstring"]):
        page = folder / f"page-{number}"
        page.mkdir()
        os.chdir(page)
        report[piece["name"]] = run(piece["name"], piece["code"], {})
    examples = folder / "examples"
    examples.mkdir()
    os.chdir(examples)
    given = taken_for_granted()
    for piece in pieces:
        if piece["is_docstring"]:
            report[piece["name"]] = run(piece["name"], piece["code"], given)
    os.chdir(folder)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
