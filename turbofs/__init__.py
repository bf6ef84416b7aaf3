"""TurboFS: a mount that lets a training job tell the storage what it will read and write, and when."""

__version__ = "0.1.0"
