"""Checkpoints of TensorFlow, which consist of several files: read, verified and published."""
