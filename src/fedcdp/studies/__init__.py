"""Studies: the demonstration, the paper's tables and figures, and speed measurements."""
