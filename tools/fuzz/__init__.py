"""Hostile input for every parser of files, messages and options."""
