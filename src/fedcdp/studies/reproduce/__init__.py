"""The paper's tables and figures, cell by cell: printed and measured values side by side (`fedcdp reproduce`)."""
