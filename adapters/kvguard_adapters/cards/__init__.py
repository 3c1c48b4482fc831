"""Memory devices behind the `Card` protocol."""
