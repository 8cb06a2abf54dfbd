"""The parts of a pool: what was moved into it, what sleeps, what stays after its end."""
