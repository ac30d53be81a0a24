"""`verify`: row invariance and token parity on this machine."""
