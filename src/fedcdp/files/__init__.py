"""Files: atomic writes, tensors on disk, and safe reading of untrusted files."""
