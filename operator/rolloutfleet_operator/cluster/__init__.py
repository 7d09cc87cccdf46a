"""The only room that talks to the API server, and the only one that knows the ``kubernetes`` package."""
