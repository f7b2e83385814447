"""What a user hands to ``model.fit``."""
