"""Deployments: the same plan on Flower processes, with certificates and keys, on this machine or several."""
