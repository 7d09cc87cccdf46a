"""kopf's side of the operator: watches, indexes, one daemon per object. Thin on purpose; what happens is decided in ``reconcile``."""
