"""Rows of HDF5 shards: found, checked, read, standardized, fed to the engine in the sample order."""
