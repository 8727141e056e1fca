"""The privacy mechanism: clipping, noise, sampling, and their source of randomness."""
