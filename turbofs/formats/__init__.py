"""What is inside files. Planned (issue: small tensor reads): safetensors, torch distributed checkpoints, data sets."""
