"""nodeagent: a node-local eviction agent for Kubernetes."""

__version__ = "0.1.0"
