"""Measurements of the kernels and the server; each result names its command, hardware, versions and date."""
