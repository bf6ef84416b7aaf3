"""The agent service. Planned (issue: predicted replicas)."""
