"""vtensor in other libraries, one module for each. Modules are imported by name and patch nothing."""
