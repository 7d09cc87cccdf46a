"""The sync job's state machine: events in, commands out, time passed in.

Nothing below imports asyncio, an HTTP library, a clock, randomness or the environment; identifiers of sessions and refits come with
their events. :func:`~rolloutfleet_sync.protocol.machine.step` is the only way to change a state, and
:mod:`~rolloutfleet_sync.protocol.view` and :mod:`~rolloutfleet_sync.protocol.summary` the only ways to show one.
"""
