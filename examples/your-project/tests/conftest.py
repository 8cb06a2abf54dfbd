pytest_plugins = ["vtensor.testing.plugin"]
