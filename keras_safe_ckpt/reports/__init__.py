"""What the events of a run say, for people: numbers, and a page."""
