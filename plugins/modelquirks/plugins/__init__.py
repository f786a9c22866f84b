"""The quirks that ship with modelquirks, registered by entry points like anybody else's."""
