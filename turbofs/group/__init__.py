"""Group plans for writes and reads. Planned."""
