"""Writing. Planned (issue: the mount, writing): staging, chunks, flusher, recovery."""
