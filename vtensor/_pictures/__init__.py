"""Pages and events as pictures: what :mod:`vtensor.plot` and notebooks draw."""
