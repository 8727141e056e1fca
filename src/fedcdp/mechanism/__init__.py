"""The privacy mechanism: clipping, noise, sampling and the randomness that they draw from."""
