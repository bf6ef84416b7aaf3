"""Policies for predicted replicas and replication hints. Planned."""
