"""Stand-ins for parties that are not under test; they speak the wire contract and hold no real weights."""
