"""NumPy arrays that become TensorFlow tensors without being copied.

TensorFlow copies an ndarray twice on its way into a variable. An array that offers the public
``__tf_tensor__`` protocol and is aligned as TensorFlow wants it is taken over as it is, so a load
moves each byte once: from the file to where the variable keeps it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

#: What TensorFlow's CPU kernels require of memory that they did not allocate.
_ALIGNMENT = 64


class TensorArray(np.ndarray[Any, Any]):
    """An ndarray in every respect; give it away, do not write to it afterwards."""

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        import tensorflow as tf

        plain = self.view(np.ndarray)
        try:
            tensor = tf.experimental.dlpack.from_dlpack(plain.__dlpack__())
        except (TypeError, BufferError, RuntimeError, tf.errors.OpError):
            # bfloat16 and its kin are unknown to DLPack: the ordinary way, with its copies.
            tensor = tf.constant(plain)
        return tensor if dtype is None else tf.cast(tensor, dtype)


def empty_tensor_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorArray:
    """Uninitialised, aligned memory of this shape."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape).view(TensorArray)
