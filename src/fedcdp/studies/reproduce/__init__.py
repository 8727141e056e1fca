"""The paper's tables and figures, cell by cell: what was printed beside what is measured (`fedcdp reproduce`)."""
