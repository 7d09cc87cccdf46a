"""The wire contract between operator, sync job, workers and trainers.

Every message is a pydantic model; every route lives below :data:`~rolloutfleet.contract.names.API_PREFIX`, which carries the
contract's version. Nothing here imports torch, kubernetes or an HTTP library.
"""
