"""Training: rounds of many virtual clients on one device, into a run directory."""
