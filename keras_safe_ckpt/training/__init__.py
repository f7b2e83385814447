"""What a run decides: when to save, and what is best."""
