"""A real Kubernetes on one Linux machine, built from pinned Go modules: `python -m localcluster --help`."""
