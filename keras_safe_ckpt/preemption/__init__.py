"""Who tells us that the end is near."""
