"""The Kubernetes API of rolloutfleet: pydantic models are its only source, the CRDs are generated from them."""
