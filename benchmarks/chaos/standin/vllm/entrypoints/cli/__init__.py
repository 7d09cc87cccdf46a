"""Where the launcher looks for the server."""
