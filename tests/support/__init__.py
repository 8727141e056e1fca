"""Helpers that tests share; the programs in `tools` use some of them as well."""
