"""Deployment directories: files, keys and processes of a server and its nodes."""
