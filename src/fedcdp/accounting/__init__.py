"""Privacy accounting: ε against each adversary, before, during and after training.

Needs `dp-accounting`; training does not, and writes its ledger all the same.
"""
