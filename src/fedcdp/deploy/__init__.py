"""A deployment: the same plan on Flower's processes, with certificates and keys, on this machine or copied to others."""
