"""The parts of a KV cache: its layout, its statistics, writes to it."""
