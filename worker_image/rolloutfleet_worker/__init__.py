"""Plugin and launcher that let stock vLLM take part in fleet-wide refits.

:mod:`~rolloutfleet_worker.launcher` is the pod's main process. Inside vLLM, :mod:`~rolloutfleet_worker.middleware` fences generation
in the API server and :mod:`~rolloutfleet_worker.rank` receives weights in every rank's process.
"""
