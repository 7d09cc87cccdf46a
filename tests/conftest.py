"""Plugins that every tier uses."""

pytest_plugins = ["proof.plugin", "pytester"]
