"""The same safety for hand-written loops and for TensorFlow's own checkpoints."""
