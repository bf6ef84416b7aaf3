"""The only room that imports pyfuse3: request → fs → reply, and the mount's life."""
