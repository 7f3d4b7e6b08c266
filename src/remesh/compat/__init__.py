"""The names of other systems, as thin drop-ins over the same engine."""
