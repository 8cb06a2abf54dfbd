"""What all of vtensor stands on: arguments and their units, streams, processes, the terminal."""
