"""Kill trainings and other commands, or fill their disk, and check their files."""
