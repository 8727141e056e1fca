"""Hostile input for everything that reads a file, a message or an option."""
