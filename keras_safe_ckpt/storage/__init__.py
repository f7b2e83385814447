"""How a snapshot becomes durable bytes."""
