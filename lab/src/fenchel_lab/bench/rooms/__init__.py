"""The workloads of every room of the library, a file each."""
