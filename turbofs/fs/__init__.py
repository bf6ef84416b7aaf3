"""What the mount means, without FUSE: names, handles, hints, the hidden tree."""
