"""A server that tries everything to get more from a client than the client grants."""
