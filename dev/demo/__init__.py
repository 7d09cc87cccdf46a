"""The demo: a local cluster, the chart, a fleet of two real vLLM engines, and a trainer that refits them twice."""
