"""Which rows and failure scenarios the tests prove: a pytest plugin and a report over several runs."""
