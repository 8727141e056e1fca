"""Datasets: the benchmarks by name (`load`), or your own file (`load_file`), each as seeded `Splits`."""

from fedcdp.data.dataset import Dataset, Splits
from fedcdp.data.load import DATASETS, load
from fedcdp.data.own_files import load_file

__all__ = ["DATASETS", "Dataset", "Splits", "load", "load_file"]
