"""Masked sums against plain sums, over many random rosters, vectors and drop-outs."""
