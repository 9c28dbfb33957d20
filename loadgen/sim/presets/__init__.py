"""The simulated machines, as YAML files, and the module that reads such a file."""
