"""Plugins that every tier uses, and how properties are tried."""

import importlib.util

pytest_plugins = ["proof.plugin", "pytester"]

if importlib.util.find_spec("hypothesis"):  # the engines' environment does without
    from hypothesis import settings

    # How long an example takes says what else the machine does.
    settings.register_profile("rolloutfleet", deadline=None)
    settings.load_profile("rolloutfleet")
