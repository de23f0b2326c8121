"""Checkpoints, on a parameter server: files in the safetensors format, one a server, written and read by the servers.

tensor_files.py  the format, and where files lie (fsspec)
parts.py         what a server does: mark, write, read beside, take the place
"""
