"""Who am I among the workers, and who writes."""
