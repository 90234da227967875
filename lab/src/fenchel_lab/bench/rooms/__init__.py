"""The workloads of every room of the library, one file each."""
