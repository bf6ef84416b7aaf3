"""The controller service. Planned (issue: predicted replicas)."""
