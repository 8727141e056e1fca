"""Privacy accounting: ε against each adversary, before, during and after training.

Computing an ε needs `dp-accounting`. Training does not; it writes its ledger even without it.
"""
