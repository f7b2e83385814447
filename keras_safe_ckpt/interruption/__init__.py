"""What a run makes of a notice: heard by all workers, acted on after the same step, and left."""
