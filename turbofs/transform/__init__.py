"""Just-in-time transforms on storage nodes. Planned."""
