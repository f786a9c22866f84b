"""Where everything goes, in bytes, and why."""
