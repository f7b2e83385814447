"""NumPy arrays that become TensorFlow tensors without being copied.

TensorFlow copies an ndarray twice on its way into a variable. An array that offers the public
``__tf_tensor__`` protocol and is aligned as TensorFlow wants it is taken over as it is, so a load
moves each byte once: from the file to where the variable keeps it.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

#: What TensorFlow's CPU kernels require of memory that they did not allocate.
_ALIGNMENT = 64


class TensorArray(np.ndarray[Any, Any]):
    """An ndarray in every respect, which gives its memory away to the first tensor made of it.

    Only the first: two variables with one memory would change each other.
    """

    owns_memory = False  # Views and copies are made without it.

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        import tensorflow as tf

        plain = self.view(np.ndarray)
        tensor = None
        if self.owns_memory:
            self.owns_memory = False
            # bfloat16 and its kin are unknown to DLPack: the ordinary way, with its copies.
            with contextlib.suppress(TypeError, BufferError, RuntimeError, tf.errors.OpError):
                tensor = tf.experimental.dlpack.from_dlpack(plain.__dlpack__())
        if tensor is None:
            tensor = tf.constant(plain)
        return tensor if dtype is None else tf.cast(tensor, dtype)


def empty_tensor_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorArray:
    """Uninitialised, aligned memory of this shape."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    array = room[start : start + size].view(dtype).reshape(shape).view(TensorArray)
    array.owns_memory = True
    return array
