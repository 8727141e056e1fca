"""Trainings and other commands that are killed, or whose disk fills up, and what must hold of their files."""
