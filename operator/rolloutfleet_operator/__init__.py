"""The rolloutfleet operator: keeps vLLM engines, their sync job and their status as a RolloutFleet asks.

Imports point one way: ``naming, errors, config -> api -> plan -> render -> status`` are pure (no kubernetes, kopf, asyncio, clock or
environment), ``cluster`` alone talks to the API server, ``reconcile`` runs passes, ``handlers`` and ``__main__`` alone know kopf.
"""
