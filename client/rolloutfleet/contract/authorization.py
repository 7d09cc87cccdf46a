"""The check of the bearer token that every server of a fleet makes."""

import hmac


def carries_token(authorization: str, token: str) -> bool:
    """Whether an Authorization header, empty when there is none, is ``Bearer`` and this token; takes equally long for every other one."""
    kind, _, given = authorization.partition(" ")
    if kind.lower() != "bearer" or not token:
        return False
    # Servers decode header bytes that are not UTF-8 to surrogates.
    return hmac.compare_digest(given.strip().encode(errors="surrogateescape"), token.encode())
