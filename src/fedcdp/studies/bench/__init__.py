"""Speed on this machine: what a client step costs, how it grows, and what it costs elsewhere."""
