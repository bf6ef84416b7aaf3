"""The command line: one file a command; builds the object graph; the only place with trio.run."""
