"""What torch itself does with the memory of a pool: its allocations, and functions on a VTensor."""
