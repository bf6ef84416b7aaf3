"""Between processes: the control socket's codec, server and client; later Arrow Flight between nodes."""
