"""Files: atomic writes, tensors on disk, and reading what somebody else may have written."""
