"""The generators of random numbers that belong to the process: Python's, NumPy's, TensorFlow's.

TensorFlow and Keras keep theirs under private names: they are used here only, and looked for
first. Where one is not found, it is left out.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def capture_random() -> dict[str, Any]:
    """The state of all of them, as plain values and arrays."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, "uint32"), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": np.array(keys),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }
    context = _tensorflow_context()
    source = getattr(context, "_rng", None)
    if isinstance(source, random.Random):
        version, words, gauss = source.getstate()
        states["tensorflow"] = {
            "seed": getattr(context, "_seed", None),
            "version": version,
            "words": np.array(words, "uint32"),
            "gauss": gauss,
        }
    generator = _tensorflow_generator()
    if generator is not None:
        states["tensorflow_generator"] = np.array(generator.state)
    seed = _keras_generator()
    if seed is not None:
        states["keras"] = np.array(seed.state.value)
    return states


def restore_random(states: dict[str, Any]) -> None:
    """What `capture_random` found. One that the process does not use yet is made for it."""
    python = states["python"]
    random.setstate(_python_state(python))
    numpy = states["numpy"]
    np.random.set_state(
        (numpy["kind"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    context = _tensorflow_context()
    known = states.get("tensorflow")
    # With another seed it is another program; its draws are its own.
    if known is not None and getattr(context, "_seed", None) == known["seed"]:
        source = getattr(context, "_rng", None)
        if isinstance(source, random.Random):
            source.setstate(_python_state(known))
    if "tensorflow_generator" in states:
        generator = _tensorflow_generator(make=True)
        if generator is not None:
            generator.state.assign(states["tensorflow_generator"])
    if "keras" in states:
        seed = _keras_generator(make=True)
        if seed is not None:
            seed.state.assign(states["keras"])


def check_random(states: dict[str, Any]) -> None:
    """Raise what `restore_random` would raise half-way, for a state that it cannot use."""
    random.Random().setstate(_python_state(states["python"]))
    numpy = states["numpy"]
    np.random.RandomState().set_state(
        (numpy["kind"], numpy["keys"], numpy["position"], numpy["has_gauss"], numpy["cached"])
    )
    if states.get("tensorflow") is not None:
        random.Random().setstate(_python_state(states["tensorflow"]))


def global_seed_is_set() -> bool:
    """Whether `keras.utils.set_random_seed` or `tf.random.set_seed` was called."""
    return getattr(_tensorflow_context(), "_seed", None) is not None


def _python_state(state: dict[str, Any]) -> Any:
    words = tuple(int(word) for word in state["words"])
    return state["version"], words, state["gauss"]


def _tensorflow_context() -> Any:
    try:
        from tensorflow.python.eager.context import context
    except ImportError:
        return None
    return context()


def _tensorflow_generator(*, make: bool = False) -> Any:
    """The global one, if the program uses it; asking for it in public would ``make`` one."""
    try:
        from tensorflow.python.ops import stateful_random_ops
    except ImportError:
        return None
    if make:
        return stateful_random_ops.get_global_generator()
    return getattr(stateful_random_ops, "global_generator", None)


def _keras_generator(*, make: bool = False) -> Any:
    """The one that Keras's random functions use without a seed, if there is one.

    It is made when a step is traced that uses it, which after a restart is later than this.
    """
    try:
        from keras.src.backend.common import global_state
        from keras.src.random.seed_generator import global_seed_generator
    except ImportError:
        return None
    if make:
        return global_seed_generator()
    return global_state.get_global_attribute("global_seed_generator")
