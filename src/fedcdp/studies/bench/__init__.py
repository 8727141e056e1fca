"""Speed on this machine: the cost of a client step, how it scales, and its cost in other libraries."""
