"""vtensor inside other libraries, one module a library; each is imported by name and patches nothing."""
