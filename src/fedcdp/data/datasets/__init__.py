"""The benchmark datasets, one file each."""
