"""A server that tries everything to get more out of a client than it grants."""
